"""Runs a worker script for as long as the process that started it: `python worker_host.py SCRIPT …`

Standard input is a pipe whose other end only that process holds: the kernel closes it however the
process ends. Then the worker is killed, and with it all that it started, for it leads a process
group. Like the scripts this imports nothing of the package.
"""

import os
import runpy
import signal
import sys
import threading


def _end_with_starter() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main(script: str, *arguments: str) -> None:
    """Runs `script` as a program with these arguments, and watches meanwhile."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
