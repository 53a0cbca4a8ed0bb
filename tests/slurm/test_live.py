"""The client and a real Slurm: what it answers, refuses, and how it fails."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pitools.core import timestamps
from pitools.core.errors import ClusterError, PitError, Unreachable
from pitools.slurm.client import Client, Transport
from pitools.slurm.errors import OutcomeUnknown
from pitools.slurm.records import AccountingRow, Switch
from pitools.slurm.states import is_final

pytestmark = pytest.mark.slurm

SCRIPT = "#!/bin/sh\nsleep 60\n"
HELD = ["--hold", "--output=/dev/null"]
ODD = 'a\x1fb|c\nd JobState=COMPLETED é\t$HOME `x` "q"'


@pytest.fixture
def name() -> str:
    """A job name of this test alone."""
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
def queued(alpha: Client) -> Iterator[Callable[..., str]]:
    """Queues held jobs, and cancels them in the end."""
    created: list[str] = []

    def submit(*args: str, script: str = SCRIPT) -> str:
        created.append(alpha.submit(script, args=[*HELD, *args]).job_id)
        return created[-1]

    yield submit
    if created:
        alpha.cancel(created)


def other_conf(clusters: Path, folder: Path, **changes: object) -> Path:
    """Alpha's slurm.conf with other values, as another cluster would have."""
    lines = (clusters / "alpha" / "slurm.conf").read_text().split("\n")
    retained = [line for line in lines if line.split("=")[0] not in changes]
    path = folder / "slurm.conf"
    path.write_text("\n".join([*(f"{key}={value}" for key, value in changes.items()), *retained]))
    return path


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_cluster_itself(alpha: Client) -> None:
    """Configuration, version, partitions, nodes, addresses and switches of a running cluster."""
    config = alpha.config()
    assert config.cluster == "alpha"
    assert config.version == alpha.version() >= (22, 5)
    assert {partition.partition for partition in alpha.partitions() if partition.nodes == 8} >= {"train", "dev"}
    nodes = alpha.nodes()
    assert {f"alpha0{i}" for i in range(1, 9)} <= {node.node for node in nodes}
    assert all(node.cpus and node.memory_mib and node.partitions and node.state for node in nodes)
    assert [node.node for node in alpha.nodes("alpha[01,03]")] == ["alpha01", "alpha03"]
    assert alpha.address("alpha01") == "127.0.0.1"
    leaves = [switch for switch in alpha.topology() if isinstance(switch, Switch) and switch.level == 0]
    assert len(leaves) >= 2
    with pytest.raises(ClusterError, match="nosuch not found"):
        alpha.address("nosuch")


def test_accounts_and_qos(alpha: Client) -> None:
    """Associations of one user, and the QOS of the cluster."""
    assert {row.user for row in alpha.associations("root")} == {"root"}
    assert {row.cluster for row in alpha.associations()} >= {"alpha", "beta"}
    assert {row.qos for row in alpha.qos()} >= {"normal", "low", "high"}


def test_start_estimates(alpha: Client) -> None:
    """An estimate lies in the present or future; what can never start says why."""
    estimate = alpha.test_only(SCRIPT, ["--nodes=2", "--time=5"])
    assert estimate.cpus >= 2
    assert estimate.partition == "train"
    assert estimate.start > timestamps.to_rfc3339(datetime.now(UTC) - timedelta(minutes=1))
    for args, words in [
        (["--nodes=99"], "node configuration is not available"),
        (["--partition=nosuch"], "Invalid partition name"),
        (["--account=nosuch"], "Invalid account"),
        (["--qos=nosuch"], "Invalid qos"),
    ]:
        with pytest.raises(ClusterError, match=words) as caught:
            alpha.test_only(SCRIPT, args)
        assert caught.value.hint


def test_any_name_and_comment(alpha: Client, queued: Callable[..., str]) -> None:
    """A name with newlines, bars, control characters and Slurm's keys comes back whole, and forges nothing."""
    comment = "c\n999999|x|COMPLETED\n|k=v"
    job_id = queued(f"--job-name={ODD}", f"--comment={comment}")
    (job,) = alpha.jobs([job_id])
    assert (job.job_id, job.state, job.name, job.comment) == (job_id, "PENDING", ODD, comment)
    assert (job.reason, job.nodes, job.partition) == ("JobHeldUser", 1, "train")
    assert "999999" not in {job.job_id for job in alpha.jobs()}
    (detail,) = alpha.job(job_id)
    assert (detail.name, detail.state, detail.restarts) == (ODD, "PENDING", 0)


def test_the_callers_settings_change_nothing(
    alpha: Client, queued: Callable[..., str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell full of SQUEUE_, SLURM_ and SBATCH_ variables, in another zone, gets the same answers."""
    for variable, value in {
        "SQUEUE_FORMAT": "%j",
        "SQUEUE_STATES": "RUNNING",
        "SQUEUE_USERS": "nobody",
        "SLURM_TIME_FORMAT": "relative",
        "SLURM_CLUSTERS": "nosuch",
        "SBATCH_PARTITION": "nosuch",
        "SBATCH_BEGIN": "now+1day",
        "TZ": "Asia/Tokyo",
    }.items():
        monkeypatch.setenv(variable, value)
    job_id = queued(f"--job-name={name}")
    (job,) = alpha.jobs(name=name)
    assert (job.job_id, job.partition, job.state) == (job_id, "train", "PENDING")
    assert alpha.test_only(SCRIPT).start < timestamps.to_rfc3339(datetime.now(UTC) + timedelta(hours=2))


def test_states_of_jobs_arrays_and_strangers(alpha: Client, queued: Callable[..., str]) -> None:
    """A job, a task, a whole array, a het component and an id that nobody knows, in one question."""
    # Squares fold into no range, and are more text than Slurm prints of an array unless it is told to print all.
    job, array = queued(), queued("--array=" + ",".join(str(i * i) for i in range(25)) + "%2")
    het = queued(script="#!/bin/sh\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n2\nsleep 60\n")
    states = alpha.state_of([job, array, f"{array}_529", f"{het}+1", "999999", "999999_3"])
    assert list(states.values()) == ["PENDING"] * 4 + ["UNKNOWN"] * 2
    full = next(record for record in alpha.jobs([array]) if record.array_job_id == array)
    assert full.array_task.endswith("441,484,529,576%2")
    assert alpha.jobs(["999999"]) == []
    assert alpha.job("999999") == []


def test_cancel_is_repeatable_and_kept_by_accounting(alpha: Client, queued: Callable[..., str], name: str) -> None:
    """Cancelled once, twice and with a stranger; then squeue and sacct both say who and what."""
    began = datetime.now(UTC) - timedelta(minutes=1)
    job_id = queued(f"--job-name={name}")
    assert not is_final(alpha.state_of([job_id])[job_id])
    for ids in ([job_id], [job_id], [job_id, "999999"]):
        alpha.cancel(ids)
    assert alpha.state_of([job_id]) == {job_id: "CANCELLED"}

    def kept() -> list[AccountingRow]:
        actual = alpha.accounting(name=name, since=began)
        return [record for record in actual if record.state == "CANCELLED"]

    until = time.monotonic() + 15
    while not kept() and time.monotonic() < until:
        time.sleep(0.3)
    (record,) = kept()
    assert (record.job_id, record.state, record.cancelled_by_uid, record.user) == (job_id, "CANCELLED", 0, "root")
    assert record.submit > timestamps.to_rfc3339(began)
    assert alpha.accounting([job_id])[0].name == name


def test_a_job_of_another_name_or_user_is_not_cancelled(alpha: Client, queued: Callable[..., str], name: str) -> None:
    """Its id was another's before a crash: scancel goes by all of them."""
    job = queued(f"--job-name={name}")
    alpha.cancel([job], name=f"{name}.1")
    alpha.cancel([job, f"{job}_[1-3]"], user="daemon")
    assert alpha.state_of([job]) == {job: "PENDING"}
    for _ in range(2):
        alpha.cancel([job], name=name)
    assert alpha.state_of([job]) == {job: "CANCELLED"}


def test_what_slurm_refuses_to_queue(alpha: Client, tmp_path: Path) -> None:
    """Text that is no script, an unknown option, a missing file and an unknown job are refused, not in doubt."""
    for submit in (
        lambda: alpha.submit("echo hello\n"),
        lambda: alpha.submit(SCRIPT, args=["--no-such-option"]),
        lambda: alpha.submit(path=str(tmp_path / "none.sh")),
        lambda: alpha.requeue(["999999"]),
    ):
        with pytest.raises(ClusterError) as caught:
            submit()
        assert caught.value.exit_code == 4


def test_a_script_file_is_queued(alpha: Client, queued: Callable[..., str], tmp_path: Path, name: str) -> None:
    """A path is submitted as it is, whatever it is called."""
    script = tmp_path / "my job.sh"
    script.write_text(SCRIPT)
    job = alpha.submit(path=str(script), args=[*HELD, f"--job-name={name}"])
    try:
        assert [actual.job_id for actual in alpha.jobs(name=name)] == [job.job_id]
    finally:
        alpha.cancel([job.job_id])


def test_a_controller_that_is_gone(clusters: Path, tmp_path: Path) -> None:
    """Nobody listens on the controller's and the database's ports: every question is Unreachable, none is empty."""
    conf = other_conf(
        clusters, tmp_path, SlurmctldPort=closed_port(), AccountingStoragePort=closed_port(), MessageTimeout=1
    )
    client = Client(Transport(env={"SLURM_CONF": str(conf)}, timeout_s=10))
    questions: list[Callable[[], object]] = [
        client.config,
        client.partitions,
        client.nodes,
        client.topology,
        client.jobs,
        client.qos,
        client.associations,
        lambda: client.accounting(["1"]),
        lambda: client.jobs(["1"]),
        lambda: client.job("1"),
        lambda: client.cancel(["1"]),
        lambda: client.state_of(["1"]),
        lambda: client.address("alpha01"),
        lambda: client.test_only(SCRIPT),
        lambda: client.submit(SCRIPT),
        lambda: client.requeue(["1"]),
    ]
    for ask in questions:
        with pytest.raises(Unreachable) as caught:
            ask()
        assert caught.value.exit_code == 75
        assert caught.value.hint
    with pytest.raises(Unreachable) as caught:
        client.submit(SCRIPT)
    assert not isinstance(caught.value, OutcomeUnknown)


def test_a_controller_that_never_answers(clusters: Path, tmp_path: Path) -> None:
    """A controller that takes the connection and says nothing: a reading times out, a submission is in doubt."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        conf = other_conf(clusters, tmp_path, SlurmctldPort=silent.getsockname()[1], MessageTimeout=60)
        client = Client(Transport(env={"SLURM_CONF": str(conf)}, timeout_s=0.4))
        with pytest.raises(Unreachable, match=r"no answer within 0\.4 s") as caught:
            client.nodes()
        assert caught.value.where == "scontrol"
        with pytest.raises(OutcomeUnknown, match="no answer within") as caught:
            client.submit(SCRIPT)
        assert "its name with squeue" in caught.value.hint


def test_states_while_the_database_is_gone(clusters: Path, tmp_path: Path) -> None:
    """The controller answers and the database does not: a job that has left the queue is UNKNOWN."""
    conf = other_conf(clusters, tmp_path, AccountingStoragePort=closed_port())
    client = Client(Transport(env={"SLURM_CONF": str(conf)}, timeout_s=10))
    assert client.state_of(["999999"]) == {"999999": "UNKNOWN"}
    with pytest.raises(PitError):
        client.accounting(["999999"])
