"""A headless browser for tests, driven over its own protocol: nothing but Debian's chromium.

`chromedriver` speaks WebDriver, JSON over HTTP, which the standard library speaks too.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-default-apps", "--disable-extensions", "--disable-dev-shm-usage"),
)


class Browser:
    """One window of a headless chromium."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, file: Path) -> None:
        """Load a file as a page."""
        self._post("url", {"url": file.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """Return what a JavaScript body returns; the page's own policy does not hold for it."""
        return self._post("execute/sync", {"script": script, "args": []})

    def resize(self, width: int, height: int = 900) -> None:
        """Make the page so many CSS pixels wide."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.tell("Emulation.setDeviceMetricsOverride", size)

    def paint(self, scheme: str) -> None:
        """Ask for "light" or "dark"."""
        wish = [{"name": "prefers-color-scheme", "value": scheme}]
        self.tell("Emulation.setEmulatedMedia", {"features": wish})

    def shoot(self, file: Path) -> None:
        """Write a picture of the whole page."""
        wish = {"format": "png", "captureBeyondViewport": True}
        shot = self.tell("Page.captureScreenshot", wish)
        file.write_bytes(base64.b64decode(shot["data"]))

    def console(self) -> list[str]:
        """Return what the page had to complain about since the last call."""
        return [entry["message"] for entry in self._post("se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Return every address that was asked for since the last call."""
        found = []
        for entry in self._post("se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def tell(self, command: str, params: dict[str, Any]) -> Any:
        """Send a command of the browser's DevTools protocol."""
        return self._post("goog/cdp/execute", {"cmd": command, "params": params})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _send(f"{self._session}/{path}", body)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Yield a browser with a fresh profile; skip the test where there is none, but not in CI."""
    chrome, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chrome is None or driver is None:
        says = "needs Debian's chromium and chromium-driver: apt-get install chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(says)
        pytest.skip(says)
    with subprocess.Popen(
        [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            port = next(
                line.split("on port ")[1].strip(" .\n")
                for line in process.stdout
                if "started successfully on port" in line
            )
            base = f"http://127.0.0.1:{port}/session"
            options = {
                "binary": chrome,
                "args": [*_FLAGS, f"--user-data-dir={profile}"],
            }
            wish = {
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            made = _send(base, {"capabilities": {"alwaysMatch": wish}})
            session = f"{base}/{made['sessionId']}"
            try:
                yield Browser(session)
            finally:
                _send(session, None, "DELETE")
        finally:
            process.terminate()


def _send(address: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(
        address, data, {"Content-Type": "application/json"}, method=method
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(asked, timeout=120) as answer:
        return json.loads(answer.read())["value"]
