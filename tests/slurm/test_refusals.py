"""What a command's failure means, from recorded stderr of each version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core import proc
from pitools.core.errors import ClusterError, PitError, TryLater, Unreachable
from pitools.slurm import refusals

Recorded = Callable[[str], str]


@pytest.mark.parametrize("name", ["down_squeue", "down_sinfo", "down_sbatch"])
def test_a_controller_that_is_gone(recorded: Recorded, name: str) -> None:
    """Whoever asks, a controller that does not answer is Unreachable, with Slurm's sentence."""
    error = refusals.refusal("squeue", "", 1, recorded(f"{name}.txt.err"))
    assert type(error) is Unreachable
    assert error.exit_code == 75
    assert error.what == "Unable to contact slurm controller (connect failure)"
    assert refusals.was_never_sent(error)


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("test_only_never", "Requested node configuration is not available", "ask for fewer"),
        ("test_only_bad_partition", "invalid partition specified: nope; Invalid partition name specified", "sinfo -s"),
        ("test_only_bad_account", "Invalid account or account/partition combination specified", "show assoc"),
        ("test_only_bad_qos", "Invalid qos specification", "format=account,qos"),
        ("drain_mixed", "Invalid node state specified", ""),
    ],
)
def test_what_a_cluster_refuses(recorded: Recorded, name: str, what: str, hint: str) -> None:
    """A wrong request is a ClusterError with Slurm's sentence and what to do."""
    error = refusals.refusal("sbatch", "login", 1, recorded(f"{name}.txt.err"))
    assert type(error) is ClusterError
    assert error.exit_code == 4
    assert (error.what, error.where) == (what, "sbatch on login")
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
    assert refusals.is_denied(refusals.refusal("scancel", "", 1, said)) is is_denied


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
    assert hint in refusals.refusal("sbatch", "", 1, said + after).hint


def test_a_block_refusal(repo: Path) -> None:
    """The block topology refuses in the same words."""
    text = (repo / "tests/replay/slurm-25.05-block/test_only_segment_bad.txt.err").read_text()
    assert "ask for fewer" in refusals.refusal("sbatch", "", 1, text).hint


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
    error = refusals.refusal("x", "", 1, stderr)
    assert type(error) is kind
    assert error.what


@pytest.mark.parametrize(
    ("said", "certain"),
    [
        ("Unable to contact slurm controller (connect failure)", True),
        ('ssh to "h" failed: ssh: connect to host h port 22: Connection refused', True),
        ('ssh to "h" failed: Could not resolve hostname h', True),
        ("Unable to contact slurm controller (receive failure)", False),
        ("Socket timed out on send/recv operation", False),
        ("Connection reset by peer", False),
        ('ssh to "h" failed: Connection timed out during banner exchange', True),
        ('ssh to "h" failed: kex_exchange_identification: Connection closed by remote host', True),
        ('ssh to "h" failed: Connection closed by remote host', False),
        ("no answer within 30 s", False),
        ("Unable to contact slurm controller (connect failure); Socket timed out on send/recv operation", False),
        ("Connection refused; Zero Bytes were transmitted or received", False),
    ],
)
def test_what_certainly_changed_nothing(said: str, certain: bool) -> None:
    """Only a request that was never sent may be repeated without looking."""
    assert refusals.was_never_sent(Unreachable(said)) is certain


@pytest.mark.parametrize(
    ("error", "busy"),
    [
        (TryLater("Slurm temporarily unable to accept job"), True),
        (Unreachable("Unable to contact slurm controller (connect failure)"), True),
        (Unreachable("Slurm backup controller in standby mode"), True),
        (Unreachable('ssh to "h" failed: kex_exchange_identification: Connection closed by remote host'), True),
        (Unreachable('ssh to "h" failed: h: Permission denied (publickey)'), False),
        (Unreachable('ssh to "h" failed: Could not resolve hostname h'), False),
        (Unreachable('ssh to "h" failed: ssh: connect to host h port 22: Connection refused'), False),
        (Unreachable("no answer within 30 s"), False),
        (refusals.Unanswered("Connection refused"), False),
        (ClusterError("Invalid qos specification"), False),
    ],
)
def test_what_is_worth_another_try(error: PitError, busy: bool) -> None:
    """Only what was certainly not done, and what waiting may mend, is asked again as it is."""
    assert refusals.is_busy(error) is busy


@pytest.mark.parametrize(
    ("code", "stderr", "silent"),
    [(0, "", False), (1, "", True), (-9, "said", True), (137, "Killed", True), (1, "Invalid qos", False),
     (255, "Connection closed", False), (254, "said", False)],
)  # fmt: skip
def test_a_command_that_was_ended(code: int, stderr: str, silent: bool) -> None:
    """One that was killed, or failed without a word, has not said what became of its request."""
    assert refusals.is_silent(proc.Completed(("sbatch",), code, "", stderr)) is silent


def test_an_unknown_job_is_gone(recorded: Recorded) -> None:
    """Each version's words for a job that is not there."""
    assert refusals.means_gone(recorded("squeue_gone.txt.err"))
    assert refusals.means_gone(recorded("job_unknown.txt.err"))
    assert not refusals.means_gone(recorded("down_squeue.txt.err"))
    assert not refusals.means_gone(recorded("squeue_gone.txt.err") + recorded("down_squeue.txt.err"))
    assert not refusals.means_gone("")


def test_an_exit_code_of_zero_can_lie() -> None:
    """scontrol show topology exits with 0 when the controller is gone: an empty answer is then no answer."""
    said = "slurm_load_topo error: Unable to contact slurm controller (connect failure)\n"
    assert refusals.is_refused(proc.Completed(("scontrol",), 0, "", said))
    assert not refusals.is_refused(proc.Completed(("scontrol",), 0, "", "scontrol: error: No topology information\n"))
    assert not refusals.is_refused(proc.Completed(("squeue",), 0, "", ""))
