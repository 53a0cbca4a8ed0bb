"""Repeat a run for some of its steps, to time them: its code and data again, on its nodes, with some keys changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from pitools.core import hostlist
from pitools.core.errors import ClusterError, PitError, TryLater
from pitools.core.signals import interrupt_on_termination
from pitools.launch import plan as planning
from pitools.launch.monitor.wait import wait_for_run
from pitools.launch.plan import Plan
from pitools.launch.recovery.cancel_run import cancel_run
from pitools.launch.reproduce.facts import rank_nodes
from pitools.launch.reproduce.rerun import plan_rerun
from pitools.launch.submission.submit import submit_run
from pitools.run.steps import read_run_steps
from pitools.site.connect import client
from pitools.site.load import load_site
from pitools.site.schema import Site

_MAX_NAME = 48


def plan_repeat(run_dir: Path, *, values: Mapping[str, str], suffix: str, nodes_of: Path) -> tuple[Plan, Site]:
    """Return the plan of a repetition, and its site; arguments as of `repeat_steps`. Raises the errors of a rerun."""
    old = planning.load_plan(run_dir)
    site = load_site(old.site)
    name = f"{old.name[: _MAX_NAME - len(suffix)]}{suffix}"
    nodes = rank_nodes(nodes_of) if site.scheduler == "slurm" else []
    placed = {"nodelist": hostlist.fold(nodes), "topology": "none", "exclude": ""} if nodes else {}
    plan, _ = plan_rerun(run_dir, site, values={**placed, **values, "name": name})
    return plan, site


def require_accepted(plan: Plan, site: Site) -> None:
    """Raise ClusterError for a job that Slurm would refuse, such as one for more nodes than there are."""
    if site.scheduler == "slurm":
        run_dir = f"{plan.runs_dir}/{plan.name}"
        try:
            client(site).test_only(planning.render_script(plan, site, run_dir=run_dir, payload="true"))
        except ClusterError as error:
            raise ClusterError(f"Slurm would refuse this job: {error.message}", where=plan.name) from error


@interrupt_on_termination()
def repeat_steps(
    run_dir: Path,
    *,
    steps: int,
    values: Mapping[str, str],
    suffix: str,
    nodes_of: Path,
    timeout_s: float,
    report: Callable[[str], None],
) -> Path:
    """Repeat a run, cancel it after so many steps behind the first, and return its folder.

    values: as of `plan_rerun`. suffix: of its name, which keeps it apart from other runs of the request. nodes_of: a
    run whose nodes it gets, unless `values` choose them. timeout_s: for its queue and its steps.
    report: gets a line for what it waits for. Raises the errors of a rerun and of a submission, ClusterError for a run
    that fails, TryLater after timeout_s, KeyboardInterrupt also on SIGTERM and SIGHUP. A run that is not waited for to
    its end is cancelled.
    """
    plan, site = plan_repeat(run_dir, values=values, suffix=suffix, nodes_of=nodes_of)
    new_dir = submit_run(plan, site)
    is_enough = False

    def stop_if_enough(_: int) -> None:
        nonlocal is_enough
        if not is_enough and len(read_run_steps(new_dir)) > steps:
            is_enough = True
            cancel_run(new_dir, site)

    try:
        report(f"run {new_dir.name} in {new_dir}")
        run = wait_for_run(new_dir, site, stop_if_enough, report, timeout_s)
    except BaseException as error:
        with contextlib.suppress(PitError):
            cancel_run(new_dir, site)
        if isinstance(error, TimeoutError):
            raise TryLater(f"{error}", where=str(new_dir), hint="a longer --timeout") from error
        raise
    if not is_enough and run.state != "COMPLETED":
        problem = f"the repeated run was stopped: {run.cause}: {run.reason}"
        raise ClusterError(problem, where=str(new_dir), hint=f"pit launch why {new_dir}")
    return new_dir
