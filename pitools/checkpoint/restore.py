"""All ranks look together for the newest checkpoint whose every byte is as it was saved, and move bad ones aside."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from pitools.checkpoint import tier_copy
from pitools.checkpoint.coordination.barrier import Barrier
from pitools.checkpoint.coordination.exchange import together
from pitools.checkpoint.store import layout, locks, lookup, quarantine, unreadable, verify
from pitools.checkpoint.store.manifest import Manifest, load
from pitools.checkpoint.store.problem import Problem
from pitools.core.errors import ClusterError, PitError
from pitools.core.fs import plain_file
from pitools.core.record import decode_json

# What cannot be read now may be readable in a moment: a server that is started anew takes about so long.
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_MOST_TOLD = 100  # problems, of each rank


class Look:
    """One restore's. Every rank reads a share of the bytes; rank 0 chooses, and tells the others.

    local: a folder of copies on this node, which are nearer. name: of this look, never used twice. writer: as
    `verify.shared_out` takes it.
    """

    def __init__(
        self, barrier: Barrier, folder: Path, local: Path | None, name: str, writer: verify.Writer | None = None
    ) -> None:
        self._barrier, self._folder, self._local, self._name, self._writer = barrier, folder, local, name, writer
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
                        lock.enter_context(locks.reading(path))
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
        looks_whole = [path for path in tier_copy.candidates(self._local, self._folder) if path not in self._away]
        newest = max((step for path in looks_whole if (step := layout.step_of(path)) is not None), default=-1)
        for folder in filter(None, (self._local, self._folder)):
            newer = (layout.step_path(folder, step) for step in layout.steps(folder) if step > newest)
            yield from (path for path in newer if path not in self._away)
        yield from looks_whole

    def _is_good(self, path: Path) -> bool:
        """Whether it is; when not it has been moved aside, or is passed by."""
        rank, word, tries = self._barrier.rank, "again", -1
        while word == "again":
            tries += 1
            mine = verify.check(path, share=(rank, self._barrier.world_size), writer=self._writer)
            found = self._told(f"checking {path.name}", mine)
            doubts = {problem.path for problems in found for problem in problems}
            told = self._barrier.tell(self._key("the doubts"), _encoded(sorted(doubts)) if doubts else "")
            if not told:
                return True
            # By rank 0, and by one on another node: who is wrong may be rank 0's.
            looks = rank in (0, self._barrier.witness)
            seen = _check_anew(path, decode_json(told, list[str])) if looks else []
            again = self._told(f"checking {path.name} again", seen)
            with together(self._barrier, self._key(f"judging {path.name}")):
                word = self._judge(path, found, again, tries) if rank == 0 else ""
            word = self._barrier.tell(self._key("the verdict"), word)
        return False

    def _told(self, what: str, mine: list[Problem]) -> list[list[Problem]]:
        """What every rank found, at rank 0."""
        told = self._barrier.gather(self._key(what), _encoded(mine[:_MOST_TOLD]))
        return [decode_json(text, list[Problem]) for text in told]

    def _judge(self, path: Path, found: list[list[Problem]], again: list[list[Problem]], tries: int) -> str:
        """Rank 0's word on what all ranks found, and what it and a witness saw when they looked again.

        Only what both see, and can read, is damage: a node with a stale cache, bad memory or a broken mount, or a
        server that is away, would else have a good checkpoint moved aside.
        """
        witness = self._barrier.witness
        damage, theirs = (
            [problem for problem in again[rank] if problem.problem != "unreadable"] for rank in (0, witness or 0)
        )
        if damage and theirs:
            aside = quarantine.put(path, damage)
            _tell(f"{path} is not what was saved ({damage[0].text()}): moved to {aside}")
            return "bad"
        if tries < len(_PAUSES_S) and not self._away:  # those after the first have had their minute
            time.sleep(_PAUSES_S[tries])
            return "again"
        other = (witness or 0) if damage else 0  # who did not see it when it looked again
        doubts = [(rank, problem) for rank, problems in enumerate(found) for problem in problems]
        bad = [(0, problem) for problem in damage] or [one for one in doubts if one[1].problem != "unreadable"]
        away = [(other, problem) for problem in again[other]]
        rank, problem = (away or bad or doubts)[0]
        if bad and not away:
            names = self._barrier.named
            what = f"{names([rank])} finds {problem.text()}, and {names([other])} finds it as it was saved"
            raise ClusterError(what, where=str(path), hint="look at that node's mounts and memory; nothing was moved")
        hint = "is the file system there? nothing was moved; if it stays so, `pit checkpoint check --quarantine`"
        what = f"cannot be read by {self._barrier.named([rank])}: {problem.text()}"
        self._away[path] = ClusterError(what, where=str(path), hint=hint)
        return "away"

    def _settle(self, step: int, path: Path) -> None:
        """Tell what was passed by for this one, and keep it from being taken for progress until it is read again."""
        for away, error in self._away.items():
            cost = (layout.step_of(away) or step) - step
            _tell(f"{away} {error.what}: going on from {path}, {cost} steps earlier; it stays")
            unreadable.mark(away, error.what)
        if self._away or unreadable.is_marked(path):
            unreadable.clear(path)
            lookup.point(self._folder)

    def _key(self, what: str) -> str:
        self._count += 1
        return f"{what}, {self._name} {self._count}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # stdout is the training program's


def _check_anew(path: Path, names: Collection[str]) -> list[Problem]:
    """By the bytes of the disk or the server, where they can be had: not by those that this node keeps in memory."""
    for name in names:
        with suppress(OSError), plain_file(path / name) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return verify.check(path, only=names)


def _encoded(what: Sequence[Problem | str]) -> str:
    return msgspec.json.encode(what).decode()
