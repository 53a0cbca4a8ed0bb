from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pitools.core.errors import ClusterError, DataError, NoSpace, TryLater
from pitools.stage.cache import evict as evicting
from pitools.stage.cache import records, space
from pitools.stage.cache.evict import EvictionCandidate, KeptReason, evict_item
from pitools.stage.cache.inventory import disk_usage, list_sets, partial_copies, total_bytes
from pitools.stage.cache.layout import create_root, lock_owner, partial_path, version_lock
from pitools.stage.cache.lease import acquire, is_leased, last_used
from pitools.stage.cache.space import RootLimits, Shortfall, reserve

KIB = 1 << 10
NAMES = [letter * 32 for letter in "abcde"]
SIZES = dict(zip(NAMES, (100 * KIB, 200 * KIB, 50 * KIB, 300 * KIB, 150 * KIB), strict=True))
versions = st.sampled_from(NAMES)


def content(version: str) -> dict[str, bytes]:
    half = SIZES[version] // 2
    return {"zarr.json": version.encode(), "c/0": version[:1].encode() * half, "c/1": version[1:2].encode() * half}


class Cache(RuleBasedStateMachine):
    """A real root; stagers, readers, evictors and clocks do as they like, in real processes and on real locks."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.sets: set[str] = set()
        self.leases: dict[str, list[int]] = {}
        self.pinned: set[str] = set()
        self.known: set[str] = set()
        self.stagers: dict[str, tuple[int, int]] = {}  # pid, and the room it has reserved in all
        self.quota = 600 * KIB

    @initialize()
    def begin(self) -> None:
        create_root(self.root)

    def path(self, version: str) -> Path:
        return self.root / "objects" / version

    def why(self, version: str, grace_s: float, *, force: bool = False) -> KeptReason | None:
        """The reason for which this set must stay, by the model alone."""
        age = time.time() - last_used(self.root, version)
        if version in self.stagers:
            return KeptReason.LOCKED
        if self.leases.get(version):
            return KeptReason.LEASED
        if version in self.pinned:
            return KeptReason.PINNED
        if version not in self.known and not force:
            return KeptReason.UNKNOWN_SOURCE
        if grace_s and age < grace_s:
            return KeptReason.RECENTLY_USED
        return None if version in self.sets else KeptReason.NOT_PRESENT

    def taken(self) -> int:
        """What cannot be evicted, or is promised: by measuring, and by what stagers were granted."""
        actual = total_bytes(disk_usage(self.path(version)) for version in self.sets)
        for version in NAMES:
            left = disk_usage(partial_path(self.root, version)).own_bytes
            actual += self.stagers[version][1] if version in self.stagers else left
        return actual

    def fill(self, version: str, names: list[str]) -> None:
        for name in names:
            file = partial_path(self.root, version) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content(version)[name])

    @rule(version=versions, grace_s=st.sampled_from([0, 600]))
    def stage(self, version: str, grace_s: float) -> None:
        """A set comes, and what had to go for it was allowed to go, and was used longest ago; or nothing went."""
        before, needed = set(self.sets), SIZES[version] + 64 * KIB
        stay = {v for v in self.sets if self.why(v, grace_s)} | ({version} & self.sets)
        used = {v: last_used(self.root, v) for v in self.sets}
        dead = [v for v in NAMES if v not in self.stagers and v != version and partial_path(self.root, v).exists()]
        try:
            with version_lock(self.root, version, timeout_s=0):
                if version in self.sets:
                    return
                with reserve(self.root, version, needed, RootLimits(quota_bytes=self.quota), grace_s=grace_s):
                    self.sets = {path.name for path in (self.root / "objects").iterdir()}
                    assert self.taken() + needed <= self.quota
                    self.fill(version, list(content(version)))
                records.write_stage_record(self.root, version, source="/shared", n_bytes=SIZES[version])
                os.rename(partial_path(self.root, version), self.path(version))
        except (NoSpace, ClusterError) as error:
            assert isinstance(error, ClusterError) == (needed > self.quota)  # noqa: PT017 - a rule is no test
            assert {path.name for path in (self.root / "objects").iterdir()} == before, "evicted in vain"
            assert all(partial_path(self.root, v).exists() for v in dead), "removed in vain"
            goes = sum(total_bytes([disk_usage(self.path(v))]) for v in before - stay)
            goes += sum(total_bytes([disk_usage(partial_path(self.root, v))]) for v in dead)
            assert self.taken() - goes + needed > self.quota, "there was room to be made"
            return
        except TryLater:
            assert version in self.stagers
            return
        gone = before - self.sets
        assert not gone & stay
        retained = before - stay - gone
        assert not gone or not retained or max((used[v], v) for v in gone) < min((used[v], v) for v in retained)
        assert not gone or not any(partial_path(self.root, v).exists() for v in dead), "unfinished copies go first"
        self.sets.add(version)
        self.known = (self.known - gone) | {version}
        self.pinned -= gone

    @rule(version=versions)
    def begin_to_stage(self, version: str) -> None:
        """Another process stages, and is in the middle of it."""
        if version in self.stagers or version in self.sets:
            return
        ready, send = os.pipe()
        needed = SIZES[version] + 64 * KIB
        own_part = disk_usage(partial_path(self.root, version)).own_bytes + needed
        pid = os.fork()
        if not pid:
            for descriptors in self.leases.values():  # a fork keeps leases, but this one stands for a stranger
                for descriptor in descriptors:
                    os.close(descriptor)
            with contextlib.suppress(BaseException), version_lock(self.root, version, timeout_s=0) as tell:
                tell(0, SIZES[version])
                try:
                    with reserve(self.root, version, needed, RootLimits(quota_bytes=self.quota)):
                        self.fill(version, ["c/0"])
                        os.write(send, b"y")
                        time.sleep(60)
                except (NoSpace, ClusterError):
                    os.write(send, b"n")
            os._exit(1)
        os.close(send)
        if os.read(ready, 1) == b"y":
            self.stagers[version] = pid, own_part
        else:
            os.waitpid(pid, 0)
        os.close(ready)
        paths = {path.name for path in (self.root / "objects").iterdir()}
        assert not {v for v in self.sets - paths if self.why(v, 600) not in (None, KeptReason.NOT_PRESENT)}
        self.known -= self.sets - paths
        self.pinned -= self.sets - paths
        self.sets = paths

    @rule(version=versions)
    def kill(self, version: str) -> None:
        if version in self.stagers:
            pid, _ = self.stagers.pop(version)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    @rule(version=versions)
    def lease(self, version: str) -> None:
        try:
            self.leases.setdefault(version, []).append(acquire(self.path(version)))
            assert version in self.sets
        except DataError:
            assert version not in self.sets

    @rule(version=versions)
    def end_lease(self, version: str) -> None:
        if self.leases.get(version):
            os.close(self.leases[version].pop())

    @rule(version=versions, pinned=st.booleans())
    def pin(self, version: str, pinned: bool) -> None:
        if version in self.sets:
            records.set_pinned(self.root, version, pinned=pinned)
            (self.pinned.add if pinned else self.pinned.discard)(version)

    @rule(version=versions)
    def forget(self, version: str) -> None:
        """Nobody knows any more where it came from."""
        records.remove_stage_record(self.root, version)
        self.known.discard(version)
        self.pinned.discard(version)

    @rule(version=versions, when=st.sampled_from([0, -(10**4), -300, 0.0, 10**8]))
    def jump(self, version: str, when: float) -> None:
        """The clock was wrong when this set was last used."""
        path = self.root / ".leases" / version
        if path.exists():
            os.utime(path, (0, time.time() + when if when else 0))

    @rule(quota=st.sampled_from([0, 300 * KIB, 600 * KIB, 900 * KIB, 5000 * KIB]))
    def change_quota(self, quota: int) -> None:
        self.quota = quota

    @rule(version=versions, grace_s=st.sampled_from([0, 600]), force=st.booleans(), dry_run=st.booleans())
    def evict(self, version: str, grace_s: float, force: bool, dry_run: bool) -> None:
        """One named set: it goes, or stays for the reason that the model knows."""
        if version not in self.sets:
            return
        expected = self.why(version, grace_s, force=force)
        actual = evict_item(
            self.root, EvictionCandidate(version, self.path(version)), grace_s=grace_s, force=force, dry_run=dry_run
        )
        assert actual == expected
        if not actual and not dry_run:
            self.sets.discard(version)
            self.known.discard(version)

    @rule(size=st.sampled_from([1, 150 * KIB, 10**9]), grace_s=st.sampled_from([0, 600]))
    def make_room(self, size: int, grace_s: float) -> None:
        """An operator asks for room: all that goes may go, and nothing does when all of it is too little."""
        before = set(self.sets)
        stay = {v for v in self.sets if self.why(v, grace_s)}
        left = (
            total_bytes(disk_usage(path) for path in [*(self.root / "objects").iterdir(), *partial_copies(self.root)])
            - size
        )
        goal = space.make_room(
            self.root, lambda usages: Shortfall(total_bytes(usages.values()) - left, 0), grace_s=grace_s
        )
        self.sets = {path.name for path in (self.root / "objects").iterdir()}
        assert not (before - self.sets) & stay
        assert bool(goal.missing_bytes) == (not goal.evicted)
        self.known -= before - self.sets

    @invariant()
    def all_is_well(self) -> None:
        """Sets are whole and where the model has them; leases, locks and promises are of the living alone."""
        assert {path.name for path in (self.root / "objects").iterdir()} == self.sets
        for version in self.sets:
            for name, data in content(version).items():
                assert (self.path(version) / name).read_bytes() == data
        for version in NAMES:
            assert is_leased(self.root, version) == bool(self.leases.get(version))
            assert (lock_owner(self.root, version) is not None) == (version in self.stagers)
            if version in self.sets:
                assert records.read_stage_record(self.root, version).pinned == (version in self.pinned)
        assert set(space.read_reservations(self.root)) == set(self.stagers)
        assert not list((self.root / ".tmp").glob("*.old.*"))
        listed = {(record.version, record.state, record.locked) for record in list_sets(self.root)}
        assert {v for v, _, busy in listed if busy} <= set(self.stagers)
        assert {v for v, state, _ in listed if state != "partial"} == self.sets

    def teardown(self) -> None:
        for version in list(self.stagers):
            self.kill(version)
        for descriptors in self.leases.values():
            for descriptor in descriptors:
                os.close(descriptor)
        shutil.rmtree(self.root)


def test_any_order_of_events_keeps_the_promises():
    """Stage, lease, pin, kill, evict, turn clocks and quotas: no needed set ever goes, and no promise is broken."""
    assert evicting.GRACE_S == 600
    run_state_machine_as_test(Cache, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))
