"""Kernel tables from a trace in the format of the profiler."""

import jax
import pytest

from gemma_jax.benchmarks import profile
from gemma_jax.benchmarks.profile import Event

TRACE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #14(Compute)"
    timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 3000000 stats { metadata_id: 1 str_value: "layers/0/mlp" } }
    events { metadata_id: 2 offset_ps: 5000000 duration_ps: 1000000 stats { metadata_id: 1 str_value: "layers/1/mlp" } }
  }
  lines {
    name: "XLA Ops"
    timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 }
  }
  event_metadata { key: 1 value { id: 1 name: "gemm_fusion_3" } }
  event_metadata { key: 2 value { id: 2 name: "gemm_fusion_12" } }
  stat_metadata { key: 1 value { id: 1 name: "tf_op" } }
}
planes {
  name: "/host:CPU"
  lines { name: "python" events { metadata_id: 1 offset_ps: 0 duration_ps: 7000000 } }
  event_metadata { key: 1 value { id: 1 name: "call" } }
}
"""  # noqa: E501


@pytest.fixture
def events():
    data = jax.profiler.ProfileData
    return profile.device_events(
        data.from_serialized_xspace(data.text_proto_to_serialized_xspace(TRACE))
    )


def test_only_kernels_on_gpu_streams_count(events):
    assert [(e.name, e.op, e.duration) for e in events] == [
        ("gemm_fusion_3", "layers/0/mlp", 3000.0),
        ("gemm_fusion_12", "layers/1/mlp", 1000.0),
    ]
    assert events[1].start - events[0].start == 5000.0


def test_numbered_kernels_and_layers_are_summed(events):
    text = profile.tables(events)
    assert "2 kernels, busy 0.004 ms of 0.006 ms" in text
    (kernel,) = (line for line in text.splitlines() if line.endswith("gemm_fusion"))
    assert kernel.split() == ["0.004", "100.0%", "2", "2.00", "gemm_fusion"]
    assert "layers/#/mlp" in text


def test_overlapping_kernels_are_busy_once():
    starts = [(0, 10), (5, 2), (8, 4), (20, 1)]
    events = [Event("k", "", "", s, d) for s, d in starts]
    assert profile.busy_time(events) == 13


def test_the_long_tail_is_one_line():
    events = [Event(f"{'k' * (i + 1)}", "", "", i, 1) for i in range(profile.TOP + 5)]
    assert profile.tables(events).count("5 others") == 1


def test_a_trace_of_a_cpu_says_that_it_has_no_kernels(tmp_path):
    with profile.record(tmp_path):
        jax.block_until_ready(jax.numpy.ones(3) + 1)
    assert "no device kernels" in profile.tables(profile.newest_events(tmp_path))


def test_an_empty_folder_has_no_kernels(tmp_path):
    assert profile.newest_events(tmp_path) == []
