"""What a run left for now is told from what is to stay, by each way in which the run may have ended."""

from __future__ import annotations

from typing import Any

import pytest

from pitools.tenancy.apply import JournalEntry
from pitools.tenancy.changes import ObjectChange
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.leftovers import settled_state

LAB: Key = ("team", "lab")
OLD, WIDE, NEW = {"QOS": "a", "DefaultQOS": "a"}, {"QOS": "a,b"}, {"QOS": "+b", "DefaultQOS": "a"}
BOTH, LATER = {"QOS": "a,b", "DefaultQOS": "b"}, {"QOS": "b", "DefaultQOS": "b"}


def entry(kind: Any, before: Values | None = None, after: Values | None = None, **more: Any) -> JournalEntry:
    """An entry of a run of site s, which changes the team."""
    objects = [ObjectChange(key=LAB, before=before, after=after)] if kind in ("start", "call") else []
    return JournalEntry(
        **{"kind": kind, "run": "1", "at": "", "user": "", "site": "s", "cluster": "c", "objects": objects, **more}
    )


CUT = [entry("start", OLD, NEW), entry("call", OLD, WIDE), entry("done")]
ALL = [*CUT, entry("call", WIDE, NEW), entry("done"), entry("end")]
REMOVED = [entry("start", OLD, None), entry("call", OLD, None), entry("done")]


@pytest.mark.parametrize(
    ("entries", "found", "settled"),
    [
        (CUT, {**WIDE, "MaxJobs": "7"}, {**OLD, "MaxJobs": "7"}),
        (CUT, {"QOS": "b"}, {"QOS": "b"}),
        (CUT[:2], WIDE, OLD),  # killed during the call
        (CUT[:2], OLD, OLD),
        ([*CUT[:2], entry("refused")], WIDE, WIDE),
        ([*CUT, entry("call", WIDE, NEW), entry("refused")], WIDE, OLD),
        ([*CUT, entry("call", WIDE, NEW)], WIDE, OLD),
        ([*CUT, entry("call", WIDE, NEW)], NEW, NEW),
        ([*CUT, entry("call", WIDE, {}), entry("done"), entry("call", {}, NEW)], WIDE, WIDE),
        ([*CUT, entry("call", WIDE, {"QOS": "c"})], WIDE, OLD),
        (ALL, WIDE, WIDE),  # set again by hand
        ([*CUT, entry("start", WIDE, NEW, run="2"), entry("call", WIDE, {"QOS": "b"}, run="2")], {"QOS": "b"}, OLD),
        ([*CUT, entry("start", objects=[], run="2"), entry("end", run="2")], WIDE, WIDE),  # whose policy wants it
        ([*CUT, entry("start", objects=[], run="2", undoes="3"), entry("end", run="2", undoes="3")], WIDE, OLD),
        ([*CUT, entry("start", WIDE, OLD, run="2", undoes="1"), entry("end", run="2", undoes="1")], WIDE, WIDE),
        (CUT[1:], WIDE, WIDE),  # a journal that lacks the start
        ([entry("start", run="0"), *CUT[1:]], WIDE, WIDE),
        ([entry("start", {}, {}, site="t"), *(entry(e.kind, {}, WIDE, site="t") for e in CUT[1:])], WIDE, WIDE),
        (REMOVED, {}, {}),  # made again by hand
        ([entry("start", OLD, None), *CUT[1:]], WIDE, OLD),
        ([entry("start", {"QOS": "gone"}, NEW), entry("call", {"QOS": "gone"}, WIDE)], WIDE, WIDE),
        ([entry("start", OLD, LATER), entry("call", OLD, BOTH), entry("done")], BOTH, OLD),  # the default with its list
    ],
)
def test_only_what_a_run_left_for_now_is_taken_back(
    entries: list[JournalEntry], found: Values, settled: Values
) -> None:
    """What somebody changed since stays, and what no start in the journal explains."""
    tiers: dict[Key, Values] = {("tier", name): {} for name in "ab"}
    now = ClusterState(cluster="c", objects={**tiers, LAB: found})
    assert settled_state(now, entries, "s").objects == {**tiers, LAB: settled}
