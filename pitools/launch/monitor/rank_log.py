"""A rank's output, from files: following a log asks Slurm for nothing but whether the run has ended."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator
from pathlib import Path

from pitools.core.errors import UsageError
from pitools.launch.monitor import status
from pitools.launch.plan import load_plan
from pitools.run import run_folder
from pitools.site.schema import Site
from pitools.slurm.states import is_finished


def log_path(run_dir: Path, rank: int) -> Path | None:
    """The rank's log of the last attempt, or that of the staging in which it ended; the job's own before; or None."""
    last = run_folder.last_attempt(run_dir)
    if last and (log := last / "logs" / f"{rank}.out").exists():
        return log
    if last and (last / "exit.json").exists() and (failed := _failed_staging(last / "logs")):
        return failed
    # supervisor.out, supervisor.1.out, …, supervisor.10.out
    supervisors = sorted(run_dir.glob("supervisor*.out"), key=lambda path: (len(path.name), path.name))
    own = [*run_folder.job_output_files(run_dir), *supervisors]
    return own[-1] if own else None


def _failed_staging(logs: Path) -> Path | None:
    """The output of staging on the node that says why it failed; None where none does."""
    found = sorted(logs.glob("stage.*.out"))
    return next((log for log in found if b"pit: error:" in log.read_bytes()), None)


def read_log(run_dir: Path, site: Site, rank: int, *, follow: bool) -> Iterator[str]:
    """The log's text, and with `follow` what comes after, until the run has ended. Raises UsageError."""
    plan = load_plan(run_dir)
    ranks = plan.job.nodes * plan.job.tasks_per_node
    if rank >= ranks:
        raise UsageError(f"no rank {rank}: there are {ranks}", where=str(run_dir), hint=f"--rank 0 to {ranks - 1}")
    shown: Path | None = None
    at, watch, ended = 0, status.RunPoller(run_dir, site), not follow
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        log = log_path(run_dir, rank)
        if log != shown:
            yield decoder.decode(b"", final=True)
            shown, at = log, 0
            decoder.reset()
        if log:
            with log.open("rb") as file:
                file.seek(at)
                data = file.read()
            at += len(data)
            if text := decoder.decode(data):
                yield text
        if ended:
            yield decoder.decode(b"", final=True)
            return
        time.sleep(0.5)
        ended = is_finished(watch.poll().state) or watch.lost
