"""A page in a headless Chromium that is driven by the keyboard, through the browser's debugging protocol."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from websocket import create_connection

_CODES = {"Tab": 9, "Enter": 13, "ArrowRight": 39}
_LIMIT_S = 30.0


class Page:
    """One page at a time. Close it in the end."""

    def __init__(self, chromium: str, profile: Path, *, width: int, height: int = 900) -> None:
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command += ["--remote-debugging-port=0", "--remote-allow-origins=*"]
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
