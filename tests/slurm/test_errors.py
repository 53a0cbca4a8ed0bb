"""What a command's failure means, from recorded stderr of each version."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, PitError, TryLater, Unreachable
from pitools.slurm import errors
from pitools.slurm.errors import SlurmBusy, SlurmReason, SlurmRefused, SlurmUnreachable

Recorded = Callable[[str], str]

# Recorded answer → why the command failed, and whether its request arrived.
REASONS = {
    "down_squeue": ("controller-down", "not-sent"),
    "down_sinfo": ("controller-down", "not-sent"),
    "down_sbatch": ("controller-down", "not-sent"),
    "down_sacct": ("controller-down", "not-sent"),
    "down_topology": ("controller-down", "not-sent"),
    "standby_sbatch": ("controller-down", "not-sent"),
    "munge_sbatch": ("credential-failed", "not-sent"),
    "silent_sbatch": ("no-answer", "maybe-sent"),
    "hangup_sbatch": ("no-answer", "maybe-sent"),
    "junk_sbatch": ("no-answer", "maybe-sent"),
    "full_sbatch": ("busy", "answered"),
    "denied_scancel": ("permission-denied", "answered"),
    "denied_update": ("permission-denied", "answered"),
    "denied_requeue": ("permission-denied", "answered"),
    "denied_reserve": ("permission-denied", "answered"),
    "bad_node_sbatch": ("invalid-node-name", "answered"),
    "bad_node_update": ("invalid-node-name", "answered"),
    "no_accounting_sacct": ("accounting-disabled", "answered"),
    "reservation_in_use": ("reservation-in-use", "answered"),
    "reservation_gone": ("reservation-not-found", "answered"),
    "topology_node": ("no-topology", "answered"),
    "test_only_never": ("other", "answered"),
    "drain_mixed": ("other", "answered"),
}
SSH_REASONS = {
    "refused": ("login-failed", "not-sent"),
    "unresolved": ("login-failed", "not-sent"),
    "unroutable": ("login-failed", "not-sent"),
    "no_key": ("login-failed", "not-sent"),
    "host_key": ("login-failed", "not-sent"),
    "negotiate": ("login-failed", "not-sent"),
    "banner": ("login-failed", "not-sent"),
    "closed_at_once": ("login-dropped", "not-sent"),
    "jump": ("login-dropped", "not-sent"),
    "lost": ("no-answer", "maybe-sent"),
}
CLASSES = {"not-sent": SlurmUnreachable, "maybe-sent": SlurmUnreachable, "answered": SlurmRefused}


@pytest.mark.parametrize(("name", "meaning"), REASONS.items())
def test_what_slurm_said(repo: Path, name: str, meaning: tuple[str, str]) -> None:
    """Each recorded failure, of each version that has it, is recognised, as an error of the class for its exit code."""
    actual = list(repo.glob(f"tests/replay/slurm-*/{name}.txt.err"))
    assert actual
    for path in actual:
        error = errors.error_for("x", "", 1, path.read_text())
        assert isinstance(error, errors.SlurmError)
        assert (error.reason, error.delivery) == meaning
        assert type(error) is (SlurmBusy if meaning[0] == "busy" else CLASSES[meaning[1]])


@pytest.mark.parametrize(("name", "meaning"), SSH_REASONS.items())
def test_what_ssh_said(repo: Path, name: str, meaning: tuple[str, str]) -> None:
    """Each recorded failure of ssh tells whether a command can have been run at the other end."""
    text = (repo / f"tests/replay/openssh-9.2/{name}.txt.err").read_text()
    error = errors.error_for("sbatch", "login", errors.SSH_FAILED, f"Welcome!\nConnection refused\n\n{text}")
    assert isinstance(error, SlurmUnreachable)
    assert (error.reason, error.delivery) == meaning


def test_every_reason_is_recorded() -> None:
    """No reason without an answer that a real command gave."""
    assert {reason for reason, _ in (REASONS | SSH_REASONS).values()} == set(SlurmReason)


def test_an_error_crosses_processes() -> None:
    """Pickled and back, it is of its class and has its fields."""
    error = errors.error_for("sbatch", "h", 1, "sbatch: error: Unable to contact slurm controller (connect failure)")
    record = pickle.loads(pickle.dumps(error))
    assert type(record) is SlurmUnreachable
    assert vars(record) == vars(error)


@pytest.mark.parametrize("name", ["down_squeue", "down_sinfo", "down_sbatch"])
def test_a_controller_that_is_gone(recorded: Recorded, name: str) -> None:
    """Whoever asks, a controller that does not answer is Unreachable, with Slurm's sentence."""
    error = errors.error_for("squeue", "", 1, recorded(f"{name}.txt.err"))
    assert isinstance(error, Unreachable)
    assert error.exit_code == 75
    assert error.message == "Unable to contact slurm controller (connect failure)"
    assert errors.was_not_sent(error)


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("test_only_never", "Requested node configuration is not available", "fewer GPUs"),
        ("test_only_bad_partition", "invalid partition specified: nope; Invalid partition name specified", "sinfo -s"),
        ("test_only_bad_account", "Invalid account or account/partition combination specified", "show assoc"),
        ("test_only_bad_qos", "Invalid qos specification", "format=account,qos"),
        ("drain_mixed", "Invalid node state specified", ""),
    ],
)
def test_what_a_cluster_refuses(recorded: Recorded, name: str, what: str, hint: str) -> None:
    """A wrong request is a ClusterError with Slurm's sentence and what to do."""
    error = errors.error_for("sbatch", "login", 1, recorded(f"{name}.txt.err"))
    assert isinstance(error, ClusterError)
    assert error.exit_code == 4
    assert (error.message, error.where) == (what, "sbatch on login")
    assert hint in error.hint


@pytest.mark.parametrize(
    ("said", "is_denied"),
    [
        ("scancel: error: Kill job error on job id 5: Access/permission denied", True),
        ("scancel: error: Kill job error on job id 5: Invalid user id", True),
        ("scancel: error: DNS SRV lookup failed\nscancel: fatal: Could not establish a configuration source", False),
        ("scancel: error: open(/etc/slurm/slurm.conf): Permission denied", False),
    ],
)
def test_what_slurm_denies(said: str, is_denied: bool) -> None:
    """Only what the controller does not let this user do will be refused again tomorrow."""
    assert errors.is_denied(errors.error_for("scancel", "", 1, said)) is is_denied


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("sbatch: error: Memory specification can not be satisfied", "%m"),
        ("sbatch: error: Invalid --mem specification", "%m"),
        ("sbatch: error: CPU count per node can not be satisfied", "%c"),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", "%f"),
    ],
)
def test_the_hint_is_about_what_was_refused(said: str, hint: str) -> None:
    """Who asked for too much memory is not told to ask for fewer GPUs, though the same sentence follows."""
    after = "\nsbatch: error: Batch job submission failed: Requested node configuration is not available"
    assert hint in errors.error_for("sbatch", "", 1, said + after).hint


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "another QOS"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "%l"),
        ("sbatch: unrecognized option '--partitions=dev'", "--help"),
        ("sbatch: option requires an argument -- 'p'", "--help"),
        ("sbatch: error: open(/etc/slurm/slurm.conf): Permission denied", "SLURM_CONF"),
    ],
)
def test_the_hint_is_of_the_cause_where_a_message_names_more(said: str, hint: str) -> None:
    """A limit of the account is not one of the partition; an option, a file and a time limit are named as such."""
    assert hint in errors.error_for("sbatch", "", 1, said).hint


def test_a_block_refusal(repo: Path) -> None:
    """The block topology refuses in the same words."""
    text = (repo / "tests/replay/slurm-25.05-block/test_only_segment_bad.txt.err").read_text()
    assert "fewer GPUs" in errors.error_for("sbatch", "", 1, text).hint


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ("sacct: error: Problem talking to the database: Connection refused", Unreachable),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", Unreachable),
        ("Unexpected message received for job 1", Unreachable),
        ("sbatch: error: Batch job submission failed: Connection reset by peer", Unreachable),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.", TryLater),
        ("sbatch: error: Batch job submission failed: Insane message length", Unreachable),
        ("sbatch: error: Batch job submission failed: Message receive failure", Unreachable),
        ("sbatch: error: Batch job submission failed: Header lengths are longer than data received", Unreachable),
        ("sbatch: error: Batch job submission failed: Protocol authentication error", Unreachable),
        ("sbatch: error: Batch job submission failed: Unspecified error", Unreachable),
        ("sbatch: error: Batch job submission failed: No error\n", Unreachable),
        ("sbatch: error: Batch job submission failed: Unable to create job record, try again", TryLater),
        ("sbatch: error: Slurm job queue full, sleeping and retrying", TryLater),
        ("Slurm accounting storage is disabled", ClusterError),
        ("scontrol: error: Access/permission denied", ClusterError),
        ("something that no version says yet", ClusterError),
        ("", ClusterError),
    ],
)
def test_kinds(stderr: str, kind: type) -> None:
    """What to wait for and what to change are told apart; unknown words are shown as they are."""
    error = errors.error_for("x", "", 1, stderr)
    assert isinstance(error, kind)
    assert error.exit_code == kind.exit_code
    assert isinstance(error, Unreachable) is (kind is Unreachable)
    assert error.message


@pytest.mark.parametrize(
    ("said", "certain"),
    [
        ("Unable to contact slurm controller (receive failure)", False),
        ("Connection reset by peer", False),
        ("Unable to contact slurm controller (connect failure)\nSocket timed out on send/recv operation", False),
        ("Connection refused\nZero Bytes were transmitted or received", False),
        ("Zero Bytes were transmitted or received\nConnection refused", False),
    ],
)
def test_what_certainly_changed_nothing(said: str, certain: bool) -> None:
    """Only a request that was never sent may be repeated without looking: one line may tell of another try."""
    assert errors.was_not_sent(errors.error_for("sbatch", "", 1, said)) is certain


@pytest.mark.parametrize(
    ("said", "certain"),
    [
        ("kex_exchange_identification: Connection closed by remote host", True),
        ("mux_client_request_session: read from master failed: Broken pipe\nssh: connect to host h port 22: No", False),
        ("Connection closed by remote host", False),
        ("curl: (7) Connection refused", False),
        ("", False),
    ],
)
def test_what_ssh_certainly_did_not_run(said: str, certain: bool) -> None:
    """Only where ssh itself says that it never logged in; a login script may have said anything else."""
    assert errors.was_not_sent(errors.error_for("sbatch", "h", 255, said)) is certain


def test_no_answer_is_never_certain() -> None:
    """A time-out, or an answer cut short, says nothing of the request; nor does a refusal say that it was not sent."""
    assert not errors.was_not_sent(Unreachable("no answer within 30 s"))
    assert not errors.was_not_sent(errors.error_for("sbatch", "", 1, "Invalid qos specification"))


@pytest.mark.parametrize(
    ("host", "code", "said", "busy"),
    [
        ("", 1, "Slurm temporarily unable to accept job", True),
        ("", 1, "Unable to contact slurm controller (connect failure)", True),
        ("", 1, "Slurm backup controller in standby mode", True),
        ("", 1, "Socket timed out on send/recv operation", False),
        ("", 1, "Invalid qos specification", False),
        ("h", 255, "kex_exchange_identification: Connection closed by remote host", True),
        ("h", 255, "h: Permission denied (publickey)", False),
        ("h", 255, "ssh: Could not resolve hostname h", False),
        ("h", 255, "ssh: connect to host h port 22: Connection refused", False),
        ("h", 127, "", False),
    ],
)
def test_what_is_worth_another_try(host: str, code: int, said: str, busy: bool) -> None:
    """Only what was certainly not done, and what waiting may mend, is asked again as it is."""
    assert errors.is_busy(errors.error_for("sbatch", host, code, said)) is busy


@pytest.mark.parametrize("error", [Unreachable("no answer within 30 s"), errors.OutcomeUnknown("Connection refused")])
def test_what_may_have_been_done_is_not_asked_again(error: PitError) -> None:
    """In doubt the job is looked for first."""
    assert not errors.is_busy(error)


@pytest.mark.parametrize(
    ("code", "stderr", "silent"),
    [
        (0, "", False),
        (1, "", True),
        (-9, "said", True),
        (137, "Killed", True),
        (1, "Invalid qos", False),
        (255, "Connection closed", False),
        (254, "said", False),
    ],
)
def test_a_command_that_was_ended(code: int, stderr: str, silent: bool) -> None:
    """One that was killed, or failed without a word, has not said what became of its request."""
    assert errors.died_without_message(subprocesses.Completed(("sbatch",), code, "", stderr)) is silent


def test_an_unknown_job_is_gone(recorded: Recorded) -> None:
    """Each version's words for a job that is not there."""
    assert errors.job_not_found(recorded("squeue_gone.txt.err"))
    assert errors.job_not_found(recorded("job_unknown.txt.err"))
    assert not errors.job_not_found(recorded("down_squeue.txt.err"))
    assert not errors.job_not_found(recorded("squeue_gone.txt.err") + recorded("down_squeue.txt.err"))
    assert not errors.job_not_found("")


def test_an_exit_code_of_zero_can_lie() -> None:
    """scontrol show topology exits with 0 when the controller is gone: an empty answer is then no answer."""
    output = "slurm_load_topo error: Unable to contact slurm controller (connect failure)\n"
    assert errors.has_failed(subprocesses.Completed(("scontrol",), 0, "", output))
    assert not errors.has_failed(
        subprocesses.Completed(("scontrol",), 0, "", "scontrol: error: No topology information\n")
    )
    assert not errors.has_failed(subprocesses.Completed(("squeue",), 0, "", ""))
