"""Headless Chromium, driven over a pipe with DevTools messages. Each message ends with a zero byte."""

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

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# `.ci/run` installs Chromium: a test without it fails there.
needs_chromium = pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason="needs Chromium")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
]
TIMEOUT_S = 60


class Page:
    """A browser tab.

    Attributes:
        requests: the URLs that it has requested.
        errors: the exceptions, and the errors and warnings of its console.
    """

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd = write_fd
        self._read_fd = read_fd
        self._buffer = b""
        self._last_id = 0
        self._session = ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a DevTools method and return its result. Events that arrive meanwhile are recorded."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while (response := self._read_message()).get("id") != self._last_id:
            self._record_event(response)
        assert "error" not in response, f"{method}: {response['error']}"
        return dict(response["result"])

    def _read_message(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            remaining_s = max(0.0, deadline_s - time.monotonic())
            assert select.select([self._read_fd], [], [], remaining_s)[0], "Chromium does not respond"
            chunk = os.read(self._read_fd, 1 << 20)
            assert chunk, "Chromium has exited"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _record_event(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert", "trace"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))

    def open(self, url: str, *, width: int, dark: bool) -> None:
        """Open a URL in a window of this width and wait until it is loaded."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.evaluate(
            "new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))"
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def print_pdf(self, path: Path, *, width_in: float, height_in: float) -> None:
        """Print the page to a PDF on paper of this size."""
        printed = self.call("Page.printToPDF", paperWidth=width_in, paperHeight=height_in, printBackground=True)
        path.write_bytes(base64.b64decode(printed["data"]))


@contextmanager
def open_page() -> Iterator[Page]:
    """Start a browser with one tab."""
    assert CHROMIUM, "Chromium is missing: apt-get install chromium"
    browser_reads, write_fd = os.pipe()
    read_fd, browser_writes = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium reads commands from descriptor 3 and writes responses to 4.
        script = f'exec 3<&{browser_reads} 4>&{browser_writes}; exec "$@"'
        arguments = [CHROMIUM, *ARGUMENTS, f"--user-data-dir={profile}"]
        command = ["/bin/bash", "-c", script, "chromium", *arguments]
        browser = subprocess.Popen(command, pass_fds=[browser_reads, browser_writes], stderr=subprocess.DEVNULL)
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            yield Page(write_fd, read_fd)
        finally:
            os.close(write_fd)
            os.close(read_fd)
            browser.terminate()
            browser.wait()
