"""The lines of the screen: their order and their cells."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from pitools.ledger.records import State
from pitools.ledger.run_ledger import run_ledger
from pitools.monitor.live import rows
from pitools.monitor.live.rows import RUN_COLUMNS, RunItem
from pitools.monitor.live.site_feeds import make_feeds
from tests.monitor.fleet import Runs

MakeSite = Callable[..., Runs]


@pytest.fixture
def items(make_site: MakeSite) -> list[RunItem]:
    """Runs of other ages and goodputs: `slow` and `good` run, `done` and `lost` have ended."""
    runs, now_s, items = make_site("east"), time.time(), []
    seconds = dict.fromkeys(State, 0.0) | {State.INPUT: 18.4}
    for name, state, age_s in (("slow", "RUNNING", 90), ("good", "RUNNING", 80), ("done", "COMPLETED", 70)):
        runs.log(runs.add(name, state=state, age_s=age_s), 0, 3)
    runs.add("lost", state="FAILED")
    (site,) = make_feeds(["east"])
    assert site.runs
    for run in site.runs._call():
        assert run.record
        name = run.record.run_id.split("-")[0]
        goodput, step_age_s = {"slow": (0.25, 50), "good": (0.75, 47 * 3600), "done": (0.5, 60), "lost": (None, 0)}[
            name
        ]
        ledger = replace(run_ledger(run.run_dir), goodput=goodput, allocated_s=100.0, seconds=seconds)
        ledger = replace(ledger, greatest_loss=State.INPUT)
        items.append(RunItem(run.record, now_s - step_age_s, ledger, is_stale=False))
    return items


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("newest", "done good slow lost"),
        ("newest reversed", "lost slow good done"),
        ("state", "good slow done lost"),
        ("goodput", "slow done good lost"),
        ("step age", "good slow done lost"),
    ],
)
def test_orders(items: list[RunItem], order: str, expected: str) -> None:
    """What needs a look comes first; what is unknown, or over, last."""
    listed = rows.sort_items(items, order.removesuffix(" reversed"), is_reversed=order.endswith("reversed"))
    assert [item.record.run_id.split("-")[0] for item in listed] == expected.split()


def test_cells(items: list[RunItem]) -> None:
    """Goodput and loss are by the folder alone, so about; only a running run has an age; why a stopped one stopped."""
    titles = [column.title for column in RUN_COLUMNS]
    shown = {
        item.record.run_id.split("-")[0]: dict(zip(titles, rows.run_row(item).cells, strict=True)) for item in items
    }
    found = {name: (cells["GOODPUT"], cells["STEP AGE"], cells["WHY"]) for name, cells in shown.items()}
    assert found == {
        "slow": ("≈25%", "50s", "input ≈18%"),
        "good": ("≈75%", "47h", "input ≈18%"),
        "done": ("≈50%", "", "input ≈18%"),
        "lost": ("", "", "program: it raised KeyError"),
    }
    assert rows.run_row(items[0]._replace(is_stale=True)).style == "dim"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-5, "0s"),
        (59.4, "59s"),
        (60, "1m"),
        (3599, "60m"),
        (3600, "1h"),
        (172799, "48h"),
        (172800, "2d"),
        (9e8, "10417d"),
    ],
)
def test_durations(seconds: float, expected: str) -> None:
    """Days from the second on."""
    assert rows.short_time(seconds) == expected
