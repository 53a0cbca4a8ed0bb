"""Ours and the peers copying one set, in turn, each time to a fresh folder of the same file system."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from perf.harness.harness import Case, compare, in_turn, judge
from perf.harness.workspace import execute, file_system, say, settle, spread, sync_file_system
from perf.stage.stage_data import Set, require_same, stage
from perf.stage.stage_peers import Way, seconds_of_fio

OURS = "pit-stage run"
FIO = "fio"
# ext4 without a journal does not reuse an inode for a minute after its file was deleted, and meanwhile walks past all
# such inodes for every new file: whoever comes next would pay for the cleaning.
_RECENTLY_DELETED_S = 65


class Race:
    """Runs of `ours` and of chosen peers on one set.

    sync: whether a peer's run ends with a syncfs, as it must where durability is asked for; ours never gets one, and
    how long one still takes after ours is in `after_s`. ours_s, fio_s: seconds by their own clocks. These three have
    an item for each run, the uncounted one first.
    """

    def __init__(self, made: Set, home: Path, *, sync: bool) -> None:
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

    def tuned(self, peers: Mapping[str, Sequence[Way]], *, tune: bool) -> dict[str, Way]:
        """The fastest way of each peer here, by the better of two runs each; else its first way."""
        return {peer: self._fastest(peer, ways) if tune and len(ways) > 1 else ways[0] for peer, ways in peers.items()}

    def run(self, rounds: int, peers: Mapping[str, Way]) -> dict[str, list[float]]:
        """Seconds of every run of ours and of each peer."""
        runs: dict[str, Callable[[], object]] = {OURS: self._ours}
        runs |= {peer: self._peer(peer, way) for peer, way in peers.items()}
        times = in_turn(rounds, runs, setting=self._setting, rotate=True)
        for name, seconds in times.items():
            say(f"  {name}: {spread(seconds)} {peers[name].command if name in peers else ''}")
        return times

    def cases(
        self,
        case: str,
        times: Mapping[str, Sequence[float]],
        peers: Mapping[str, Way],
        reach: Mapping[str, float],
        *,
        least: float,
    ) -> list[Case]:
        """One case for each peer; `least` is the reach where `reach` names none."""
        return [
            compare(
                case, peer, way.version, times[OURS], times[peer], reach=reach.get(peer, least), command=way.command
            )
            for peer, way in peers.items()
            if peer != FIO
        ]

    def durable(self, case: str) -> Case:
        """Whether ours was durable when it returned: a sync after it must find next to nothing to do."""
        pairs = zip(self.ours_s[1:], self.after_s[1:], strict=True)
        ratios = [ours / (ours + after) for ours, after in pairs]
        return judge(f"{case}: ours ÷ (ours + a sync after it)", "syncfs", os.uname().release, ratios, reach=0.95)

    def fio(self, case: str, way: Way, times: Mapping[str, Sequence[float]], *, reach: float) -> list[Case]:
        """fio's time over ours, each of the whole command, and each by its own clock, without its start-up."""
        whole = compare(
            f"{case}, whole commands", FIO, way.version, times[OURS], times[FIO], reach=reach, command=way.command
        )
        own = compare(
            f"{case}, by their own clocks",
            FIO,
            way.version,
            self.ours_s[1:],
            self.fio_s[-len(times[FIO]) :],
            reach=reach,
            command=way.command,
        )
        return [whole, own]

    def _ours(self) -> None:
        record = stage(self.made, self.dest)
        if (record["state"], record["verified_bytes"]) != ("staged", self.made.bytes):
            raise SystemExit(f"not a whole, verified stage: {record}")
        self.ours_s.append(float(str(record["wall_s"])))

    def _peer(self, peer: str, way: Way) -> Callable[[], None]:
        def run() -> None:
            out = execute(*way.at(src=self.made.folder, dest=self.dest, work=self.home))
            if self.sync:
                sync_file_system(self.home)
            if peer == FIO:
                self.fio_s.append(seconds_of_fio(out))

        return run

    def _fastest(self, peer: str, ways: Sequence[Way]) -> Way:
        took = [min(self._took(peer, way) for _ in range(3 if peer == FIO else 2)) for way in ways]
        best = took.index(min(took))
        for number, (seconds, way) in enumerate(zip(took, ways, strict=True)):
            say(f"  {peer}: {seconds:.3f} s {way.version} {way.command}{' ← this' if number == best else ''}")
        return ways[best]

    def _took(self, peer: str, way: Way) -> float:
        with self._setting(peer):
            began = time.perf_counter()
            self._peer(peer, way)()
            seconds = time.perf_counter() - began
        # fio's start-up takes longer than its writing, and is the same for all its ways.
        return self.fio_s[-1] if peer == FIO else seconds

    @contextmanager
    def _setting(self, name: str) -> Iterator[None]:
        self._number += 1
        settle(self.home)
        if name == FIO:
            self.dest.mkdir()
        yield
        if name == OURS:
            self.after_s.append(sync_file_system(self.home))
        if name != FIO:
            landed = next((self.dest / "objects").iterdir()) if name == OURS else self.dest
            require_same(self.made, landed, content=name not in self._read)
            self._read.add(name)
        clear(self.dest)


def clear(dest: Path) -> None:
    """Give back the bytes of what was copied. On a disk the emptied files stay until the end (see the top)."""
    if file_system(dest) == "tmpfs":
        shutil.rmtree(dest)
        return
    for folder, _, names in os.walk(dest):
        for name in names:
            path = Path(folder, name)
            path.chmod(0o600)
            os.truncate(path, 0)


def let_inodes_rest(home: Path) -> None:
    """On an ext4 without a journal, wait until files deleted before do not slow the making of new ones."""
    device = home.stat().st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    if (Path("/proc/fs/ext4") / name).exists() and not list(Path("/proc/fs/jbd2").glob(f"{name}-*")):
        say(f"{name} is an ext4 without a journal: waiting {_RECENTLY_DELETED_S} s for deleted inodes to be usable")
        os.sync()
        time.sleep(_RECENTLY_DELETED_S)
