"""Start the hooks of a site, a user and a request when something happens to a run.

<run>/.hooks        while events may still have to be delivered; `pit launch tick` looks for it
<run>/hooks.json    pit.hooks/1: the position in events.jsonl
<run>/hooks.out     the output of background deliveries

Each hook gets each of its events at least once, in order: of runs of `pit launch run`, and of tickets on this file
system. A hook that fails is tried again by the next delivery, three times in all; it changes nothing of the run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pitools.core import subprocesses, trust
from pitools.core.errors import PitError, ToolMissing, TryLater
from pitools.core.locks import lock
from pitools.core.record import Record, decode_json
from pitools.launch.plan import Plan, load_plan
from pitools.run import run_folder
from pitools.run.attempt_records import Verdict
from pitools.site.schema import Hook, HookEvent

TIMEOUT_S = 10.0
_TRIES = 3
_PENDING, _POSITION, _LOCK = ".hooks", "hooks.json", ".hooks.lock"
_LOSS_NAN = "loss-nan"


class HookInput(Record, frozen=True, kw_only=True, tag="pit.hook-input/1"):
    """What a hook gets on stdin. t: the event's time. attempt, cause, action, reason: of the decision or the verdict.

    step: of the first loss that is NaN or infinite, or None.
    """

    event: HookEvent
    run_id: str
    name: str
    site: str
    run_dir: str
    t: str
    attempt: str = ""
    cause: str = ""
    action: str = ""
    reason: str = ""
    step: int | None = None
    params: dict[str, str | int | float | bool] = {}


class HookPosition(Record, frozen=True, kw_only=True, tag="pit.hooks/1"):
    """How far events are delivered. offset: bytes of events.jsonl that all hooks are done with.

    hook: index of the next hook for the event at the offset. tries: its failed tries. last_error: of the last hook that
    failed, or "".
    """

    offset: int = 0
    hook: int = 0
    tries: int = 0
    last_error: str = ""


def last_error(run_dir: Path) -> str:
    """Return how the last hook of a run failed, or ""."""
    position = run_folder.read_or_none(run_dir / _POSITION, HookPosition)
    return position.last_error if position else ""


def mark_pending(run_dir: Path) -> None:
    """Have `pit launch tick` look for events of a run. Raises OSError."""
    (run_dir / _PENDING).touch(0o644)


def mark_again(run_dir: Path) -> None:
    """Have the events of a run that goes on after its verdict delivered, if it has hooks. Raises OSError."""
    if (run_dir / _POSITION).exists():
        mark_pending(run_dir)


def is_pending(run_dir: Path) -> bool:
    """Whether events of a run may have to be delivered."""
    return (run_dir / _PENDING).exists()


def find_program(hook: Hook, workdir: Path) -> str:
    """Return the program of a hook; a relative path is in the run's workdir.

    Raises ToolMissing for a name that is not on the PATH, ConfigError for a file that is missing or that others could
    change. Programs on the PATH, and files that are arguments, are not checked.
    """
    program = os.path.expanduser(hook.command[0])  # noqa: PTH111 - a name without "/" is left alone
    if "/" in program:
        trust.require_trusted(workdir / program, "program of a hook")
    elif shutil.which(program) is None:
        raise ToolMissing("not on this machine's PATH", where=program)
    return program


def report_nan(attempt: Path, step: int) -> None:
    """Record the first loss of an attempt that is NaN or infinite, and deliver that in the background. Never raises."""
    run_dir = attempt.parent.parent
    with contextlib.suppress(PitError, OSError):
        run_folder.append_event(run_dir, _LOSS_NAN, attempt=attempt.name, step=step)
        if is_pending(run_dir):
            argv = [sys.executable, "-m", "pitools.launch.hooks", str(run_dir)]
            subprocesses.start_detached(argv, env=os.environ, log=run_dir / "hooks.out", session=True)


@contextlib.contextmanager
def deliver_at_end(run_dir: Path) -> Iterator[None]:
    """Deliver a run's events at the end of the block, which may hold the run's lock."""
    try:
        yield
    finally:
        deliver(run_dir)


def deliver(run_dir: Path) -> None:
    """Start the hooks of a run's new events, each for at most TIMEOUT_S; errors go to stderr.

    Returns at once for a run without hooks, or while another process delivers.
    """
    try:
        if not is_pending(run_dir):
            return
        with lock(run_dir / _LOCK, f"delivery of run {run_dir.name}"):
            _deliver_locked(run_dir, load_plan(run_dir))
    except TryLater:
        return
    except (PitError, OSError) as error:
        print(f"pit: {run_dir.name}: hooks: {error}", file=sys.stderr)


def _deliver_locked(run_dir: Path, plan: Plan) -> None:
    position = run_folder.read_or_none(run_dir / _POSITION, HookPosition) or HookPosition()
    while read := _read_event(run_dir, position.offset):
        length, event = read
        hook_input = event and _make_input(event, run_dir, plan)
        while hook_input and position.hook < len(plan.hooks):
            hook = plan.hooks[position.hook]
            error = _start_hook(hook, hook_input, plan) if hook_input.event in hook.on else ""
            position = HookPosition(
                offset=position.offset,
                hook=position.hook + (not error or position.tries + 1 >= _TRIES),
                tries=position.tries + 1 if error and position.tries + 1 < _TRIES else 0,
                last_error=f"{hook.command[0]}, of {hook_input.event}: {error}" if error else position.last_error,
            )
            run_folder.write_record(run_dir / _POSITION, position)
            if error:
                print(f"pit: {run_dir.name}: hook {hook.command[0]}: {error}", file=sys.stderr)
                if position.tries:
                    return  # again by the next delivery
        position = HookPosition(offset=position.offset + length, last_error=position.last_error)
        run_folder.write_record(run_dir / _POSITION, position)
    verdict = run_folder.read_or_none(run_dir / "verdict.json", Verdict)
    is_moving = verdict is not None and verdict.code == "moving"  # a move that fails is followed by another verdict
    if (run_dir / "verdict.json").exists() and not is_moving:
        (run_dir / _PENDING).unlink(missing_ok=True)
        if _read_event(run_dir, position.offset):  # written since
            mark_pending(run_dir)


def _read_event(run_dir: Path, offset: int) -> tuple[int, run_folder.Event | None] | None:
    """Return the length of the line at an offset of events.jsonl, and its event if readable; None at the end."""
    with (run_dir / "events.jsonl").open("rb") as file:
        file.seek(offset)
        line = file.readline(1 << 20)
    if not line.endswith(b"\n"):
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return len(line), decode_json(line, run_folder.Event)
    return len(line), None


def _hook_event(event: run_folder.Event) -> HookEvent | None:
    """Return the name of an event for hooks; None if they do not get it."""
    if event.event == "decided" and event.detail.get("action") in ("retry", "resubmit"):
        return "retry"
    if event.event in ("succeeded", "stopped") and event.detail.get("code") != "moving":
        return "verdict"
    return "nan" if event.event == _LOSS_NAN else None


def _make_input(event: run_folder.Event, run_dir: Path, plan: Plan) -> HookInput | None:
    """Return what hooks get of an event; None if hooks do not get it."""
    name, detail = _hook_event(event), event.detail
    if name is None:
        return None
    return HookInput(
        event=name,
        run_id=run_dir.name,
        name=plan.name,
        site=plan.site,
        run_dir=str(run_dir),
        t=event.t,
        attempt=str(detail.get("attempt", "")),
        cause=str(detail.get("kind", "")),
        action=event.event if name == "verdict" else str(detail.get("action", "")),
        reason=str(detail.get("reason", "")),
        step=detail.get("step"),
        params=plan.request.params,
    )


def _start_hook(hook: Hook, hook_input: HookInput, plan: Plan) -> str:
    """Run one hook of a run to its end; return its error, or ""."""
    workdir = Path(plan.request.workdir)
    env = {"PIT_EVENT": hook_input.event, "PIT_RUN_ID": hook_input.run_id, "PIT_RUN_DIR": hook_input.run_dir}
    return run_hook(hook, hook_input, env, workdir, workdir if workdir.is_dir() else Path(hook_input.run_dir))


def run_hook(hook: Hook, record: Record, env: dict[str, str], program_dir: Path, cwd: Path) -> str:
    """Run a hook with a record on stdin, for at most TIMEOUT_S; return its error, or "".

    program_dir: folder of its program, if that is a relative path.
    """
    try:
        done = subprocesses.run(
            [find_program(hook, program_dir), *hook.command[1:]],
            timeout_s=TIMEOUT_S,
            env=env,
            stdin=msgspec.json.encode(record).decode() + "\n",
            cwd=cwd,
        )
    except PitError as error:
        return error.message
    return f"exit code {done.code}: {done.stderr.strip()[-500:]}" if done.code else ""


if __name__ == "__main__":
    deliver(Path(sys.argv[1]))
