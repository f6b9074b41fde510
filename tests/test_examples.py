"""Every example runs, on a tiny model."""

import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("quick_compilation")

EXAMPLES = Path(__file__).parent.parent / "examples"
QUICK = ("generate", "chat", "logprobs")
SLOW = ("batch",)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_example_prints_text(name, tiny_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, tiny_model])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert len(capsys.readouterr().out.split()) > 5
