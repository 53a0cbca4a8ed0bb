"""Draw ledgers: the allocated time of runs, stacked by state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pitools.core.html_page import table
from pitools.ledger.plot import STATE_COLOURS
from pitools.ledger.records import RunLedger, State
from pitools.monitor.report.svg import Part, bars, legend

_PERCENT = {tick / 100: f"{tick} %" for tick in range(0, 101, 20)}


def ledger_bars(rows: Sequence[tuple[str, Sequence[RunLedger]]]) -> str:
    """Return a stacked line for each label: the shares of states in the allocated time of its ledgers."""
    lines = []
    for label, ledgers in rows:
        seconds = sum_states(ledgers)
        total, end, parts = sum(seconds.values()), 0.0, []
        for state in STATE_COLOURS:
            if total and (share := seconds[state] / total):
                tip = f"{state}: {hours(seconds[state])} {ledgers[0].resource}-hours, {share:.1%}"
                parts.append(Part(end, end + share, STATE_COLOURS[state], tip))
                end += share
        lines.append((f"{label}, {hours(total)} h" if len(ledgers) > 1 else label, parts))
    return legend({str(state): colour for state, colour in STATE_COLOURS.items()}) + bars(lines, 0.0, 1.0, _PERCENT)


def sum_states(ledgers: Iterable[RunLedger]) -> dict[State, float]:
    """Return state → resource-seconds of all ledgers."""
    seconds = dict.fromkeys(State, 0.0)
    for ledger in ledgers:
        for state, value in ledger.seconds.items():
            seconds[state] += value
    return seconds


def ledger_table(ledgers: Sequence[RunLedger]) -> str:
    """Return a line a state that took time: its hours and share, the largest first."""
    seconds = sum_states(ledgers)
    total = sum(seconds.values()) or 1.0
    resource = ledgers[0].resource if ledgers else "node"
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return table(
        ("state", f"{resource}-hours", "share"),
        [(state, hours(value), f"{value / total:.1%}") for state, value in ordered if value],
    )


def hours(seconds: float) -> str:
    """Return seconds as hours, with the digits that tell."""
    digits = 4 if seconds < 360 else 2 if seconds < 360_000 else 0
    return f"{seconds / 3600:,.{digits}f}"
