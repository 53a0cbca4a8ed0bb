"""What the client makes of answers and failures, told to it one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pitools.core.errors import ClusterError, PitError, ToolMissing, Unreachable
from pitools.slurm.client import Client, Transport
from pitools.slurm.errors import OutcomeUnknown, SlurmRefused, SlurmUnreachable
from pitools.slurm.parse_accounting import ACCOUNTING_FORMAT
from pitools.slurm.parse_jobs import JOB_FORMAT

Make = Callable[..., tuple[Client, list[list[str]]]]
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


def queue(argv: Sequence[str], *jobs: tuple[str, str, str]) -> str:
    """squeue's text for (job id, number, state), with the mark that the call asked for."""
    sep = argv[-1].removeprefix("%i").split("%")[0]
    rows = [dict.fromkeys(JOB_FORMAT, "") | {"job_id": a, "raw_id": b, "state": c} for a, b, c in jobs]
    return "".join(sep.join(row.values()) + "\n" for row in rows)


def accounts(argv: Sequence[str], *jobs: tuple[str, str, str]) -> str:
    """sacct's text for (job id, number, state), with its header."""
    sep = next(argument for argument in argv if argument.startswith("--delimiter=")).removeprefix("--delimiter=")
    empty = dict.fromkeys(ACCOUNTING_FORMAT, "") | {"ExitCode": "0:0"}
    rows = [empty | {"JobID": a, "JobIDRaw": b, "State": c} for a, b, c in jobs]
    return "".join(sep.join(row) + "\n" for row in [list(ACCOUNTING_FORMAT), *(row.values() for row in rows)])


def test_states_take_one_squeue_when_it_knows_all(told: Make) -> None:
    """Jobs that squeue knows cost one command, however many they are."""
    client, ran = told(lambda argv: (0, queue(argv, ("4", "4", "RUNNING"), ("5", "5", "FAILED")), ""))
    assert client.state_of(["4", "5"]) == {"4": "RUNNING", "5": "FAILED"}
    assert [argv[0] for argv in ran] == ["squeue"]
    assert {"--jobs=4,5", "--states=all", "--array"} <= set(ran[0])


def test_states_ask_accounting_once_for_the_rest(told: Make) -> None:
    """Only what squeue does not know goes to sacct, in one command; what neither knows is UNKNOWN."""

    def answer(argv: Sequence[str]) -> tuple[int, str, str]:
        if argv[0] == "squeue":
            return 0, queue(argv, ("4", "4", "RUNNING")), ""
        return 0, accounts(argv, ("5", "5", "CANCELLED by 1000"), ("8_0", "9", "TIMEOUT")), ""

    client, ran = told(answer)
    assert client.state_of(["4", "5", "6", "8_0"]) == {
        "4": "RUNNING",
        "5": "CANCELLED",
        "6": "UNKNOWN",
        "8_0": "TIMEOUT",
    }
    assert [argv[0] for argv in ran] == ["squeue", "sacct"]
    assert "--jobs=5,6,8_0" in ran[1]


@pytest.mark.parametrize(
    "sacct",
    [
        (1, "", "Slurm accounting storage is disabled\n"),
        (1, "", "sacct: error: Problem talking to the database: Connection refused\n"),
        (0, "garbage\n", ""),
    ],
)
def test_states_without_accounting_are_unknown(told: Make, sacct: tuple[int, str, str]) -> None:
    """Where accounting is off, down or unreadable, a job that has left the queue is UNKNOWN, not finished."""
    gone = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
    client, _ = told(lambda argv: gone if argv[0] == "squeue" else sacct)
    assert client.state_of(["4"]) == {"4": "UNKNOWN"}


def test_states_fail_when_the_controller_is_gone(told: Make) -> None:
    """No answer from slurmctld is no state: accounting alone is not asked."""
    client, ran = told(lambda argv: (1, "", DOWN))
    with pytest.raises(Unreachable):
        client.state_of(["4"])
    assert len(ran) == 1
    assert client.state_of([]) == {}
    assert len(ran) == 1


def test_the_state_of_a_whole_array(told: Make) -> None:
    """An array runs while a task does; that its last known tasks have ended is asked of accounting, which knows all."""
    running, _ = told(lambda argv: (0, queue(argv, ("6_0", "13", "COMPLETED"), ("6_1", "6", "RUNNING")), ""))
    assert running.state_of(["6", "6_0", "13"]) == {"6": "RUNNING", "6_0": "COMPLETED", "13": "COMPLETED"}

    def answer(argv: Sequence[str]) -> tuple[int, str, str]:
        if argv[0] == "squeue":
            return 0, queue(argv, ("6_1", "6", "COMPLETED")), ""
        return 0, accounts(argv, ("6_0", "13", "FAILED"), ("6_1", "6", "COMPLETED")), ""

    end, ran = told(answer)
    assert end.state_of(["6", "6_1"]) == {"6": "FAILED", "6_1": "COMPLETED"}
    assert "--jobs=6" in ran[1]


@pytest.mark.parametrize("method", ["jobs", "job"])
def test_an_unknown_job_is_no_error(told: Make, method: str) -> None:
    """A job that is not there is an empty list."""
    client, _ = told(lambda argv: (1, "", "slurm_load_jobs error: Invalid job id specified\n"))
    ask: Any = getattr(client, method)
    assert ask(["4"] if method == "jobs" else "4") == []


def test_a_job_name_is_exact(told: Make) -> None:
    """Of what squeue's name list matches, only the very name counts."""
    rows = [("run-1", "4"), ("RUN-1", "5")]

    def answer(argv: Sequence[str]) -> tuple[int, str, str]:
        sep = argv[-1].removeprefix("%i").split("%")[0]
        base = dict.fromkeys(JOB_FORMAT, "") | {"state": "RUNNING"}
        return 0, "".join(sep.join((base | {"job_id": i, "raw_id": i, "name": n}).values()) + "\n" for n, i in rows), ""

    client, _ = told(answer)
    assert [job.job_id for job in client.jobs(name="run-1")] == ["4"]


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (0, "scontrol: error: No topology information available\n"),
        (1, "slurm_load_topo error: Requested topology configuration is not available\n"),
    ],
)
def test_a_flat_topology_is_empty(told: Make, code: int, stderr: str) -> None:
    """Each version's way to say that there is no topology."""
    client, _ = told(lambda argv: (code, "", stderr))
    assert client.topology() == []


def test_a_topology_that_nobody_answered_is_not_flat(told: Make) -> None:
    """scontrol exits with 0 though the controller is gone; that is not a flat topology."""
    client, _ = told(lambda argv: (0, "", DOWN))
    with pytest.raises(Unreachable):
        client.topology()


@pytest.mark.parametrize(
    ("stdout", "stderr", "kind"),
    [
        ("", DOWN, SlurmUnreachable),
        ("", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n", OutcomeUnknown),
        ("", "sbatch: error: Batch job submission failed: Invalid qos specification\n", SlurmRefused),
    ],
)
def test_submitting_in_doubt_is_said(told: Make, stdout: str, stderr: str, kind: type[PitError]) -> None:
    """A job that may have been queued is told apart from one that was not."""
    client, _ = told(lambda argv: (1, stdout, stderr))
    with pytest.raises(kind) as caught:
        client.submit("#!/bin/sh\n")
    assert type(caught.value) is kind
    if kind is OutcomeUnknown:
        assert "its name with squeue" in caught.value.hint


def test_an_answer_without_an_id_is_in_doubt(told: Make) -> None:
    """sbatch that succeeds and 0 jobs has probably queued one."""
    client, _ = told(lambda argv: (0, "thank you\n", ""))
    with pytest.raises(OutcomeUnknown, match="0 jobs"):
        client.submit("#!/bin/sh\n")


@pytest.mark.parametrize(
    "stderr",
    [
        "",
        "scancel: error: Kill job error on job id 4: Invalid job id specified\n",
        "scancel: error: Kill job error on job id 4: Job/step already completing or completed\n",
    ],
)
def test_cancelling_what_has_ended_is_done(told: Make, stderr: str) -> None:
    """Cancelling twice, or what is gone, is no error."""
    client, ran = told(lambda argv: (1 if stderr else 0, "", stderr))
    client.cancel(["4"])
    client.cancel(["4"], name="mine")
    assert ran == [["scancel", "4"], ["scancel", "--name=mine", "4"]]


def test_a_scancel_that_is_cut_off_is_no_refusal(told: Make) -> None:
    """Ended before it said anything, it may have been carried out; scancel's own codes go beyond 128."""
    client, _ = told(lambda argv: (143, "", ""))
    with pytest.raises(Unreachable):
        client.cancel(["4"])
    output = "scancel: error: Kill job error on job id 4: Access/permission denied\n"
    client, _ = told(lambda argv: (210, "", output))
    with pytest.raises(ClusterError):
        client.cancel(["4"])


def test_cancelling_another_users_job_is_refused(told: Make) -> None:
    """A job that is not ours, among jobs that are gone, is an error whatever the exit code."""
    output = (
        "scancel: error: Kill job error on job id 3: Invalid job id specified\n"
        "scancel: error: Kill job error on job id 4: Access/permission denied\n"
    )
    client, _ = told(lambda argv: (0, "", output))
    with pytest.raises(ClusterError, match="Access/permission denied") as caught:
        client.cancel(["3", "4"])
    assert "owner" in caught.value.hint


def test_ssh_failures_name_the_host(told: Make) -> None:
    """255 is ssh's, 127 is a missing command; both name the host."""
    client, ran = told(lambda argv: (255, "", "Connection closed by 10.0.0.1\n"), Transport(host="login"))
    with pytest.raises(Unreachable, match='ssh to "login" failed: Connection closed'):
        client.nodes()
    assert ran[0][:5] == ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    assert ran[0][-3:-1] == ["--", "login"]
    with pytest.raises(OutcomeUnknown):
        client.submit("#!/bin/sh\n")
    client, _ = told(lambda argv: (127, "", "env: 'sinfo': No such file or directory\n"), Transport(host="login"))
    with pytest.raises(ToolMissing, match="login"):
        client.version()


def test_an_address_needs_one_node(told: Make) -> None:
    """Two nodes have no one address."""
    line = "NodeName={} CPUAlloc=0 CPUTot=4 NodeAddr=10.0.0.{} RealMemory=1 State=IDLE\n"
    client, _ = told(lambda argv: (0, line.format("n1", 1) + line.format("n2", 2), ""))
    with pytest.raises(ClusterError, match="is 2 nodes"):
        client.address("n[1-2]")
    client, _ = told(lambda argv: (0, line.format("n1", 1), ""))
    assert client.address("n1") == "10.0.0.1"
