"""Walk a workdir for a copy of its code, without caches, environments, runs, datasets and excluded files."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from pitools.core.errors import ConfigError
from pitools.core.units import format_size
from pitools.launch.provenance.copy_rules import CopyRules
from pitools.site.tar_stream import TarEntry

MAX_UPLOAD_BYTES = 256 << 20
MAX_FILES = 50_000
_SKIPPED_DIRS = {
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".tox",
    ".nox",
    ".ipynb_checkpoints",
    "node_modules",
}
# Files that mark a folder as an environment, which is useless on another machine, a run, or a dataset.
_ENVIRONMENT_MARKERS = ("pyvenv.cfg", "conda-meta")
_RUN_MARKERS = ("plan.json", "attempts")
_DATASET_MARKERS = ("manifest.json", "zarr.json")


def workdir_entries(
    workdir: Path,
    *,
    ignored: Iterable[str] | None = None,
    tracked: Iterable[str] = (),
    name: str = "code",
    limit: int = MAX_UPLOAD_BYTES,
) -> list[TarEntry]:
    """Return the files of a workdir as tar entries below `name`.

    ignored, tracked: as for `CopyRules`. A link to a target inside stays a link. Raises ConfigError for a link to a
    target outside, a pipe, socket or device, a name that is not printable, and for more than `limit` bytes or 50,000
    files.
    """
    root = workdir.resolve()
    entries = [TarEntry(name=name)]
    sizes: dict[str, int] = {}
    for path in walk_workdir(root, CopyRules(root, ignored, tracked)):
        relative = str(path.relative_to(root))
        if not relative.isprintable():
            raise _upload_error(workdir, f"{relative!r} is not a printable name", "rename the file")
        kind = path.lstat()
        if stat.S_ISREG(kind.st_mode):
            sizes[relative] = kind.st_size
            entries.append(TarEntry(name=f"{name}/{relative}", path=path))
        elif stat.S_ISLNK(kind.st_mode):
            entries.append(TarEntry(name=f"{name}/{relative}", link=_link_inside(path, root, workdir)))
        elif stat.S_ISDIR(kind.st_mode):
            entries.append(TarEntry(name=f"{name}/{relative}"))
        else:
            raise _upload_error(workdir, f'"{relative}" is neither a file nor a folder', "remove it, or use .pitignore")
        if len(entries) > MAX_FILES:
            break
    total = sum(sizes.values())
    if total > limit or len(entries) > MAX_FILES:
        largest = max(sizes, key=sizes.__getitem__)
        limits = f"at most {format_size(limit)} and {MAX_FILES} files"
        hint = f"move data out of the workdir; the largest file is {largest}, {format_size(sizes[largest])}"
        raise _upload_error(workdir, f"{format_size(total)} in {len(sizes)} files ({limits})", hint)
    return entries


def walk_workdir(
    root: Path,
    exclusions: CopyRules,
    *,
    without: Collection[Path] = (),
    left_out: list[Path] | None = None,
    excluded: dict[Path, str] | None = None,
) -> Iterator[Path]:
    """Yield the paths below a folder that a copy includes, in a fixed order, each folder before its contents.

    without: folders to skip. left_out: receives the skipped environments, runs, datasets and caches. excluded: receives
    the paths that `exclusions` excludes, with the reason. Raises ConfigError for an unreadable folder.
    """
    excluded = {} if excluded is None else excluded
    for folder, folders, names in os.walk(root, onerror=_raise):
        parent = Path(folder)
        links = [name for name in folders if (parent / name).is_symlink()]
        candidates = [one for one in folders if one not in links and parent / one not in without]
        folders[:] = sorted(one for one in candidates if not is_skipped(parent / one))
        if left_out is not None:
            left_out += [parent / one for one in candidates if one not in folders]
        reasons = {one: exclusions.exclusion_reason(parent / one) for one in (*folders, *links, *names)}
        excluded |= {parent / one: reason for one, reason in reasons.items() if reason}
        folders[:] = [one for one in folders if not reasons[one]]
        yield from (parent / one for one in sorted(reasons) if not reasons[one])


def _raise(error: OSError) -> None:
    raise ConfigError(f"cannot read: {error.strerror}", where=str(error.filename)) from error


def is_skipped(folder: Path) -> bool:
    """Return whether a copy skips a folder: a cache, version control, an environment, a run or a dataset."""
    return (
        folder.name in _SKIPPED_DIRS
        or is_needed_at_run_time(folder)
        or all((folder / mark).exists() for mark in _RUN_MARKERS)
    )


def is_needed_at_run_time(folder: Path) -> bool:
    """Return whether the program needs a skipped folder: an environment or a dataset."""
    if any((folder / mark).exists() for mark in _ENVIRONMENT_MARKERS):
        return True
    return all((folder / mark).exists() for mark in _DATASET_MARKERS)


def _link_inside(link: Path, root: Path, workdir: Path) -> str:
    """Return a link's target relative to the link's folder. Raises ConfigError for a target outside the workdir."""
    target = Path(os.path.realpath(link))
    if not target.is_relative_to(root):
        inner = link.relative_to(root)
        raise _upload_error(workdir, f'"{inner}" links to a target outside', "replace the link by its target")
    return os.path.relpath(target, link.parent)


def _upload_error(workdir: Path, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"cannot upload the workdir: {problem}", where=str(workdir), hint=hint)
