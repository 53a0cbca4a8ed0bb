"""Build the sbatch options for a user's script whose nodes are chosen after submission."""

from __future__ import annotations

import re
from pathlib import Path

from pitools.core.errors import UsageError
from pitools.site.psbatch import directives, is_given, missing_defaults, variable_options
from pitools.site.schema import Site

_REFUSED_OPTIONS = {
    "begin": "omit it, and submit the script when it may start",
    "array": "submit each task as a separate job",
    "nodelist": "omit it, or submit the script with psbatch",
    "nodefile": "omit it, or submit the script with psbatch",
    "clusters": "omit it, and give --site",
    "wait": "omit it: the command returns when the job has started",
    "reservation": "omit it, or submit the script with psbatch",
}


def sbatch_arguments(site: Site, script: str, *, name: str, nodes: int | None = None, segment: int = 0) -> list[str]:
    """Return sbatch's options for a script: the site's defaults where the script has none, the job name and nodes.

    name: path of the script, which gives the default job name. nodes: overrides the script's. Raises UsageError for a
    script that sets its own start time, nodes, array or hetjob.
    """
    script_options = {_SHORT_TO_LONG.get(option, option) for option in directives(script)}
    script_options |= {"wait"} if _WAIT.search(script) else set()
    for option, hint in _REFUSED_OPTIONS.items():
        if is_given(script_options, option):
            raise UsageError(f"--{option} is not supported in the script", where=name, hint=hint)
    if _HET_JOB.search(script):
        raise UsageError("hetjobs are not supported", where=name, hint="submit each component as a separate job")
    args = [*_environment_options(name), *missing_defaults(site, script_options)]
    if not is_given(script_options, "job-name"):
        args.append(f"--job-name={Path(name).name.strip('<>') or 'stdin'}")
    if nodes:
        args.append(f"--nodes={nodes}")
    if segment and site.dialect.segment:
        args.append(f"--segment={segment}")
    return args


def _environment_options(script_name: str) -> list[str]:
    """Return options from SBATCH_* variables, which override the script; our sbatch is called without them.

    Of other options than _VARIABLE_OPTIONS the variable is ignored: Slurm sets some in jobs. Raises UsageError as
    `sbatch_arguments` does.
    """
    overrides = variable_options()
    if refused := sorted(overrides.keys() & _REFUSED_OPTIONS.keys()):
        hint = "unset its SBATCH_ variable, or submit the script with psbatch"
        raise UsageError(f"--{refused[0]} from the environment is not supported", where=script_name, hint=hint)
    return [
        f"--{option}" + (f"={value}" if value else "")
        for option, value in overrides.items()
        if option in _VARIABLE_OPTIONS
    ]


_VARIABLE_OPTIONS = frozenset(
    [
        "account",
        "constraint",
        "exclusive",
        "export",
        "gpus",
        "gpus-per-node",
        "gres",
        "mem",
        "mem-per-cpu",
        "mem-per-gpu",
        "open-mode",
        "partition",
        "qos",
        "signal",
        "time",
        "wckey",
    ]
)
_WAIT = re.compile(r"^#SBATCH(?:[ \t]+\S+)*?[ \t]+-[HIksOQvVhu]*W", re.MULTILINE)
_HET_JOB = re.compile(r"^#SBATCH[ \t]+(?:het|pack)job\b", re.MULTILINE)
_SHORT_TO_LONG = {"-b": "begin", "-a": "array", "-w": "nodelist", "-F": "nodefile", "-M": "clusters"}
