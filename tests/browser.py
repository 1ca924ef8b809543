"""A headless Chromium, driven by its DevTools protocol over a pipe: no driver and no package beside it.

with browser.opened() as chromium:
    page = chromium.visit(url, width=390, dark=True)
    assert page.problems == [] and page.requests == [url]
    assert page.evaluate("document.title") == "..."
"""

import base64
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60.0  # seconds for anything
QUIET = 0.2  # seconds without a request after which a page is at rest


@contextlib.contextmanager
def open_browser() -> Iterator["Chromium"]:
    """A browser of its own, with nothing of an earlier one; a skip where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium here: `make browser` installs it (Debian, root)")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        down, commands = os.pipe()
        answers, up = os.pipe()
        # Chromium reads its commands from descriptor 3 and answers on 4.
        line = shlex.join([program, *FLAGS, f"--user-data-dir={profile}", "about:blank"])
        script = f"exec {line} 3<&{down} 4>&{up}"
        running = subprocess.Popen(["bash", "-c", script], pass_fds=(down, up), stderr=subprocess.DEVNULL)
        os.close(down)
        os.close(up)
        try:
            yield Chromium(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            running.terminate()
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


class Chromium:
    """The protocol: messages end with a NUL; an answer has the number of its question, an event has none."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.last, self.rest = 0, b""
        self.events: list[dict[str, Any]] = []
        os.set_blocking(answers, False)

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The answer to a command."""
        self.last += 1
        message = {"id": self.last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for found in self._read():
                if found.get("id") == self.last:
                    assert "error" not in found, (method, found["error"])
                    return dict(found["result"])
        raise TimeoutError(f"Chromium did not answer {method} within {PATIENCE:g} s")

    def wait(self, method: str, session: str) -> None:
        """Return when an event has come."""
        until = time.monotonic() + PATIENCE
        while not any(event["method"] == method and event.get("sessionId") == session for event in self.events):
            if time.monotonic() > until:
                raise TimeoutError(f"{method} did not come within {PATIENCE:g} s")
            list(self._read())

    def rested(self) -> None:
        """Return when nothing has been asked for during a while."""
        before, since = -1, time.monotonic()
        while time.monotonic() - since < QUIET:
            list(self._read())
            count = sum(event["method"] == "Network.requestWillBeSent" for event in self.events)
            before, since = (count, time.monotonic()) if count != before else (before, since)

    def _read(self) -> Iterator[dict[str, Any]]:
        """What has come; events are kept."""
        try:
            chunk = os.read(self.answers, 2**20)
            assert chunk, "Chromium has ended"
            self.rest += chunk
        except BlockingIOError:
            time.sleep(0.005)
        *whole, self.rest = self.rest.split(b"\0")
        for text in whole:
            message = json.loads(text)
            if "id" not in message:
                self.events.append(message)
            yield message

    def visit(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        media: Literal["screen", "print"] = "screen",
        offline: bool = False,
    ) -> "Page":
        """A page that has loaded in a window of this size, on a phone where it is narrow."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable", session)
        if offline:
            self.ask("Network.emulateNetworkConditions", session,
                     offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", session,
                 width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", session, media=media, features=[scheme])
        self.ask("Page.navigate", session, url=url)
        self.wait("Page.loadEventFired", session)
        self.rested()
        return Page(self, session)


@dataclasses.dataclass(frozen=True)
class Page:
    """A loaded page."""

    chromium: Chromium
    session: str

    def _events(self, method: str) -> list[dict[str, Any]]:
        every = self.chromium.events
        return [each["params"] for each in every if each["method"] == method and each.get("sessionId") == self.session]

    @property
    def problems(self) -> list[str]:
        """Exceptions, and what the console says as a warning or an error."""
        thrown = [str(each["exceptionDetails"]["text"]) for each in self._events("Runtime.exceptionThrown")]
        logged = [each["entry"] for each in self._events("Log.entryAdded")]
        said = [each for each in self._events("Runtime.consoleAPICalled") if each["type"] in ("error", "warning")]
        return [
            *thrown,
            *(f"{entry['text']} {entry.get('url', '')}" for entry in logged if entry["level"] in ("error", "warning")),
            *(str(each["args"]) for each in said),
        ]

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for, without those that hold their data themselves."""
        asked = [str(each["request"]["url"]) for each in self._events("Network.requestWillBeSent")]
        return [url for url in asked if not url.startswith("data:")]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        found = self.chromium.ask("Runtime.evaluate", self.session, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    @property
    def overflow(self) -> list[str]:
        """What reaches beyond the right edge of the window, where the page can be scrolled sideways."""
        return list(self.evaluate(_OVERFLOW))

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write the page as PNG, all of it or what the window shows."""
        found = self.chromium.ask("Page.captureScreenshot", self.session, captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


_OVERFLOW = """(() => {
  const wide = document.scrollingElement;
  if (wide.scrollWidth <= window.innerWidth) return [];
  return [`page ${wide.scrollWidth} > ${window.innerWidth}`, ...[...document.querySelectorAll("*")]
    .filter(each => each.getBoundingClientRect().right > window.innerWidth + 0.5)
    .map(each => `${each.tagName}.${each.className}`).slice(0, 20)];
})()"""
