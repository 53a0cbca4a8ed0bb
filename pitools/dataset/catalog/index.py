"""What a search needs to know of every version, in one local file that is only ever a shortcut.

It is believed as far as the folders it was made from have not changed since; what did is read again (`scan.py`), and a
file that is damaged, of another release, or somebody else's counts for nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from pathlib import Path

import msgspec

from pitools.core import user_dirs
from pitools.core.errors import PitError
from pitools.core.fs import plain_file, write_atomic
from pitools.store.version_list import is_name

FORM = 2  # of the file
_SUM_BYTES = 4


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One version. folder: its name, and version: "" where that is the same. fields, tasks: numbers in its home's."""

    folder: str
    version: str
    mtime_ns: int
    episodes: int
    steps: int
    bytes: int
    files: int
    source_bytes: int
    parent: str
    fields: int
    tasks: int


class Home(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One dataset. stamps: when a folder last changed (ctime), by its path; 0 where that was too recent to tell. rows:
    oldest first.

    fields, tasks: what its versions have, names of arrays and instructions, one a line. tags: version by tag.
    quarantined: number of episodes by version, -1 for all of it. damaged: folders of versions whose manifest could not
    be read.
    """

    stamps: dict[str, int]
    rows: tuple[Row, ...]
    fields: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    tags: dict[str, str] = {}
    retired: tuple[str, ...] = ()
    quarantined: dict[str, int] = {}
    damaged: tuple[str, ...] = ()


class Index(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All datasets of a root, by name."""

    form: int
    root: str
    homes: dict[str, Home]


def load(root: Path, *, rebuild: bool = False) -> tuple[Index, list[PitError]]:
    """What is in a root now, and what of it is damaged. rebuild: from the versions themselves."""
    known = {} if rebuild else _kept(root)
    wanted = sorted(entry.name for entry in os.scandir(root) if is_name(entry.name) and entry.is_dir())
    homes: dict[str, Home] = {}
    errors: list[PitError] = []
    changed = len(wanted) != len(known)
    for name in wanted:
        home = known.get(name)
        if home is None or home.damaged or not _is_current(home.stamps):
            from pitools.dataset.catalog import scan  # only where something changed

            home = scan.home(root, name, home, errors)
            changed = True
        homes[name] = home
    index = Index(FORM, str(root.absolute()), homes)
    if changed:
        _keep(root, index)
    return index, errors


def file_for(root: Path) -> Path:
    """Where the index of a root is kept. Two roots may have one file: whose it is stands in it."""
    folder = user_dirs.base("XDG_CACHE_HOME", ".cache") / "pitools" / "datasets"
    return folder / f"{zlib.crc32(os.fsencode(root.absolute())):08x}.msgpack"


def _kept(root: Path) -> dict[str, Home]:
    try:
        with plain_file(file_for(root)) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return {}
            data = file.read()
        if data[:_SUM_BYTES] != _sum(data[_SUM_BYTES:]):
            return {}
        index = msgspec.msgpack.decode(data[_SUM_BYTES:], type=Index)
    except (OSError, RuntimeError, ValueError):  # msgspec's errors are ValueErrors
        return {}
    return index.homes if index.form == FORM and index.root == str(root.absolute()) else {}


def _keep(root: Path, index: Index) -> None:
    path = file_for(root)
    with contextlib.suppress(OSError, PitError):  # it is a shortcut; a home that is full or read-only has none
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = msgspec.msgpack.encode(index)
        write_atomic(path, _sum(data) + data, mode=0o600, durable=False)


def _sum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(_SUM_BYTES, "big")


def _is_current(stamps: dict[str, int]) -> bool:
    try:
        # Not mtime, which a copy of a root, or `rsync` into it, sets back.
        return all(os.stat(path).st_ctime_ns == stamp for path, stamp in stamps.items())  # noqa: PTH116 (thousands)
    except OSError:
        return False
