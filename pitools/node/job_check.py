"""Make this node's checks for a job before its ranks start: `python -m pitools.node.job_check [CONFIG]`.

Prints a line, pit.node-preflight/1. The job's user is an ordinary one, so only checks count whose facts that user reads
as root would. No program is started, and no Slurm command.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pitools.core.errors import PitError
from pitools.node.check import this_node
from pitools.node.check.config import load_config
from pitools.node.check.rule import Check
from pitools.run.attempt_records import NodePreflight, PreflightFailure
from pitools.slurm.job_step import gpus_per_node

_TIMEOUT_S, _GATHER_TIMEOUT_S = 25.0, 20.0
_MAX_LINE = 1000  # bytes: a line longer than srun's buffer of 1 KiB may be broken by another node's
_SHORTER = ((3, 200), (3, 100), (3, 40), (1, 40))
"""How many failures are printed, and the characters of their messages: the first that _MAX_LINE has room for."""


def main(argv: Sequence[str]) -> None:
    """Print the result of this node's checks, or exit with why there is none.

    argv: the file of checks, which must be here, too; without it, the node's own.
    """
    faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)  # by a thread: also while this one hangs
    try:
        config = load_config(Path(argv[0]) if argv else None)
        checked = this_node.check_node(config, this_node.node_name(), in_job=True, timeout_s=_GATHER_TIMEOUT_S)
        result = check_for_job(checked)
    except PitError as error:
        sys.exit(f"{error.where}: {error.message}")  # one line, for the result of the job's first node
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")  # whatever the job's locale encodes


def check_for_job(checked: this_node.NodeCheck) -> NodePreflight:
    """Return the failures for which no further job may start on a node."""
    valid = {check.name for check in checked.checks if is_valid_in_job(check, gpus_per_node())}
    failed = [one for one in this_node.refusing(checked) if one.check in valid]
    unknown = sum(one.state == "unknown" for one in checked.findings)
    for count, length in _SHORTER:
        failures = tuple(
            PreflightFailure(node=one.node, check=one.check, message=one.message[:length]) for one in failed[:count]
        )
        result = NodePreflight(node=checked.facts.node, failures=failures, unknown=unknown)
        if len(msgspec.json.encode(result)) < _MAX_LINE:
            break
    return result


def is_valid_in_job(check: Check, gpus: int) -> bool:
    """Whether a job reads the same facts as root does. gpus: of the job on this node, which may see no others.

    A folder that this user may not write to is not at fault either.
    """
    needed = max(check.count or 0, check.min_count or 0)
    return "is_writable" not in (check.key, *check.where) and (check.table != "gpus" or needed <= gpus)


if __name__ == "__main__":
    main(sys.argv[1:])
