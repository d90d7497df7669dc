"""The page in a headless Chromium: what people do with it, and what a hostile model does to it."""

import json

import pytest
import pytest_asyncio

from mlx_troupe.api.keys import ApiKeys
from mlx_troupe.runtime.events import Failed, Finished, ReasoningDelta, TextDelta, Usage
from tests.api.fake_service import FakeService, Gate
from tests.api.serving import serving
from tests.api.tiny_server import real_server
from tests.models.tiny import build_tiny

from .browser import CHROMIUM, browser

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.asyncio(loop_scope="module"),
]

KEY = "a-secret-key-of-alice"
KEYS = ApiKeys([("alice", KEY)])
LAST = "article.assistant:last-of-type"
COMPLETE = "document.getElementById('said').textContent === 'The answer is complete.'"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium(tmp_path_factory):
    async with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def says(*pieces):
    usage = Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=len(pieces))
    return lambda _: [*(TextDelta(piece, (1,)) for piece in pieces), Finished("stop", usage)]


async def ask(page, text):
    await page.fill("#question", text)
    await page.press("Enter")


def quiet(page):
    """Nothing went wrong in the browser, and nobody but this machine was asked."""
    assert page.problems == []
    assert {request["url"].split("/")[2].partition(":")[0] for request in page.requests} == {"127.0.0.1"}


async def test_a_chat_streams_and_remembers(chromium):
    gate = Gate()

    def script(generation):
        if len(generation.messages) == 1:
            return [TextDelta("Hel", (1,)), gate, TextDelta("lo **you**", (2,)), Finished("stop", Usage(3, 1, 2))]
        return says(f"{len(generation.messages)} messages")(generation)

    async with serving(FakeService(script)) as client, chromium.tab() as page:
        await page.open(client.url)
        await ask(page, "hi\nthere")
        await page.until(f"document.querySelector('{LAST}').innerText.startsWith('Hel')")
        assert await page.evaluate("document.getElementById('stop').hidden") is False
        gate.set()
        await page.until(COMPLETE)
        assert (await page.text(LAST)).startswith("Hello you")
        assert await page.text(f"{LAST} strong") == "you"
        assert "3 tokens read (1 from the cache)" in await page.text(f"{LAST} .facts")
        await ask(page, "again")
        await page.until(f"document.querySelector('{LAST}').innerText.startsWith('3 messages')")
        assert [message["role"] for message in client.service.submitted[1].messages] == ["user", "assistant", "user"]
        assert client.service.submitted[1].messages[1]["content"] == "Hello **you**"
        await page.until("document.getElementById('state').textContent === 'ready'")
        quiet(page)


async def test_stop_ends_the_request(chromium):
    script = [TextDelta("Once", (1,)), Gate(), Finished("stop", Usage())]
    async with serving(FakeService(lambda _: list(script))) as client, chromium.tab() as page:
        await page.open(client.url)
        await ask(page, "a story")
        await page.until(f"document.querySelector('{LAST}').innerText.includes('Once')")
        await page.click("#stop")
        await client.service.until(lambda: len(client.service.cancelled) == 1)
        await page.until(f"document.querySelector('{LAST} .facts').textContent.includes('stopped')")
        assert await page.evaluate("document.getElementById('send').hidden") is False
        quiet(page)


async def test_the_key_is_asked_for_and_stays_in_the_tab(chromium):
    async with serving(FakeService(says("welcome")), keys=KEYS) as client, chromium.tab() as page:
        await page.open(client.url)
        await page.until("document.getElementById('options').open")
        assert await page.text("#state") == "a key is needed"
        await page.fill("#key", KEY)
        await page.press("Enter")
        await page.until("document.getElementById('state').textContent === 'ready'")
        await ask(page, "hi")
        await page.until(COMPLETE)
        assert (await page.text(LAST)).startswith("welcome")
        assert await page.evaluate("sessionStorage.getItem('mlx-troupe.key')") == KEY
        assert await page.evaluate("JSON.stringify(localStorage) + document.cookie") == "{}"
        assert KEY not in await page.evaluate("document.documentElement.outerHTML + location.href")
        for request in page.requests:
            told = json.dumps({name: value for name, value in request.items() if name != "headers"})
            assert KEY not in told
            carries = KEY in json.dumps(request["headers"])
            assert not carries or request["headers"]["Authorization"] == f"Bearer {KEY}"
            assert not (carries and "/v1/" not in request["url"])
        # The refusals before the key was known are all that the console has.
        assert all("401" in problem for problem in page.problems)


HOSTILE = (
    '<img src=x onerror="window.owned=1"><script>window.owned=1</script>\n\n'
    '[a](javascript:window.owned=1) [b](data:text/html,x) [c](JaVaScRiPt:owned=1) [d](https://evil.example/"x) '
    '![e](http://evil.example/pixel.png) <a href="javascript:1">f</a>\n\n'
    "```html\n<script>window.owned=1</script>\n```\n# <svg onload=window.owned=1>\n- <iframe src=//evil.example>\n"
    "> <style>*{display:none}</style>\n\n`</code><script>window.owned=1</script>`"
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_what_a_model_says_is_only_text(chromium, size):
    pieces = [HOSTILE[place : place + size] for place in range(0, len(HOSTILE), size)]
    async with serving(FakeService(says(*pieces))) as client, chromium.tab() as page:
        await page.open(client.url)
        await ask(page, "<img src=x onerror='window.owned=1'>")
        await page.until(COMPLETE)
        names = await page.evaluate(
            "[...new Set([...document.querySelectorAll('article *')].map((one) => one.localName))].sort().join()"
        )
        assert names == "a,blockquote,code,div,h3,li,p,pre,ul"
        links = await page.evaluate(
            "[...document.querySelectorAll('article a')].map((one) => one.href + ' ' + one.rel)"
        )
        assert links == [
            "https://evil.example/%22x noopener noreferrer nofollow",
            "http://evil.example/pixel.png noopener noreferrer nofollow",
        ]
        assert await page.evaluate("window.owned") is None
        text = await page.evaluate(f"document.querySelector('{LAST}').textContent")
        assert "<script>window.owned=1</script>" in text
        assert "<iframe src=//evil.example>" in text
        quiet(page)


async def test_script_from_elsewhere_is_refused_by_the_browser(chromium):
    async with serving() as client, chromium.tab() as page:
        await page.open(client.url)
        await page.evaluate(
            "(() => { const made = document.createElement('img'); made.src = 'http://127.0.0.1:1/x.png';"
            " document.body.append(made); })()"
        )
        for attack in ("document.body.innerHTML = '<b>x</b>'", "eval('1')", "new Function('1')()"):
            refused = await page.evaluate(f"(() => {{ try {{ {attack}; return false; }} catch {{ return true; }} }})()")
            assert refused or "eval" in attack or "Function" in attack
        await page.until("performance.now() > 0")
        assert any("Content Security Policy" in problem for problem in page.problems)


async def test_a_thought_a_tool_call_and_a_failure_are_shown(chromium):
    script = [
        ReasoningDelta("let me <b>think", 2),
        TextDelta("so", (1,)),
        Failed("engine_failed", "secret", None, None),
    ]
    async with serving(FakeService(lambda _: list(script))) as client, chromium.tab() as page:
        await page.open(client.url)
        await ask(page, "hi")
        await page.until(f"document.querySelector('{LAST} .problem')")
        assert await page.evaluate(f"document.querySelector('{LAST} details div').textContent") == "let me <b>think"
        assert "server failed on this request" in await page.text(f"{LAST} .problem")
        assert await page.evaluate("document.getElementById('question').value") == "hi"


async def test_a_huge_answer_does_not_hang_the_page(chromium):
    line = "word `code` **bold** " * 40
    pieces = [*([line + "\n"] * 1000), "```\n", *(["x" * 999 + "\n"] * 1000), "```\n", "y" * 400_000]
    async with serving(FakeService(says(*pieces))) as client, chromium.tab() as page:
        await page.open(client.url)
        await ask(page, "all of it")
        await page.until(COMPLETE)
        code = await page.evaluate(f"[...document.querySelectorAll('{LAST} pre code')].map((one) => one.textContent)")
        assert "".join(code) == ("x" * 999 + "\n") * 1000
        assert await page.evaluate(f"document.querySelectorAll('{LAST} strong').length") == 40_000
        assert (await page.text(f"{LAST} div")).endswith("y\n\n(The rest is not shown.)")
        await page.evaluate("new Promise(requestAnimationFrame)")
        quiet(page)


async def test_options_reach_the_request(chromium):
    async with serving(FakeService(says("ok"))) as client, chromium.tab() as page:
        await page.open(client.url)
        await page.click("#show-options")
        await page.fill("#system", "Be brief.")
        await page.fill("#temperature", "0.5")
        await page.fill("#max-tokens", "7")
        await page.click("dialog button.main")
        await ask(page, "hi")
        await page.until(COMPLETE)
        asked = client.service.submitted[0]
        assert asked.messages[0] == {"role": "system", "content": "Be brief."}
        assert (asked.sampling.temperature, asked.max_tokens) == (0.5, 7)


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")])
async def test_it_fits_and_can_be_used_without_a_mouse(chromium, width, scheme):
    async with (
        serving(FakeService(says("word " * 30 + "\n\n```\n" + "x" * 400 + "\n```\n"))) as client,
        chromium.tab() as page,
    ):
        await page.view(width, 740, scheme=scheme, phone=width < 500)
        await page.open(client.url)
        await ask(page, "h" * 200)
        await page.until(COMPLETE)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        box = "document.getElementById('question').getBoundingClientRect()"
        assert await page.evaluate(f"{box}.bottom <= innerHeight && {box}.top > 0")
        # Every control has a name, every field a label, ink on ground has contrast.
        unnamed = await page.evaluate(
            "[...document.querySelectorAll('button, input, textarea, select, meter, a')].filter((one) =>"
            " !(one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length)).length"
        )
        assert unnamed == 0
        assert await page.evaluate(CONTRAST) == []
        await page.press("Tab")
        assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        if width < 500:
            await page.click("#show-live")
            assert await page.evaluate("document.getElementById('live').getBoundingClientRect().width") > 300


# Texts whose contrast with what lies behind them is below 4.5 (WCAG 2.2, 1.4.3).
CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d");
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = ([...parts]) => {
    const [r, g, b] = parts.slice(0, 3).map((part) => {
      part /= 255; return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const colour = rgb(getComputedStyle(one).backgroundColor);
      if (colour[3]) return colour;
    }
    return rgb("white");
  };
  return [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility() &&
    [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())).filter((one) => {
      const [a, b] = [light(rgb(getComputedStyle(one).color)), light(ground(one))].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05) < 4.5;
    }).map((one) => one.id || one.textContent.slice(0, 40));
})()"""


async def test_the_live_view_shows_a_real_runtime(chromium, tmp_path_factory):
    folder = build_tiny("llama", tmp_path_factory.mktemp("model"))
    async with real_server(folder) as url, chromium.tab() as page:
        await page.open(url)
        await page.click("#show-options")
        await page.fill("#max-tokens", "9")
        await page.click("dialog button.main")
        for _ in range(2):
            await page.evaluate("document.getElementById('said').textContent = ''")
            await ask(page, "word " * 600)
            await page.until(COMPLETE)
            await page.click("#new-chat")
        await page.until("Number(document.getElementById('answer-tokens').textContent) > 1")
        await page.until("document.getElementById('finished').textContent === '2'")
        await page.until("document.getElementById('cache-meter').value > 0.3")
        assert await page.text("#model") == "tiny"
        assert await page.text("#running") == "0"
        assert "pages" in await page.text("#cache-ram")
        assert await page.text("#memory-limit") != "not known"
        quiet(page)


HOSTILE_LINES = (
    "'`'.repeat(n)",
    "'`a'.repeat(n)",
    "'*'.repeat(n)",
    "'**a'.repeat(n)",
    "'['.repeat(n)",
    "'[]('.repeat(n)",
    "'[a](b '.repeat(n)",
    "'http://'.repeat(n)",
    "'> '.repeat(n)",
    "'#'.repeat(n)",
    "'- ' + ' '.repeat(n) + '\\ra'",
    "'-'.repeat(n) + 'x'",
    "'- - ' + ' '.repeat(n) + 'x'",
    "'1. '.repeat(n)",
    "'~'.repeat(n)",
)


@pytest.mark.parametrize("size", [19_000, 200_000])
async def test_no_line_takes_long_to_show(chromium, size):
    """Lines as long as are parsed at all, and longer ones; whole and in pieces."""
    async with serving() as client, chromium.tab() as page:
        await page.open(client.url)
        for line in HOSTILE_LINES:
            took_ms = await page.evaluate(
                f"import('/page/markdown.js').then(({{ Markdown }}) => {{ const n = {size}; const line = {line};"
                " const start = performance.now();"
                " for (const step of [line.length, 997]) {"
                "   const root = document.createElement('div'); const shown = new Markdown(root);"
                "   for (let at = 0; at < line.length; at += step) shown.push(line.slice(at, at + step));"
                "   shown.push('\\n'); shown.finish(); }"
                " return performance.now() - start; })"
            )
            assert took_ms < 5000, (line, took_ms)
