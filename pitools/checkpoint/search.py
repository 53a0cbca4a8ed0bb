"""Find the newest checkpoint whose bytes all match its manifest, over all ranks; quarantine damaged ones."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from pitools.checkpoint.coordination.barrier import Barrier
from pitools.checkpoint.coordination.exchange import all_or_none
from pitools.checkpoint.store import layout, locks, lookup, owner, quarantine, unreadable, verify
from pitools.checkpoint.store.manifest import CheckpointManifest, load_manifest
from pitools.checkpoint.store.problem import CheckpointProblem
from pitools.core.errors import ClusterError, ConfigError, DataError, PitError
from pitools.core.fs import open_regular
from pitools.core.record import decode_json

# Seconds between reads of an unreadable checkpoint: a file server that restarts takes about a minute.
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_MAX_REPORTED = 100  # problems, of each rank
_MAX_NAMED = 8


class RestoreSearch:
    """The search of one restore. Every rank verifies a share of the bytes; rank 0 chooses and broadcasts.

    name: of this search, never used twice. rank_of_file: as `verify.split_files` takes it.
    """

    def __init__(
        self, barrier: Barrier, folder: Path, name: str, rank_of_file: verify.RankOfFile | None = None
    ) -> None:
        self._barrier, self._folder, self._name, self._rank_of_file = barrier, folder, name, rank_of_file
        self._count = 0
        # At rank 0: checkpoints that could not be read, newest first, each with its error.
        self._unreadable: dict[Path, ClusterError] = {}

    @contextmanager
    def newest_good(self) -> Iterator[tuple[CheckpointManifest, Path] | None]:
        """Yield the newest good checkpoint and its path, locked while the block runs; None when there is none.

        An unreadable one is retried for a minute, then skipped with a message: it stays. Raises DataError when all are
        damaged, ConfigError for one of another run, ClusterError when no existing checkpoint can be read, the folder
        cannot be listed, or a damaged one cannot be moved.
        """
        while path := self._choose():
            with ExitStack() as lock:
                if self._barrier.rank == 0:
                    with suppress(PitError):  # no manifest to lock: verification reports why
                        lock.enter_context(locks.read_lock(path))
                if self._is_good(path):
                    with all_or_none(self._barrier, self._key(f"opening {path.name}")):
                        manifest = load_manifest(path)
                        if self._barrier.rank == 0:
                            self._report_skipped(manifest.step, path)
                    yield manifest, path
                    return
        yield None

    def _choose(self) -> Path | None:
        path = ""
        with all_or_none(self._barrier, self._key("choosing a checkpoint")):
            if self._barrier.rank == 0:
                path = next((str(path) for path in self._candidates()), "")
                if path:
                    self._require_own(Path(path))
                else:
                    self._require_none_lost()
        choice = self._barrier.broadcast(self._key("the choice"), path)
        return Path(choice) if choice else None

    def _candidates(self) -> Iterator[Path]:
        """Yield the complete checkpoints, newest first, each after any newer incomplete one."""
        path_of = partial(layout.step_path, self._folder)
        complete = [step for step in lookup.complete_steps(self._folder) if path_of(step) not in self._unreadable]
        newer = [step for step in layout.listed_steps(self._folder) if step > max(complete, default=-1)]
        yield from (path_of(step) for step in [*newer, *complete] if path_of(step) not in self._unreadable)

    def _require_own(self, path: Path) -> None:
        """Raise ConfigError for the checkpoint of another run, which is not damaged: a person put it here."""
        folder_owner = owner.read_owner(self._folder)
        with suppress(DataError):  # a damaged manifest: verification reports it
            manifest = load_manifest(path)
            if folder_owner and not owner.is_owned_by(folder_owner, manifest):
                message = f"of another run (expected {folder_owner.run}, state {folder_owner.state_fingerprint}, "
                message += f"got {manifest.run}, state {manifest.state_fingerprint})"
                hint = f"move it out of this folder: mv {path} {self._folder}.other"
                raise ConfigError(message, where=str(path), hint=hint)

    def _require_none_lost(self) -> None:
        """Raise if there were checkpoints and none is good: a run never silently restarts from step 0."""
        if self._unreadable:
            raise next(iter(self._unreadable.values()))
        folder = self._folder / layout.QUARANTINE
        if names := [path.name for path in sorted(folder.glob("step_*"))]:
            message = f"no good checkpoint: {', '.join(names[:_MAX_NAMED])} in quarantine"
            message += f", and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            hint = f"to start from step 0, move them away: mv {folder} {self._folder}.damaged"
            raise DataError(message, where=str(self._folder), hint=hint)

    def _is_good(self, path: Path) -> bool:
        """Return whether every byte matches; if not, the checkpoint was quarantined or is skipped."""
        rank, outcome, tries = self._barrier.rank, "retry", -1
        while outcome == "retry":
            tries += 1
            own_problems = self._verify_share(path)
            all_problems = self._gather_problems(f"checking {path.name}", own_problems)
            reported_paths = {problem.path for problems in all_problems for problem in problems}
            paths_json = self._barrier.broadcast(
                self._key("the files to read again"), _encoded(sorted(reported_paths)) if reported_paths else ""
            )
            if not paths_json:
                return True
            # By rank 0 and by a rank on another node: rank 0's own node may be the faulty one.
            is_checker = rank in (0, self._barrier.second_node_rank)
            own_recheck = _check_uncached(path, decode_json(paths_json, list[str])) if is_checker else []
            rechecked = self._gather_problems(f"checking {path.name} again", own_recheck)
            with all_or_none(self._barrier, self._key(f"deciding on {path.name}")):
                outcome = self._decide(path, all_problems, rechecked, tries) if rank == 0 else ""
            outcome = self._barrier.broadcast(self._key("the decision"), outcome)
        return False

    def _verify_share(self, path: Path) -> list[CheckpointProblem]:
        """Verify this rank's share of the files; stray files are only reported."""
        share = (self._barrier.rank, self._barrier.world_size)
        problems = verify.verify_checkpoint(path, share=share, rank_of_file=self._rank_of_file)
        if strays := [problem for problem in problems if not problem.is_damage]:
            _print(f"{path} has {len(strays)} stray files, such as {strays[0].path}: ignored")
        return [problem for problem in problems if problem.is_damage]

    def _gather_problems(self, key: str, problems: list[CheckpointProblem]) -> list[list[CheckpointProblem]]:
        """Return the problems that each rank found, at rank 0."""
        messages = self._barrier.gather(self._key(key), _encoded(problems[:_MAX_REPORTED]))
        return [decode_json(text, list[CheckpointProblem]) for text in messages]

    def _decide(
        self,
        path: Path,
        first_pass: list[list[CheckpointProblem]],
        rechecked: list[list[CheckpointProblem]],
        tries: int,
    ) -> str:
        """Decide at rank 0 from all ranks' problems and the uncached recheck: "damaged", "retry" or "unreadable".

        A problem is damage only if rank 0 and a rank of another node both detect it: otherwise a stale cache, bad
        memory, a broken mount or an absent server would have a good checkpoint quarantined.
        """
        witness = self._barrier.second_node_rank
        damage, witness_damage = (
            [problem for problem in rechecked[rank] if problem.problem != "unreadable"] for rank in (0, witness or 0)
        )
        if damage and witness_damage:
            quarantined = quarantine.quarantine_checkpoint(path, damage)
            _print(f"{path} is damaged ({damage[0].text()}): moved to {quarantined or 'quarantine by another process'}")
            return "damaged"
        if tries < len(_PAUSES_S) and not self._unreadable:  # one minute for all candidates
            time.sleep(_PAUSES_S[tries])
            return "retry"
        clean_rank = (witness or 0) if damage else 0  # the rank whose recheck found no damage
        reported = [(rank, problem) for rank, problems in enumerate(first_pass) for problem in problems]
        damaged = [(0, problem) for problem in damage] or [pair for pair in reported if pair[1].problem != "unreadable"]
        unread = [(clean_rank, problem) for problem in rechecked[clean_rank]]
        rank, problem = (unread or damaged or reported)[0]
        if damaged and not unread:
            names = self._barrier.format_ranks
            message = f"{names([rank])} finds {problem.text()}, and {names([clean_rank])} finds it as it was saved"
            raise ClusterError(message, where=str(path), hint="check that node's mounts and memory; nothing was moved")
        hint = "nothing was moved; if its file system answers, move it: `pit checkpoint check --quarantine`"
        message = f"cannot be read by {self._barrier.format_ranks([rank])}: {problem.text()}"
        self._unreadable[path] = ClusterError(message, where=str(path), hint=hint)
        return "unreadable"

    def _report_skipped(self, step: int, path: Path) -> None:
        """Report the skipped checkpoints, and mark them so that they do not count as progress until read again."""
        for skipped, error in self._unreadable.items():
            cost = (layout.step_of(skipped) or step) - step
            _print(f"{skipped} {error.message}: continuing from {path}, {cost} steps earlier; it is not removed")
            unreadable.mark_unreadable(skipped, error.message)
        if self._unreadable or unreadable.is_marked_unreadable(path):
            unreadable.clear_mark(path)
            lookup.update_latest_link(self._folder)

    def _key(self, purpose: str) -> str:
        self._count += 1
        return f"{purpose}, {self._name} {self._count}"


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # stdout is the training program's


def _check_uncached(path: Path, names: Collection[str]) -> list[CheckpointProblem]:
    """Verify files after dropping them from this node's page cache, where the kernel allows."""
    for name in names:
        with suppress(OSError), open_regular(path / name) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return [problem for problem in verify.verify_checkpoint(path, only=names) if problem.is_damage]


def _encoded(items: Sequence[CheckpointProblem | str]) -> str:
    return msgspec.json.encode(items).decode()
