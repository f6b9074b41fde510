"""A server with a fake engine in a process of its own, and the means to end it.

As a program: `python server_process.py '{"server": {…}, "engine": {…}}'` serves.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

START_SECONDS = 30
KEY = "secret-key"


class ServerProcess:
    """A running server.

    Attributes:
      url: its address.
      process: its `subprocess.Popen`.
    """

    def __init__(self, command, ready=True):
        self._errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stderr=self._errors, stdin=subprocess.DEVNULL)
        self.url = wait_for(self._address, self)
        if ready:
            wait_for(self._is_ready, self)

    def errors(self):
        """What it has written to stderr."""
        return Path(f"/proc/self/fd/{self._errors.fileno()}").read_text()

    def _address(self):
        found = re.search(r"listening on (\S+),", self.errors())
        return found and found[1]

    def _is_ready(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health") as answer:
            return answer.status == 200

    def terminate(self, seconds=20):
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self):
        """End it without asking."""
        self.process.kill()
        self.process.wait()

    def engine_pid(self):
        """Return the id of the engine's process."""
        return wait_for(lambda: next(iter(self._children()), None))

    def _children(self):
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in map(int, task.read_text().split()):
                if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
                    yield pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            try:
                self.terminate()
            except subprocess.TimeoutExpired:
                self.kill()
        self._errors.close()


def start(server=None, engine=None, ready=True, **text_side):
    """Start a server with a fake engine; the arguments are settings of its parts."""
    settings = json.dumps({"server": server or {}, "engine": engine or {}, "text_side": text_side})
    return ServerProcess([sys.executable, __file__, settings], ready)


def wait_for(condition, server=None, seconds=START_SECONDS):
    """Return the first true result of `condition`, called again and again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := condition():
            return result
        if server is not None and server.process.poll() is not None:
            break
        time.sleep(0.02)
    if server is None:
        raise AssertionError(f"did not happen within {seconds} s")
    server.kill()
    errors = server.errors()
    server.__exit__()
    raise AssertionError(f"the server did not start:\n{errors}")


def is_alive(pid):
    """Return whether a process runs."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def main(text):
    import fake_engine

    from gemma_jax.errors import GemmaError
    from gemma_jax.serve.config import ServerConfig
    from gemma_jax.serve.launch import serve
    from gemma_jax.text_side import TextSide

    settings = json.loads(text)
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings["server"].items()
    }
    config = ServerConfig(**({"port": 0} | fields))
    try:
        text_side = TextSide.load("nano", **settings.get("text_side", {}))
        serve(config, text_side, fake_engine.factory(**settings["engine"]))
    except GemmaError as error:
        sys.exit(f"error: {error}")
    if "jax" in sys.modules:
        sys.exit("the HTTP process has imported JAX")


if __name__ == "__main__":
    main(sys.argv[1])
