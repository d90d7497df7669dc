"""A headless Chromium, driven through its DevTools protocol over aiohttp's WebSocket: no package to install.

https://chromedevtools.github.io/devtools-protocol/
"""

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PATIENCE_S = 120.0
# No name is looked up and nothing but this machine is reached.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)


class Page:
    """One tab. `requests` holds every URL it asked for, `problems` what the console or the CSP complained of."""

    def __init__(self, owner: "Browser", session_id: str) -> None:
        self.requests: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._owner = owner
        self._session_id = session_id

    def heard(self, event: str, params: Any) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif event in ("Log.entryAdded", "Runtime.exceptionThrown"):
            self.problems.append(json.dumps(params))

    async def command(self, method: str, **params: Any) -> Any:
        return await self._owner.command(method, self._session_id, **params)

    async def open(self, url: str) -> None:
        for domain in ("Page", "Network", "Log", "Runtime"):
            await self.command(f"{domain}.enable")
        await self.command("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        found = await self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true; the browser itself looks, at each frame."""
        poll = (
            "new Promise((done, failed) => { const end = performance.now() + 100000; const look = () => {"
            f" let found = null; try {{ found = ({condition}); }} catch {{}}"
            " if (found) done(found); else if (performance.now() > end) failed(new Error('too late'));"
            " else setTimeout(look, 20); }; look(); })"
        )
        return await self.evaluate(poll)

    async def fill(self, selector: str, text: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.command("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        text = "\r" if key == "Enter" else ""
        code = {"Enter": 13, "Tab": 9, "Escape": 27}[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.command("Input.dispatchKeyEvent", type="keyUp", **common)

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def text(self, selector: str) -> str:
        return await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    async def view(self, width: int, height: int, *, scheme: str = "light", phone: bool = False) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        await self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self) -> bytes:
        """A PNG of what is in view."""
        return base64.b64decode((await self.command("Page.captureScreenshot", format="png"))["data"])


class Browser:
    """A running browser: `tab` gives pages that share nothing."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self._pages: dict[str, Page] = {}

    async def read(self) -> None:
        """Hand out replies and events until the socket closes."""
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                reply = self._replies.pop(found["id"])
                if not reply.done():
                    reply.set_result(found)
            elif found.get("sessionId") in self._pages:
                self._pages[found["sessionId"]].heard(found["method"], found["params"])

    async def command(self, method: str, session_id: str | None = None, **params: Any) -> Any:
        self._last += 1
        reply = self._replies[self._last] = asyncio.get_running_loop().create_future()
        session = {} if session_id is None else {"sessionId": session_id}
        await self._socket.send_json({"id": self._last, "method": method, "params": params} | session)
        found = await asyncio.wait_for(reply, PATIENCE_S)
        assert "error" not in found, found["error"]
        return found["result"]

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Page]:
        """A tab with storage of its own."""
        context = (await self.command("Target.createBrowserContext"))["browserContextId"]
        target = await self.command("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        try:
            yield page
        finally:
            await self.command("Target.disposeBrowserContext", browserContextId=context)


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    """A fresh browser; its profile lies in `folder`."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={folder}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )
    try:
        address = await asyncio.wait_for(_address(folder / "DevToolsActivePort"), PATIENCE_S)
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
            found = Browser(socket)
            reader = asyncio.create_task(found.read())
            try:
                yield found
            finally:
                reader.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _address(path: Path) -> str:
    # The browser tells it nowhere else.
    while not (written := _text(path)).count("\n"):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    port, _, address = written.partition("\n")
    return f"ws://127.0.0.1:{port}{address.strip()}"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
