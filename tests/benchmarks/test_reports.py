"""JSON lines, tables, charts, the page and the progress line."""

from __future__ import annotations

import asyncio
import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from benchmarks.figures.metrics import METRICS, shown
from benchmarks.figures.objective import Objective
from benchmarks.figures.outcome import Outcome
from benchmarks.figures.summary import Sample, summarise
from benchmarks.interleave import ratios, run_plan
from benchmarks.measure import BenchPlan, Measurement
from benchmarks.reports.charts import gap_timeline
from benchmarks.reports.lines import MeasurementLine, Results, RunLine, read_lines, write_line
from benchmarks.reports.page import page
from benchmarks.reports.progress import Progress
from benchmarks.reports.svg import Scale, Series, line_chart, powers, thinned, ticks
from benchmarks.reports.table import aligned, report
from benchmarks.traffic.arrivals import Level
from benchmarks.traffic.drive import DriveSettings, Tally

from .virtual_time import ScriptedTarget, run

PLAN = BenchPlan(levels=(Level("1 users", users=1), Level("8 users", users=8)))


def measured(target, level=PLAN.levels[0], repeat=0, speed=1.0, **changes):
    facts = {
        "conversation": 0, "turn": 0, "intended_s": 0.0, "sent_s": 0.0, "end_s": 2 / speed, "tokens": 10,
        "text_times_s": tuple((place + 1) / 5 / speed for place in range(10)), "counted_by_server": True,
        "wanted_tokens": 10, "prompt_tokens": 10, "cached_tokens": 0, "finish_reason": "length", "error": "",
        "left": False,
    }  # fmt: skip
    outcomes = (Outcome(**(facts | changes)),)
    samples = tuple(Sample(at_s, {"process_bytes": 2.0**20 * (1 + at_s)}) for at_s in (0.0, 1.0, 2.0))
    figures = summarise(outcomes, Objective(), samples, wall_s=2 / speed)
    return Measurement(target, level, repeat, figures, outcomes, samples)


def two_servers():
    return [
        measured(name, level, repeat, speed)
        for level in PLAN.levels
        for repeat in range(3)
        for name, speed in (("ours", 3.0), ("theirs", 1.0 + repeat / 10))
    ]


def cell(text, row, column):
    """The cell of an aligned table, by the names of its row and column."""
    lines = text.splitlines()
    names = re.split(r"\s{2,}", lines[0].strip())
    (line,) = [line for line in lines if line.strip().startswith(row)]
    return re.split(r"\s{2,}", line.strip())[names.index(column)]


# --- lines ------------------------------------------------------------------------------------------------------------


def test_lines_come_back_as_they_went(tmp_path):
    path = tmp_path / "run.jsonl"
    with path.open("wb") as file:
        write_line(file, RunLine({"machine": "this"}, PLAN))
        for one in two_servers():
            write_line(file, MeasurementLine(one))
    line, found = read_lines(path)
    assert (line.about, line.plan, found) == ({"machine": "this"}, PLAN, two_servers())


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "run.jsonl"
    with Results(str(path), None, {}, PLAN) as results:
        results.add(measured("ours"))
        results.add(measured("ours", repeat=1))
    path.write_bytes(path.read_bytes()[:-20])
    assert read_lines(path)[1] == [measured("ours")]


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n", '{"kind": "measurement"}\n', '{"kind": "run"}'])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match="x"):
        read_lines(tmp_path / "x")


def test_a_run_cut_short_keeps_what_it_has(tmp_path):
    lines, html = tmp_path / "run.jsonl", tmp_path / "run.html"

    def run_until_stopped():
        with Results(str(lines), str(html), {}, PLAN) as results:
            results.add(measured("ours"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_until_stopped()
    assert read_lines(lines)[1] == [measured("ours")]
    assert "ours" in html.read_text()


# --- tables -----------------------------------------------------------------------------------------------------------


def test_columns_are_aligned():
    assert aligned([["a", "bb"], ["ccc", "1"]]) == "a    bb\nccc   1"


def test_the_table_has_confidence_and_ratios_by_repeat():
    found = two_servers()
    text = report(found, PLAN)
    block = text.split("\n\n")[0]
    assert cell(block, "tok/s", "ours / theirs") == "2.73x (2.50-3.00)"
    assert cell(block, "tok/s", "ours") == "15 ±0"
    assert cell(block, "tok/s", "theirs").startswith("5.5 ±1.24")
    alone = report([one for one in found if one.target == "ours"], PLAN).split("\n\n")[0]
    assert cell(alone, "tok/s", "8 users") == "15 ±0"
    assert ratios(found, METRICS[0], "1 users", "ours", "theirs") == pytest.approx([3.0, 3 / 1.1, 2.5], rel=1e-3)


def test_ratios_leave_out_repeats_that_only_one_has():
    found = [measured("ours", repeat=0), measured("ours", repeat=1), measured("theirs", repeat=1)]
    assert ratios(found, METRICS[0], "1 users", "ours", "theirs") == [1.0]


def test_what_went_wrong_stands_below():
    found = [
        measured("ours", error="HTTP 429: x", tokens=0, text_times_s=()),
        measured("ours", repeat=1, left=True),
        measured("ours", repeat=2, sent_s=0.2, wanted_tokens=99, cached_tokens=5),
    ]
    note = report(found, PLAN).splitlines()[-1]
    for part in ("3 requests", "1 HTTP 429", "1 left early", "1 ended before", "17% of prompt", "CLIENT WAS LATE"):
        assert part in note


def test_nothing_measured():
    assert report([], PLAN) == "nothing was measured"
    assert "nothing was measured" in page({}, PLAN, [])


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.01234, "0.0123"), (99.94, "99.9"), (12345.6, "12,346")])
def test_shown(value, text):
    assert shown(value) == text


# --- charts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("high", "last", "count"), [(1.0, 1.0, 6), (97, 100, 6), (0.003, 0.003, 4), (4100, 5000, 6)])
def test_ticks_are_round_and_reach(high, last, count):
    found = ticks(high)
    assert found[0] == 0
    assert found[-1] == pytest.approx(last)
    assert len(found) == count


@pytest.mark.parametrize("high", [0.0, -1.0, float("nan"), float("inf")])
def test_ticks_of_nothing(high):
    assert ticks(high) == [0.0, 1.0]


def test_a_chart_is_xml_with_a_line_a_series():
    chart = line_chart("a < b", "x & y", "y", [Series("<one>", [(0, 0), (1, 5)]), Series("two", [(1, 1)], [(1, 0, 2)])])
    root = ElementTree.fromstring(chart)
    assert len(root.findall(".//polyline")) == 2
    points = root.find(".//polyline").get("points").split()
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in points)
    assert x0 < x1
    assert y0 > y1  # up is less in SVG
    assert root.findtext("figcaption") == "a < b"
    assert "not measured" in line_chart("t", "x", "y", [Series("none", [])])


def test_powers_of_ten_enclose_the_values():
    assert powers([0.0, 3.0, 250.0]) == [1.0, 10.0, 100.0, 1000.0]
    assert powers([10.0]) == [10.0, 100.0]
    assert powers([0.0]) == [1.0, 10.0]


def test_a_logarithmic_axis_has_decades_of_one_width():
    scale = Scale(1.0, 1000.0, 0.0, 300.0, logarithmic=True)
    assert [scale.at(value) for value in (0.0, 1.0, 10.0, 100.0, 1000.0)] == pytest.approx([0, 0, 100, 200, 300])


def test_stems_stand_on_zero():
    chart = line_chart("t", "x", "y", [Series("one", [(1.0, 2.0), (2.0, 4.0)], stems=True)])
    path = ElementTree.fromstring(chart).find(".//path").get("d")
    assert path.count("M") == path.count("V") == 2


def test_thinning_keeps_the_ends():
    points = [(float(number), 0.0) for number in range(5001)]
    kept = thinned(points)
    assert len(kept) <= 601
    assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_gap_timeline_shows_the_stall_where_it_was():
    times = (0.1, 0.2, 0.3, 1.5, 1.6)
    series = gap_timeline(measured("ours", text_times_s=times), "ours")
    at_s, gap_ms = max(series.points, key=lambda point: point[1])
    assert gap_ms == pytest.approx(1200)
    assert at_s == pytest.approx(1.5, abs=0.02)


class _Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.references, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else():
    text = page({"command": "<script>alert(1)</script>"}, PLAN, two_servers())
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.references == []
    assert not {"script", "link", "img", "iframe"} & set(checker.tags)
    assert "url(" not in text
    assert checker.tags.count("svg") == 5 + 2 * 5
    for title in ("tok/s against load", "First token, distribution", "Longest gap, over time", "Memory, over time"):
        assert title in text


# --- interleaving and progress ----------------------------------------------------------------------------------------


def test_targets_take_turns_and_odd_repeats_turn_round():
    async def names():
        targets = [ScriptedTarget(lambda number: 1.0), ScriptedTarget(lambda number: 2.0)]
        targets[0].name, targets[1].name = "a", "b"
        plan = BenchPlan(levels=PLAN.levels, drive=DriveSettings(conversations=2), repeats=2, warm_up=1, scrape_s=0)
        found = [one async for one in run_plan(targets, plan)]
        return [(one.level.users, one.repeat, one.target) for one in found], targets

    order, (a, b) = run(names())
    each = [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert order == [(users, *rest) for users in (1, 8) for rest in each]
    assert a.asks == b.asks


def test_progress_says_what_runs():
    async def draw():
        stream, target, tally = io.StringIO(), ScriptedTarget(lambda number: 1.0), Tally()
        progress = Progress(stream, live=True)
        progress.watch(target, PLAN.levels[1], 1, tally)
        tally.begun, tally.ended = 5, 2
        target.asks = [None] * 30
        async with progress.ticking():
            await asyncio.sleep(3)
        return stream.getvalue()

    text = run(draw())
    assert "scripted | 8 users | repeat 2 | 0 s | 2 done, 3 running, 60 pieces/s" in text
    assert "| 2 s |" in text
    assert text.endswith("\r\x1b[K")


def test_without_a_terminal_only_results_are_told():
    async def draw():
        stream = io.StringIO()
        progress = Progress(stream, live=False)
        async with progress.ticking():
            progress.done(measured("ours", error="HTTP 500: x"))
        return stream.getvalue()

    assert run(draw()) == "ours | 1 users | repeat 1 | 5 tok/s, ttft p50 None ms, 1 errors\n"
