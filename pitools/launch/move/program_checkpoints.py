"""List, copy and verify the checkpoints that a program saves in a format of its own, for a move."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from pitools.checkpoint.store import check_folder, layout, locks, manifest, owner, unreadable
from pitools.core.errors import DataError, UsageError
from pitools.core.fs import from_os_error, open_regular, sync_fs
from pitools.core.progress import progress_bar
from pitools.launch.plan import Plan
from pitools.run import run_folder
from pitools.site.tar_stream import TarEntry

CHECKPOINTS_DIR, PROGRESS_FILE = "checkpoints", "progress"
_BLOCK_BYTES = 1 << 20


def program_entries(run_dir: Path) -> list[TarEntry]:
    """Return the program's own files in a run's checkpoint folder, and `progress`; [] for none.

    Names are relative to the run's folder. A link to a target inside the folder stays a link. Raises DataError for a
    link to a target outside, and for a device, pipe or socket; ClusterError.
    """
    top = run_dir / CHECKPOINTS_DIR
    try:
        entries = [
            entry for path in sorted(top.iterdir()) if not _is_pitools_entry(path) for entry in _walk_entries(path, top)
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, top) from error
    if entries and (run_dir / PROGRESS_FILE).is_file():
        entries.append(TarEntry(name=PROGRESS_FILE, data=(run_dir / PROGRESS_FILE).read_bytes()))
    return entries


def _is_pitools_entry(path: Path) -> bool:
    """Whether `pitools.checkpoint` made this entry of a checkpoint folder."""
    if path.name in (owner.OWNER_FILE, locks.WRITER_LOCK, layout.QUARANTINE) or layout.parse_unpublished(path):
        return True
    if path.name.startswith((f"{layout.OLD_PREFIX}step_", f".{layout.LATEST}.", f"{unreadable.MARK_PREFIX}step_")):
        return True
    if path.name == layout.LATEST and path.is_symlink():
        target = path.parent / path.readlink()
        return target.parent == path.parent and _is_pitools_entry(target)
    return layout.step_of(path) is not None and any(
        (path / name).exists() for name in (manifest.MANIFEST_FILE, layout.PAYLOAD)
    )


def _walk_entries(path: Path, top: Path) -> Iterator[TarEntry]:
    name = f"{CHECKPOINTS_DIR}/{path.relative_to(top)}"
    mode = path.lstat().st_mode
    if not name.isprintable() or "\\" in name:
        problem = f"cannot copy a file name with a backslash or a character that is not printable: {name!r}"
        raise DataError(problem, where=str(top))
    if stat.S_ISLNK(mode):
        yield TarEntry(name=name, link=_relative_link(path, top))
    elif stat.S_ISREG(mode):
        yield TarEntry(name=name, path=path)
    elif stat.S_ISDIR(mode):
        yield TarEntry(name=name)
        for inner in sorted(path.iterdir()):
            yield from _walk_entries(inner, top)
    else:
        raise DataError("cannot copy: not a file, a folder or a link", where=str(path))


def _relative_link(link: Path, top: Path) -> str:
    """Return a link's target relative to the link's folder, so that it is valid after the move."""
    # Only one level is resolved: `latest` may name another link.
    target = Path(os.path.normpath(link.parent / link.readlink()))
    if not target.is_relative_to(top):
        # A program may use another path to its run, such as a link to a scratch folder.
        real = Path(os.path.realpath(target.parent), target.name)
        if real.is_relative_to(top.resolve()):
            target = top / real.relative_to(top.resolve())
    if not target.is_relative_to(top):
        problem = f"link to a target outside the checkpoint folder: {target}"
        raise DataError(problem, where=str(link), hint="replace the link by the file, or remove it")
    return os.path.relpath(target, link.parent)


def copy_entries(entries: Sequence[TarEntry], run_dir: Path, to: Path) -> None:
    """Copy these entries of a run into the folder of another, with their times and modes.

    Raises DataError for a copy that differs; NoSpace.
    """
    files = [entry for entry in entries if entry.path]
    total = sum(entry.path.stat().st_size for entry in files if entry.path)
    digests = {}
    try:
        with progress_bar(CHECKPOINTS_DIR, total) as advance:
            for entry in entries:
                target = to / entry.name
                target.parent.mkdir(parents=True, exist_ok=True)
                if entry.path:
                    digest = hashlib.sha256()
                    with open_regular(entry.path) as file, target.open("xb") as out:
                        while block := file.read(_BLOCK_BYTES):
                            digest.update(block)
                            out.write(block)
                            advance(len(block))
                    digests[target] = digest.hexdigest()
                elif entry.data is not None:
                    target.write_bytes(entry.data)
                elif entry.link:
                    target.symlink_to(entry.link)
                else:
                    target.mkdir(exist_ok=True)
        sync_fs(to)
        for target, digest_before in digests.items():
            if _sha256(target) != digest_before:
                raise DataError("copied file differs", where=str(target), hint="try again")
        for entry in reversed(entries):  # a folder last, because its content changes its time
            shutil.copystat(run_dir / entry.name, to / entry.name, follow_symlinks=False)
    except OSError as error:
        raise from_os_error(error, to) from error


def sha256_lines(entries: Sequence[TarEntry]) -> str:
    """Return a checksum file for `sha256sum -c`: a line per file of these entries."""
    return "".join(f"{_sha256(entry.path)}  {entry.name}\n" for entry in entries if entry.path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()
    except OSError as error:
        raise from_os_error(error, path) from error


def require_saved(run_dir: Path, plan: Plan, *, is_stopped: bool = False) -> None:
    """Raise UsageError for a run whose progress here would be lost at another site.

    is_stopped: whether the run has ended. Until then, a run with a signal may still save.
    """
    if layout.listed_steps(run_dir / CHECKPOINTS_DIR) or program_entries(run_dir):
        return
    saved_steps = program_progress(run_dir)
    may_save = bool(plan.request.entry or plan.job.signal) and not is_stopped
    is_lost = bool(run_folder.attempt_dirs(run_dir)) and not plan.request.entry
    if not saved_steps and (may_save or not is_lost):
        return
    message = f"the run has {saved_steps} saved steps, but no checkpoint to move"
    hint = f"save in $PIT_CHECKPOINT_DIR; or start from step 0: pit launch reproduce {run_dir.name} --site NAME"
    raise UsageError(message, where=str(run_dir / CHECKPOINTS_DIR), hint=hint)


def step_to_resume(run_dir: Path, plan: Plan) -> int | None:
    """Return `newest_step` of a stopped run. Raises as it does, and UsageError of `require_saved`."""
    step = newest_step(run_dir)
    require_saved(run_dir, plan, is_stopped=True)
    return step


def newest_step(run_dir: Path) -> int | None:
    """Return the step of a run's newest good checkpoint; None for a program's own checkpoints, or for none.

    Raises DataError if all checkpoints are damaged.
    """
    step = check_folder.newest_good_step(run_dir / CHECKPOINTS_DIR)
    if step is None and layout.listed_steps(run_dir / CHECKPOINTS_DIR) and not program_entries(run_dir):
        hint = f"for the problems: pit checkpoint check {run_dir / CHECKPOINTS_DIR}"
        raise DataError("all checkpoints are damaged", where=str(run_dir / CHECKPOINTS_DIR), hint=hint)
    return step


def program_progress(run_dir: Path) -> int:
    """Return the number of saved steps that the program has reported in `progress`; 0 for none."""
    try:
        text = (run_dir / PROGRESS_FILE).read_text(errors="replace")[:64]
    except OSError:
        return 0
    return int(text) if re.fullmatch(r"\s*\d{1,15}\s*", text) else 0
