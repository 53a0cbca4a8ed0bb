"""States: shortened, unknown and compound ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.slurm import states


@pytest.mark.parametrize(
    ("text", "state", "finished"),
    [
        ("COMPLETED", "COMPLETED", True),
        ("CANCELLED by 1000", "CANCELLED", True),
        ("CANCELLED+", "CANCELLED", True),
        ("OUT_OF_ME+", "OUT_OF_MEMORY", True),
        ("NODE_FAIL", "NODE_FAIL", True),
        ("PR", "PREEMPTED", True),
        ("PD", "PENDING", False),
        ("COMPLETING", "COMPLETING", False),
        ("REQUEUE_HOLD", "REQUEUE_HOLD", False),
        ("SPECIAL_EXIT", "SPECIAL_EXIT", False),
        ("COMPLET+", "COMPLET+", False),
        ("EXPEDITING", "EXPEDITING", False),
        ("", "UNKNOWN", False),
    ],
)
def test_job_states(text: str, state: str, finished: bool) -> None:
    """A state is one whole word, and only the known last ones are finished."""
    assert states.parse_job_state(text) == state
    assert states.is_final(text) is finished


@given(st.text())
def test_any_text_is_some_state(text: str) -> None:
    """No text makes the functions fail, and reading a state twice changes nothing."""
    state = states.parse_job_state(text)
    assert state
    assert states.parse_job_state(state) == state or " " in state
    states.is_final(text)
    base, flags = states.parse_node_state(text)
    assert base
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (["COMPLETED", "RUNNING", "FAILED"], "RUNNING"),
        (["COMPLETED", "FAILED", "TIMEOUT"], "FAILED"),
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["FAILED", "NEW_IN_27"], "NEW_IN_27"),
        ([], "UNKNOWN"),
    ],
)
def test_joint_state(parts: list[str], whole: str) -> None:
    """A job of several parts is unfinished while one is, and completed only if all are."""
    assert states.combined_state(parts) == whole


@pytest.mark.parametrize(
    ("text", "reason", "held"),
    [
        ("Resources", "resources", False),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "resources", False),
        ("ReqNodeNotAvail,_UnavailableNodes:n[1-2]", "resources", False),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "resources", False),
        ("Priority", "priority", False),
        ("BadConstraints", "bad-constraints", False),
        ("PartitionConfig", "bad-constraints", False),
        ("Reservation", "reservation", False),
        ("BeginTime", "begin-time", False),
        ("JobHeldUser", "held", True),
        ("JobHeldAdmin", "held", True),
        ("JobHoldMaxRequeue", "held", True),
        ("launch_failed_requeued_held", "held", True),
        ("Dependency", "other", False),
        ("QOSMaxCpuPerUserLimit", "other", False),
        ("Brand new", "other", False),
        ("None", "none", False),
        ("", "none", False),
    ],
)
def test_pending_reasons(text: str, reason: str, held: bool) -> None:
    """One class for each of Slurm's spellings; what a later Slurm adds is none of the known ones."""
    assert states.pending_reason(text) == reason
    assert states.is_held(text) is held


def test_pending_reasons_of_a_real_queue(repo: Path) -> None:
    """slurmctld gave a reason of each class to a job that was made to wait so."""
    files = [repo / f"tests/replay/slurm-22.05/pending_{name}.txt" for name in ("squeue", "full_squeue")]
    rows = [line.split("|") for file in files for line in file.read_text().splitlines()]
    output = {name: states.pending_reason(reason).value for name, _, reason in rows}
    assert output == {
        "admin": "held",
        "begin": "begin-time",
        "constraints": "bad-constraints",
        "depends": "other",
        "drained": "resources",
        "fill": "none",
        "held": "held",
        "priority": "priority",
        "requeued": "held",
        "reservation": "reservation",
        "resources": "resources",
        "unavailable": "resources",
    }
    assert set(output.values()) == set(states.PendingReason)


@pytest.mark.parametrize(
    ("text", "state", "flags"),
    [
        ("IDLE", "idle", ()),
        ("IDLE+DRAIN", "idle", ("drain",)),
        ("DOWN+DRAIN+NOT_RESPONDING", "down", ("drain", "not_responding")),
        ("DOWN*+CLOUD", "down", ("not_responding", "cloud")),
        ("MIXED+PLANNED+SOME_NEW_FLAG", "mixed", ("planned", "some_new_flag")),
        ("BRANDNEW", "brandnew", ()),
        ("idle~", "idle", ("powered_down",)),
        ("mixed-", "mixed", ("planned",)),
        ("down$*", "down", ("maintenance", "not_responding")),
        ("allocated+", "allocated", ("completing",)),
    ],
)
def test_node_states(text: str, state: str, flags: tuple[str, ...]) -> None:
    """Flags spelt out and flags as marks give the same base state and flags; unknown words stay."""
    assert states.parse_node_state(text) == (state, flags)


@pytest.mark.parametrize(
    ("state", "flags", "takes"),
    [
        ("idle", (), True),
        ("allocated", ("completing",), True),
        ("idle", ("powered_down", "cloud"), True),
        ("idle", ("cloud", "powered_down", "not_responding"), True),
        ("idle", ("drain",), False),
        ("mixed", ("not_responding",), False),
        ("down", (), False),
        ("brandnew", (), False),
    ],
)
def test_which_nodes_take_jobs(state: str, flags: tuple[str, ...], takes: bool) -> None:
    """A node takes jobs when its base state can and no flag forbids it."""
    assert states.is_schedulable(state, flags) is takes
