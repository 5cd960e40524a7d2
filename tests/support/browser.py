"""A headless browser for the tests of pages and their screenshots."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

from support.waiting import until

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
"""Path of Chromium, or None."""


class Gone(Exception):
    """The browser could not answer, usually because the page was left."""


class Browser:
    """Headless Chromium, driven by the DevTools protocol over pipes; needs no port and no package."""

    def __init__(self, program: str, profile: Path) -> None:
        inward, outward = os.pipe(), os.pipe()
        # Chromium reads from 3 and writes to 4. Move our descriptors out of the way, so that none is overwritten.
        read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (inward[0], outward[1]))
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
            "--disable-background-networking", "--no-first-run", "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
        ]  # fmt: skip
        script = f'exec "$@" 3<&{read} 4>&{write}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *flags, "about:blank"], pass_fds=(read, write),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (inward[0], outward[1], read, write):
            os.close(fd)
        self.into, self.out = os.fdopen(inward[1], "wb", 0), os.fdopen(outward[0], "rb")
        self.number, self.rest, self.events = 0, b"", list[dict[str, Any]]()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> Any:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if method.partition(".")[0] != "Target":
            message["sessionId"] = self.session
        self.into.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise Gone(answer["error"]["message"])
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = os.read(self.out.fileno(), 1 << 20)
            assert more, "the browser ended"
            self.rest += more
        one, _, self.rest = self.rest.partition(b"\0")
        return json.loads(one)

    def run(self, code: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, code: str) -> Any:
        def value() -> Any:
            try:
                return self.run(code)
            except Gone:
                return None  # the next page is loading

        return until(value)

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url.split('#')[0])})")

    def follow(self, selector: str) -> None:
        """Click on a link as soon as it is visible."""
        link = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{link}.checkVisibility()")
        self.run(f"{link}.click()")

    def screen(self, width: int, height: int, dark: bool = False) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Enter": 13, "Escape": 27, "ArrowDown": 40}[key]
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def faults(self) -> list[str]:
        """List complaints in the console, and requests that left the disk."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:300])
            if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(params["args"])[:300])
            if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
                ("file:", "data:", "about:")
            ):
                found.append(params["request"]["url"])
        return found

    def barriers(self) -> list[str]:
        """List the serious and critical faults of accessibility that axe finds in the open page."""
        self.run(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8") + "; 0")
        found = self.run("axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations)")
        return [
            f"{fault['impact']}: {fault['help']}: {fault['nodes'][0]['html'][:200]}"
            for fault in found
            if fault["impact"] in ("serious", "critical")
        ]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.into.close()
        self.out.close()
