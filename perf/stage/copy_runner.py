"""Ours and the peers copying one set, in turn, each time to a fresh folder of the same file system."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from perf.harness.harness import Case, compare, from_ratios, interleave
from perf.harness.workspace import (
    execute,
    file_system,
    format_spread,
    print_progress,
    sync_file_system,
    wait_until_idle,
)
from perf.stage.stage_data import FileSet, require_same, stage
from perf.stage.stage_peers import PeerCommand, seconds_of_fio

OURS = "pit-stage run"
FIO = "fio"
# ext4 without a journal does not reuse an inode for a minute after its file was deleted, and meanwhile walks past all
# such inodes for every new file: whoever comes next would pay for the cleaning.
_RECENTLY_DELETED_S = 65


class CopyRunner:
    """Runs of `ours` and of chosen peers on one set.

    sync: whether a peer's run ends with a syncfs, as it must where durability is asked for; ours never gets one, and
    how long one still takes after ours is in `after_s`. ours_s, fio_s: seconds by their own clocks. These three have
    an item for each run, the uncounted one first.
    """

    def __init__(self, made: FileSet, home: Path, *, sync: bool) -> None:
        self.made, self.home, self.sync = made, home, sync
        self.after_s: list[float] = []
        self.ours_s: list[float] = []
        self.fio_s: list[float] = []
        self._number = 0
        self._read: set[str] = set()

    @property
    def dest(self) -> Path:
        """Where the present run copies to; not there before it."""
        return self.home / f"{self._number}"

    def tuned(self, peers: Mapping[str, Sequence[PeerCommand]], *, tune: bool) -> dict[str, PeerCommand]:
        """The fastest way of each peer here, by the better of two runs each; else its first way."""
        return {peer: self._fastest(peer, ways) if tune and len(ways) > 1 else ways[0] for peer, ways in peers.items()}

    def run(self, rounds: int, peers: Mapping[str, PeerCommand]) -> dict[str, list[float]]:
        """Seconds of every run of ours and of each peer."""
        runs: dict[str, Callable[[], object]] = {OURS: self._ours}
        runs |= {peer: self._peer(peer, way) for peer, way in peers.items()}
        times = interleave(rounds, runs, around_each=self._setting, rotate=True)
        for name, seconds in times.items():
            print_progress(f"  {name}: {format_spread(seconds)} {peers[name].command if name in peers else ''}")
        return times

    def cases(
        self,
        case: str,
        times: Mapping[str, Sequence[float]],
        peers: Mapping[str, PeerCommand],
        targets: Mapping[str, float],
        *,
        least: float,
    ) -> list[Case]:
        """One case for each peer; `least` is the target where `targets` names none."""
        return [
            compare(
                case, peer, way.version, times[OURS], times[peer], target=targets.get(peer, least), command=way.command
            )
            for peer, way in peers.items()
            if peer != FIO
        ]

    def durable(self, case: str) -> Case:
        """Whether ours was durable when it returned: a sync after it must find next to nothing to do."""
        pairs = zip(self.ours_s[1:], self.after_s[1:], strict=True)
        ratios = [ours / (ours + after) for ours, after in pairs]
        return from_ratios(
            f"{case}: ours ÷ (ours + a sync after it)", "syncfs", os.uname().release, ratios, target=0.95
        )

    def fio(self, case: str, way: PeerCommand, times: Mapping[str, Sequence[float]], *, target: float) -> list[Case]:
        """fio's time over ours, each of the whole command, and each by its own clock, without its start-up."""
        full = compare(
            f"{case}, whole commands", FIO, way.version, times[OURS], times[FIO], target=target, command=way.command
        )
        own = compare(
            f"{case}, by their own clocks",
            FIO,
            way.version,
            self.ours_s[1:],
            self.fio_s[-len(times[FIO]) :],
            target=target,
            command=way.command,
        )
        return [full, own]

    def _ours(self) -> None:
        record = stage(self.made, self.dest)
        if (record["state"], record["verified_bytes"]) != ("staged", self.made.bytes):
            raise SystemExit(f"not a whole, verified stage: {record}")
        self.ours_s.append(float(str(record["wall_s"])))

    def _peer(self, peer: str, way: PeerCommand) -> Callable[[], None]:
        def run() -> None:
            out = execute(*way.argv_for(src=self.made.folder, dest=self.dest, work=self.home))
            if self.sync:
                sync_file_system(self.home)
            if peer == FIO:
                self.fio_s.append(seconds_of_fio(out))

        return run

    def _fastest(self, peer: str, ways: Sequence[PeerCommand]) -> PeerCommand:
        took = [min(self._took(peer, way) for _ in range(3 if peer == FIO else 2)) for way in ways]
        best = took.index(min(took))
        for number, (seconds, way) in enumerate(zip(took, ways, strict=True)):
            print_progress(
                f"  {peer}: {seconds:.3f} s {way.version} {way.command}{' ← this' if number == best else ''}"
            )
        return ways[best]

    def _took(self, peer: str, way: PeerCommand) -> float:
        with self._setting(peer):
            began = time.perf_counter()
            self._peer(peer, way)()
            seconds = time.perf_counter() - began
        # fio's start-up takes longer than its writing, and is the same for all its ways.
        return self.fio_s[-1] if peer == FIO else seconds

    @contextmanager
    def _setting(self, name: str) -> Iterator[None]:
        self._number += 1
        wait_until_idle(self.home)
        if name == FIO:
            self.dest.mkdir()
        yield
        if name == OURS:
            self.after_s.append(sync_file_system(self.home))
        if name != FIO:
            landed = next((self.dest / "objects").iterdir()) if name == OURS else self.dest
            require_same(self.made, landed, content=name not in self._read)
            self._read.add(name)
        delete_copies(self.dest)


def delete_copies(dest: Path) -> None:
    """Give back the bytes of what was copied. On a disk the emptied files stay until the end (see the top)."""
    if file_system(dest) == "tmpfs":
        shutil.rmtree(dest)
        return
    for folder, _, names in os.walk(dest):
        for name in names:
            path = Path(folder, name)
            path.chmod(0o600)
            os.truncate(path, 0)


def wait_for_inode_reuse(home: Path) -> None:
    """On an ext4 without a journal, wait until files deleted before do not slow the making of new ones."""
    device = home.stat().st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    if (Path("/proc/fs/ext4") / name).exists() and not list(Path("/proc/fs/jbd2").glob(f"{name}-*")):
        print_progress(
            f"{name} is an ext4 without a journal: waiting {_RECENTLY_DELETED_S} s for deleted inodes to be usable"
        )
        os.sync()
        time.sleep(_RECENTLY_DELETED_S)
