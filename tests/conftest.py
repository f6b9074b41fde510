"""What every test runs under: CPU only, offline, a fixed device count, warnings as errors."""

import importlib.util
import json
import logging
import os
import shutil
import socket
from importlib import resources

import hypothesis
import pytest

# Time is no property of ours: a busy machine makes any example slow.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")

CPU_DEVICES = 1

# Environment of the test process and of every process it starts; set before JAX is imported.
FIXED_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # XLA's threads on a CPU: interpreted Mosaic kernels block one for each warpgroup that waits.
    "NPROC": "16",
}

WARNING_FILTERS = (
    "error",
    # Third-party packages warn about their own future, which is not ours to fix.
    "ignore::DeprecationWarning",
    "ignore::PendingDeprecationWarning",
    "ignore::FutureWarning",
    "error::DeprecationWarning:gemma_jax",
)


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="run on the GPU, and fail the gpu tests that would be skipped",
    )


def pytest_configure(config):
    for name in [name for name in os.environ if name.startswith("GEMMA_JAX_")]:
        del os.environ[name]
    os.environ.update(FIXED_ENVIRONMENT)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.rootpath / ".pytest_cache/xla"))
    if not config.option.require_gpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    count = f"--xla_force_host_platform_device_count={CPU_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
    for line in WARNING_FILTERS:
        config.addinivalue_line("filterwarnings", line)
    if _selects(config, "aot"):
        _report_resources()
    if _selects(config, "parity") and importlib.util.find_spec("torch") is None:
        raise pytest.UsageError(
            "-m parity needs torch and transformers: uv run --extra parity pytest -m parity"
        )


def _report_resources():
    """Let ptxas say what each kernel takes; JAX and XLA read these when they start."""
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    from gemma_jax.testing import aot

    if not aot.available():
        raise pytest.UsageError("-m aot needs the CUDA plugin: uv run --group aot pytest -m aot")
    flags = f"{os.environ.get('XLA_FLAGS', '')} {aot.ENVIRONMENT['XLA_FLAGS']}".strip()
    os.environ.update(aot.ENVIRONMENT, XLA_FLAGS=flags)


def _selects(config, marker):
    expression = config.option.markexpr
    return marker in expression and f"not {marker}" not in expression


def pytest_collection_modifyitems(config, items):
    """Leave out the slow, parity and aot tests, unless -m or a test's own name asks for them."""
    if config.option.markexpr or any("::" in arg for arg in config.args):
        return
    apart = [item for item in items if item.get_closest_marker("slow")]
    for marker in ("parity", "aot"):
        apart += [x for x in items if x.get_closest_marker(marker) and x not in apart]
    if apart:
        config.hook.pytest_deselected(items=apart)
        items[:] = [item for item in items if item not in apart]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None:
        return
    if not item.config.option.require_gpu:
        pytest.skip("needs an NVIDIA GPU; --require-gpu runs it")
    import jax

    if jax.default_backend() != "gpu":
        pytest.fail(f"--require-gpu, but JAX runs on {jax.default_backend()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn a skipped gpu test into a failure under --require-gpu."""
    report = yield
    if item.config.option.require_gpu and item.get_closest_marker("gpu") and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped under --require-gpu: {call.excinfo and call.excinfo.value}"
    return report


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Let sockets reach this machine only."""
    connect = socket.socket.connect

    def guarded(self, address):
        local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost")
        if not local:
            raise RuntimeError(f"a test tried to reach {address}; tests run without network")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def _logging_as_before():
    """Undo what a command that ran inside this process did to logging."""
    root, ours = logging.getLogger(), logging.getLogger("gemma_jax")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = [h for h in root.handlers if h in handlers]
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture(scope="module")
def quick_compilation():
    """Programs are compiled quickly rather than well, here and in processes started from here.

    For modules whose programs run for a moment and compile for seconds, and whose claims do not
    depend on what XLA makes of the code.
    """
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def key():
    """A JAX random key, the same for every test."""
    import jax

    return jax.random.key(0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a random two-layer model with nano's tokenizer: compiles in seconds, babbles."""
    from gemma_jax.config import FULL, SLIDING, ModelConfig
    from gemma_jax.testing.checkpoint import write_checkpoint

    nano = resources.files("gemma_jax") / "data" / "nano"
    config = ModelConfig.from_hf(json.loads((nano / "config.json").read_text()))
    config = config.replace(
        num_hidden_layers=2,
        layer_types=(SLIDING, FULL),
        num_kv_shared_layers=0,
        hidden_size=64,
        intermediate_size=64,
        head_dim=32,
        global_head_dim=64,
    )
    folder = write_checkpoint(config, tmp_path_factory.mktemp("model") / "tiny", dtype="float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(str(nano / name), folder)
    return str(folder)
