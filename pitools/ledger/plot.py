"""Draw ledgers as stacked bars."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from pitools.core.errors import ToolMissing, UsageError
from pitools.core.fs import write_atomic
from pitools.ledger.records import RunLedger, State

_FORMATS = {".svg": "svg", ".png": "png", ".pdf": "pdf"}
STATE_COLOURS = {
    State.PRODUCTIVE: "#009E73",
    State.LOST: "#D55E00",
    State.RECOVERY: "#CC79A7",
    State.START: "#E69F00",
    State.STAGING: "#56B4E9",
    State.COMPILE: "#F0E442",
    State.INPUT: "#0072B2",
    State.CHECKPOINT: "#882255",
    State.STRAGGLER: "#44AA99",
    State.IDLE: "#999999",
    State.UNACCOUNTED: "#CCCCCC",
}
"""In the order of a bar's parts."""


def plot_ledgers(ledgers: Sequence[RunLedger], path: Path) -> None:
    """Write a bar for each ledger, of the share of each state. Raises UsageError, ToolMissing, NoSpace."""
    if path.suffix not in _FORMATS:
        raise UsageError(f'"{path.suffix}": not an image format', where="--plot", hint="FILE.svg, FILE.png or FILE.pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolMissing("matplotlib is not installed", hint="pip install 'pitools-hpc[plot]'") from error
    figure = Figure(figsize=(10, 1.6 + 0.4 * len(ledgers)), layout="constrained")
    axes = figure.subplots()
    names = [f"{ledger.name} {ledger.run_id[-6:]}" for ledger in ledgers]
    left = [0.0] * len(ledgers)
    for state, colour in STATE_COLOURS.items():
        shares = [100 * ledger.seconds[state] / (ledger.allocated_s or 1.0) for ledger in ledgers]
        if any(shares):
            axes.barh(range(len(ledgers)), shares, left=left, color=colour, label=state.value)
            left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(ledgers)), names)
    axes.invert_yaxis()
    axes.set(xlabel="% of the allocated time", xlim=(0, 100))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6, frameon=False, fontsize="small")
    with io.BytesIO() as out:
        figure.savefig(out, format=_FORMATS[path.suffix])
        write_atomic(path, out.getvalue(), durable=False)
