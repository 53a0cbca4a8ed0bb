"""Start a daemon, record its identity, and end exactly that process later.

A process id alone is reused by the kernel. Its start time, counted from a boot that has its own id, is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from devcluster_parts.errors import ClusterProblem

POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One process for all time: its id, its start in clock ticks since boot, and which boot."""

    pid: int
    start: int
    boot: str


def boot_id() -> str:
    """The kernel's name for this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identify(pid: int) -> Identity | None:
    """Who has this id now; None when nobody has, or only a zombie that waits to be reaped."""
    fields = stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return Identity(pid=pid, start=int(fields[19]), boot=boot_id())


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on: [0] state, [1] parent, [19] start; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # ESRCH and ENOENT, as the process ends
        return None
    return text.rpartition(")")[2].split()  # the name in parentheses may hold anything, a ")" too


def is_alive(who: Identity) -> bool:
    """Whether this very process still runs."""
    return identify(who.pid) == who


def send(who: Identity, number: signal.Signals) -> bool:
    """Signal this very process; False when it had ended.

    The id cannot pass to another process between the look and the signal: the descriptor is opened first.
    """
    try:
        fd = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(who):
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def stop(everyone: Iterable[Identity], *, term_s: float, kill_s: float = 5.0) -> list[Identity]:
    """TERM, wait up to `term_s`, KILL, wait up to `kill_s`; returns those that still run."""
    left = [who for who in everyone if send(who, signal.SIGTERM)]
    left = _wait_for_end(left, term_s)
    left = [who for who in left if send(who, signal.SIGKILL)]
    return _wait_for_end(left, kill_s)


def _wait_for_end(everyone: list[Identity], limit_s: float) -> list[Identity]:
    end = time.monotonic() + limit_s
    left = [who for who in everyone if is_alive(who)]
    while left and time.monotonic() < end:
        time.sleep(POLL_S)
        left = [who for who in left if is_alive(who)]
    return left


def read_record(path: Path) -> Identity | None:
    """Who was started under this name; None when nobody was."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Identity(pid=int(kept["pid"]), start=int(kept["start"]), boot=str(kept["boot"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterProblem(
            f"is not a process record ({error})", where=str(path), hint="look at it, then remove it"
        ) from error


def spawn(argv: Sequence[str], *, env: Mapping[str, str], output: Path, record: Path) -> Identity:
    """Start a program in a session of its own, with only /dev/null and `output` open; write its identity to `record`.

    The record is written by the new process before it becomes the program, so that no daemon is ever without one.
    Raises ClusterProblem if the program cannot be executed.
    """
    read_end, write_end = os.pipe()  # closed by a successful exec; else carries the error
    child = os.fork()
    if child == 0:
        _exec_daemon(list(argv), dict(env), output, record, write_end)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end, "rb") as answer:
        trouble = answer.read().decode(errors="replace")
    if trouble:
        record.unlink(missing_ok=True)
        raise ClusterProblem(f"cannot start {argv[0]}: {trouble}", where=str(output))
    who = read_record(record)
    if who is None:
        raise ClusterProblem(f"{argv[0]} ended before it began", where=str(record), hint="run it again")
    return who


def _exec_daemon(argv: list[str], env: dict[str, str], output: Path, record: Path, write_end: int) -> None:
    try:
        os.setsid()
        if os.fork():
            os._exit(0)  # the daemon is now nobody's child, and can never get a terminal
        who = identify(os.getpid())
        assert who is not None
        write_atomically(record, json.dumps(asdict(who)) + "\n")
        _reset_process(output, write_end)
        os.execvpe(argv[0], argv, env)
    except BaseException as error:  # noqa: BLE001  whatever it is, this copy of the interpreter must go no further
        with contextlib.suppress(OSError):
            os.write(write_end, str(error).encode())
    finally:
        os._exit(127)


def _reset_process(output: Path, keep: int) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)  # nohup's and Python's ignored signals would be inherited
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o022)
    os.chdir("/")
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd != keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(part, path)
