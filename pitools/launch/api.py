"""Launch and follow runs from Python: `pitools.launch`, `pitools.Run`, `pitools.runs`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import strict_toml
from pitools.core.errors import ConfigError, PitError, suggest
from pitools.launch import plan as planning
from pitools.launch import request as requests
from pitools.launch.monitor import merged_logs, rank_log, status, wait
from pitools.launch.rank.environment import IMPORTING
from pitools.launch.recovery import apply_decision, cancel_run
from pitools.launch.recovery.resume import ResumeResult, resume_run, settle_run
from pitools.launch.run_lookup import find_run_dir, runs_dir
from pitools.launch.submission import submit
from pitools.run import run_folder, steps
from pitools.run.attempt_records import Cause
from pitools.run.run_folder import RunRecord
from pitools.site.load import load_site


class Run:
    """A run, by its id or folder. Each call reads its state anew; only its plan and site are read once."""

    def __init__(self, run: str | Path, *, site: str = "local") -> None:
        """run: an id, or a folder. site: where the id is looked up first. Raises RunNotFound, UsageError, DataError."""
        self.dir = find_run_dir(str(run), site)
        self.plan = planning.load_plan(self.dir)
        self.site = load_site(self.plan.site)

    @property
    def id(self) -> str:
        """The run's id."""
        return self.dir.name

    def __repr__(self) -> str:
        return f"pitools.Run({self.id!r}, site={self.site.name!r})"

    def record(self) -> RunRecord:
        """Return the run's record, as `pit launch show` prints it. Raises TryLater while Slurm does not answer."""
        return status.run_status(self.dir, self.site)

    @property
    def state(self) -> str:
        """Slurm's job state: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, …; UNKNOWN while Slurm does not answer."""
        try:
            return self.record().state
        except PitError:
            return status.run_status(self.dir, self.site, query_slurm=False).state

    def wait(self, timeout_s: float | None = None) -> RunRecord:
        """Wait until the run has ended, continuing it after faults, and return its record.

        timeout_s: None for no limit. Raises TimeoutError; ClusterError if Slurm holds the job until it is released. The
        record of a run whose job is lost is returned with `is_over` false.
        """
        limit_s = math.inf if timeout_s is None else timeout_s
        return wait.wait_for_run(
            self.dir, self.site, lambda _: None, lambda line: print(line, file=sys.stderr), limit_s
        )

    def logs(self, rank: int | str = 0) -> str:
        """Return the output of a rank in the last attempt; of several, such as "all" or "0-3", each line with its rank.

        Before the ranks start, one rank's output is the job's. Raises UsageError for ranks that the run does not have.
        """
        if isinstance(rank, int):
            return "".join(rank_log.read_log(self.dir, self.site, rank, follow=False))
        chosen = merged_logs.parse_ranks(rank, self.plan.ranks)
        lines = merged_logs.read_lines(
            self.dir, self.site, chosen, "ranks", merged_logs.LogFilter(), follow=False, report=lambda _: None
        )
        return "".join(f"{line.source}: {line.text}\n" for line in lines)

    def why(self) -> list[Cause]:
        """Return why each attempt ended, oldest first."""
        settle_run(self.dir, self.site)
        return list(apply_decision.cause_history(self.dir))

    def steps(self) -> list[steps.Step]:
        """Return rank 0's steps over all attempts, by their number; of a repeated step, the last."""
        logged = steps.read_run_steps(self.dir)
        return [logged[number] for number in sorted(logged)]

    def cancel(self) -> None:
        """Cancel the run and its jobs. Safe to repeat. Raises ConfigError, TryLater and ClusterError."""
        cancel_run.cancel_run(self.dir, self.site)

    def resume(self, *, force: bool = False) -> ResumeResult:
        """Continue the run if it is due. force: also a stopped one. Raises the errors of `pit launch resume`."""
        return resume_run(self.dir, self.site, force=force)


def launch(
    request: str | Path | Callable[..., object] | None = None,
    *,
    site: str = "local",
    data: Mapping[str, str] | None = None,
    params: Mapping[str, requests.Parameter] | None = None,
    **keys: Any,
) -> Run:
    """Start a run and return it at once.

    request: a request file; or a function of a module, which every rank calls; or None with `command=` or `entry=`.
    site: as `pit site list` names it. data: dataset name → path. params: parameters, which replace the request's. keys:
    keys of a request, such as `nodes=4`, `time="2h"`, `name="bc"`, which replace the request's own; tables are merged.

    Raises ConfigError for an invalid request or a function that ranks cannot import, and the errors of a submission.
    """
    if entry := os.environ.get(IMPORTING):
        # Seen as the last line of the import's error.
        problem = f'called while {entry} is imported, again and again: put it below `if __name__ == "__main__":`'
        raise ConfigError(problem, where="launch")
    loaded_site = load_site(site)
    path, tables = _tables(request)
    known = tables.get("params", {}) if isinstance(request, (str, Path)) else params or {}
    for name in params or {}:
        if name not in known:
            hint = suggest(name, known) or f"add it under [params] of the request: {name} = …"
            raise ConfigError(f'no parameter "{name}"', where=str(path), hint=hint)
    for key, value in {**keys, **({"params": dict(params)} if params else {})}.items():
        is_table = isinstance(value, Mapping) and isinstance(tables.get(key, {}), dict)
        tables[key] = {**tables.get(key, {}), **value} if is_table else value
    loaded = requests.request_of_tables(tables, path)
    loaded = requests.fill_datasets(loaded, dict(data or {}))
    text = path.read_text() if isinstance(request, (str, Path)) else ""
    if keys or params or not text:
        text = f"# Launched from Python: {msgspec.json.encode(loaded).decode()}\n{text}"
    plan = planning.make_plan(loaded, loaded_site, str(path), request_text=text)
    return Run(submit.submit_run(plan, loaded_site), site=site)


def _tables(request: str | Path | Callable[..., object] | None) -> tuple[Path, dict[str, Any]]:
    """Return the path and the tables of a request; for a function and None, those of one in the working directory."""
    if isinstance(request, (str, Path)):
        return Path(request), strict_toml.read_toml(Path(request))
    if request is None:
        return Path("request"), {}
    if isinstance(request, Mapping):
        raise ConfigError(
            "request: a mapping (expected a file or a function)", where="launch", hint="launch(**request)"
        )
    module, name = request.__module__, getattr(request, "__qualname__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if not name.isidentifier() or file is None:
        hint = "use a function at the top of a module; for any callable: pitools.Executor(site=…).submit(function)"
        raise ConfigError(f"{name or request!r}: ranks cannot import it", where="launch", hint=hint)
    folder = Path(file).resolve().parent
    if module == "__main__":
        module = Path(file).stem
    for _ in range(module.count(".")):
        folder = folder.parent
    plain_name = "".join(char if char.isalnum() else "-" for char in name.lower()).strip("-")
    return folder / "request", {"name": plain_name, "entry": f"{module}:{name}", "workdir": str(folder)}


def runs(*, site: str = "local") -> list[Run]:
    """Return the runs of a site, oldest first; folders that cannot be read are left out."""
    loaded_site = load_site(site)
    listed = []
    for run_dir in run_folder.run_dirs(runs_dir(loaded_site)):
        try:
            run = Run(run_dir, site=site)
        except (PitError, OSError):
            continue
        if run.site.name == loaded_site.name:
            listed.append(run)
    return listed
