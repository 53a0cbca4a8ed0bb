"""`pit launch attach|env`: a shell beside a rank, and a rank's variables for one's own shell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands import completion
from pitools.commands.launch_monitor import find_run_and_site
from pitools.commands.options import data_option, parse_named_paths, run_argument, site_option

if TYPE_CHECKING:
    from pitools.core.errors import ClusterError
    from pitools.launch.plan import Plan
    from pitools.site.schema import Site


@click.command()
@run_argument()
@site_option
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def attach(run: str, site_name: str, rank: int, command: tuple[str, ...]) -> None:
    """Open a shell on the node of a running RUN's rank, with the rank's variables, or run COMMAND there (after --).

    It is a job step that shares the job's resources, and ends with the job. Ranks in a container are seen from outside.
    """
    import sys

    from pitools.launch.monitor import rank_variables, status
    from pitools.launch.plan import load_plan
    from pitools.site.interactive import interactive_call

    run_dir, site = find_run_and_site(run, site_name)
    node, variables = rank_variables.variables_of_rank(run_dir, site, rank)
    plan = load_plan(run_dir)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    argv = list(command) or ["bash", "-i"]
    if site.scheduler == "slurm":
        settings = [f"{name}={value}" for name, value in variables.items()]
        argv = [*_srun(run_dir, site, node, plan, is_terminal), "env", *settings, *argv]
        interactive_call(site, argv, terminal=is_terminal).execute()
    if status.run_status(run_dir, site).state != "RUNNING":
        raise _not_running_error(run_dir)
    import os

    os.chdir(plan.request.workdir)
    interactive_call(site, argv, env=variables).execute()


def _srun(run_dir: Path, site: Site, node: str, plan: Plan, is_terminal: bool) -> list[str]:
    """Return the srun of a step beside the ranks. Raises ClusterError for a run that is not running."""
    from pitools.launch.submission import submissions
    from pitools.site.connect import client

    job = submissions.latest_job(run_dir)
    running = [one for one in client(site).job(job.job_id) if one.state == "RUNNING"] if job else []
    if not running:
        raise _not_running_error(run_dir)
    return [
        "srun",
        f"--jobid={running[0].raw_id}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--mem=0",
        f"--chdir={plan.request.workdir}",
        *(["--pty"] if is_terminal else []),
    ]


def _not_running_error(run_dir: Path) -> ClusterError:
    from pitools.core.errors import ClusterError

    return ClusterError("the run is not running", where=str(run_dir), hint=f"pit launch show {run_dir.name}")


@click.command()
@click.argument("run", metavar="RUN|REQUEST", shell_complete=completion.complete_runs)
@site_option
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Of a run.")
@data_option()
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="A key or parameter of the request.")
def env(run: str, site_name: str, rank: int, data: tuple[str, ...], sets: tuple[str, ...]) -> None:
    """Print the variables of a rank of RUN, or of REQUEST (a .toml file) as one process, for eval in a shell.

    In an allocation, a debugger or a notebook: eval "$(pit launch env request.toml)", then run your program. What it
    saves for a REQUEST lies in a folder beside the runs, which is named on stderr, and stays for the next time.
    """
    import os

    from pitools.launch.monitor import rank_variables
    from pitools.launch.sweep.points import parse_point, plan_point
    from pitools.site.load import load_site

    if not run.endswith(".toml"):
        run_dir, site = find_run_and_site(run, site_name)
        _, variables = rank_variables.variables_of_rank(run_dir, site, rank)
        lines = rank_variables.export_lines(variables)
    else:
        plan = plan_point(Path(run), load_site(site_name), parse_point(sets), data=parse_named_paths(data, "--data"))
        folder = Path(plan.runs_dir) / f".debug.{os.geteuid()}" / plan.name  # not in a copy of the code, or a run
        click.echo(f"pit: its files: {folder}", err=True)
        lines = rank_variables.export_lines(rank_variables.variables_of_request(plan, folder))
        lines.append('mkdir -p "$PIT_ATTEMPT_DIR" "$PIT_CHECKPOINT_DIR"')
    for line in lines:
        click.echo(line)
