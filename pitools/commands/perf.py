"""`pit perf`: where the time of a training step goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.lazy_group import LazyGroup

if TYPE_CHECKING:
    from pitools.core.errors import PitError
    from pitools.perf.read.files import Found
    from pitools.run.run_folder import RunRecord

COMMANDS = {
    "trace": ("perf_trace", "trace", "Record a trace of some steps of a running or a new run."),
    "attribute": ("perf_attribute", "attribute", "Split each step into its parts, and say what limits the run."),
    "advise": ("perf_advise", "advise", "Say what would make a run faster, and by how much; try it."),
    "stragglers": ("perf_stragglers", "stragglers", "Find ranks that are slower than the others of their run."),
    "compare": ("perf_compare", "compare", "Compare the speed of two runs, or two files of numbers."),
    "watch": ("perf_compare", "watch", "Find regressions in stored series of measurements."),
    "scaling": ("perf_scaling", "scaling", "Fit step times over sizes: what limits, and what more GPUs would give."),
    "mfu": ("perf_mfu", "mfu", "Relate a speed to the peak of its devices, in three conventions."),
    "collectives": ("perf_collectives", "collectives", "Measure collectives between a job's nodes, and compare."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Where the time of training steps goes: profiles and step logs of PyTorch and JAX."""


def find_source(source: str, site_name: str) -> Path:
    """Return the path of a file, folder, or run. Raises UsageError for none of them."""
    from pitools.launch.run_lookup import find_run_dir
    from pitools.run.run_folder import RunNotFound

    if (path := Path(source)).exists():
        return path
    try:
        return find_run_dir(source, site_name)
    except RunNotFound as error:
        raise RunNotFound(f'no file, folder or run "{source}"', where=error.where, hint=error.hint) from error


def find_profiles(paths: Sequence[Path]) -> list[Found]:
    """Return the profiles and logs of these paths. Raises as `find_files`; of a run without any, with its state."""
    from pitools.core.errors import UsageError
    from pitools.launch.monitor.status import run_status
    from pitools.launch.plan import load_plan
    from pitools.perf.read.files import find_files
    from pitools.site.load import load_site

    try:
        return find_files(paths)
    except UsageError as error:
        if not Path(error.where, "plan.json").is_file():
            raise
        run_dir = Path(error.where)
        raise without_steps(run_status(run_dir, load_site(load_plan(run_dir).site))) from error


def without_steps(run: RunRecord) -> PitError:
    """Return the error of a run that has logged no step, by its state."""
    from pitools.core.errors import NoSpace, TryLater, UsageError
    from pitools.perf.trace_run import HOW_TO_LOG, is_disk_full
    from pitools.slurm.states import is_final

    state, how_to_log = run.state.lower(), f"; if it writes no step log, {HOW_TO_LOG}" * bool(run.attempts)
    if is_disk_full(Path(run.run_dir)):
        hint = f"free space, then: pit launch resume {run.run_id}"
        return NoSpace(f"the disk of the run is full, and the run is {state}", where=run.run_dir, hint=hint)
    if not is_final(run.state):
        hint = f"wait for it: pit launch watch {run.run_id}{how_to_log}"
        return TryLater(f"the run is {state}, and has logged no step", where=run.run_dir, hint=hint)
    hint = f"why it ended: pit launch why {run.run_id}{how_to_log}"
    return UsageError(f"the run has ended: {state} without a step log", where=run.run_dir, hint=hint)
