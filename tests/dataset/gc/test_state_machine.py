from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pitools.core.errors import UsageError
from pitools.dataset.catalog.retirement import retire_version, undo_retirement
from pitools.dataset.gc.collect import GRACE_S, collect_garbage
from pitools.store import retirement, tags, version_state

numbers = st.integers(0, 5)
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # every step syncs several files


class Catalog(RuleBasedStateMachine):
    """A real root with a clock of its own; people publish, tag, lease, run, retire and collect as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(dir=MEMORY))
        self.root, self.runs = self.home / "root", self.home / "runs"
        self.root.mkdir()
        self.runs.mkdir()
        self.now = version_state.utc_now()
        self.made: dict[int, Path] = {}
        self.parents: dict[int, int | None] = {}
        self.tagged: dict[str, int] = {}
        self.retired: dict[int, object] = {}
        self.leases: list[tuple[int, object, object]] = []
        self.planned: set[int] = set()

    @rule(number=numbers, parent=st.none() | numbers)
    def publish_version(self, number: int, parent: int | None) -> None:
        if number in self.made:
            return
        parent = parent if parent in self.made and parent != number else None
        path = self.made[parent] if parent is not None else None
        # A number that was taken is published again as another version: its ancestors may differ.
        self.made[number] = self.publish(self.root, "x", number, parent=path.name if path else "", shares=path)
        self.parents[number] = parent

    @rule(tag=st.sampled_from("ab"), number=numbers)
    def tag(self, tag: str, number: int) -> None:
        if number in self.made:
            try:
                tags.move_tag(self.root, "x", tag, self.made[number].name)
                assert number not in self.retired
                self.tagged[tag] = number
            except UsageError:
                assert number in self.retired

    @rule(tag=st.sampled_from("ab"))
    def untag(self, tag: str) -> None:
        tags.move_tag(self.root, "x", tag, "")
        self.tagged.pop(tag, None)

    @rule(number=numbers)
    def retire(self, number: int) -> None:
        if number in self.made:
            try:
                retire_version(self.made[number], now=self.now)
                assert number not in self.tagged.values()
                self.retired.setdefault(number, self.now)
            except UsageError:
                assert number in self.tagged.values()

    @rule(number=numbers)
    def undo(self, number: int) -> None:
        if number in self.made:
            undo_retirement(self.root, "x", self.made[number].name)
            self.retired.pop(number, None)

    @rule(number=numbers, days=st.integers(1, 20))
    def lease(self, number: int, days: int) -> None:
        if number in self.made:
            holder = version_state.leased_version(self.made[number], days * 86400, "job", clock=lambda: self.now)
            holder.__enter__()
            self.leases.append((number, self.now + timedelta(days=days), holder))

    @rule()
    def end_lease(self) -> None:
        if self.leases:
            self.leases.pop()[2].__exit__(None, None, None)

    @rule(number=numbers)
    def plan(self, number: int) -> None:
        if number in self.made:
            folder = self.runs / f"run-{number}"
            folder.mkdir(exist_ok=True)
            (folder / "plan.json").write_text(json.dumps({"data": [{"version": self.made[number].name}]}))
            self.planned.add(number)

    @rule()
    def end_runs(self) -> None:
        shutil.rmtree(self.runs)
        self.runs.mkdir()
        self.planned.clear()

    @rule(hours=st.sampled_from((1, 30, 80, 200)))
    def wait(self, hours: int) -> None:
        self.now += timedelta(hours=hours)

    @rule(dry=st.booleans())
    def collect(self, dry: bool) -> None:
        expected = self.expected()
        collected = list(collect_garbage(self.root, runs=[self.runs], now=self.now, dry_run=dry))
        by_version = {path.name: number for number, path in self.made.items()}
        gone = {by_version[record.version] for record in collected if record.state in ("removed", "would-remove")}
        assert gone == expected
        assert {by_version[record.version] for record in collected} == set(self.retired)
        for number in expected if not dry else ():
            del self.made[number], self.retired[number], self.parents[number]
            # Named by a child that is older than its second life: a parent by content no more.
            self.parents = {child: None if parent == number else parent for child, parent in self.parents.items()}
        self.leases = [lease for lease in self.leases if lease[0] in self.made]

    def expected(self) -> set[int]:
        """What may go, by the model alone."""
        named = {*self.tagged.values(), *self.planned}
        named |= {number for number, until, _ in self.leases if until + version_state.SKEW >= self.now}
        due = {number for number, when in self.retired.items() if when + timedelta(seconds=GRACE_S) <= self.now}
        going = due - named
        while rest := {parent for child, parent in self.parents.items() if child not in going and parent in going}:
            going -= rest
        return going

    @invariant()
    def nothing_is_lost(self) -> None:
        """What the model has is there and whole, and tags and retirements are what the model says."""
        for number, path in self.made.items():
            assert (path / "action/c/1").read_bytes() == f"own x {number}".encode() * 50
            assert (path / "action/c/0").read_bytes() == b"common" * 10
        assert {path.name for path in version_state.list_names(self.root / "x")} == {
            path.name for path in self.made.values()
        }
        held = {tag: value.version for tag, value in tags.read_tags(self.root, "x").items()}
        assert held == {tag: self.made[number].name for tag, number in self.tagged.items()}
        assert set(retirement.read_retirements(self.root, "x")) == {self.made[number].name for number in self.retired}
        assert not (self.root / version_state.TRASH).exists()

    def teardown(self) -> None:
        for _, _, holder in self.leases:
            with contextlib.suppress(Exception):
                holder.__exit__(None, None, None)
        shutil.rmtree(self.home)


def test_any_order_of_events_keeps_the_promises(publish) -> None:
    """Tag, lease, run, retire, undo, wait, publish, collect: nothing that is named goes, and all else does in time."""
    machine = type("Bound", (Catalog,), {"publish": staticmethod(publish)})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
