"""Draw the parts of steps, the ranks as a heat map, and the timeline of one step."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pitools.core import html_page
from pitools.core.errors import ToolMissing
from pitools.core.fs import write_atomic
from pitools.perf.attribute.buckets import BUCKETS, Buckets
from pitools.perf.attribute.collectives import Matched
from pitools.perf.attribute.intervals import union
from pitools.perf.attribute.verdict import Verdict
from pitools.perf.spans import Kind, SpanTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers tell apart; idle is grey, skew is pale communication.
_HEX = ("#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#F0E442", "#009E73", "#56B4E9", "#DDDDDD", "#F4C9A8")
_COLOURS = dict(zip((*BUCKETS, "skew"), _HEX, strict=True))
_MAX_BARS = 200
_MAX_ROWS = 64  # ranks in a timeline
_PIXELS = 2000


def draw(table: SpanTable, buckets: Buckets, verdict: Verdict, path: Path, step: int | None = None) -> None:
    """Write a picture as PNG, SVG or a self-contained HTML page, by the path's suffix.

    step: whose timeline is drawn; the longest by default. Raises ToolMissing, ClusterError, NoSpace.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolMissing("matplotlib is not installed", hint="pip install 'pitools-hpc[plot]'") from error

    ranks = sorted(table.ranks)
    rows = min(len(ranks), _MAX_ROWS)
    heights = (3.0, min(6.0, 1.0 + 0.2 * len(ranks)), 1.0 + 0.35 * rows)
    figure = Figure(figsize=(12, sum(heights) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    stacked, heat, timeline = figure.subplots(3, 1, height_ratios=heights)
    figure.suptitle(f"{verdict.verdict}: {verdict.evidence[0] if verdict.evidence else ''}", fontsize=10)
    steps = np.unique(buckets.windows.step)
    shown = steps[-_MAX_BARS:]
    _draw_steps(stacked, buckets, shown, "" if len(shown) == len(steps) else f", the last {_MAX_BARS} of {len(steps)}")
    _draw_ranks(heat, buckets, shown, ranks)
    wall = [buckets.wall_ns[buckets.windows.step == step].max() for step in steps]
    longest = int(steps[int(np.argmax(wall))])
    _draw_timeline(timeline, table, longest if step is None else step, ranks[:rows], buckets.matched)
    with io.BytesIO() as out:
        figure.savefig(out, format="png" if path.suffix == ".png" else "svg", dpi=110)
        data = out.getvalue()
    if path.suffix == ".html":
        data = _page(data.decode(), buckets, verdict).encode()
    write_atomic(path, data, durable=False)


def _draw_steps(axes: Axes, buckets: Buckets, steps: np.ndarray, more: str) -> None:
    """Draw each step's parts as a stacked bar, as means over its ranks."""
    skew = buckets.skew_ns[:, None]
    columns = np.c_[buckets.parts_ns, skew]
    columns[:, [BUCKETS.index("communication")]] -= skew
    parts = np.array([columns[buckets.windows.step == step].mean(axis=0) / 1e6 for step in steps])
    at, bottom = np.arange(len(steps)), np.zeros(len(steps))
    label = {"communication": "transfer", "skew": "skew: waiting for the last rank"} if skew.any() else {}
    for index, (name, colour) in enumerate(_COLOURS.items()):
        if parts[:, index].any():
            axes.bar(at, parts[:, index], 0.8, bottom=bottom, color=colour, label=label.get(name, name))
            bottom = bottom + parts[:, index]
    _label_steps(axes, steps)
    axes.set(title=f"Steps: mean over the ranks{more}", xlabel="step", ylabel="ms")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=len(_COLOURS), frameon=False)


def _label_steps(axes: Axes, steps: np.ndarray) -> None:
    ticks = list(range(0, len(steps), max(1, len(steps) // 20)))
    axes.set_xticks(ticks, ["all" if steps[tick] < 0 else str(steps[tick]) for tick in ticks])


def _draw_ranks(axes: Axes, buckets: Buckets, steps: np.ndarray, ranks: list[int]) -> None:
    """Draw what each rank does itself in each step: its wall time without communication and waits for a CPU."""
    own = np.full((len(ranks), len(steps)), np.nan)
    row = np.searchsorted(ranks, buckets.windows.rank)
    column = np.searchsorted(steps, buckets.windows.step)
    inside = buckets.windows.step >= steps[0]
    own[row[inside], column[inside]] = buckets.own_ns[inside] / 1e6
    image = axes.imshow(own, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.figure.colorbar(image, ax=axes, label="ms")
    ticks = range(0, len(ranks), max(1, len(ranks) // 16))
    axes.set_yticks(list(ticks), [str(ranks[tick]) for tick in ticks])
    title = "Ranks: time without communication and waits for a CPU, so a slow rank is bright"
    axes.set(title=title, xlabel="step", ylabel="rank")
    _label_steps(axes, steps)


def _draw_timeline(axes: Axes, table: SpanTable, step: int, ranks: list[int], matched: Matched) -> None:
    """Draw one step of ranks: a lane for each kind, with gaps closed that are too small to be seen."""
    offsets = matched.offsets_ns
    windows = table.windows.where(table.windows.step == step)
    zero = min(
        (start - offsets.get(rank, 0) for rank, start in zip(windows.rank, windows.start_ns, strict=True)), default=0
    )
    for row, rank in enumerate(ranks):
        own = windows.where(windows.rank == rank)
        if not len(own):
            continue
        begin, end = int(own.start_ns[0]), int(own.end_ns[0])
        spans = table.spans.where(
            (table.spans.rank == rank) & (table.spans.start_ns < end) & (table.spans.end_ns > begin)
        )
        pixel = max(1, (end - begin) // _PIXELS)
        kinds = [kind for kind in Kind if (spans.kind == kind).any()]
        for lane, kind in enumerate(kinds):
            of_kind = spans.kind == kind
            drawn = [(kind.name.lower(), spans.start_ns[of_kind], spans.end_ns[of_kind])]
            if kind is Kind.COMMUNICATION:
                lasting = matched.end_ns > np.maximum(matched.start_ns, begin)
                waits = lasting & (matched.rank == rank) & (matched.start_ns < end)
                drawn.append(("skew", matched.start_ns[waits], matched.end_ns[waits]))
            for name, starts, ends in drawn:
                merged = union(np.maximum(starts, begin), np.minimum(ends + pixel, end))
                bars = np.c_[merged.start_ns - offsets.get(rank, 0) - zero, merged.end_ns - merged.start_ns] / 1e6
                height = 0.8 / len(kinds)
                axes.broken_barh(list(map(tuple, bars)), (row - 0.4 + lane * height, height), color=_COLOURS[name])
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.invert_yaxis()
    axes.set(title=f"Timeline of {'the trace' if step < 0 else f'step {step}'}", xlabel="ms", ylabel="rank")


def _page(svg: str, buckets: Buckets, verdict: Verdict) -> str:
    """Return a page without references to other files."""
    records = buckets.records()
    names = [name for name in records[0].__struct_fields__ if name != "schema"]
    lines = [
        f"verdict: {verdict.verdict}",
        *verdict.evidence,
        *(f"{each.cause}: {each.remedy}: gains about {each.gain_ms:.3g} ms, at most {each.ceiling_ms:.3g} ms"
          for each in verdict.advice),
        *(f"note: {note}" for note in verdict.notes),
    ]  # fmt: skip
    items = "".join(f"<li>{html_page.text(line)}</li>" for line in lines)
    rows = html_page.table(names, ([getattr(record, name) for name in names] for record in records[:1000]))
    return html_page.page("pit perf attribute", (f"<ul>{items}</ul>{svg[svg.index('<svg') :]}{rows}",))
