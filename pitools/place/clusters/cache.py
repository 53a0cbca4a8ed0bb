"""What sites said, kept for a moment for all terminals and cron jobs of one user: a folder of files, one lock each.

Of many that want the same answer at once, one asks; the others wait for its answer. Whoever dies while asking frees
its lock, and leaves what was there before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from pitools.core.errors import PitError, Unreachable
from pitools.core.fs import open_regular, write_atomic
from pitools.core.locks import lock_or_timeout
from pitools.core.record import Record, decode_json
from pitools.core.user_dirs import ensure_private_dir, xdg_dir

T = TypeVar("T", bound=Record)

_MAX_CACHED = 20  # failures are counted up to here
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
# What `kept` read: (file, kind) → the file's state, and what is in it.
_memory_cache: dict[tuple[Path, type[Record]], tuple[tuple[int, int, int], Record | None]] = {}


class CachedFailure(Record, frozen=True, kw_only=True, tag="pit.cached-failure/1"):
    """Why a site gave no answer. times: how often in a row."""

    message: str
    where: str
    hint: str
    times: int = 1


class CacheEntry(Record, frozen=True, kw_only=True, tag="pit.cache-entry/1"):
    """A record. began_s: Unix time; nothing in it is older."""

    began_s: float
    value: msgspec.Raw


def cache_dir() -> Path:
    """Where answers are kept, made if it is missing. Raises ClusterError when others can write there."""
    return ensure_private_dir(xdg_dir("XDG_CACHE_HOME", ".cache") / "pitools" / "place")


def _writable_cache_dir() -> Path | None:
    """That folder; None where nothing can be written, as on a disk that is read-only. Raises ClusterError, too."""
    try:
        folder = cache_dir()
    except PitError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _UNWRITABLE:
            return None
        raise
    return folder if os.access(folder, os.W_OK) else None


def get_or_query(
    name: str, kind: type[T], query: Callable[[float], T], *, max_age_s: float, timeout_s: float, failure_s: float = 0.0
) -> T:
    """The kept answer of this name, or that of `query`, which gets the seconds that it has.

    Nothing is returned that was asked for longer than `max_age_s` before this call. A failure is not asked for again
    within `failure_s`, and each further one for twice as long, up to `max_age_s`. Where nothing can be kept, each asks
    for itself. Raises what `query` does, Unreachable where another process still asks when the time is up.
    """
    if (folder := _writable_cache_dir()) is None:
        return query(timeout_s)
    now = time.time()
    deadline = time.monotonic() + timeout_s
    path = folder / f"{name}.json"
    failure_path = path.with_suffix(".failed")

    def known() -> T | None:
        if (found := _read_if_newer(path, kind, now - max_age_s)) is not None:
            return found
        wait_s = min(max_age_s, failure_s * 2.0 ** (failure_count(name) - 1))
        if (failure := _read_if_newer(failure_path, CachedFailure, now - wait_s)) is not None:
            raise Unreachable(failure.message, where=failure.where, hint=failure.hint)
        return None

    if (found := known()) is not None:
        return found
    with lock_or_timeout(path.with_suffix(".lock"), timeout_s) as had:
        if not had:
            what = f"another process has been asking for {timeout_s:g} s"
            raise Unreachable(what, where=name, hint="try again later")
        # Whoever had the lock before us may have asked meanwhile.
        if (found := known()) is not None:
            return found
        began_s = time.time()
        try:
            answer = query(max(0.0, deadline - time.monotonic()))
        except PitError as error:
            # By its end: whoever came while it was asked has the same answer.
            times = min(failure_count(name) + 1, _MAX_CACHED)
            _write_entry(
                failure_path,
                time.time(),
                CachedFailure(message=error.message, where=error.where, hint=error.hint, times=times),
            )
            raise
        _write_entry(path, began_s, answer)
        with contextlib.suppress(OSError):
            failure_path.unlink(missing_ok=True)
        return answer


def failure_count(name: str) -> int:
    """How often in a row the answer of this name was asked for in vain."""
    folder = _writable_cache_dir()
    failure = _read_if_newer(folder / f"{name}.failed", CachedFailure, 0.0) if folder else None
    return failure.times if failure else 0


def peek(name: str, kind: type[T], *, max_age_s: float) -> T | None:
    """The kept answer of this name, if it is no older; None, and nobody is asked, where there is none.

    Cheap to ask for again: a file that has not changed since is not read again.
    """
    if (folder := _writable_cache_dir()) is None:
        return None
    path = folder / f"{name}.json"
    with contextlib.suppress(OSError):
        now = path.stat()
        state = (now.st_ino, now.st_size, now.st_mtime_ns)
        cached = _memory_cache.get((path, kind))
        if cached is None or cached[0] != state or time.time() - max_age_s > now.st_mtime:
            cached = _memory_cache[path, kind] = state, _read_if_newer(path, kind, time.time() - max_age_s)
        return cast("T | None", cached[1])
    return None


def _read_if_newer(path: Path, kind: type[T], since: float) -> T | None:
    """The record that is kept here, if it was asked for since a moment; what is no record is none."""
    try:
        with open_regular(path) as file:
            entry = decode_json(file.read(), CacheEntry)
        # A clock that was set back makes an answer come from the future: nobody knows how old that is.
        return decode_json(entry.value, kind) if since <= entry.began_s <= time.time() else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _write_entry(path: Path, began_s: float, record: Record) -> None:
    entry = CacheEntry(began_s=began_s, value=msgspec.Raw(msgspec.json.encode(record)))
    # A full disk costs the next one an answer, not this one.
    with contextlib.suppress(PitError):
        write_atomic(path, msgspec.json.encode(entry), mode=0o600, durable=False)
