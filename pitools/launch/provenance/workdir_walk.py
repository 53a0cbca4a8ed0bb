"""A workdir as it is now, as entries of a stream: what a program needs, and not what can be made again."""

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
# By what a folder is seen to be an environment, which is no use elsewhere, a run, or a dataset.
_ENVIRONMENT_MARKERS = ("pyvenv.cfg", "conda-meta")
_RUN_MARKERS = ("plan.json", "attempts")
_DATASET_MARKERS = ("manifest.json", "zarr.json")


def workdir_entries(
    workdir: Path, *, ignored: Iterable[str] | None = None, name: str = "code", limit: int = MAX_UPLOAD_BYTES
) -> list[TarEntry]:
    """All of a folder, below `name`, but for caches, version control, environments, runs, datasets and exclusions.

    ignored: what git ignores there, None where that is not known: see copy_rules.py. Links are kept where they stay
    inside. Raises ConfigError for a link that leads out, for what is neither file nor folder, a name that is not
    printable, and for more than `limit` bytes or 50,000 files.
    """
    root = workdir.resolve()
    found = [TarEntry(name=name)]
    sizes: dict[str, int] = {}
    for path in walk_workdir(root, CopyRules(root, ignored)):
        inner = str(path.relative_to(root))
        if not inner.isprintable():
            raise _refused_error(workdir, f"{inner!r} is not a printable name", "rename it")
        kind = path.lstat()
        if stat.S_ISREG(kind.st_mode):
            sizes[inner] = kind.st_size
            found.append(TarEntry(name=f"{name}/{inner}", path=path))
        elif stat.S_ISLNK(kind.st_mode):
            found.append(TarEntry(name=f"{name}/{inner}", link=_link_inside(path, root, workdir)))
        elif stat.S_ISDIR(kind.st_mode):
            found.append(TarEntry(name=f"{name}/{inner}"))
        else:
            raise _refused_error(workdir, f'"{inner}" is neither a file nor a folder', "remove it")
        if len(found) > MAX_FILES:
            break
    total = sum(sizes.values())
    if total > limit or len(found) > MAX_FILES:
        largest = max(sizes, key=sizes.__getitem__)
        limits = f"{format_size(limit)} and {MAX_FILES} files"
        what = f"{format_size(total)} in {len(sizes)} files, more than the {limits} that travel"
        raise _refused_error(
            workdir, what, f"the largest is {largest}, {format_size(sizes[largest])}: keep data outside"
        )
    return found


def walk_workdir(
    root: Path,
    exclusions: CopyRules,
    *,
    without: Collection[Path] = (),
    left_out: list[Path] | None = None,
    excluded: dict[Path, str] | None = None,
) -> Iterator[Path]:
    """Everything below a folder that is part of a snapshot, each folder before what is in it, in a fixed order.

    without: folders that are none of it, either. left_out: is given the folders that were. excluded: is given what the
    exclusions left out, with the reason. Raises ConfigError for a folder that cannot be read.
    """
    excluded = {} if excluded is None else excluded
    for folder, folders, names in os.walk(root, onerror=_raise):
        here = Path(folder)
        links = [one for one in folders if (here / one).is_symlink()]
        kept = [one for one in folders if one not in links and here / one not in without]
        folders[:] = sorted(one for one in kept if not is_skipped(here / one))
        if left_out is not None:
            left_out += [here / one for one in kept if one not in folders]
        reasons = {one: exclusions.exclusion_reason(here / one) for one in (*folders, *links, *names)}
        excluded |= {here / one: reason for one, reason in reasons.items() if reason}
        folders[:] = [one for one in folders if not reasons[one]]
        yield from (here / one for one in sorted(reasons) if not reasons[one])


def _raise(error: OSError) -> None:
    raise ConfigError(f"cannot be read: {error.strerror}", where=str(error.filename)) from error


def is_skipped(folder: Path) -> bool:
    """Whether a folder is no part of a snapshot: it can be made again, or is kept elsewhere for good."""
    return (
        folder.name in _SKIPPED_DIRS
        or is_needed_at_run_time(folder)
        or all((folder / mark).exists() for mark in _RUN_MARKERS)
    )


def is_needed_at_run_time(folder: Path) -> bool:
    """Whether a folder is left out and yet needed by what runs: an environment, or a dataset."""
    if any((folder / mark).exists() for mark in _ENVIRONMENT_MARKERS):
        return True
    return all((folder / mark).exists() for mark in _DATASET_MARKERS)


def _link_inside(link: Path, root: Path, workdir: Path) -> str:
    """Where a link leads, relative to itself. Raises ConfigError where that is outside."""
    target = Path(os.path.realpath(link))
    if not target.is_relative_to(root):
        inner = link.relative_to(root)
        raise _refused_error(workdir, f'"{inner}" is a link that leads out of the folder', "put there what it leads to")
    return os.path.relpath(target, link.parent)


def _refused_error(workdir: Path, what: str, hint: str) -> ConfigError:
    return ConfigError(f"the workdir cannot travel: {what}", where=str(workdir), hint=hint)
