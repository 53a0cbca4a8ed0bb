from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pitools.stage import plan as planning
from pitools.stage.cache.inventory import list_sets
from pitools.stage.request import StageRequest
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.verify import check_versions

FILES = {"zarr.json": b"{}", "a/c/0": b"0123456789" * 50, "a/c/1": b"x"}


class Staging(RuleBasedStateMachine):
    """Two versions on one root, damaged and staged in any order; the model knows each one's true state."""

    build = staticmethod(lambda *_: Path())  # set by the test below

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.root = self.home / "pit"
        self.truth = ["absent", "absent"]

    @initialize()
    def datasets(self) -> None:
        folders = [self.build(self.home / "data", {**FILES, "n": bytes([n])}, f"d{n}") for n in range(2)]
        self.sets = [load_version(folder) for folder in folders]
        self.finals = [self.root / "objects" / dataset.version for dataset in self.sets]

    @rule(n=st.integers(0, 1), verify=st.booleans())
    def run(self, n: int, verify: bool) -> None:
        """What `run` says it did follows from what was there; then it is whole, unless damage was not looked for."""
        record = stage_version(self.sets[n], self.root, verify=verify, readers=1)
        observed = {"flipped": "damaged" if verify else "present"}.get(self.truth[n], self.truth[n])
        assert record.state == {"absent": "staged", "damaged": "repaired"}.get(observed, observed)
        if record.state != "present":
            self.truth[n] = "present"

    @rule(n=st.integers(0, 1), file=st.sampled_from(sorted(FILES)), gone=st.booleans())
    def damage(self, n: int, file: str, gone: bool) -> None:
        if self.finals[n].exists():
            path = self.finals[n] / file
            path.unlink(missing_ok=True)
            if not gone:
                path.write_bytes(b"another size")
            self.truth[n] = "damaged"

    @rule(n=st.integers(0, 1))
    def flip(self, n: int) -> None:
        if self.truth[n] == "present":
            path = self.finals[n] / "a/c/1"
            path.unlink()
            path.write_bytes(b"y")
            self.truth[n] = "flipped"

    @rule(n=st.integers(0, 1))
    def remove(self, n: int) -> None:
        shutil.rmtree(self.finals[n], ignore_errors=True)
        self.truth[n] = "absent"

    @rule()
    def judge(self) -> None:
        """`plan` and `list` see names and sizes, `check` sees content, and nothing unfinished stands about."""
        quick = [{"flipped": "present"}.get(truth, truth) for truth in self.truth]
        plans = [plan.state for plan in planning.plan_requests(StageRequest(each, self.root) for each in self.sets)]
        assert plans == quick
        listed = {record.version: record.state for record in list_sets(self.root)}
        assert listed == {s.version: truth for s, truth in zip(self.sets, quick, strict=True) if truth != "absent"}
        for final, truth in zip(self.finals, self.truth, strict=True):
            if truth != "absent":
                *findings, _ = check_versions(final, readers=1)
                assert bool(findings) == (truth != "present")
        assert not list(self.root.glob(".tmp/*"))

    def teardown(self) -> None:
        shutil.rmtree(self.home)


def test_any_order_of_events_keeps_the_promises(build):
    """Stage, damage, remove and check in any order: each answer follows from the true state."""
    machine = type("Bound", (Staging,), {"build": staticmethod(build)})
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=12, deadline=None))
