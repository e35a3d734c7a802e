"""A headless browser for tests of HTML pages: Chromium, driven over a pipe by the Chrome DevTools Protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any, Final

#: Names of the program, the first found is used.
NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
#: Seconds that the browser may take for one answer.
PATIENCE: Final = 60.0
#: Starts a program that reads descriptor 3 and writes descriptor 4, as the browser does.
_START: Final = """
import os, sys
from fcntl import F_DUPFD, fcntl
reading, writing = (fcntl(int(d), F_DUPFD, 10) for d in sys.argv[1:3])
os.dup2(reading, 3), os.dup2(writing, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """Return the path of an installed browser, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Page:
    """An open page. ``problems`` lists errors of scripts, of the console and of the security policy."""

    reading: int
    writing: int
    session: str = ""
    number: int = 0
    pending: bytes = b""
    problems: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises RuntimeError if it fails."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        os.write(self.writing, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.pending:
            if not select([self.reading], [], [], PATIENCE)[0]:
                raise TimeoutError(f"the browser did not answer within {PATIENCE:g} s")
            read = os.read(self.reading, 1 << 20)
            if not read:
                raise RuntimeError("the browser ended")
            self.pending += read
        text, _, self.pending = self.pending.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        found, given = event.get("method"), event.get("params", {})
        if found == "Runtime.exceptionThrown":
            detail = given["exceptionDetails"]
            self.problems.append(str(detail.get("exception", {}).get("description", detail["text"])))
        elif found == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in given["args"]))
        elif found == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; a promise is awaited. Raises RuntimeError if it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", "exception"))
        return found["result"].get("value")

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the window in pixels, and light or dark colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Open a file and wait until it has drawn itself (``data-ready`` of the document)."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.value(
            "new Promise(done => { const look = () => document.documentElement?.dataset.ready ? done(1) : setTimeout(look, 5);"
            " look(); })"
        )

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Click with the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        """Press and release a key; a letter types itself."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def shoot(self, kind: str = "png", **clip: float) -> bytes:
        """Return a picture of the window, or of the part of the document with x, y, width and height in ``clip``. ``kind`` is
        png or webp."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        given = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True} if clip else {}
        return base64.b64decode(self.call("Page.captureScreenshot", format=kind, quality=75, **given)["data"])


@contextmanager
def open_browser(program: str) -> Iterator[Page]:
    """Start a browser with an empty profile and yield its page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        (own_read, their_write), (their_read, own_write) = os.pipe(), os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-pipe",
            "--hide-scrollbars",
        ]
        words = [sys.executable, "-I", "-c", _START, str(their_read), str(their_write), program, *flags]
        words.append(f"--user-data-dir={folder}")
        log = Path(folder) / "stderr"
        with log.open("wb") as file:
            process = subprocess.Popen(words, pass_fds=(their_read, their_write), stdout=file, stderr=file)
        os.close(their_read)
        os.close(their_write)
        try:
            page = Page(own_read, own_write)
            target = page.call("Target.createTarget", url="about:blank")["targetId"]
            page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                page.call(f"{domain}.enable")
            yield page
        finally:
            process.terminate()
            process.wait()
            os.close(own_read)
            os.close(own_write)
