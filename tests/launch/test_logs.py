"""One rank's output: the program's own, whole, in the order in which it was written."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.launch import plan as planning
from pitools.launch.framed import Unframed

MakePlan = Callable[..., planning.Plan]
Pit = Callable[..., subprocess.CompletedProcess[str]]

# As submitit 1.5.4 writes them, in both forms that they take.
BEFORE = [
    "submitit INFO (2026-11-22 05:10:31,959) - Starting with JobEnvironment(job_id=22, hostname=n1, local_rank=0(1))\n",
    "submitit INFO (2026-11-22 05:10:31,960) - Loading pickle: /runs/x/submitit/22_submitted.pkl\n",
]
AFTER = [
    "submitit INFO (2026-11-22 05:10:32,291) - Job completed successfully\n",
    "INFO:submitit:Job completed successfully\n",
    "submitit INFO (2026-11-22 05:10:32,291) - Exiting after successful completion\n",
]
OWN = ["loss 0.5\n", "\n", "INFO:submitit:mine\n", "submitit INFO (2026-11-22 05:10:32,291) - mine\n", "é\r\n"]


def said(pieces: list[str]) -> str:
    unframed = Unframed()
    return "".join(map(unframed.feed, pieces)) + unframed.end()


@given(
    st.lists(st.sampled_from(BEFORE + AFTER + OWN), max_size=8),
    st.sampled_from(["", "sub", "submitit INFO (", "INFO:", " ", "9 of 9"]),
    st.lists(st.integers(0, 500), max_size=6),
)
def test_only_the_frame_is_left_out(lines: list[str], rest: str, cuts: list[int]) -> None:
    """However it arrives: between the first and the last line of the program nothing is."""
    text = "".join(lines) + rest
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found = said([text[begin:end] for begin, end in pairwise(at)])
    own = [*lines, rest]
    while own and own[0] in BEFORE:
        del own[0]
    while own and own[-1] in ("", *AFTER):
        del own[-1]
    assert found == "".join(own)


@pytest.fixture
def log(make_plan: MakePlan, tmp_path: Path) -> Path:
    """The log of rank 0 of a run's second attempt, with submitit's lines around the program's."""
    run = tmp_path / "runs" / "x-20260101-000000-abc123"
    plan = msgspec.structs.replace(make_plan("local"), site="local")
    path = run / "attempts" / "1" / "logs" / "0.out"
    path.parent.mkdir(parents=True)
    (run / "plan.json").write_bytes(msgspec.json.encode(plan))
    path.write_text("".join([*BEFORE, "loss 0.5\n", *AFTER]))
    return path


def test_logs_are_the_programs_own(pit: Pit, log: Path) -> None:
    """Unless all is asked for; where none began, why staging failed; a rank without a word is named as such."""
    run = str(log.parents[3])
    assert pit("launch", "logs", run).stdout == "loss 0.5\n"
    assert pit("launch", "logs", run, "--all").stdout == log.read_text()
    log.rename(log.with_name("lost"))
    (log.parent / "stage.n1.out").write_text("pit: 3 of 9 GiB\n")
    (log.parent / "stage.n2.out").write_text("pit: error: no space left\n")
    log.parent.with_name("exit.json").write_text("{}")
    assert pit("launch", "logs", run).stdout == "pit: error: no space left\n"
    log.write_text("")
    done = pit("launch", "logs", run)
    assert (done.returncode, done.stdout, "rank 0 has said nothing" in done.stderr) == (0, "", True)
