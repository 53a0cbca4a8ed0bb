"""Run several read-only commands in one call, over one connection."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Sequence

from pitools.core import subprocesses
from pitools.core.errors import ToolMissing, Unreachable
from pitools.slurm.errors import BIN_HINT, NOT_FOUND, SSH_FAILED, error_for, has_failed
from pitools.slurm.fields import parse_error
from pitools.slurm.transport import QUERY_ENV, RunFunction, Transport, run_command

# Include hidden and forbidden partitions: their jobs and nodes exist too.
_BATCH_ENV = {**QUERY_ENV, "SCONTROL_ALL": "1", "SQUEUE_ALL": "1"}


def run_queries(
    transport: Transport, commands: Sequence[Sequence[str]], *, run: RunFunction = subprocesses.run
) -> list[subprocesses.Completed]:
    """Run read-only commands one after another; a failed command does not stop the next.

    The transport's time-out covers all of them. Raises what `run_command` raises, Unreachable if ssh fails, and
    ClusterError for truncated output.
    """
    mark = secrets.token_hex(8)  # random: no job name contains it
    end_line = f"printf '\\036%s %s\\n' {mark} \"$r\""
    script = "".join(f"{shlex.join(command)} </dev/null; r=$?; {end_line}; {end_line} >&2\n" for command in commands)
    try:
        done = run_command(transport, ["sh", "-c", script], env=_BATCH_ENV, run=run)
    except Unreachable as error:
        names = " and ".join(dict.fromkeys(command[0] for command in commands))
        where = f"{names} on {transport.host}" if transport.host else names
        raise Unreachable(error.message, where=where, hint=error.hint) from error
    if transport.host and done.code == SSH_FAILED:
        raise error_for("ssh", transport.host, done.code, done.stderr)
    ends = re.compile(rf"\x1e{mark} (\d+)\n")
    outputs, errors = ends.split(done.stdout), ends.split(done.stderr)
    if len(outputs) != 2 * len(commands) + 1 or outputs[1::2] != errors[1::2]:
        text = done.stderr.strip() or done.stdout.strip()
        raise parse_error(" and ".join(command[0] for command in commands), "truncated", text[-200:])
    return [
        subprocesses.Completed(tuple(command), int(code), out, error)
        for command, code, out, error in zip(commands, outputs[1::2], outputs[::2], errors[::2], strict=False)
    ]


def stdout_or_raise(transport: Transport, done: subprocesses.Completed) -> str:
    """Return the stdout of a command of a batch. Raises the error of `errors.error_for` if the command failed."""
    if done.code == NOT_FOUND and not transport.host:
        raise ToolMissing(f'"{done.argv[0]}" is not on the PATH', hint=BIN_HINT)
    if has_failed(done):
        raise error_for(done.argv[0], transport.host, done.code, done.stderr or done.stdout)
    return done.stdout
