"""Several commands in one call: a far cluster is asked over one connection, and its answers belong together."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Sequence

from pitools.core import subprocesses
from pitools.core.errors import ToolMissing
from pitools.slurm.errors import NOT_FOUND, SSH_FAILED, error_for, has_failed
from pitools.slurm.fields import parse_error
from pitools.slurm.transport import QUERY_ENV, RunFunction, Transport, run_command

# Also what is in partitions that are hidden, or that we may not use: their jobs and nodes are there all the same.
_BATCH_ENV = {**QUERY_ENV, "SCONTROL_ALL": "1", "SQUEUE_ALL": "1"}


def run_batch(
    transport: Transport, commands: Sequence[Sequence[str]], *, run: RunFunction = subprocesses.run
) -> list[subprocesses.Completed]:
    """Run commands that only read, one after the other, each to its end whatever became of those before it.

    The transport's time-out is for all of them. Raises as `run_command`, Unreachable where ssh fails, and ClusterError
    where the answer lacks the end of any command.
    """
    mark = secrets.token_hex(8)  # in nobody's job name
    told = f"printf '\\036%s %s\\n' {mark} \"$r\""
    script = "".join(f"{shlex.join(command)} </dev/null; r=$?; {told}; {told} >&2\n" for command in commands)
    done = run_command(transport, ["sh", "-c", script], env=_BATCH_ENV, run=run)
    if transport.host and done.code == SSH_FAILED:
        raise error_for("ssh", transport.host, done.code, done.stderr)
    ends = re.compile(rf"\x1e{mark} (\d+)\n")
    said, errors = ends.split(done.stdout), ends.split(done.stderr)
    if len(said) != 2 * len(commands) + 1 or said[1::2] != errors[1::2]:
        text = done.stderr.strip() or done.stdout.strip()
        raise parse_error(" and ".join(command[0] for command in commands), "it is cut short", text[-200:])
    return [
        subprocesses.Completed(tuple(command), int(code), out, error)
        for command, code, out, error in zip(commands, said[1::2], said[::2], errors[::2], strict=False)
    ]


def stdout_or_raise(transport: Transport, done: subprocesses.Completed) -> str:
    """What one command of a batch printed. Raises what its failure means: see `refusals`."""
    if done.code == NOT_FOUND and not transport.host:
        raise ToolMissing(f'"{done.argv[0]}" is not on the PATH', hint="install it, or run on a host that has it")
    if has_failed(done):
        raise error_for(done.argv[0], transport.host, done.code, done.stderr or done.stdout)
    return done.stdout
