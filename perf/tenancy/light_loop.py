"""A loop without a framework, whose loss depends on all steps before: it saves every few steps, and at a signal."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from pitools.launch import exit_codes
from pitools.run.steps import StepLog


def light(*, steps: int, checkpoint_every: int, delay_s: float, hold_at: int = -1, **_: object) -> None:
    """Make steps up to `steps`, each rank its own. Raises SystemExit after the save that SIGTERM or SIGUSR2 caused.

    delay_s: of each step; hold_at: wait before this step; both until the run's folder has a file `go`.
    """
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _frame: received.append(number))
    rank = int(os.environ["PIT_RANK"])
    state = Path(os.environ["PIT_CHECKPOINT_DIR"], f"{rank}.json")
    state.parent.mkdir(parents=True, exist_ok=True)
    step, loss = json.loads(state.read_text()) if state.exists() else (0, 0.5)
    log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"], "steps"), rank)

    def save() -> None:
        _replace(state, json.dumps([step, loss]))
        if rank == 0:
            _replace(Path(os.environ["PIT_RUN_DIR"], "progress"), str(step))

    go = Path(os.environ["PIT_RUN_DIR"], "go")
    while step < steps and not received:
        if not go.exists():
            time.sleep(0.1 if step == hold_at else delay_s)
        if step == hold_at and not go.exists():
            log.heartbeat()
            continue
        loss = 3.7 * loss * (1 - loss)
        log.write(step=step, loss=loss, wall_s=delay_s, input_s=0, compute_s=delay_s, comm_s=0, rank_samples=1)
        step += 1
        if step % checkpoint_every == 0:
            save()
    log.close()
    if step < steps:
        save()
        raise SystemExit(exit_codes.STOPPED_FOR_RESUME)


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)
