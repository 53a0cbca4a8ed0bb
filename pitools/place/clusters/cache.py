"""A cache of sites' answers, shared by all processes of a user: a folder with one file and one lock file an answer.

If several processes want the same answer, one queries and the others wait for it. A process that dies during a query
frees its lock and leaves the old file.
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

from pitools.core.errors import ClusterError, ConfigError, DataError, PitError, Unreachable
from pitools.core.fs import open_regular, write_atomic
from pitools.core.locks import lock_or_timeout
from pitools.core.record import Record, decode_json
from pitools.core.user_dirs import ensure_private_dir, xdg_dir

T = TypeVar("T", bound=Record)

_MAX_FAILURE_COUNT = 20
_ERROR_CLASSES = {kind.exit_code: kind for kind in (ConfigError, ClusterError, DataError, Unreachable)}
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
# (file, kind) → the file's inode, size and mtime, and the record in it. Filled by `peek`.
_memory_cache: dict[tuple[Path, type[Record]], tuple[tuple[int, int, int], Record | None]] = {}


class CachedFailure(Record, frozen=True, kw_only=True, tag="pit.cached-failure/1"):
    """The error of a query. exit_code: of the error's class. times: number of consecutive failures."""

    message: str
    where: str
    hint: str
    exit_code: int
    times: int = 1


class CacheEntry(Record, frozen=True, kw_only=True, tag="pit.cache-entry/1"):
    """A cached record. began_s: start of its query, Unix time."""

    began_s: float
    value: msgspec.Raw


def cache_dir() -> Path:
    """Return the cache folder, and create it if missing. Raises ClusterError if other users can write to it."""
    return ensure_private_dir(xdg_dir("XDG_CACHE_HOME", ".cache") / "pitools" / "place")


def _writable_cache_dir() -> Path | None:
    """Return the cache folder, or None on a read-only or full disk. Raises ClusterError as `cache_dir`."""
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
    """Return the cached answer of this name, or that of `query`, which gets the remaining seconds as its argument.

    max_age_s: a cached answer's query began at most this long ago. failure_s: after a failure, `query` is not repeated
    for this time, twice as long after each further failure, up to `max_age_s`. If the cache is not writable, every
    process queries for itself. Raises as `query` does, and Unreachable if another process still queries at the
    time-out.
    """
    if (folder := _writable_cache_dir()) is None:
        return query(timeout_s)
    now_s = time.time()
    deadline = time.monotonic() + timeout_s
    path = folder / f"{name}.json"
    failure_path = path.with_suffix(".failed")

    def read_cached() -> T | None:
        if (record := _read_if_newer(path, kind, now_s - max_age_s)) is not None:
            return record
        wait_s = min(max_age_s, failure_s * 2.0 ** (failure_count(name) - 1))
        if (failure := _read_if_newer(failure_path, CachedFailure, now_s - wait_s)) is not None:
            error_class = _ERROR_CLASSES.get(failure.exit_code, Unreachable)
            raise error_class(failure.message, where=failure.where, hint=failure.hint)
        return None

    if (cached := read_cached()) is not None:
        return cached
    with lock_or_timeout(path.with_suffix(".lock"), timeout_s) as has_lock:
        if not has_lock:
            message = f"the query of another process took longer than {timeout_s:g} s"
            raise Unreachable(message, where=name, hint="try again later")
        # The previous holder of the lock may have written the answer.
        if (cached := read_cached()) is not None:
            return cached
        query_start_s = time.time()
        try:
            answer = query(max(0.0, deadline - time.monotonic()))
        except PitError as error:
            # Dated by the query's end, so that processes that waited for it get the same error.
            times = min(failure_count(name) + 1, _MAX_FAILURE_COUNT)
            failure = CachedFailure(
                message=error.message, where=error.where, hint=error.hint, exit_code=error.exit_code, times=times
            )
            _write_entry(failure_path, time.time(), failure)
            raise
        _write_entry(path, query_start_s, answer)
        with contextlib.suppress(OSError):
            failure_path.unlink(missing_ok=True)
        return answer


def failure_count(name: str) -> int:
    """Return the number of consecutive failures of this query."""
    folder = _writable_cache_dir()
    failure = _read_if_newer(folder / f"{name}.failed", CachedFailure, 0.0) if folder else None
    return failure.times if failure else 0


def peek(name: str, kind: type[T], *, max_age_s: float) -> T | None:
    """Return the cached answer of this name without a query; None if it is missing or older.

    Repeated calls are cheap: a file that has not changed is not read again.
    """
    if (folder := _writable_cache_dir()) is None:
        return None
    path = folder / f"{name}.json"
    with contextlib.suppress(OSError):
        file_stat = path.stat()
        file_id = (file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns)
        cached = _memory_cache.get((path, kind))
        if cached is None or cached[0] != file_id or time.time() - max_age_s > file_stat.st_mtime:
            cached = _memory_cache[path, kind] = file_id, _read_if_newer(path, kind, time.time() - max_age_s)
        return cast("T | None", cached[1])
    return None


def _read_if_newer(path: Path, kind: type[T], min_began_s: float) -> T | None:
    """Return the record in a cache file if its query began at this time or later; None otherwise, and for an invalid
    file.
    """
    try:
        with open_regular(path) as file:
            entry = decode_json(file.read(), CacheEntry)
        # After the clock was set back, an answer may be dated in the future; its age is unknown.
        return decode_json(entry.value, kind) if min_began_s <= entry.began_s <= time.time() else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _write_entry(path: Path, query_start_s: float, record: Record) -> None:
    entry = CacheEntry(began_s=query_start_s, value=msgspec.Raw(msgspec.json.encode(record)))
    # On a full disk, only the next reader has to query again.
    with contextlib.suppress(PitError):
        write_atomic(path, msgspec.json.encode(entry), mode=0o600, durable=False)
