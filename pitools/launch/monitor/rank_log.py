"""Read a rank's output from its files. Slurm is queried only for the end of the run."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator
from pathlib import Path

from pitools.core.errors import UsageError
from pitools.launch.monitor import wait
from pitools.launch.plan import load_plan
from pitools.run import run_folder
from pitools.site.schema import Site
from pitools.slurm.states import is_final

_CHUNK_BYTES = 128 << 10  # of each rank's log in memory


def log_path(run_dir: Path, rank: int) -> Path | None:
    """Return the rank's log of the last attempt; else the log of a failed staging, else the job's output, or None."""
    attempt = run_folder.last_attempt(run_dir)
    if attempt and (log := attempt / "logs" / f"{rank}.out").exists():
        return log
    if attempt and (attempt / "exit.json").exists() and (staging_log := _failed_staging(attempt / "logs")):
        return staging_log
    return next(reversed(job_outputs(run_dir)), None)


def job_outputs(run_dir: Path) -> list[Path]:
    """Return the output files of a run's jobs, or of its supervisors, oldest first."""
    # supervisor.out, supervisor.1.out, …, supervisor.10.out
    supervisors = sorted(run_dir.glob("supervisor*.out"), key=lambda path: (len(path.name), path.name))
    return [*run_folder.job_output_files(run_dir), *supervisors]


def _failed_staging(logs: Path) -> Path | None:
    """Return the first staging log that holds an error of pitools, or None."""
    log_files = sorted(logs.glob("stage.*.out"))
    return next((log for log in log_files if any(b"pit: error:" in chunk for chunk in iter_chunks(log, 0))), None)


def iter_chunks(path: Path, offset: int) -> Iterator[bytes]:
    """Yield the bytes of a file from an offset to its present end, in chunks. Raises OSError.

    The file is closed between two chunks: a run may have more ranks than a process may have open files.
    """
    end = path.stat().st_size
    while offset < end:
        with path.open("rb") as file:
            file.seek(offset)
            chunk = file.read(min(_CHUNK_BYTES, end - offset))
        if not chunk:
            return
        offset += len(chunk)
        yield chunk


def read_log(run_dir: Path, site: Site, rank: int, *, follow: bool) -> Iterator[str]:
    """Yield the log's text; with `follow`, also later text until the run has ended. Raises UsageError for the rank."""
    plan = load_plan(run_dir)
    ranks = plan.job.nodes * plan.job.tasks_per_node
    if rank >= ranks:
        raise UsageError(f"no rank {rank}: there are {ranks}", where=str(run_dir), hint=f"--rank 0 to {ranks - 1}")
    shown: Path | None = None
    offset, poller, ended = 0, wait.RunPoller(run_dir, site), not follow
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        log = log_path(run_dir, rank)
        if log != shown:
            yield decoder.decode(b"", final=True)
            shown, offset = log, 0
            decoder.reset()
        if log:
            for chunk in iter_chunks(log, offset):
                offset += len(chunk)
                if text := decoder.decode(chunk):
                    yield text
        if ended:
            yield decoder.decode(b"", final=True)
            return
        time.sleep(0.5)
        ended = is_final(poller.poll().state) or poller.lost
