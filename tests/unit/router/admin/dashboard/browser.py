"""A headless Chromium that tests drive over a pipe, in the DevTools protocol: one process for all tests."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--no-proxy-server", "--force-color-profile=srgb", "--lang=en-GB", "about:blank",
)  # fmt: skip
TIMEOUT_S = 15.0


class Browser:
    """The process and its two pipes. A test's event loop reads the answers while it is in `tab`."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The shell gives the pipes the numbers that Chromium expects.
        order = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", order, "bash", program, f"--user-data-dir={profile}", *FLAGS],
            pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**os.environ, "TZ": "UTC"},
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._buffer = b""
        self._tabs: dict[str, Tab] = {}

    def close(self) -> None:
        os.write(self._write, json.dumps({"id": next(self._numbers), "method": "Browser.close"}).encode() + b"\0")
        self._process.wait(timeout=TIMEOUT_S)
        os.close(self._write)
        os.close(self._read)

    @asynccontextmanager
    async def tab(self, url: str, *, width: int = 1000, height: int = 900, dark: bool = False) -> AsyncIterator[Tab]:
        """A tab without any past, that has loaded `url`."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._read, self._receive)
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        try:
            target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
            session = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            tab = self._tabs[session["sessionId"]] = Tab(self, session["sessionId"])
            await tab.open(url, width, height, dark)
            yield tab
        finally:
            await self.call("Target.disposeBrowserContext", browserContextId=context)
            self._tabs.clear()
            loop.remove_reader(self._read)

    async def call(self, method: str, session: str = "", **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(TIMEOUT_S):
            return await answer

    def _receive(self) -> None:
        *messages, self._buffer = (self._buffer + os.read(self._read, 2**20)).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                answer = self._answers.pop(message["id"], None)
                if answer is None or answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(AssertionError(message["error"]["message"]))
                else:
                    answer.set_result(message["result"])
            elif (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                tab.heard(message["method"], message["params"])


class Tab:
    """A tab of the browser. `troubles`: errors of its console, with those of the security policy."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.troubles: list[str] = []

    async def open(self, url: str, width: int, height: int, dark: bool) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.look(width=width, height=height, dark=dark)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.protocol === 'http:'")

    async def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Resizes the window; `dark` as somebody's system is set."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, self._session, **params)

    async def js(self, expression: str) -> Any:
        """The value of an expression, or what its promise resolves to."""
        made = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in made, made["exceptionDetails"]
        return made["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Its value, once that is true."""
        look = f"const look = () => {{ const it = {expression}; it ? done(it) : setTimeout(look, 10); }}; look();"
        try:
            return await self.js(f"new Promise((done) => {{ {look} }})")
        except TimeoutError:
            raise AssertionError(f"never: {expression}; the page shows: {await self.text()}") from None

    async def text(self, selector: str = "body") -> str:
        return str(await self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def press(self, key: str, *, ctrl: bool = False) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, "")
        code = {"Enter": 13, "Tab": 9, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}.get(key, 0)
        down = {
            "type": "keyDown",
            "key": key,
            "text": text,
            "windowsVirtualKeyCode": code,
            "modifiers": 2 if ctrl else 0,
        }
        await self.call("Input.dispatchKeyEvent", **down)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def screenshot(self, selector: str) -> bytes:
        """A PNG of the first element that the selector finds."""
        box = await self.js(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return {x: it.x + scrollX, y: it.y + scrollY, width: it.width, height: it.height, scale: 1}; })()"
        )
        made = await self.call("Page.captureScreenshot", format="png", clip=box, captureBeyondViewport=True)
        return base64.b64decode(made["data"])

    def heard(self, method: str, params: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.troubles.append(params["exceptionDetails"]["exception"].get("description", "?"))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.troubles.append(params["entry"]["text"])
