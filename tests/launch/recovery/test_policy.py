"""What follows from a cause: the table, the budgets, and the properties that no order of faults may break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pitools.launch.plan import Plan
from pitools.launch.recovery import policy
from pitools.launch.request import Request, RetryBudget
from pitools.run.attempt_records import Cause, CauseKind, Decision, Evidence
from pitools.site import dialect, load
from pitools.site.schema import Recovery, Site

SITE = Site(name="s")
KINDS = get_args(CauseKind)
CONTINUED = ("retry", "resubmit", "defer")


def plan(nodes: int = 4, **retry: int) -> Plan:
    request = Request(name="t", command="true", nodes=nodes, retry=RetryBudget(**retry))
    job = dialect.JobSpec(name="t", nodes=nodes, partition="train")
    return Plan(name="t", site="s", request=request, job=job, data=(), runs_dir="/r", nvme="", python="python")


def cause(kind: CauseKind, at: int = 0, *, node: str = "", **more: Any) -> Cause:
    observed = (Evidence(t="", source="log", text="seen", kind=kind, node=node),) if node else ()
    return Cause(attempt=str(at), kind=kind, confidence="certain", reason=kind, evidence=observed, **more)


def decide(*causes: Cause, nodes: int = 4, **asked: Any) -> Decision:
    return policy.decide(plan(nodes), asked.pop("site", SITE), causes[-1], causes[:-1], **{"in_job": True, **asked})


@pytest.mark.parametrize(
    ("causes", "action", "exclude"),
    [
        ([cause("succeeded")], "done", ()),
        ([cause("cancelled")], "stop", ()),
        ([cause("program")], "stop", ()),
        ([cause("program", progressed=True)], "stop", ()),
        ([cause("memory")], "stop", ()),
        ([cause("preempted")], "resubmit", ()),
        ([cause("time-limit", progressed=True)], "resubmit", ()),
        ([cause("time-limit")], "resubmit", ()),
        ([cause("time-limit")] * 2, "stop", ()),
        ([cause("time-limit"), cause("time-limit", progressed=True), cause("time-limit")], "resubmit", ()),
        ([cause("node", nodes=("n1",))], "resubmit", ("n1",)),
        ([cause("gpu", nodes=("n1",))], "resubmit", ("n1",)),
        ([cause("node", node="n2")], "retry", ()),
        ([cause("node", node="n2"), cause("node", node="n3")], "retry", ()),
        ([cause("node", node="n2"), cause("node", node="n2")], "resubmit", ("n2",)),
        ([cause("preflight", nodes=("n1",))], "resubmit", ("n1",)),
        ([cause("preflight", nodes=("n1",))] * 5, "stop", ()),
        ([cause("preflight")] * 4 + [cause("preempted"), cause("preflight", nodes=("n1",))], "resubmit", ("n1",)),
        ([cause("unknown", fingerprint="f"), cause("preflight"), cause("unknown", fingerprint="f")], "stop", ()),
        ([cause("preflight")] * 4 + [cause("unknown")], "retry", ()),
        ([cause("network", node="n2", nodes=("n2",))], "retry", ()),
        ([cause("network"), cause("network")], "resubmit", ()),
        ([cause("network", progressed=True)] * 9, "retry", ()),
        ([cause("network")] * 4, "stop", ()),
        ([cause("hang", nodes=("n1",))], "retry", ()),
        ([cause("hang", nodes=("n1",))] * 2, "resubmit", ("n1",)),
        ([cause("hang", nodes=("n1",))] * 3, "stop", ()),
        ([cause("storage")], "retry", ()),
        ([cause("storage", nodes=("n4",))], "resubmit", ("n4",)),
        ([cause("unknown")], "retry", ()),
        ([cause("unknown")] * 3, "stop", ()),
        ([cause("unknown", fingerprint="f")] * 2, "stop", ()),
        ([cause("unknown", fingerprint="f"), cause("unknown", fingerprint="g")], "retry", ()),
        ([cause("unknown", fingerprint="f", node="n1")] * 2, "resubmit", ("n1",)),
        ([cause("unknown", fingerprint="f", node="n1")] * 2 + [cause("unknown", fingerprint="f")], "stop", ()),
        ([cause("unknown", exit_code=75, node="n1", progressed=True)] * 3, "retry", ()),
        (
            [cause("unknown", exit_code=75, node="n1"), cause("unknown", exit_code=75, node="n1", progressed=True)],
            "retry",
            (),
        ),
        ([cause("unknown", exit_code=137, node="n1", progressed=True)] * 2, "resubmit", ("n1",)),
    ],
)
def test_the_table(causes: list[Cause], action: str, exclude: tuple[str, ...]) -> None:
    """Each cause, the first time and again, in the job that it happened in."""
    output = decide(*causes)
    assert (output.action, output.exclude) == (action, exclude)


@pytest.mark.parametrize(
    ("nodes", "causes"),
    [
        (4, [replace(cause("node", node="n1", exit_code=137), confidence="guess")] * 2),
        (1, [cause("unknown", fingerprint="f", node="n1"), cause("unknown", fingerprint="g", node="n1")]),
    ],
)
def test_no_node_is_excluded_for_being_the_place_alone(nodes: int, causes: list[Cause]) -> None:
    """Neither the node of a rank that was killed twice, perhaps by itself, nor the only node of a run."""
    output = decide(*causes, nodes=nodes)
    assert (output.action, output.exclude) == ("retry", ())


def test_the_same_failure_again_is_the_program_s() -> None:
    """Twice the same without progress is called a user error, and says how often."""
    output = decide(*[cause("unknown", fingerprint="f")] * 2)
    assert (output.action, output.kind) == ("stop", "program")


def test_storage_is_waited_for_and_longer_each_time() -> None:
    """A shared folder that is read-only for 30 s is outlived by the second wait."""
    waits = [decide(*[cause("storage")] * count).wait_s for count in range(1, 6)]
    assert waits == [10, 30, 60, 120, 120]


@pytest.mark.parametrize(
    ("asked", "action"),
    [
        ({"in_job": False}, "resubmit"),
        ({"seconds_left": 5.0}, "resubmit"),
        ({"seconds_left": 3000.0}, "retry"),
        ({"seconds_left": 5.0, "site": Site(name="s", recovery=Recovery(submit_from="login"))}, "defer"),
        ({"seconds_left": 5.0, "site": Site(name="s", recovery=Recovery(chain="none"))}, "defer"),
        ({"in_job": False, "site": Site(name="s", recovery=Recovery(chain="none"))}, "stop"),
        ({"in_job": False, "site": Site(name="s", recovery=Recovery(submit_from="login"))}, "resubmit"),
    ],
)
def test_where_the_next_attempt_is_made(asked: dict[str, Any], action: str) -> None:
    """In the allocation while it lives and has time; else in a fresh job, by whom the site lets submit one."""
    assert decide(cause("unknown"), **asked).action == action


@pytest.mark.parametrize("kind", ["preempted", "cancelled"])
def test_a_bare_term_decides_nothing_in_the_job(kind: CauseKind) -> None:
    """Preemption and scancel look alike from inside: the job neither stops the run nor submits another."""
    guess = replace(cause(kind), confidence="guess")
    assert decide(guess).action == "defer"
    # What Slurm itself has started again was not cancelled.
    assert decide(guess, allocation_nodes=["n1"]).action == "retry"


def test_slurm_s_own_requeue_is_waited_for_where_the_site_says_so() -> None:
    """A preempted job is in the queue again; for any other cause it has to be put there."""
    site = Site(name="s", recovery=Recovery(chain="requeue"))
    assert decide(cause("preempted"), site=site).action == "defer"
    assert decide(cause("preempted"), site=site, in_job=False).action == "resubmit"
    assert decide(cause("time-limit"), site=site).action == "resubmit"


def test_time_limits_without_a_step_name_the_staging_logs() -> None:
    """Staging is not watched for hangs: where no step was logged, the verdict says where to look."""
    reasons = [decide(cause("time-limit"), cause("time-limit", steps=steps)).reason for steps in (0, 9)]
    assert ["--of stage" in reason for reason in reasons] == [True, False]


def test_a_job_that_slurm_began_again_goes_on_where_it_may() -> None:
    """On nodes that are not the bad one it goes on; with the bad one among them it asks for others."""
    bad = cause("node", nodes=("n1",))
    assert decide(bad, allocation_nodes=["n2", "n3"]).action == "retry"
    assert decide(bad, allocation_nodes=["n2", "n3"]).exclude == ("n1",)
    assert decide(bad, allocation_nodes=["n1", "n2"]).action == "resubmit"
    assert decide(cause("preempted"), allocation_nodes=["n1"]).action == "retry"


@pytest.mark.parametrize("name", ["alpha", "local", "h100-ib"])
def test_enough_is_less_than_all(name: str) -> None:
    """However short a job is, an attempt at its beginning is worth making."""
    assert load.load_site(name).recovery.grace_s >= 0
    for time_s in (60, 300, 86400):
        short = replace(plan(), job=replace(plan().job, time_s=time_s, signal="USR2@600"))
        assert policy.useful_attempt_s(short) <= time_s / 2


causes = st.builds(
    lambda kind, progressed, fingerprint, node, nodes, confidence: Cause(
        attempt="0",
        kind=kind,
        confidence=confidence,
        reason=kind,
        progressed=progressed,
        fingerprint=fingerprint,
        nodes=nodes,
        evidence=cause(kind, node=node).evidence,
    ),
    st.sampled_from([kind for kind in KINDS if kind not in ("succeeded", "cancelled")]),
    st.booleans(),
    st.sampled_from(["", "f", "g"]),
    st.sampled_from(["", "n1", "n2"]),
    st.lists(st.sampled_from(["n1", "n2"]), unique=True).map(tuple),
    st.sampled_from(["certain", "likely", "guess"]),
)


def run_of(world: Callable[[int], Cause], most: int, **retry: int) -> tuple[list[Cause], Decision]:
    """The attempts of a run in which attempt i ends as the world says, until it stops, or `most` were made."""
    history: list[Cause] = []
    while True:
        now = replace(world(len(history)), attempt=str(len(history)))
        output = policy.decide(plan(**retry), SITE, now, history)
        history.append(now)
        if output.action not in CONTINUED or len(history) >= most:
            return history, output


@given(st.lists(causes, min_size=1, max_size=30), st.integers(1, 12))
@settings(max_examples=80)
def test_without_progress_a_run_ends(faults: list[Cause], most: int) -> None:
    """However faults mix, there are never more than `max` attempts with ranks in a row that bring nothing."""
    created, output = run_of(lambda at: replace(faults[at % len(faults)], progressed=False), 200, max=most)
    assert output.action == "stop"
    assert sum(past.kind != "preflight" for past in created) <= most


@given(st.lists(st.sampled_from(["preempted", "time-limit", "node", "gpu", "network", "storage"]), min_size=1))
@settings(max_examples=50)
def test_steady_progress_never_stops(faults: list[CauseKind]) -> None:
    """What is not the program's own never ends a run that gets on between the faults."""
    _, output = run_of(lambda at: cause(faults[at % len(faults)], progressed=True), 150)
    assert output.action == "resubmit"


@given(st.lists(causes, max_size=10), st.booleans(), st.sampled_from([None, 5.0, 1e5]))
@settings(max_examples=100)
def test_what_is_over_is_never_continued(before: list[Cause], in_job: bool, left_s: float | None) -> None:
    """Cancelled and finished runs are not, whatever came before; nor is a memory or user error by default."""
    for kind, action in (("cancelled", "stop"), ("succeeded", "done"), ("program", "stop"), ("memory", "stop")):
        last = cause(kind)  # type: ignore[arg-type]
        assert policy.decide(plan(), SITE, last, before, in_job=in_job, seconds_left=left_s).action == action


@given(st.lists(causes, min_size=1, max_size=12), st.booleans())
@settings(max_examples=100)
def test_only_named_nodes_are_left_out(faults: list[Cause], in_job: bool) -> None:
    """Nobody is excluded whom no evidence names, and a run that stops excludes nobody."""
    output = policy.decide(plan(), SITE, faults[-1], faults[:-1], in_job=in_job)
    named = set(faults[-1].nodes) | {item.node for item in faults[-1].evidence}
    assert set(output.exclude) <= named
    assert not (output.action in ("stop", "done") and output.exclude)


def test_a_preflight_spends_no_budget() -> None:
    """With no retry left at all, its nodes are replaced; and what came before it still counts."""
    nothing = dict.fromkeys(RetryBudget.__struct_fields__, 0) | {"max": 1}
    bad = cause("preflight", nodes=("n1",))
    assert policy.decide(plan(**nothing), SITE, bad, []).action == "resubmit"
    assert policy.decide(plan(max=2), SITE, cause("network"), [bad] * 4).action == "resubmit"
    assert policy.decide(plan(max=2), SITE, cause("network"), [cause("network"), bad]).action == "stop"


def test_without_slurm_no_other_node_is_there() -> None:
    """A machine that fails its own preflight stops the run at once."""
    assert decide(cause("preflight", nodes=("here",)), site=Site(name="s", scheduler="none")).action == "stop"
