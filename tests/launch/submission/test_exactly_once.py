"""A job is submitted once, whatever becomes of sbatch's answer, and whoever is killed.

The controller is a stand-in in this process, so that it can be killed at every call; tests/cluster/test_submission.py
has the real one behind a proxy that loses its answers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, NoSpace, PitError, TryLater
from pitools.launch import slurm_cache
from pitools.launch.submission import exactly_once, find_job, grant, submissions
from pitools.run import run_folder
from pitools.run.run_folder import JobRef
from pitools.site.schema import Site, Slurm
from pitools.slurm import submit_rate
from pitools.slurm.client import Client, Transport
from pitools.slurm.errors import OutcomeUnknown, SlurmBusy, SlurmUnreachable
from pitools.slurm.parse_accounting import ACCOUNTING_FORMAT
from pitools.slurm.parse_jobs import JOB_FORMAT

SITE = Site(name="a", slurm=Slurm(cluster="alpha"))
FAILED = "sbatch: error: Batch job submission failed: "
LOST = FAILED + "Socket timed out on send/recv operation\n"
CONFIG = "ClusterName = alpha\nSLURM_VERSION = 22.05.8\nMessageTimeout = {} sec\n"
# What may happen at a call of sbatch: (is the job queued?, exit code, does its id come?, stderr)
FATES = {
    "well": (True, 0, True, ""),
    "lost": (True, 1, False, LOST),
    "half": (True, 1, False, FAILED + "Zero Bytes were transmitted or received\n"),
    "killed": (True, -9, False, ""),
    "cut off late": (True, 1, True, LOST),
    "never came": (False, 1, False, LOST),
    "busy": (False, 1, False, FAILED + "Slurm temporarily unable to accept job, sleeping and retrying\n"),
    "away": (False, 1, False, FAILED + "Unable to contact slurm controller (connect failure)\n"),
    "refused": (False, 1, False, FAILED + "Invalid qos specification\n"),
}


class Killed(BaseException):
    """What SIGKILL does to this process."""


class Controller:
    """slurmctld, slurmdbd and their commands. fates: of the calls of sbatch, then all go well."""

    def __init__(self, fates: Sequence[str] = (), *, timeout_s: int = 0) -> None:
        self.fates, self.timeout_s = list(fates), timeout_s
        self.jobs: dict[str, tuple[str, str]] = {}  # id → (name, state)
        self.forgotten: set[str] = set()
        self.ran: list[list[str]] = []
        self.killed_at = -1.0  # n: before the n-th command, n + 0.5: after it
        self.is_silent = False
        self.after: Callable[[], None] = lambda: None

    def run(self, argv: Sequence[str], *, stdout: BinaryIO | None = None, **options: object) -> subprocesses.Completed:
        if len(self.ran) == self.killed_at:
            self.ran.append([])
            raise Killed
        self.ran.append(list(argv))
        code, out, err = getattr(self, f"_{argv[0]}")(list(argv))
        if stdout:
            stdout.write(out.encode())
            out = ""
        if len(self.ran) - 0.5 == self.killed_at:
            raise Killed
        return subprocesses.Completed(tuple(argv), code, out, err)

    def add(self, name: str, state: str = "PENDING") -> str:
        job_id = str(len(self.jobs) + 7)
        self.jobs[job_id] = (name, state)
        return job_id

    def names(self) -> list[str]:
        return [name for name, _ in self.jobs.values()]

    def _sbatch(self, argv: list[str]) -> tuple[int, str, str]:
        is_queued, code, is_told, err = FATES[self.fates.pop(0) if self.fates else "well"]
        (name,) = [argument.removeprefix("--job-name=") for argument in argv if argument.startswith("--job-name=")]
        job_id = self.add(name) if is_queued else ""
        self.after()
        return code, f"{job_id}\n" if is_told else "", err

    def _squeue(self, argv: list[str]) -> tuple[int, str, str]:
        if self.is_silent:
            return 1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
        sep = argv[-1].removeprefix("%i").split("%")[0]
        empty = dict.fromkeys(JOB_FORMAT, "")
        rows = [
            empty | {"job_id": job_id, "raw_id": job_id, "state": state, "name": name}
            for job_id, (name, state) in self.jobs.items()
            if job_id not in self.forgotten
        ]
        return 0, "".join(sep.join(row.values()) + "\n" for row in rows), ""

    def _sacct(self, argv: list[str]) -> tuple[int, str, str]:
        sep = next(argument for argument in argv if argument.startswith("--delimiter=")).removeprefix("--delimiter=")
        empty = dict.fromkeys(ACCOUNTING_FORMAT, "") | {"ExitCode": "0:0"}
        rows = [
            empty | {"JobID": job_id, "JobIDRaw": job_id, "State": state, "JobName": name}
            for job_id, (name, state) in self.jobs.items()
        ]
        return 0, "".join(sep.join(row) + "\n" for row in [list(ACCOUNTING_FORMAT), *(r.values() for r in rows)]), ""

    def _scontrol(self, argv: list[str]) -> tuple[int, str, str]:
        return 0, CONFIG.format(self.timeout_s), ""

    def _id(self, argv: list[str]) -> tuple[int, str, str]:
        return 0, "me\n", ""

    def _scancel(self, argv: list[str]) -> tuple[int, str, str]:
        for job_id in argv[1:]:
            self.jobs[job_id] = (self.jobs[job_id][0], "CANCELLED")
        return 0, "", ""


Make = Callable[..., Controller]


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes the controller that every site has from then on; nobody waits for it."""
    monkeypatch.setattr(exactly_once, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(find_job, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(submit_rate, "wait_turn", lambda: None)
    monkeypatch.setattr(exactly_once, "_cluster_names", {})

    def make(*fates: str, timeout_s: int = 0) -> Controller:
        created = Controller(fates, timeout_s=timeout_s)
        monkeypatch.setattr(exactly_once, "client", lambda site: Client(Transport(), created.run))
        return created

    return make


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder with a script."""
    path = tmp_path / "run-1"
    path.mkdir()
    (path / "script.sbatch").write_text("#!/bin/sh\n")
    return path


def test_the_first_job_and_the_next(controller: Make, run_dir: Path) -> None:
    """The intent is there before sbatch, with what it is called with; each job has a number, a name and a cluster."""
    slurm = controller()
    slurm.after = lambda: observed.append(
        run_folder.read_record(
            submissions.job_dir(run_dir, len(observed)) / "intent.json", submissions.SubmissionIntent
        )
    )
    observed: list[submissions.SubmissionIntent | None] = []
    first = exactly_once.submit_once(run_dir, SITE)
    second = exactly_once.submit_once(run_dir, SITE, args=["--exclude=n1"])
    assert [(ref.job_id, ref.job_number, ref.cluster) for ref in (first, second)] == [
        ("7", 0, "alpha"),
        ("8", 1, "alpha"),
    ]
    assert [(item.name, item.args, item.site) for item in observed if item] == [
        ("run-1", (), "a"),
        ("run-1.1", ("--exclude=n1",), "a"),
    ]
    assert slurm.names() == ["run-1", "run-1.1"]
    assert slurm.ran[-1] == [
        "sbatch",
        "--parsable",
        "--exclude=n1",
        "--job-name=run-1.1",
        "--",
        f"{run_dir}/script.sbatch",
    ]
    assert run_folder.read_record(run_dir / "job.json", JobRef) == second
    assert run_folder.read_record(submissions.job_dir(run_dir, 0) / "job.json", JobRef) == first
    assert exactly_once.submit_once(run_dir, SITE, job_number=0) == first
    assert exactly_once.find_submitted(run_dir, SITE, 1) == second
    assert len(slurm.jobs) == 2


@pytest.mark.parametrize("fate", [name for name in FATES if name != "refused"])
def test_every_fate_of_an_answer_makes_one_job(
    controller: Make, run_dir: Path, fate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lost, halved, cut off or never heard: there is one job, and its id is known. The talk is on stderr."""
    slurm = controller(fate, fate)
    ref = exactly_once.submit_once(run_dir, SITE)
    assert slurm.names() == ["run-1"]
    assert ref.job_id in slurm.jobs
    output = capsys.readouterr()
    assert not output.out
    assert bool(output.err) is (fate not in ("well", "cut off late"))


@pytest.mark.parametrize(("before", "kind"), [((), ClusterError), (("busy", "never came"), ClusterError)])
def test_a_refusal_leaves_nothing(controller: Make, run_dir: Path, before: Sequence[str], kind: type) -> None:
    """What Slurm refuses is an error at once, and the run's folder knows of no submission."""
    slurm = controller(*before, "refused")
    with pytest.raises(kind, match="Invalid qos"):
        exactly_once.submit_once(run_dir, SITE)
    assert not slurm.jobs
    assert submissions.job_numbers(run_dir) == []
    assert submissions.next_job_number(run_dir) == 0


@pytest.mark.parametrize(
    ("fate", "kind"), [("busy", SlurmBusy), ("away", SlurmUnreachable), ("never came", OutcomeUnknown), ("lost", None)]
)
def test_without_patience(controller: Make, run_dir: Path, fate: str, kind: type | None) -> None:
    """Asked once, looked once: what is certain to have come to nothing leaves nothing, what is not leaves an intent."""
    slurm = controller(*[fate] * 9, timeout_s=60)
    if kind is None:
        assert exactly_once.submit_once(run_dir, SITE, retry_for_s=0).job_id == "7"
        return
    with pytest.raises(PitError) as caught:
        exactly_once.submit_once(run_dir, SITE, retry_for_s=0)
    assert type(caught.value) is kind
    assert submissions.is_unresolved(run_dir, 0) is (kind is OutcomeUnknown)
    assert [argv[0] for argv in slurm.ran].count("sbatch") == 1


def test_a_request_that_is_digested_late(controller: Make, run_dir: Path) -> None:
    """A job that shows up seconds after sbatch gave up is adopted: none is made beside it."""
    slurm = controller("never came", timeout_s=60)
    threading.Timer(0.1, slurm.add, ["run-1", "RUNNING"]).start()
    assert exactly_once.submit_once(run_dir, SITE).job_id == "7"
    assert slurm.names() == ["run-1"]
    assert [argv[0] for argv in slurm.ran].count("squeue") < 15


def test_a_job_that_the_controller_has_forgotten(controller: Make, run_dir: Path) -> None:
    """It ran and was purged while its submitter lay dead: accounting knows it."""
    slurm = controller()
    slurm.killed_at = 1  # before sbatch; which cluster answers was asked before
    with pytest.raises(Killed):
        exactly_once.submit_once(run_dir, SITE)
    slurm.add("run-1", "COMPLETED")
    slurm.forgotten = {"7"}
    assert exactly_once.submit_once(run_dir, SITE).job_id == "7"
    assert slurm.ran[-1][0] == "sacct"


def test_a_silent_controller_decides_nothing(controller: Make, run_dir: Path) -> None:
    """While nobody can be asked whether the job is there, none is made; the same call later finds it."""
    slurm = controller("lost")
    slurm.is_silent = True
    with pytest.raises(OutcomeUnknown, match="Socket timed out") as caught:
        exactly_once.submit_once(run_dir, SITE, retry_for_s=0.2)
    assert "same command" in caught.value.hint
    slurm.is_silent = False
    assert exactly_once.submit_once(run_dir, SITE).job_id == "7"
    assert slurm.names() == ["run-1"]


def test_of_several_the_one_that_has_leave(controller: Make, run_dir: Path) -> None:
    """Of two jobs of a name the one that runs already is kept, else the lowest; those that wait are cancelled."""
    for number, has_leave in enumerate((False, True)):
        slurm = controller()
        submissions.record_intent(run_dir, number, SITE, ())
        ids = [slurm.add(submissions.slurm_job_name(run_dir, number)) for _ in range(3)]
        if has_leave:
            assert grant.claim(submissions.job_dir(run_dir, number), grant.grant_token(ids[1])) == f"run.{ids[1]}"
            slurm.jobs[ids[1]] = (slurm.jobs[ids[1]][0], "RUNNING")
        retained = exactly_once.submit_once(run_dir, SITE).job_id
        assert retained == ids[1 if has_leave else 0]
        assert grant.read_grant(submissions.job_dir(run_dir, number)) == f"run.{retained}"
        assert {item for item, (_, state) in slurm.jobs.items() if state == "CANCELLED"} == {*ids} - {retained}


fates = st.lists(st.sampled_from([name for name in FATES if name != "refused"]), max_size=4)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fates=fates, deaths=st.lists(st.integers(0, 12).map(lambda n: n / 2), max_size=4))
def test_killed_at_any_call(
    controller: Make, tmp_path_factory: pytest.TempPathFactory, fates: list[str], deaths: list[float]
) -> None:
    """SIGKILL before or after any command, as often as may be, and the same call again: one job, known by its id."""
    run_dir = tmp_path_factory.mktemp("runs") / "run-1"
    run_dir.mkdir()
    slurm = controller(*fates)
    for death in deaths:
        slurm.killed_at = len(slurm.ran) + death
        with contextlib.suppress(Killed):
            exactly_once.submit_once(run_dir, SITE, job_number=0)
    slurm.killed_at = -1
    ref = exactly_once.submit_once(run_dir, SITE, job_number=0)
    assert slurm.names() == ["run-1"]
    assert [ref.job_id] == list(slurm.jobs)
    assert run_folder.read_record(run_dir / "job.json", JobRef) == ref


def test_two_at_once_make_one_job(controller: Make, run_dir: Path) -> None:
    """Whoever comes second waits, and returns the first one's job; a third that comes later makes the next."""
    slurm = controller()
    slurm.after = lambda: time.sleep(0.1)
    actual: list[JobRef] = []
    both = [threading.Thread(target=lambda: actual.append(exactly_once.submit_once(run_dir, SITE))) for _ in range(4)]
    for item in both:
        item.start()
    for item in both:
        item.join()
    assert {ref.job_id for ref in actual} == {"7"}
    assert slurm.names() == ["run-1"]
    assert exactly_once.submit_once(run_dir, SITE).job_number == 1


def test_an_sbatch_that_outlives_its_parent(controller: Make, run_dir: Path) -> None:
    """While the sbatch of a killed process lives nobody submits; what it answers in the end is the run's job."""
    slurm = controller()
    submissions.record_intent(run_dir, 0, SITE, ())
    path = run_dir / "jobs" / ".sbatch-output"
    with path.open("wb", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.4); print(41)"], stdout=file)
    with pytest.raises(TryLater, match="another process"):
        exactly_once.submit_once(run_dir, SITE, retry_for_s=0)
    assert exactly_once.submit_once(run_dir, SITE).job_id == "41"
    assert orphan.wait(5) == 0
    assert not slurm.ran


@pytest.mark.parametrize("text", ["", "4", "41;al", "thank you\n"])
def test_half_an_answer_is_none(controller: Make, run_dir: Path, text: str) -> None:
    """An id that may not be whole is not believed: the job is looked for."""
    slurm = controller()
    submissions.record_intent(run_dir, 0, SITE, ())
    (run_dir / "jobs" / ".sbatch-output").write_text(text)
    slurm.add("run-1")
    assert exactly_once.submit_once(run_dir, SITE).job_id == "7"


def test_a_folder_that_cannot_take_note(controller: Make, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that its run could not write down is cancelled: it would be nobody's."""
    slurm = controller()

    def full(path: Path, record: object, *, durable: bool = False) -> None:
        if path.name == "job.json":
            raise NoSpace("no space left", where=str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(record))

    monkeypatch.setattr(run_folder, "write_record", full)
    with pytest.raises(NoSpace):
        exactly_once.submit_once(run_dir, SITE)
    assert slurm.jobs == {"7": ("run-1", "CANCELLED")}
    assert not submissions.is_unresolved(run_dir, 0)


def test_another_cluster_is_not_asked(controller: Make, run_dir: Path) -> None:
    """Ids count anew on every cluster: where the site file has changed, neither a job nor an intent is looked up."""
    slurm = controller("lost")
    slurm.is_silent = True
    with pytest.raises(OutcomeUnknown):
        exactly_once.submit_once(run_dir, SITE, retry_for_s=0)
    requested = len(slurm.ran)
    moved = Site(name="a", slurm=Slurm(cluster="beta"))
    with pytest.raises(ClusterError, match=r'"run-1".*"alpha".*"beta"'):
        exactly_once.submit_once(run_dir, moved)
    with pytest.raises(ClusterError, match=r'run-1.*"a".*"b"'):
        exactly_once.submit_once(run_dir, Site(name="b"))
    assert len(slurm.ran) == requested
    slurm.is_silent = False
    ref = exactly_once.submit_once(run_dir, SITE)
    with pytest.raises(ClusterError, match=r'job 7 .*"alpha"'):
        submissions.require_same_cluster(moved, ref)
    with pytest.raises(ClusterError, match=r'job 7 .*"alpha"'):
        exactly_once.submit_once(run_dir, moved, job_number=0)
    submissions.require_same_cluster(Site(name="a", slurm=Slurm(cluster="Alpha")), ref)


def test_a_cluster_that_is_not_the_site_s_gets_no_job(controller: Make, run_dir: Path) -> None:
    """Where another one answers to the site's commands nothing is submitted, and nothing is left of the attempt."""
    slurm = controller()
    with pytest.raises(ClusterError) as caught:
        exactly_once.submit_once(run_dir, Site(name="a", slurm=Slurm(cluster="beta")))
    assert caught.value.exit_code == 4
    assert [argv[0] for argv in slurm.ran] == ["scontrol"]
    assert submissions.job_numbers(run_dir) == []
    assert exactly_once.submit_once(run_dir, Site(name="a", slurm=Slurm(cluster="Alpha"))).job_id == "7"


def test_a_site_that_does_not_name_its_cluster(controller: Make, run_dir: Path) -> None:
    """Then the controller says which it is, when there is a job: once in a process, for each way to a cluster."""
    slurm = controller()
    sites = [Site(name="a"), Site(name="a"), Site(name="a", slurm=Slurm(conf="/elsewhere/slurm.conf"))]
    assert [exactly_once.submit_once(run_dir, site).cluster for site in sites] == ["alpha"] * 3
    assert [argv[0] for argv in slurm.ran] == ["sbatch", "scontrol", "sbatch", "sbatch", "scontrol"]


def test_submissions_follow_each_other_at_a_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve at once get twelve moments, a tenth of a second apart, whatever an older clock left behind."""
    tmp_path.chmod(0o700)
    (tmp_path / "sbatch").write_text("99999999999.0\n")
    waits: list[float] = []
    monkeypatch.setattr(time, "clock_gettime", lambda _: 1000.0)
    threads = [threading.Thread(target=lambda: waits.append(submit_rate._reserve_slot(tmp_path))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == pytest.approx([number / 10 for number in range(12)])
    boot, _, slot = (tmp_path / "sbatch").read_text().partition(" ")
    (tmp_path / "sbatch").write_text(f"{boot} {float(slot) + 100}")  # a thousand are waiting
    assert [submit_rate._reserve_slot(tmp_path) for _ in range(2)] == pytest.approx([101.2, 101.3])
    (tmp_path / "sbatch").write_text(f"earlier {float(slot) + 100}")
    assert submit_rate._reserve_slot(tmp_path) == 0.0
    tmp_path.chmod(0o755)
    assert submit_rate._reserve_slot(tmp_path) == 0.0, "a folder that others can write to is not used"


def test_an_answer_to_the_job_before_is_none_to_this(
    controller: Make, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the intent and sbatch: the id that is still in the locked file is the other job's."""
    slurm = controller()
    exactly_once.submit_once(run_dir, SITE)
    intend = submissions.record_intent

    def killed(*args: object) -> None:
        intend(*args)  # type: ignore[arg-type]
        raise Killed

    monkeypatch.setattr(submissions, "record_intent", killed)
    with pytest.raises(Killed):
        exactly_once.submit_once(run_dir, SITE)
    monkeypatch.setattr(submissions, "record_intent", intend)
    assert exactly_once.submit_once(run_dir, SITE).job_id == "8"
    assert slurm.names() == ["run-1", "run-1.1"]


def test_what_follows_a_submission_breaks_nothing(
    controller: Make, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is there: that nobody has a home folder to keep Slurm's answers in is no reason to lose it."""
    controller()

    def homeless(_: object) -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(slurm_cache, "invalidate", homeless)
    assert exactly_once.submit_once(run_dir, SITE).job_id == "7"


def test_a_file_system_without_locks(controller: Make, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs can be kept there all the same."""
    slurm = controller()

    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    assert [exactly_once.submit_once(run_dir, SITE, job_number=1).job_id for _ in range(2)] == ["7", "7"]
    assert slurm.names() == ["run-1.1"]
