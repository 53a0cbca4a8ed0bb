"""Write perf/results/INDEX.md from the newest results of each benchmark: what it compares, and which rows fall short.

python -m perf.harness.write_index        also done after each `perf/run`
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perf.harness.workspace import REPO

RESULTS = REPO / "perf" / "results"


class Row(NamedTuple):
    """A comparison, by a row of a results file's table."""

    case: str
    peer: str
    ratio: str
    range: str
    rounds: str
    target: str
    is_reached: str


def rows(results: Path) -> Iterator[Row]:
    """Yield the comparisons of a results file; its other tables have other columns."""
    for line in results.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == len(Row._fields) and cells[-1] in ("yes", "NO"):
            yield Row(*cells)


def newest(theme: str) -> Path | None:
    """Return the newest results file of a theme; None if it was never run."""
    return max(RESULTS.glob(f"{theme}_*core-*.md"), key=lambda path: path.stem.rpartition("_")[2], default=None)


def text() -> str:
    """Return the index: a row per benchmark, then every comparison that falls short."""
    table, short = [], []
    for bench in sorted((REPO / "perf").glob("*/bench_*.py")):
        theme = f"{bench.parent.name}_{bench.stem.removeprefix('bench_')}"
        about = (ast.get_docstring(ast.parse(bench.read_text())) or "").split("\n\n")[0].replace("\n", " ")
        if not (results := newest(theme)):
            table.append(f"| {theme} | {about} | not run | |")
            continue
        actual = list(rows(results))
        reached = sum(row.is_reached == "yes" for row in actual)
        date = results.stem.rpartition("_")[2]
        table.append(f"| [{theme}]({results.name}) | {about} | {reached} of {len(actual)} | {date} |")
        short += [
            f"| {theme} | {row.case} | {row.peer} | {row.ratio} ({row.range}) | {row.target} |"
            for row in actual
            if row.is_reached == "NO"
        ]
    return "\n".join(
        [
            "# What was measured, and which figures fall short",
            "",
            "Made by `python -m perf.harness.write_index` from the newest results of each benchmark. A ratio is the",
            "peer's median time over ours, or what the case says: above 1, ours is better.",
            "",
            "| benchmark | what it compares | reached | date |",
            "|---|---|---|---|",
            *table,
            "",
            "## Short of the target",
            "",
            "| benchmark | case | peer | ratio (range) | target |",
            "|---|---|---|---|---|",
            *short,
            "",
        ]
    )


def write() -> None:
    """Write the index beside the results."""
    (RESULTS / "INDEX.md").write_text(text())


if __name__ == "__main__":
    write()
