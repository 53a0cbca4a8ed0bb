"""Record a rank's failure, and which rank failed first.

srun returns the highest exit code of all ranks: the code of ranks that srun ends after the first failure (143) hides
the first rank's. A rank ended by SIGTERM has not failed and writes no record. If the first rank was killed and could
not write its record, srun's code counts.
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
from pitools.core.fs import open_0644
from pitools.launch import fingerprint
from pitools.run import run_folder
from pitools.run.attempt_records import RankFailure

_MAX_TRACE_BYTES = 4096
_MAX_MESSAGE_BYTES = 500


@contextmanager
def record_failure() -> Iterator[None]:
    """Record an exception of this block in the attempt's folder, and re-raise it."""
    try:
        yield
    except BaseException as error:
        code = exit_code(error) if isinstance(error, SystemExit) else 1
        attempt = os.environ.get("PIT_ATTEMPT_DIR")
        if attempt and code not in (0, 128 + signal.SIGTERM):
            _write_failure(Path(attempt), code, error)
        raise


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a SystemExit as Python's interpreter does: None is success, a text is 1."""
    return 0 if error.code is None else error.code if isinstance(error.code, int) else 1


def _write_failure(attempt: Path, code: int, error: BaseException) -> None:
    rank, node = os.environ.get("SLURM_PROCID", "?"), os.environ.get("SLURMD_NODENAME", "?")
    first = attempt / "first_failure"
    with (
        contextlib.suppress(OSError),
        open(first, "x", opener=open_0644) as file,
    ):  # only the first failed rank creates it
        file.write(f"{code} {rank} {node}\n")
    with contextlib.suppress(Exception):  # if the record cannot be written, the log still has the traceback
        run_folder.write_record(attempt / "failures" / f"{rank}.json", make_failure(error, code, int(rank), node))


def make_failure(error: BaseException, code: int, rank: int, node: str) -> RankFailure:
    """Return a rank's failure record, of an exception or of its program's exit code."""
    if isinstance(error, SystemExit):  # the code of a program or of pitools; the log has the details
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
    """Return a traceback's header and its last lines, i.e. the innermost frames, in at most about 4 KiB."""
    if len(trace) <= _MAX_TRACE_BYTES:
        return trace
    header = "Traceback (most recent call last):\n"
    return header + trace[len(header) - _MAX_TRACE_BYTES :].partition("\n")[2]
