"""All ranks look together for the newest checkpoint whose every byte is as it was saved, and move bad ones aside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from pitools.checkpoint import drain, find, held, layout, quarantine, unread, verify
from pitools.checkpoint.barrier import Barrier
from pitools.checkpoint.manifest import Manifest, load
from pitools.checkpoint.meeting import together
from pitools.checkpoint.problem import Problem
from pitools.core.errors import ClusterError, PitError

# What cannot be read now may be readable in a moment: a server that is started anew takes about so long.
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_MOST_TOLD = 100  # problems, of each rank


class Look:
    """One restore's. Every rank reads a share of the bytes; rank 0 chooses, and tells the others.

    local: a folder of copies on this node, which are nearer. name: of this look, never used twice.
    """

    def __init__(self, barrier: Barrier, folder: Path, local: Path | None, name: str) -> None:
        self._barrier, self._folder, self._local, self._name = barrier, folder, local, name
        self._count = 0
        # Rank 0's: what is there and cannot be read, newest first, and what hindered it.
        self._away: dict[Path, ClusterError] = {}

    @contextmanager
    def newest(self) -> Iterator[tuple[Manifest, Path] | None]:
        """The newest good checkpoint and its place, where it stays while the block runs; None where there is none.

        One that is there and cannot be read is waited for a minute, and then passed by: it stays, and is told. Raises
        ClusterError where none of those that are there can be read, the folder cannot be listed, or what is bad cannot
        be moved.
        """
        while path := self._choose():
            with ExitStack() as lock:
                if self._barrier.rank == 0:
                    with suppress(PitError):  # without a manifest that can be locked: the next lines tell why
                        lock.enter_context(held.reading(path))
                if self._is_good(path):
                    with together(self._barrier, self._key(f"opening {path.name}")):
                        manifest = load(path)
                        if self._barrier.rank == 0:
                            self._settle(manifest.step, path)
                    yield manifest, path
                    return
        yield None

    def _choose(self) -> Path | None:
        path = ""
        with together(self._barrier, self._key("choosing a checkpoint")):
            if self._barrier.rank == 0:
                path = next((str(path) for path in self._candidates()), "")
                if not path and self._away:
                    raise next(iter(self._away.values()))
        choice = self._barrier.tell(self._key("the choice"), path)
        return Path(choice) if choice else None

    def _candidates(self) -> Iterator[Path]:
        """What looks whole, the newest first, after whatever is newer and does not."""
        looks_whole = [path for path in drain.candidates(self._local, self._folder) if path not in self._away]
        newest = max((step for path in looks_whole if (step := layout.step_of(path)) is not None), default=-1)
        for folder in filter(None, (self._local, self._folder)):
            newer = (layout.step_path(folder, step) for step in layout.steps(folder) if step > newest)
            yield from (path for path in newer if path not in self._away)
        yield from looks_whole

    def _is_good(self, path: Path) -> bool:
        """Whether it is; when not it has been moved aside, or is passed by."""
        word, tries = "again", -1
        while word == "again":
            tries += 1
            found = verify.check(path, share=(self._barrier.rank, self._barrier.world_size))[:_MOST_TOLD]
            told = self._barrier.gather(self._key(f"checking {path.name}"), msgspec.json.encode(found).decode())
            with together(self._barrier, self._key(f"judging {path.name}")):
                word = self._judge(path, told, tries) if self._barrier.rank == 0 else ""
            word = self._barrier.tell(self._key("the verdict"), word)
        return word == "good"

    def _judge(self, path: Path, told: list[str], tries: int) -> str:
        """Rank 0's word on what all ranks found. Only what it sees itself, and can read, is damage: a node with a stale
        cache or a broken mount, or a server that is away, would else have a good checkpoint moved aside.
        """
        by_rank = [msgspec.json.decode(text, type=list[Problem]) for text in told]
        if not any(by_rank):
            return "good"
        seen = verify.check(path, only={problem.path for found in by_rank for problem in found})
        if damage := [problem for problem in seen if problem.problem != "unreadable"]:
            aside = quarantine.put(path, damage)
            print(f"{path} is not what was saved ({damage[0].text()}): moved to {aside}", flush=True)
            return "bad"
        if tries < len(_PAUSES_S) and not self._away:  # those after the first have had their minute
            time.sleep(_PAUSES_S[tries])
            return "again"
        rank, found = next((rank, found) for rank, found in enumerate(by_rank) if found)
        if seen or all(problem.problem == "unreadable" for found in by_rank for problem in found):
            hint = "is the file system there? nothing was moved; if it stays so, `pit checkpoint check --quarantine`"
            rank, found = (0, seen) if seen else (rank, found)
            what = f"cannot be read by {self._barrier.named([rank])}: {found[0].text()}"
            self._away[path] = ClusterError(what, where=str(path), hint=hint)
            return "away"
        what = f"{self._barrier.named([rank])} finds {found[0].text()}, and rank 0 finds it as it was saved"
        raise ClusterError(what, where=str(path), hint="look at that node's mounts and memory; nothing was moved")

    def _settle(self, step: int, path: Path) -> None:
        """Tell what was passed by for this one, and keep it from being taken for progress until it is read again."""
        for away, error in self._away.items():
            cost = (layout.step_of(away) or step) - step
            print(f"{away} {error.what}: going on from {path}, {cost} steps earlier; it stays", flush=True)
            unread.mark(away, error.what)
        if self._away or unread.is_marked(path):
            unread.clear(path)
            find.point(self._folder)

    def _key(self, what: str) -> str:
        self._count += 1
        return f"{what}, {self._name} {self._count}"
