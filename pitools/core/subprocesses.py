"""Start programs and wait for them: an argv list, a time-out, never a shell. All of pitools starts programs here."""

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
from pitools.core.fs import open_0644

_GRACE_S = 1.0  # how long output is read after the program's end; a detached process may hold it open
_POLL_S = 0.2  # how often a program whose output is open is checked for its end
_KILL_TIMEOUT_S = 5.0  # for killed processes to free their memory
_KILL_POLL_S = 0.005
_GROUP_SETTLE_S = 0.2  # within which a signal to a step reaches all of its processes
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Completed(NamedTuple):
    """A finished program's exit code and output."""

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
    cwd: Path | None = None,
) -> Completed:
    """Run a program to its end, and return its exit code and output; an exit code other than 0 is not an error.

    The environment is this process's without `unset`, with `env` added. On time-out the whole process group is killed.
    A detached process is neither killed nor waited for, even if it holds the program's output open. stdin: text, or a
    file or pipe to read. stdout: a file for the output, which is not returned then. Raises ToolMissing if there is no
    such program, Unreachable on time-out, ClusterError if the folder `cwd` is missing.
    """
    with _stdin_file(stdin) as stdin_file:
        process = _popen(
            argv,
            stdin=stdin_file,
            stdout=stdout or subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
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
        problem = f"no answer within {round(timeout_s, 1):g} s"
        raise Unreachable(problem, where=" ".join(argv[:3]), hint="try again later") from error
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
    return Completed(tuple(argv), process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


@contextlib.contextmanager
def _stdin_file(text: str | BinaryIO | None) -> Iterator[int]:
    # A file in memory: a pipe would have to be fed while the output is read.
    if not isinstance(text, str):
        yield text.fileno() if text else subprocess.DEVNULL
        return
    with os.fdopen(os.memfd_create("stdin"), "wb") as file:
        file.write(text.encode())
        file.seek(0)
        yield file.fileno()


def _communicate(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[bytes, bytes]:
    """Return stdout and stderr, read to their end or for _GRACE_S after the program's end. Raises TimeoutExpired."""
    now = time.monotonic()
    deadline, output_deadline = now + timeout_s, float("inf")
    while True:
        try:
            out, err = process.communicate(timeout=max(0.0, min(_POLL_S, deadline - now)))
            return out or b"", err  # None for output to a file
        except subprocess.TimeoutExpired as waited:
            now = time.monotonic()
            if process.poll() is not None:
                output_deadline = min(output_deadline, now + _GRACE_S)
                # Also past the deadline: a program that ended in time gets its whole output read.
                if now >= output_deadline:
                    return waited.output or b"", waited.stderr or b""
            elif now >= deadline:
                raise


def start_detached(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None = None, session: bool = False
) -> subprocess.Popen[bytes]:
    """Start a program without waiting for it; its output is appended to a file. session: start it in a new session.

    `env` is the whole environment. Raises ToolMissing, or ClusterError when there is no folder `cwd`.
    """
    with open(log, "ab", opener=open_0644) as out:
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
    """Kill the remaining processes of sessions by their leaders' pids; the leaders may have ended.

    Returns when the processes have ended and freed ports and files, at the latest after _KILL_TIMEOUT_S: a process
    that waits for a dead mount, or of another user, cannot be killed.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while running := [pid for pid in _iter_pids() if _is_member(os.getsid, pid, *leaders) and _is_running(pid)]:
        for pid in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(_KILL_POLL_S)


def run_foreground(argv: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Run a program with this process's input and output, forward signals, and return its exit code, or 128 + signal.

    `env` is the whole environment. Main thread only, as Python's signal handlers are. Raises ToolMissing.
    """
    with _record_signals() as received:
        process = _popen(argv, env=dict(env))
        return _wait(process, received, process.send_signal)


def run_in_process_group(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None) -> int:
    """Run a rank's program as `run_foreground` does, and deliver each signal once to it and its children.

    Slurm signals this process alone (proctrack/cgroup), or every process of the step (linuxproc, or cgroup with
    SignalChildrenProcesses=yes). A second child, the probe, only waits: if a signal kills it, Slurm signalled every
    process, and nothing is forwarded. Raises ToolMissing, or ClusterError if the folder `cwd` is missing.
    """
    with _record_signals() as received:
        return _wait_for_group(_popen(argv, env=dict(env), cwd=cwd, process_group=0), received)


def _wait_for_group(process: subprocess.Popen[bytes], received: list[int]) -> int:
    probe = _signal_probe()

    def forward(number: int) -> None:
        nonlocal probe
        try:
            is_for_step = probe.wait(_GROUP_SETTLE_S) == -number
        except subprocess.TimeoutExpired:
            is_for_step = False
        else:
            _end_probe(probe)
            probe = _signal_probe()
        if not is_for_step:
            _signal_group(process.pid, number)

    try:
        return _wait(process, received, forward)
    finally:
        _end_probe(probe)


def _signal_group(group: int, number: int) -> None:
    """Send a signal to a process group: SIGTERM and SIGINT to all, others only to processes that catch them.

    SIGUSR2 would end the `tee` that a program writes to.
    """
    for pid in _iter_pids():
        if _is_member(os.getpgid, pid, group) and (number in (signal.SIGTERM, signal.SIGINT) or _catches(pid, number)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _catches(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _iter_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _is_running(pid: int) -> bool:
    """Return whether any thread runs: the first thread can end long before the process frees its ports and files."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or hidden by hidepid
        return False


def _is_member(get_id: Callable[[int], int], pid: int, *ids: int) -> bool:
    try:
        return get_id(pid) in ids
    except (ProcessLookupError, PermissionError):
        return False


def _signal_probe() -> subprocess.Popen[bytes]:
    # It reads from a pipe of this process, and so ends with it.
    return _popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _end_probe(probe: subprocess.Popen[bytes]) -> None:
    if probe.stdin:
        probe.stdin.close()
    probe.wait()


@contextlib.contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Record signals until they can be forwarded: they must not end this process without its program."""
    received: list[int] = []
    old_handlers = {
        number: signal.signal(number, lambda number, _frame: received.append(number)) for number in _FORWARDED_SIGNALS
    }
    try:
        yield received
    finally:
        for number, handler in old_handlers.items():
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
            problem = f'cannot run "{argv[0]}" in this folder: {error.strerror}'
            raise ClusterError(
                problem, where=str(cwd), hint=f"check that it is mounted on this host: ls -d {cwd}"
            ) from error
        if isinstance(error, FileNotFoundError) and not shutil.which(argv[0]):
            hint = "install it, or run this on a host where it is installed"
            problem = "does not exist" if "/" in argv[0] else "is not on the PATH"
            raise ToolMissing(f'"{argv[0]}" {problem}', hint=hint) from error
        raise ToolMissing(f'"{argv[0]}" cannot be run: {error.strerror}') from error
