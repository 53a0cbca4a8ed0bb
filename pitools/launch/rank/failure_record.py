"""The last word of a rank that fails by itself: that it was the first, and what it failed of.

srun returns the highest code of all ranks, and those that it ends because of the first (143) hide it. A rank that was
told to end has not failed: where the first was killed and could leave no word, srun's own code stands.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pitools.core import timestamps
from pitools.core.fs import own
from pitools.launch import fingerprint
from pitools.run import run_folder
from pitools.run.attempt_records import RankFailure

_MAX_TRACE_BYTES = 4096
_MAX_MESSAGE_BYTES = 500


@contextmanager
def record_failure() -> Iterator[None]:
    """Record an exception raised in this block in the attempt's folder, and raise it again."""
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        attempt = os.environ.get("PIT_ATTEMPT_DIR")
        if attempt and code not in (0, 128 + signal.SIGTERM):
            _write_failure(Path(attempt), code, error)
        raise


def _write_failure(attempt: Path, code: int, error: BaseException) -> None:
    rank, node = os.environ.get("SLURM_PROCID", "?"), os.environ.get("SLURMD_NODENAME", "?")
    first = attempt / "first_failure"
    with contextlib.suppress(OSError), open(first, "x", opener=own) as file:  # the first rank that fails makes the file
        file.write(f"{code} {rank} {node}\n")
    with contextlib.suppress(Exception):  # where nothing can be written, the log has the trace all the same
        run_folder.write_record(attempt / "failures" / f"{rank}.json", make_failure(error, code, int(rank), node))


def make_failure(error: BaseException, code: int, rank: int, node: str) -> RankFailure:
    """Return a rank's failure record: of the exception, or of the exit code of the program that it ran."""
    if isinstance(error, SystemExit):  # a program's code, or one of ours, which says all; why is in the log
        cause = error.__cause__ or ("" if isinstance(error.code, int | None) else error.code)
        exit_fingerprint = fingerprint.fingerprint_exit(f"exit code {code}")
        return RankFailure(
            t=timestamps.now_rfc3339(),
            rank=rank,
            node=node,
            exit_code=code,
            message=str(cause)[:_MAX_MESSAGE_BYTES],
            fingerprint=exit_fingerprint,
        )
    trace = "".join(traceback.format_exception(error))
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    message = (str(error).strip().splitlines() or [""])[0][:_MAX_MESSAGE_BYTES]
    return RankFailure(
        t=timestamps.now_rfc3339(),
        rank=rank,
        node=node,
        exit_code=code,
        error=name,
        message=message,
        fingerprint=fingerprint.fingerprint_exception(name, message, trace),
        trace=_innermost_frames(trace),
    )


def _innermost_frames(trace: str) -> str:
    """The last lines of a traceback, which are the innermost frames, under its heading."""
    if len(trace) <= _MAX_TRACE_BYTES:
        return trace
    heading = "Traceback (most recent call last):\n"
    return heading + trace[len(heading) - _MAX_TRACE_BYTES :].partition("\n")[2]
