"""The one place that starts programs and waits for them: an argv list, a time-out, never a shell."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pitools.core.errors import ClusterError, ToolMissing, Unreachable
from pitools.core.fs import own

_GRACE_S = 1.0  # for the last words of a program that has ended; whoever holds its output longer is not waited for
_POLL_S = 0.2  # how often it is looked at whether a program has ended whose output is still open
_KILL_TIMEOUT_S = 5.0  # within which what was killed has given back its memory
_KILL_POLL_S = 0.005
_GROUP_SETTLE_S = 0.2  # in which a signal that goes to every process of a step has reached all of them
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
    unset: Collection[str] = (),
    stdin: str | BinaryIO | None = None,
    stdout: BinaryIO | None = None,
) -> Completed:
    """Run a program to its end and return its exit code and text, whatever the code is.

    The program gets this process's environment, less the names in `unset`, and `env` on top. On time-out the whole
    process group is killed, so that a client that forked leaves nothing behind. A process that the program detached is
    left alone and not waited for, though it may hold the program's output. stdin: text, or a file or pipe to read.
    stdout: where the output goes instead of into the answer. Raises ToolMissing when there is no such program,
    Unreachable on time-out.
    """
    with _stdin_file(stdin) as given:
        process = _popen(
            argv,
            stdin=given,
            stdout=stdout or subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**{name: value for name, value in os.environ.items() if name not in unset}, **(env or {})},
            start_new_session=True,
        )
    try:
        out, err = _communicate(process, timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        what = f"no answer within {timeout_s:g} s"
        raise Unreachable(what, where=" ".join(argv[:3]), hint="try again later") from error
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
    return Completed(tuple(argv), process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


@contextlib.contextmanager
def _stdin_file(text: str | BinaryIO | None) -> Iterator[int]:
    # A file in memory, not a pipe: nobody has to feed it while the program's output is read.
    if not isinstance(text, str):
        yield text.fileno() if text else subprocess.DEVNULL
        return
    with os.fdopen(os.memfd_create("stdin"), "wb") as file:
        file.write(text.encode())
        file.seek(0)
        yield file.fileno()


def _communicate(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[bytes, bytes]:
    """Output and errors, complete, or as far as they came _GRACE_S after the program's end. Raises TimeoutExpired."""
    now = time.monotonic()
    deadline, last_words = now + timeout_s, float("inf")
    while True:
        try:
            out, err = process.communicate(timeout=max(0.0, min(_POLL_S, deadline - now)))
            return out or b"", err  # None where it went elsewhere
        except subprocess.TimeoutExpired as waited:
            now = time.monotonic()
            if process.poll() is not None:
                last_words = min(last_words, now + _GRACE_S)
                # Beyond the deadline, too: what has ended in time has been answered, and half of it would be a lie.
                if now >= last_words:
                    return waited.output or b"", waited.stderr or b""
            elif now >= deadline:
                raise


def start_detached(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None = None, session: bool = False
) -> subprocess.Popen[bytes]:
    """Start a program that outlives this call, its output appended to a file; `session` detaches it from this one.

    `env` is the whole environment. Raises ToolMissing, or ClusterError when there is no folder `cwd`.
    """
    with open(log, "ab", opener=own) as out:
        return _popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=session,
        )


def kill_sessions(*leaders: int) -> None:
    """Kill whatever is left of the sessions of programs started with `session`, whether those programs live or not.

    Returns when it is gone, ports and files too; at the latest after _DYING_S, as what waits for a dead mount, or is
    another user's, does not go.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while left := [pid for pid in _pids() if _has_status_bit(os.getsid, pid, *leaders) and _is_running(pid)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(_KILL_POLL_S)


def run_foreground(argv: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Run a program on this one's own input and output, passing signals on; returns its exit code, or 128 + signal.

    `env` is the whole environment. Main thread only, as Python's signal handlers are. Raises ToolMissing.
    """
    with _record_signals() as heard:
        process = _popen(argv, env=dict(env))
        return _wait(process, heard, process.send_signal)


def run_in_process_group(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None) -> int:
    """As `run_foreground`, for a rank's program and all that it starts, each signal reaching them once.

    Slurm signals this process alone (proctrack/cgroup), or every process of the step (linuxproc, or cgroup with
    SignalChildrenProcesses=yes). A second child, which only waits, tells which: of a signal that went to everybody it
    dies, and then there is nothing to pass on. Raises ToolMissing, or ClusterError when there is no folder `cwd`.
    """
    with _record_signals() as heard:
        return _wait_for_group(_popen(argv, env=dict(env), cwd=cwd, process_group=0), heard)


def _wait_for_group(process: subprocess.Popen[bytes], received: list[int]) -> int:
    witness = _signal_probe()

    def pass_on(number: int) -> None:
        nonlocal witness
        try:
            everybody = witness.wait(_GROUP_SETTLE_S) == -number
        except subprocess.TimeoutExpired:
            everybody = False
        else:
            _end_probe(witness)
            witness = _signal_probe()
        if not everybody:
            _signal_group(process.pid, number)

    try:
        return _wait(process, received, pass_on)
    finally:
        _end_probe(witness)


def _signal_group(group: int, number: int) -> None:
    """SIGTERM and SIGINT to all; another only to those that catch it: it must not end the `tee` they write to."""
    for pid in _pids():
        if _has_status_bit(os.getpgid, pid, group) and (
            number in (signal.SIGTERM, signal.SIGINT) or _catches(pid, number)
        ):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _catches(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _is_running(pid: int) -> bool:
    """Whether any thread of it does: a process may look dead by its first thread long before it has let go."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone; or hidden, as another user's (hidepid)
        return False


def _has_status_bit(of: Callable[[int], int], pid: int, *numbers: int) -> bool:
    try:
        return of(pid) in numbers
    except (ProcessLookupError, PermissionError):
        return False


def _signal_probe() -> subprocess.Popen[bytes]:
    # It reads from us, and so ends with us, however we end.
    return _popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _end_probe(witness: subprocess.Popen[bytes]) -> None:
    if witness.stdin:
        witness.stdin.close()
    witness.wait()


@contextlib.contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Signals that come before the program can be passed them: they must not end this process beside it."""
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: heard.append(number)) for number in _FORWARDED_SIGNALS
    }
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], received: list[int], forward: Callable[[int], None]) -> int:
    for number in _FORWARDED_SIGNALS:
        signal.signal(number, lambda number, _frame: forward(number))
    for early in received:
        forward(early)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _popen(argv: Sequence[str], *, cwd: Path | None = None, **options: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(list(argv), cwd=cwd, **options)
    except OSError as error:
        if cwd is not None and str(error.filename) == str(cwd):
            what = f'cannot run "{argv[0]}" in this folder: {error.strerror}'
            raise ClusterError(what, where=str(cwd), hint="is it mounted on this host?") from error
        if isinstance(error, FileNotFoundError) and not shutil.which(argv[0]):
            hint = "install it, or run on a host that has it"
            raise ToolMissing(f'"{argv[0]}" is not on the PATH', hint=hint) from error
        raise ToolMissing(f'"{argv[0]}" cannot be run: {error.strerror}') from error
