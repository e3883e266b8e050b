"""A real browser to look at pages with: Debian's chromium without a window, spoken to over its DevTools pipe."""

import base64
import fcntl
import json
import os
import select
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = "--headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --remote-debugging-pipe"
PATIENCE = 60  # seconds until a browser that does not answer counts as broken


class Browser:
    """One page. `requests` are the addresses it asked for, `errors` what its scripts threw."""

    def __init__(self, profile: Path):
        assert CHROMIUM
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()
        # The browser wants the pipe's ends as descriptors 3 and 4; there, none may stand in another's way.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (reads, writes)]
        browser = shlex.join([CHROMIUM, *OPTIONS.split(), f"--user-data-dir={profile}"])
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {browser} 3<&{ends[0]} 4>&{ends[1]}"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (reads, writes, *ends):
            os.close(end)
        self._received, self._count, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = ""
        self.call("Browser.close")
        self._process.wait(PATIENCE)
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            assert select.select([self._read], [], [], PATIENCE)[0], "the browser does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has ended"
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        event = json.loads(message)
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(event["params"]["exceptionDetails"]))
            case "Log.entryAdded":
                self.errors.append(str(event["params"]["entry"]))
            case "Page.loadEventFired":
                self._loaded = True
        return event

    def open(self, page: Path, width: int = 1440, height: int = 900, scheme: str = "light") -> None:
        """Show a file on a screen of this size, which is a phone's if it is narrow."""
        self.requests, self.errors, self._loaded = [], [], False
        phone = width < 640
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._next()
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is: x, y, width, height."""
        return self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, x: float, y: float, click: bool = False) -> None:
        """Move the mouse there, and press it."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def touch(self, x: float, y: float) -> None:
        """Touch the screen there, and let go."""
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.call("Emulation.setTouchEmulationEnabled", enabled=False)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """What is seen, or all of the page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))
