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
PATIENCE_S = 30.0
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

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session_id: str) -> None:
        self.requests: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._socket = socket
        self._session_id = session_id
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._last = 0

    async def read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                reply = self._replies.pop(found["id"], None)
                if reply is not None and not reply.done():
                    reply.set_result(found)
            elif found["method"] == "Network.requestWillBeSent":
                self.requests.append(found["params"]["request"])
            elif found["method"] in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.problems.append(json.dumps(found["params"]))

    async def command(self, method: str, **params: Any) -> Any:
        self._last += 1
        reply = self._replies[self._last] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(
            {"id": self._last, "sessionId": self._session_id, "method": method, "params": params}
        )
        found = await asyncio.wait_for(reply, PATIENCE_S)
        assert "error" not in found, found["error"]
        return found["result"]

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
            "new Promise((done, failed) => { const end = performance.now() + 20000; const look = () => {"
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
        await self.command(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    async def screenshot(self, path: Path) -> None:
        found = await self.command("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """A fresh browser with one empty tab; its profile lies in `folder`."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )
    try:
        port, path = await asyncio.wait_for(_address(folder / "DevToolsActivePort"), PATIENCE_S)
        async with aiohttp.ClientSession() as session, session.ws_connect(
            f"ws://127.0.0.1:{port}{path}", max_msg_size=0
        ) as socket:
            page = Page(socket, await _first_tab(socket))
            reader = asyncio.create_task(page.read())
            try:
                yield page
            finally:
                reader.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _address(path: Path) -> tuple[str, str]:
    while not path.exists() or path.read_text().count("\n") < 1:
        await asyncio.sleep(0.05)
    port, _, address = path.read_text().partition("\n")
    return port, address.strip()


async def _first_tab(socket: aiohttp.ClientWebSocketResponse) -> str:
    await socket.send_json({"id": 1, "method": "Target.getTargets"})
    targets = (await _reply(socket, 1))["targetInfos"]
    target = next(target["targetId"] for target in targets if target["type"] == "page")
    await socket.send_json({"id": 2, "method": "Target.attachToTarget", "params": {"targetId": target, "flatten": True}})
    return (await _reply(socket, 2))["sessionId"]


async def _reply(socket: aiohttp.ClientWebSocketResponse, number: int) -> Any:
    while (found := json.loads((await socket.receive()).data)).get("id") != number:
        pass
    return found["result"]
