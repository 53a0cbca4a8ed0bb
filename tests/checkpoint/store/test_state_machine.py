from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pitools.checkpoint.store import layout, lookup, publish, quarantine, retention, verify
from pitools.checkpoint.store.manifest import MANIFEST_FILE
from tests.checkpoint.conftest import FINGERPRINT, RUN, build, contents

FILES = [*(f"payload/{name}" for name in contents(0) if name != "empty"), MANIFEST_FILE]


class Checkpoints(RuleBasedStateMachine):
    """Saves, kills, damage, pruning and restores in any order: the newest undamaged checkpoint is what is restored."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.next = 1
        self.good: set[int] = set()
        self.seen: set[int] = set()  # damaged so that it shows without reading
        self.silent: set[int] = set()  # damaged so that only a digest shows it
        self.lost = 0

    def teardown(self) -> None:
        """Nothing stays in memory."""
        shutil.rmtree(self.folder)

    @rule(ranks=st.integers(1, 3))
    def save(self, ranks: int) -> None:
        """A save that succeeds."""
        place = build(self.folder, self.next, contents(self.next), ranks=ranks)
        publish.publish_checkpoint(
            self.folder, place, self.next, format="files", run=RUN, state_fingerprint=FINGERPRINT, world_size=ranks
        )
        self.good.add(self.next)
        self.next += 1

    @rule()
    def save_that_is_killed(self) -> None:
        """What it leaves is never taken for a checkpoint."""
        build(self.folder, self.next, contents(self.next))

    @rule()
    def sweep(self) -> None:
        """Leftovers go, checkpoints do not."""
        retention.remove_leftovers(self.folder)
        assert not list(self.folder.glob(".step_*"))

    @precondition(lambda self: self.good)
    @rule(data=st.data(), fault=st.sampled_from(["flip", "cut", "remove", "add"]))
    def damage(self, data: st.DataObject, fault: str) -> None:
        """One file of one checkpoint is not what it was."""
        step = data.draw(st.sampled_from(sorted(self.good)))
        name = data.draw(st.sampled_from(FILES))
        path = layout.step_path(self.folder, step) / name
        content = path.read_bytes()
        if fault == "flip":
            bit = data.draw(st.integers(0, 8 * len(content) - 1))
            path.write_bytes(content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :])
        elif fault == "cut":
            path.write_bytes(content[:-1])
        elif fault == "remove":
            path.unlink()
        else:
            path.with_name("new").write_bytes(content)
        self.good.remove(step)
        silent = fault == "add" or (fault == "flip" and name != MANIFEST_FILE)
        (self.silent if silent else self.seen).add(step)

    @rule(last=st.integers(1, 3))
    def prune(self, last: int) -> None:
        """The newest that look whole stay, and what shows damage."""
        retention.prune_checkpoints(self.folder, last)
        stay = set(sorted(self.good | self.silent)[-last:])
        self.good &= stay
        self.silent &= stay

    @rule()
    def restore(self) -> None:
        """What is bad is moved aside until one is good; that one has the bytes that were saved."""
        for step in lookup.complete_steps(self.folder):
            path = layout.step_path(self.folder, step)
            if problems := verify.verify_checkpoint(path):
                assert step in self.silent
                quarantine.quarantine_checkpoint(path, problems)
                self.silent.remove(step)
                self.lost += 1
                continue
            assert step == max(self.good)
            actual = {name: (path / "payload" / name).read_bytes() for name in contents(step)}
            assert actual == contents(step)
            return
        assert not self.good

    @invariant()
    def what_stands(self) -> None:
        """The folder has just what the model has, and `latest` never names what is not there."""
        assert lookup.complete_steps(self.folder) == sorted(self.good | self.silent, reverse=True)
        assert set(layout.listed_steps(self.folder)) == self.good | self.silent | self.seen
        assert len(list((self.folder / "quarantine").glob("*"))) == self.lost
        latest = self.folder / "latest"
        assert not latest.is_symlink() or latest.exists()


Checkpoints.TestCase.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


class TestCheckpoints(Checkpoints.TestCase):
    """Run by pytest."""
