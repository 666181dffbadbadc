"""Pages in a headless Chromium: as their scripts leave them, or driven by the keyboard."""

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from websocket import create_connection

from tools.build_book import CHROMIUM

_CODES = {"Tab": 9, "Enter": 13, "ArrowRight": 39}
_LIMIT_S = 30.0


def _command(profile: Path, *more: str) -> list[str]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    return [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", *more]


def dumped(address: str, profile: Path) -> tuple[str, list[str]]:
    """A page as its scripts leave it, and its console. No address but the page's own is found."""
    quiet = ("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr")
    files = "--allow-file-access-from-files"  # a test looks into a frame
    command = _command(profile, *quiet, files, "--virtual-time-budget=5000", "--dump-dom", address)
    environment = {**os.environ, "LANG": "C.UTF-8"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert "</html>" in done.stdout
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def seen_in(html: str, folder: Path) -> list[Any]:
    """What the scripts of a page have written into #seen; its console has to stay empty."""
    page = folder / "page.html"
    page.write_text(f"<meta charset=utf-8><body>{html}</body>", encoding="utf-8")
    shown, said = dumped(page.as_uri(), folder / "profile")
    assert said == []
    (seen,) = re.findall(r'<pre id="seen">(.*?)</pre>', shown)
    return json.loads(unescape(seen))


class Page:
    """One page at a time, through the browser's debugging protocol. Close it in the end."""

    def __init__(self, profile: Path, *, width: int, height: int = 900) -> None:
        command = _command(profile, "--remote-debugging-port=0", "--remote-allow-origins=*")
        self._process = subprocess.Popen([*command, "about:blank"], stderr=subprocess.DEVNULL)
        port = profile / "DevToolsActivePort"  # Chromium writes the port that it took
        self.wait(lambda: port.exists() and len(port.read_text().split()) == 2)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}/json"
        with urllib.request.urlopen(address, timeout=_LIMIT_S) as answer:
            (page,) = [one for one in json.load(answer) if one["type"] == "page"]
        self._socket = create_connection(page["webSocketDebuggerUrl"], timeout=_LIMIT_S)
        self._calls = 0
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def wait(self, condition: Callable[[], object]) -> None:
        limit = time.monotonic() + _LIMIT_S
        while not condition():
            assert time.monotonic() < limit, "the condition did not come true"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait(lambda: self.run("location.href != 'about:blank' && document.readyState == 'complete'"))

    def run(self, script: str) -> Any:
        """The value of an expression in the page, as JSON carries it."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, *, control: bool = False) -> None:
        event: dict[str, Any] = {"key": key, "modifiers": 2 if control else 0}
        event["windowsVirtualKeyCode"] = _CODES.get(key) or ord(key.upper())
        text = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while True:  # events stand between the answers
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._calls:
                return answer["result"]
