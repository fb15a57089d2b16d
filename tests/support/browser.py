"""Chromium without a window, driven over its own pipe: DevTools messages, each ended by a zero byte."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WORDS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
]
PATIENCE_S = 60


class Page:
    """One page. `requests` are the addresses that it has asked for, `errors` what its console has said of errors."""

    def __init__(self, say: int, hear: int) -> None:
        self._say, self._hear, self._rest, self._number, self._session = say, hear, b"", 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._say, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        by = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            assert select.select([self._hear], [], [], max(0.0, by - time.monotonic()))[0], "Chromium says nothing"
            chunk = os.read(self._hear, 1 << 20)
            assert chunk, "Chromium has ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        method, said = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(str(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.errors.append(str(said["entry"]))

    def open(self, address: str, *, width: int, dark: bool) -> None:
        """And wait for its scripts."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=address)
        self.ask("new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))")

    def ask(self, expression: str) -> Any:
        """The value of an expression there, or of what it promises."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path, selector: str = "html") -> None:
        """A PNG of the first such element."""
        box = self.ask(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect(); "
            "return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height} })()"
        )
        shot = self.call("Page.captureScreenshot", clip={**box, "scale": 1}, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def opened() -> Iterator[Page]:
    """A browser with one page."""
    (to_read, say), (hear, to_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads what it is told from 3, and answers into 4.
        shell = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        command = ["/bin/bash", "-c", shell, "chromium", str(CHROMIUM), *WORDS, f"--user-data-dir={profile}"]
        browser = subprocess.Popen(command, pass_fds=[to_read, to_write], stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        try:
            yield Page(say, hear)
        finally:
            os.close(say)
            os.close(hear)
            browser.terminate()
            browser.wait()
