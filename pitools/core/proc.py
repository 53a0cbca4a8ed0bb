"""The one place that starts programs and waits for them: an argv list, a time-out, never a shell."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pitools.core.errors import ToolMissing, Unreachable


class Completed(NamedTuple):
    """What a program answered."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    stdin: str | None = None,
) -> Completed:
    """Run a program to its end and return its exit code and text, whatever the code is.

    The program gets this process's environment, less the names in `without`, and `env` on top. On time-out the whole
    process group is killed, so that a client that forked leaves nothing behind. Raises ToolMissing when there is no
    such program, Unreachable on time-out.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**{name: value for name, value in os.environ.items() if name not in without}, **(env or {})},
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise ToolMissing(f'"{argv[0]}" is not on the PATH', hint="install it, or run on a host that has it") from error
    try:
        out, err = process.communicate(stdin.encode() if stdin is not None else None, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Unreachable(
            f"no answer within {timeout_s:g} s", where=" ".join(argv[:3]), hint="try again later"
        ) from error
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return Completed(tuple(argv), process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def start(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None = None, session: bool = False
) -> subprocess.Popen[bytes]:
    """Start a program that outlives this call, its output appended to a file; `session` detaches it from this one.

    `env` is the whole environment. Raises ToolMissing.
    """
    with log.open("ab") as out:
        try:
            return subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=dict(env), cwd=cwd, start_new_session=session,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise ToolMissing(f'"{argv[0]}" is not on the PATH') from error


def foreground(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None) -> int:
    """Run a program on this one's own input and output, passing signals on; returns its exit code, or 128 + signal.

    `env` is the whole environment. Main thread only, as Python's signal handlers are. Raises ToolMissing.
    """
    try:
        process = subprocess.Popen(list(argv), env=dict(env), cwd=cwd)
    except FileNotFoundError as error:
        raise ToolMissing(f'"{argv[0]}" is not on the PATH') from error

    def forward(number: int, _frame: object) -> None:
        process.send_signal(number)

    forwarded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, forward) for number in forwarded}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
