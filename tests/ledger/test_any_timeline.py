"""Whatever a run's folder says, each resource-second is in one state, and their sum is the allocation."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.ledger.run_ledger import run_ledger
from tests.ledger.run_maker import EPOCH, add_attempt, add_rank, add_receipt, add_steps, finish, make_run, row, text

AHEAD = b'{"t":"9999-12-31T23:59:59Z","step":1,"wall_s":1e9}\n'
SECONDS = st.floats(-50, 500)
PARTS = st.lists(st.floats(0, 3) | st.just(1e300), min_size=8, max_size=8)
RANK = st.fixed_dictionaries(
    {
        "began": SECONDS,
        "walls": st.lists(st.floats(0, 20) | st.just(1e300), min_size=1, max_size=8),
        "first": st.integers(-3, 30),
        "comm_s": PARTS,
        "input_s": PARTS,
        "checkpoint_s": PARTS,
        "again": st.none() | st.floats(-20, 20),  # the same file goes on, with a clock that was set
        "tail": st.sampled_from([b"", b'{"schema":"pit.st', b"\x00\xff\n", b"[]\n\n", AHEAD]),
    }
)
ATTEMPT = st.fixed_dictionaries(
    {
        "started": SECONDS,
        "ended": st.none() | SECONDS,
        "job": st.sampled_from(["7", "8"]),
        "restart": st.integers(0, 2),
        "saved_steps": st.integers(0, 20),
        "limit": st.none() | SECONDS,
        "staged": st.none() | st.tuples(SECONDS, SECONDS),
        "rank_began": st.none() | SECONDS,
        "ranks": st.lists(RANK, max_size=3),
        "missing": st.sampled_from(["", "", "", "start.json", "exit.json", "steps/0.jsonl"]),
    }
)
ROW = st.tuples(st.sampled_from(["7", "8"]), SECONDS, st.integers(0, 300), st.integers(0, 200), st.booleans())


def write(folder: Path, attempt: dict[str, object], run_dir: Path) -> None:
    ranks = attempt["ranks"]
    limit = attempt["limit"]
    made = add_attempt(
        run_dir, attempt["started"], attempt["ended"], job_id=attempt["job"], restart=attempt["restart"],
        saved_steps=attempt["saved_steps"], nodes=2, time_limit_at="" if limit is None else text(limit),
    )  # fmt: skip
    if attempt["staged"]:
        add_receipt(made, *attempt["staged"])
    if attempt["rank_began"] is not None:
        add_rank(made, attempt["rank_began"])
    for number, one in enumerate(ranks):
        parts = {name: one[name][: len(one["walls"])] for name in ("comm_s", "input_s", "checkpoint_s")}
        walls = one["walls"]
        end = one["began"]
        add_steps(made, number, end, [min(wall, 100) for wall in walls], first=one["first"], **parts)
        if one["again"] is not None:
            add_steps(made, number, end + one["again"], [1.0, 2.0], first=one["first"] + 1, comm_s=0.5)
        with (made / "steps" / f"{number}.jsonl").open("ab") as file:
            file.write(one["tail"])
    if attempt["missing"]:
        (made / attempt["missing"]).unlink(missing_ok=True)


@settings(max_examples=80, deadline=None)
@given(st.lists(ATTEMPT, max_size=4), st.lists(ROW, max_size=4), st.booleans(), st.integers(0, 8), st.floats(-50, 1000))
def test_states_sum_to_the_allocation(
    attempts: list[dict[str, object]],
    spans: list[tuple[str, float, int, int, bool]],
    is_over: bool,
    gpus: int,
    now: float,
) -> None:
    """Overlaps, clocks set back, torn lines, missing files, several attempts and jobs, requeues, running runs."""
    with TemporaryDirectory() as folder:
        run_dir = make_run(Path(folder), nodes=2, gpus=gpus, submitted=-1000)
        for attempt in attempts:
            write(Path(folder), attempt, run_dir)
        if is_over:
            finish(run_dir, 400)
        rows = [
            row(begin - wait, begin, None if is_open else begin + length, job_id=job, nodes=2)
            for job, begin, wait, length, is_open in spans
        ]
        ledger = run_ledger(run_dir, rows, now=EPOCH + now)
    assert all(value >= -1e-6 for value in ledger.seconds.values())
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.allocated_s, rel=1e-9, abs=1e-5)
    assert ledger.queue_s >= 0
    of_slurm = sum(row.elapsed_s * row.nodes * (gpus or 1) for row in rows if row.end and row.job_id == "7")
    assert ledger.allocated_s >= of_slurm - 1e-5
    if ledger.goodput is not None:
        assert 0 <= ledger.calendar_goodput <= ledger.goodput + 1e-9 <= 1 + 2e-9
