"""`pit perf`: where the time of a training step goes."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.lazy_group import LazyGroup

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
