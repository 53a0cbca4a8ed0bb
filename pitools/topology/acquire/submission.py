"""How a script that somebody else wrote is submitted so that nodes can still be chosen for it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pitools.core.errors import UsageError
from pitools.site.psbatch import SBATCH_VARIABLES, directives, is_given, missing_defaults
from pitools.site.schema import Site

_REFUSED_OPTIONS = {
    "begin": "it cannot begin later: choose its nodes when it may begin",
    "array": "submit each task as a job of its own",
    "nodelist": "leave it out, or submit the script with psbatch",
    "nodefile": "leave it out, or submit the script with psbatch",
    "clusters": "submit it to one site",
    "wait": "leave it out: this returns when the job has started",
    "reservation": "leave it out, or submit the script with psbatch",
}


def sbatch_arguments(site: Site, script: str, *, name: str, nodes: int | None = None, segment: int = 0) -> list[str]:
    """sbatch's options for a script: the site's defaults where it says nothing, its name, and how many nodes.

    Raises UsageError for a script that settles itself when or where it runs.
    """
    given = {_SHORT_TO_LONG.get(option, option) for option in directives(script)}
    given |= {"wait"} if _WAIT.search(script) else set()
    for option, hint in _REFUSED_OPTIONS.items():
        if is_given(given, option):
            raise UsageError(f"the script says --{option}", where=name, hint=hint)
    if _HET_JOB.search(script):
        raise UsageError("the script is several jobs (hetjob)", where=name, hint="submit each as a job of its own")
    args = [*_of_environment(), *missing_defaults(site, given)]
    if not is_given(given, "job-name"):
        args.append(f"--job-name={Path(name).name.strip('<>') or 'stdin'}")
    if nodes:
        args.append(f"--nodes={nodes}")
    if segment and site.dialect.segment:
        args.append(f"--segment={segment}")
    return args


def _of_environment() -> list[str]:
    """What SBATCH_* variables say also against the script, as with sbatch: our own sbatch is called without them."""
    found = {option: os.environ[name] for option, name in SBATCH_VARIABLES.items() if name in os.environ}
    return [f"--{option}" + (f"={value}" if value else "") for option, value in found.items()]


_WAIT = re.compile(r"^#SBATCH(?:[ \t]+\S+)*?[ \t]+-[HIksOQvVhu]*W", re.MULTILINE)
_HET_JOB = re.compile(r"^#SBATCH[ \t]+(?:het|pack)job\b", re.MULTILINE)
_SHORT_TO_LONG = {"-b": "begin", "-a": "array", "-w": "nodelist", "-F": "nodefile", "-M": "clusters"}
