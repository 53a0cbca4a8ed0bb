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
from pitools.core.fs import plain_file, write_atomic
from pitools.core.lock import taken
from pitools.core.record import Record, decode_json
from pitools.core.user_dirs import base, private

T = TypeVar("T", bound=Record)

_MOST = 20  # failures are counted up to here
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
# What `kept` read: (file, kind) → the file's state, and what is in it.
_READ: dict[tuple[Path, type[Record]], tuple[tuple[int, int, int], Record | None]] = {}


class Failure(Record, frozen=True, kw_only=True, tag="pit.failure/1"):
    """Why a site gave no answer. times: how often in a row."""

    what: str
    where: str
    hint: str
    times: int = 1


class Kept(Record, frozen=True, kw_only=True, tag="pit.kept/1"):
    """A record. began_s: Unix time; nothing in it is older."""

    began_s: float
    value: msgspec.Raw


def folder() -> Path:
    """Where answers are kept, made if it is missing. Raises ClusterError when others can write there."""
    return private(base("XDG_CACHE_HOME", ".cache") / "pitools" / "place")


def _usable() -> Path | None:
    """That folder; None where nothing can be written, as on a disk that is read-only. Raises ClusterError, too."""
    try:
        place = folder()
    except PitError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _UNWRITABLE:
            return None
        raise
    return place if os.access(place, os.W_OK) else None


def get(
    name: str, kind: type[T], ask: Callable[[float], T], *, max_age_s: float, timeout_s: float, failure_s: float = 0.0
) -> T:
    """The kept answer of this name, or that of `ask`, which gets the seconds that it has.

    Nothing is returned that was asked for longer than `max_age_s` before this call. A failure is not asked for again
    within `failure_s`, and each further one for twice as long, up to `max_age_s`. Where nothing can be kept, each asks
    for itself. Raises what `ask` does, Unreachable where another process still asks when the time is up.
    """
    if (place := _usable()) is None:
        return ask(timeout_s)
    now = time.time()
    deadline = time.monotonic() + timeout_s
    path = place / f"{name}.json"
    refused = path.with_suffix(".failed")

    def known() -> T | None:
        if (found := _fresh(path, kind, now - max_age_s)) is not None:
            return found
        wait_s = min(max_age_s, failure_s * 2.0 ** (failures(name) - 1))
        if (failure := _fresh(refused, Failure, now - wait_s)) is not None:
            raise Unreachable(failure.what, where=failure.where, hint=failure.hint)
        return None

    if (found := known()) is not None:
        return found
    with taken(path.with_suffix(".lock"), timeout_s) as had:
        if not had:
            what = f"another process has been asking for {timeout_s:g} s"
            raise Unreachable(what, where=name, hint="try again later")
        # Whoever had the lock before us may have asked meanwhile.
        if (found := known()) is not None:
            return found
        began_s = time.time()
        try:
            answer = ask(max(0.0, deadline - time.monotonic()))
        except PitError as error:
            # By its end: whoever came while it was asked has the same answer.
            times = min(failures(name) + 1, _MOST)
            _keep(refused, time.time(), Failure(what=error.what, where=error.where, hint=error.hint, times=times))
            raise
        _keep(path, began_s, answer)
        with contextlib.suppress(OSError):
            refused.unlink(missing_ok=True)
        return answer


def failures(name: str) -> int:
    """How often in a row the answer of this name was asked for in vain."""
    place = _usable()
    failure = _fresh(place / f"{name}.failed", Failure, 0.0) if place else None
    return failure.times if failure else 0


def kept(name: str, kind: type[T], *, max_age_s: float) -> T | None:
    """The kept answer of this name, if it is no older; None, and nobody is asked, where there is none.

    Cheap to ask for again: a file that has not changed since is not read again.
    """
    if (place := _usable()) is None:
        return None
    path = place / f"{name}.json"
    with contextlib.suppress(OSError):
        now = path.stat()
        state = (now.st_ino, now.st_size, now.st_mtime_ns)
        known = _READ.get((path, kind))
        if known is None or known[0] != state or time.time() - max_age_s > now.st_mtime:
            known = _READ[path, kind] = state, _fresh(path, kind, time.time() - max_age_s)
        return cast("T | None", known[1])
    return None


def _fresh(path: Path, kind: type[T], since: float) -> T | None:
    """The record that is kept here, if it was asked for since a moment; what is no record is none."""
    try:
        with plain_file(path) as file:
            kept = decode_json(file.read(), Kept)
        # A clock that was set back makes an answer come from the future: nobody knows how old that is.
        return decode_json(kept.value, kind) if since <= kept.began_s <= time.time() else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _keep(path: Path, began_s: float, record: Record) -> None:
    kept = Kept(began_s=began_s, value=msgspec.Raw(msgspec.json.encode(record)))
    # A full disk costs the next one an answer, not this one.
    with contextlib.suppress(PitError):
        write_atomic(path, msgspec.json.encode(kept), mode=0o600, durable=False)
