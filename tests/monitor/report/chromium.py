"""A real headless Chromium, spoken to over its pipe (--remote-debugging-pipe): what it says, and what it asks for."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

LIMIT_S = 120.0


class Seen(NamedTuple):
    """A page that was opened. problems: of the console. requests: URLs, but for the page's own."""

    problems: list[str]
    requests: list[str]
    screenshot: bytes
    title: str


class Chromium:
    """One process for several pages."""

    def __init__(self, folder: Path) -> None:
        (theirs, self._out), (self._in, its) = os.pipe(), os.pipe()
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={folder}",
        ]  # fmt: skip
        command = f'exec chromium "$@" 3<&{theirs} 4>&{its}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "chromium", *flags],
            pass_fds=(theirs, its), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.close(its)
        self._number, self._buffer, self._events = 0, b"", list[dict[str, Any]]()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._call("Browser.close")
            self._process.wait(20)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, 9)
                self._process.wait()
            os.close(self._in)
            os.close(self._out)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], end - time.monotonic())[0], "Chromium does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)  # type: ignore[no-any-return]

    def _call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._number += 1
        call = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(call).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]  # type: ignore[no-any-return]

    def open(self, url: str, width: int = 1280) -> Seen:
        """Open a page, and wait until it is loaded."""
        self._events.clear()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self._call(f"{domain}.enable", session)
        self._call(
            "Emulation.setDeviceMetricsOverride", session, width=width, height=800, deviceScaleFactor=1, mobile=False
        )
        self._call("Page.navigate", session, url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        size = self._call("Page.getLayoutMetrics", session)["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": width, "height": size["height"], "scale": 1}
        shot = self._call("Page.captureScreenshot", session, clip=clip, captureBeyondViewport=True)["data"]
        title = self._call("Runtime.evaluate", session, expression="document.title")["result"]["value"]
        self._call("Target.closeTarget", targetId=target)
        problems, requests = [], []
        for event in self._events:
            params = event.get("params", {})
            if event["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                problems.append(json.dumps(params))
            if event["method"] == "Network.requestWillBeSent" and params["request"]["url"] != url:
                requests.append(params["request"]["url"])
        return Seen(problems, requests, base64.b64decode(shot), title)
