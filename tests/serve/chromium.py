"""A headless Chromium, driven by the DevTools protocol over a pair of pipes."""

import base64
import json
import os
import shutil
import subprocess
import time


def find():
    """Return the path of Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab.

    Args:
      profile: an empty folder for the browser's files.
      url: what it shows.
    """

    def __init__(self, profile, url):
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # The browser reads commands from descriptor 3 and writes to 4.
        pipes = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = [
            find(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", f"--user-data-dir={profile}", "--remote-debugging-pipe",
            "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", pipes, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._received, self._number, self._session = b"", 0, None
        self.problems = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Runtime.enable")
        self._call("Page.enable")
        self._call("Page.navigate", url=url)
        self.wait("document.readyState == 'complete'")

    def run(self, script):
        """Return the value of a JavaScript expression."""
        result = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script, seconds=20):
        """Return the expression's value once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"did not become true: {script}\n{self.text()}"
            time.sleep(0.05)
        return value

    def text(self):
        """Return the text that the page shows."""
        return self.run("document.body.innerText")

    def type(self, text):
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def press_enter(self):
        """Press and release the Enter key."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self._call("Input.dispatchKeyEvent", type="keyDown", **key)
        self._call("Input.dispatchKeyEvent", type="keyUp", **key)

    def screenshot(self, file):
        """Write what the page looks like to a PNG file."""
        image = self._call("Page.captureScreenshot")["data"]
        file.write_bytes(base64.b64decode(image))

    def close(self):
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(answer["params"]["exceptionDetails"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self):
        while b"\0" not in self._received:
            part = os.read(self._from, 65_536)
            assert part, "the browser has ended"
            self._received += part
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)
