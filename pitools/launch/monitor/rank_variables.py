"""Return the variables of a rank for a shell or a debugger: of a run's rank, or of a request on one process."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from pitools.core.errors import DataError, UsageError
from pitools.launch.plan import Plan, load_plan
from pitools.launch.rank import environment, rendezvous
from pitools.launch.request import param_variables
from pitools.run import run_folder
from pitools.site.schema import Site


def variables_of_rank(run_dir: Path, site: Site, rank: int) -> tuple[str, dict[str, str]]:
    """Return the node and the variables of a rank of the run's last attempt, without the secret of its rendezvous.

    Raises ConfigError if other users could have changed the run, because a variable can make a shell run any program;
    UsageError for a rank that the run does not have, DataError before the rank has started.
    """
    run_folder.require_own_run(run_dir, group_above=site.paths.runs_access == "group")
    plan = load_plan(run_dir)
    if rank >= plan.ranks:
        raise UsageError(f"no rank {rank}", where=str(run_dir), hint=f"--rank 0 to {plan.ranks - 1}")
    attempt = run_folder.last_attempt(run_dir)
    record = run_folder.read_record(attempt / "ranks" / f"{rank}.json", run_folder.RankRecord) if attempt else None
    if attempt is None or record is None:
        raise DataError(f"rank {rank} has not started", where=str(run_dir), hint=f"pit launch show {run_dir.name}")
    context = environment.RankContext(
        rank=rank,
        world_size=record.world_size,
        local_rank=record.local_rank,
        node=record.node,
        head_node="",
        head_address=record.coordinator.rpartition(":")[0],
        job_identity=rendezvous.JobIdentity("", "", record.world_size, (0, 0)),
        attempt_dir=attempt,
        # Without Slurm all ranks are on one node.
        tasks_per_node=plan.ranks if site.scheduler == "none" else plan.job.tasks_per_node,
        gpus_per_node=plan.job.gpus_per_node,
    )
    return record.node, _variables(context, plan, record.coordinator, record.data)


def variables_of_request(plan: Plan, folder: Path) -> dict[str, str]:
    """Return the variables of a request's program as a single rank on this machine. folder: its run folder.

    Datasets are read where they are, not staged.
    """
    context = environment.RankContext(
        rank=0,
        world_size=1,
        local_rank=0,
        node=os.uname().nodename,
        head_node=os.uname().nodename,
        head_address="127.0.0.1",
        job_identity=rendezvous.JobIdentity("", "", 1, (0, 0)),
        attempt_dir=folder / "attempts" / "0",
        tasks_per_node=1,
        gpus_per_node=plan.job.gpus_per_node,
    )
    return _variables(context, plan, "127.0.0.1:29500", {data.name: data.source for data in plan.data})


def _variables(
    context: environment.RankContext, plan: Plan, coordinator: str, data: Mapping[str, str]
) -> dict[str, str]:
    cpus = {"SLURM_CPUS_PER_TASK": str(plan.job.cpus_per_task)}
    variables = environment.common_variables(context, cpus, data)
    if plan.request.framework == "jax":
        variables |= environment.jax_variables(context, {}, coordinator)
    elif plan.request.framework == "torch":
        variables |= environment.torch_variables(context, coordinator)
    return {
        **plan.request.env,
        "PIT_RUN_DIR": str(context.attempt_dir.parent.parent),
        "PIT_ATTEMPT_DIR": str(context.attempt_dir),
        **variables,
        **param_variables(plan.request),
    }


def export_lines(variables: Mapping[str, str]) -> list[str]:
    """Return variables as lines for a POSIX shell."""
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
