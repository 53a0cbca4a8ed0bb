"""Remove ended runs by rule, or their older checkpoints; never a checkpoint that is named, and never the newest.

A checkpoint is named by a symbolic link beside it (`ln -s step_400 best`). A run is named by the plan of another run
that contains its id. A removed run is renamed first, so that no reader finds a part of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from pitools.checkpoint.store import check_folder, layout, lookup, retention
from pitools.checkpoint.store.owner import OWNER_FILE
from pitools.core.errors import PitError, TryLater
from pitools.core.fs import from_os_error, fsync_dir
from pitools.core.locks import is_owned_by_user, lock, owner_name
from pitools.core.record import Record
from pitools.launch.provenance.code_copy import CODE_DIR, LISTING_FILE, read_listing
from pitools.launch.recovery import apply_decision
from pitools.run.run_folder import RunRecord, run_dirs
from pitools.slurm.states import is_final

PruneState = Literal["removed", "trimmed", "would be removed", "would be trimmed", "kept", "failed"]
_CHECKPOINTS = "checkpoints"
# What pitools and Slurm write into a run's folder; anything else is its program's.
_OWN_FILES = re.compile(
    r"(request\.toml|plan\.json|script\.sbatch|job\.json|events\.jsonl|cancel\.json|verdict\.json|move\.json"
    r"|provenance\.json|site\.json|supervisor(\.\d+)?\.out|hooks\.(json|out)|environment\.txt|dirty\.patch|code\.json"
    r"|code|jobs|unstarted|verdicts|progress|submitit|attempts|checkpoints|slurm-.*\.out|\..*)"
)
_BYTECODE = "__pycache__"
_REMOVING = ".pruned."  # of a folder that is being removed, or was when its process was killed


class PrunedRun(Record, frozen=True, kw_only=True, tag="pit.pruned-run/1"):
    """What `prune_runs` did with one run. "trimmed": some of its checkpoints were removed, and nothing else.

    steps: of the removed checkpoints. freed_bytes: on disk. reason: why the run, or a part of it, was kept, or could
    not be removed.
    """

    run_id: str
    name: str
    run_state: str
    state: PruneState
    freed_bytes: int = 0
    steps: tuple[int, ...] = ()
    reason: str = ""


def prune_runs(
    runs: Sequence[RunRecord],
    *,
    keep_last: int = 1,
    dry_run: bool = True,
    sweep: str = "",
    sweep_roots: Sequence[Path] = (),
) -> Iterator[PrunedRun]:
    """Yield what becomes of each run: one without checkpoints is removed, another loses its older checkpoints.

    Kept whole: a run that is not over, or whose job has not ended, or of another user, or that another run names.
    Never removed: a run of another sweep than `sweep`, and one with files of its program. keep_last: number of newest
    checkpoints that stay beside the named ones. sweep_roots: further folders of runs with sweeps: a sweep over several
    sites is in that of the first.
    """
    roots = dict.fromkeys(Path(run.run_dir).parent for run in runs)
    named = {run_id: other for root in roots for run_id, other in _named_runs(root).items()}
    sweeps = {run_id: name for root in (*roots, *sweep_roots) for run_id, name in _sweep_members(root) if name != sweep}
    for leftover in () if dry_run else [path for root in roots for path in root.glob(f"{_REMOVING}*")]:
        with contextlib.suppress(OSError):  # another user's
            shutil.rmtree(leftover)
    for run in runs:
        run_dir = Path(run.run_dir)
        record = PrunedRun(run_id=run.run_id, name=run.name, run_state=run.state, state="kept")
        try:
            if reason := _keep_reason(run, named):
                yield replace(record, reason=reason)
                continue
            renamed = run_dir.with_name(f"{_REMOVING}{run_dir.name}.{secrets.token_hex(4)}")
            with lock(run_dir / apply_decision.RUN_LOCK, f"run {run.run_id}"):
                record = _prune(record, run_dir, sweeps.get(run.run_id, ""), keep_last, None if dry_run else renamed)
            if record.state == "removed":  # without the lock: NFS keeps a folder with a file that is open
                shutil.rmtree(renamed)
            yield record
        except TryLater as error:  # it is being continued, or another prune removes it
            yield replace(record, reason=error.message)
        except (PitError, OSError) as error:
            error = error if isinstance(error, PitError) else from_os_error(error, run_dir)
            yield replace(record, state="failed", freed_bytes=0, reason=error.message)


def _keep_reason(run: RunRecord, named: dict[str, str]) -> str:
    """Return why a run is kept whole; "" if it may be pruned."""
    if not run.is_over:
        return "it has not ended"
    if not is_final(run.state):
        return f"its job has not ended: {run.state}"
    run_dir = Path(run.run_dir)
    if not is_owned_by_user(run_dir):
        return f"it is {owner_name(run_dir)}'s"
    return f"run {named[run.run_id]} names it" if run.run_id in named else ""


def _prune(record: PrunedRun, run_dir: Path, sweep: str, keep_last: int, renamed: Path | None) -> PrunedRun:
    """Prune one run; the caller holds its lock, so that nobody reopens it meanwhile.

    sweep: that keeps it, or "". renamed: what to rename a run that is to be removed to; None for a dry run.
    """
    verdict = apply_decision.read_verdict(run_dir)
    if verdict is None or verdict.code == "moving":
        return replace(record, reason="it has not ended" if verdict is None else "its move has not ended")
    if layout.listed_steps(run_dir / _CHECKPOINTS):
        return _trim(record, run_dir / _CHECKPOINTS, keep_last, renamed is None)
    if sweep:
        return replace(record, reason=f"it belongs to a sweep: pit launch prune --sweep {sweep}")
    if files := _other_files(run_dir):
        return replace(record, reason=f"other files are in it: {', '.join(files[:3])}{', …' if files[3:] else ''}")
    freed = _disk_bytes(run_dir)
    if renamed is None:
        return replace(record, state="would be removed", freed_bytes=freed)
    os.rename(run_dir, renamed)
    fsync_dir(renamed.parent)
    return replace(record, state="removed", freed_bytes=freed)


def _trim(record: PrunedRun, folder: Path, keep_last: int, dry_run: bool) -> PrunedRun:
    """Remove the older checkpoints of a run, if the newest that stays is good."""
    named, complete = retention.named_steps(folder), lookup.complete_steps(folder)
    removable = [step for step in complete[keep_last:] if step not in named]
    if not removable:
        return replace(record, reason="its checkpoints are the newest, named or incomplete")
    good = check_folder.newest_good_step(folder)
    if good is None:
        return replace(record, reason="none of its checkpoints is good: see `pit checkpoint check`")
    sizes = {step: _disk_bytes(layout.step_path(folder, step)) for step in removable}
    # Newer ones than the newest good one are damaged, and evidence.
    kept = {step: "newer than the newest good one" for step in complete if step >= good}
    results = retention.prune_checkpoints(folder, keep_last, kept_steps=kept, dry_run=dry_run)
    done: PruneState = "would be trimmed" if dry_run else "trimmed"
    steps = tuple(result.step for result in results if result.state in ("removed", "would be removed"))
    failed = [result for result in results if result.state == "failed"]
    return replace(
        record,
        state="failed" if failed else done if steps else "kept",
        freed_bytes=sum(sizes.get(step, 0) for step in steps),
        steps=steps,
        reason=f"step {failed[0].step}: {failed[0].reason}" if failed else "",
    )


def _named_runs(root: Path) -> dict[str, str]:
    """Return the ids of runs that the plan of another run contains, each with that other run's id."""
    paths = run_dirs(root)
    ids = {path.name for path in paths}
    named: dict[str, str] = {}
    for path in paths:
        with contextlib.suppress(OSError):  # of another user
            text = (path / "plan.json").read_text(errors="replace")
            for run_id in set(re.findall(r"[\w.-]+", text)) & ids - {path.name}:
                named.setdefault(run_id, path.name)
    return named


def _sweep_members(root: Path) -> Iterator[tuple[str, str]]:
    """Yield each run of a sweep below a folder of runs, with the sweep's name: a sweep has a link to each."""
    for link in root.glob("sweeps*/*/*"):
        if link.is_symlink():
            yield link.readlink().name, link.parent.name


def _other_files(run_dir: Path) -> list[str]:
    """Return the files below a run's folder that pitools did not write: outputs of its program, damaged checkpoints."""
    files = [entry.name for entry in sorted(run_dir.iterdir()) if not _OWN_FILES.fullmatch(entry.name)]
    for folder, own in ((run_dir / _CHECKPOINTS, {OWNER_FILE, layout.LATEST}), (run_dir / CODE_DIR, _copied(run_dir))):
        inner = [path.relative_to(folder) for path in _files(folder)]
        files += [f"{folder.name}/{path}" for path in inner if path.parts[0][0] != "." and str(path) not in own]
    return files


def _copied(run_dir: Path) -> set[str]:
    """Return the paths in `code/` that were copied there."""
    if not (run_dir / LISTING_FILE).exists():
        return set()
    listing = read_listing(run_dir)
    return {file.path for file in (*listing.files, *listing.linked)}


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files and links below a folder, without compiled Python."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in sorted(folders) if name != _BYTECODE]
        for name in (*sorted(names), *(name for name in folders if Path(parent, name).is_symlink())):
            yield Path(parent, name)


def _disk_bytes(folder: Path) -> int:
    """Return the bytes that removing a folder frees: files with other names elsewhere do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = Path(parent, name).lstat()
                total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total
