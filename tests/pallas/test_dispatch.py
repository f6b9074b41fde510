"""Dispatch: a name runs or raises, automatic choice always finds something and says what."""

import logging

import pytest

from gemma_jax.errors import ConfigError, UnsupportedError
from gemma_jax.pallas import dispatch as module
from gemma_jax.pallas.device import Device
from gemma_jax.pallas.dispatch import Choice, dispatch, needs_gpu_or_interpreter

pytestmark = pytest.mark.fast

CPU = Device("cpu", None)
A100 = Device("NVIDIA A100-SXM4-80GB", (8, 0), 108)
H200 = Device("NVIDIA H200", (9, 0), 132)
V100 = Device("Tesla V100", (7, 0), 80)


def choices():
    return {
        "mosaic": Choice(
            lambda: "mosaic",
            unsupported=lambda d: None if d.at_least(9) else f"needs sm_90, got {d.kind}",
        ),
        "triton": Choice(lambda: "triton", unsupported=needs_gpu_or_interpreter((8, 0))),
        "xla": Choice(lambda: "xla", preferred=lambda d: False),
        "reference": Choice(lambda: "reference"),
    }


@pytest.fixture
def on(monkeypatch):
    def set_device(device):
        monkeypatch.setattr(module, "current_device", lambda: device)

    return set_device


@pytest.mark.parametrize(
    ("device", "chosen"),
    [(CPU, "reference"), (A100, "triton"), (H200, "mosaic"), (V100, "reference")],
)
def test_automatic_choice_takes_the_first_that_fits_the_gpu_and_the_reference_on_a_cpu(
    on, device, chosen
):
    on(device)
    assert dispatch("op", None, choices(), f"[8] {chosen}")() == chosen


@pytest.mark.parametrize(
    ("device", "chosen"), [(CPU, "triton"), (A100, "triton"), (H200, "mosaic")]
)
def test_pallas_is_the_best_of_our_kernels(on, device, chosen):
    on(device)
    assert dispatch("op", "pallas", choices(), "[8]")() == chosen


@pytest.mark.parametrize("name", ["reference", "xla", "triton", "mosaic"])
def test_a_name_runs_what_it_names(on, name):
    on(H200)
    assert dispatch("op", name, choices(), "[8]")() == name


def test_a_name_that_cannot_take_the_inputs_raises_with_op_shape_and_reason(on):
    on(A100)
    with pytest.raises(UnsupportedError, match=r"op: mosaic cannot take \[8\]: needs sm_90.*A100"):
        dispatch("op", "mosaic", choices(), "[8]")
    on(V100)
    with pytest.raises(UnsupportedError, match=r"capability 8\.0, Tesla V100 has 7\.0"):
        dispatch("op", "triton", choices(), "[8]")
    with pytest.raises(UnsupportedError, match=r"no Pallas kernel takes.*mosaic: .*triton: "):
        dispatch("op", "pallas", choices(), "[8]")


def test_a_missing_or_unknown_name_raises(on):
    on(H200)
    with pytest.raises(UnsupportedError, match="op: has no implementation 'cudnn'"):
        dispatch("op", "cudnn", choices(), "[8]")
    with pytest.raises(ConfigError, match="implementation='cuda' of op"):
        dispatch("op", "cuda", choices(), "[8]")


def test_the_automatic_choice_is_logged_once_per_op_and_shape(on, caplog):
    on(H200)
    with caplog.at_level(logging.INFO, logger="gemma_jax.kernels"):
        for shape in ("[1]", "[1]", "[2]"):
            dispatch("logged_op", None, choices(), shape)
    assert [r.getMessage() for r in caplog.records] == [
        "logged_op [1]: mosaic on NVIDIA H200",
        "logged_op [2]: mosaic on NVIDIA H200",
    ]
