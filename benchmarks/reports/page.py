"""The HTML report: one file that needs nothing else, with the table, the charts and how it was made."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

from ..interleave import levels_of, targets_of
from .charts import against_load, of_level
from .table import report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..measure import BenchPlan, Measurement

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
pre { overflow-x: auto; background: #8881; padding: .8rem; font-size: 13px; line-height: 1.4; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; } .grid { stroke: #8884; }
.legend { margin: 0; font-size: 13px; } .legend span { margin-right: 1rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; }
.none { opacity: .6; }
"""


def page(about: dict[str, Any], plan: BenchPlan, measurements: Sequence[Measurement]) -> str:
    """The whole document."""
    title = "mlx-troupe bench: " + ", ".join(targets_of(measurements))
    parts = [f"<h1>{escape(title)}</h1>", f"<pre>{escape(report(measurements, plan))}</pre>"]
    if measurements:
        parts.append("<h2>Against load</h2>" + _grid(against_load(measurements)))
        labels = levels_of(measurements)
        parts += [f"<h2>{escape(label)}</h2>" + _grid(of_level(measurements, label)) for label in labels]
    facts = json.dumps({"about": about, "plan": msgspec.to_builtins(plan)}, indent=1)
    parts.append(
        f"<h2>How</h2><details><summary>command, machine and plan</summary><pre>{escape(facts)}</pre></details>"
    )
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{"".join(parts)}\n</body></html>\n'


def _grid(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'
