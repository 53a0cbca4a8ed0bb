"""Connections that are cut, disks that are full, and what stands in the way: nothing half, and never two jobs."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pitools.core.errors import (
    ClusterError,
    ConfigError,
    DataError,
    NoSpace,
    PitError,
    ToolMissing,
    TryLater,
    Unreachable,
)
from pitools.launch import plan as planning
from pitools.launch.tickets import remote
from pitools.site import remote_files
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.slurm.errors import OutcomeUnknown
from pitools.store.version_list import published_at

pytestmark = pytest.mark.slurm

MakePlan = Callable[..., planning.Plan]
# An sbatch that does its work, and is then cut off: from the network alone, or together with the shell that it is in.
CUT_OFF = """\
#!/bin/sh
[ -e "$0.done" ] && {{ echo again >> "$0.again"; exec /usr/bin/sbatch "$@"; }}
: > "$0.done"
/usr/bin/sbatch "$@" > "$0.said"
p=$PPID; shells=
while [ "$(ps -o comm= -p $p)" != sshd ]; do shells="$shells $p"; p=$(ps -o ppid= -p $p); done
kill -9 $p {shells}
sleep 0.3
cat "$0.said"
"""


def fake(far_side: Any, text: str) -> Path:
    """An sbatch that comes first on the far side's PATH."""
    path: Path = far_side.bin / "sbatch"
    path.write_text(text)
    path.chmod(0o755)
    far_side.own(path)
    return path


@pytest.mark.parametrize("shells", ["", "$shells"], ids=["its id is written down there", "its id is known to Slurm"])
def test_cut_between_sbatch_and_its_answer(
    site: Site, make_plan: MakePlan, far_side: Any, alpha: Client, name: str, shells: str
) -> None:
    """The job is found by what is left there, or by its name; sbatch runs once, and so does the job."""
    path = fake(far_side, CUT_OFF.format(shells=shells))
    login_hosts = far_side.logins()
    submission = remote.submit_ticket(make_plan(command="echo x"), site, name=name)
    (job,) = alpha.jobs(name=name, all_states=True)
    assert submission.job_id == job.raw_id
    assert not path.with_name("sbatch.again").exists()
    assert far_side.logins() - login_hosts == 2
    assert remote.submit_ticket(make_plan(command="echo x"), site, name=name).job_id == job.raw_id


def test_cut_again_and_again(site: Site, make_plan: MakePlan, far_side: Any, alpha: Client, name: str) -> None:
    """Whenever the connection goes, whoever asks until there is an answer gets one job a name, and it runs once."""
    plan = make_plan(command='echo x >> "$PIT_RUN_DIR/proof"')
    names: list[str] = []
    reported: dict[str, str] = {}
    moment, failures, in_a_row = random.Random(5), 0, 0
    deadline = time.monotonic() + 240  # on a busy machine; it ends as soon as there is what it needs
    over = threading.Event()

    def cut() -> None:
        # The more often in a row nothing came through, the longer the next try has: a busy machine is slow, too.
        while not over.wait(moment.uniform(0.05, 0.5) * (1 + in_a_row / 4)):
            far_side.cut()

    thread = threading.Thread(target=cut)
    thread.start()
    # As many as it takes to be cut off once.
    while (len(reported) < max(8, len(names)) or not failures) and time.monotonic() < deadline:
        if len(reported) == len(names):
            names.append(f"{name}-{len(names)}")
        try:
            reported[names[-1]] = remote.submit_ticket(plan, site, name=names[-1]).job_id
            in_a_row = 0
        except TryLater:
            failures, in_a_row = failures + 1, in_a_row + 1
    over.set()
    thread.join()
    reported |= dict.fromkeys(set(names) - set(reported), "never")
    assert failures
    jobs = [(job.name, job.raw_id) for job in alpha.jobs(user=far_side.user, all_states=True) if job.name in names]
    assert sorted(jobs) == sorted(reported.items())
    while not all(seen.is_over for item, seen in remote.ticket_states(site, names).items() if item in names):
        assert time.monotonic() < deadline + 30
        time.sleep(0.3)
    assert {remote_files.read_file(site, f"{remote.ticket_dir(site, item)}/proof") for item in names} == {b"x\n"}


def test_cut_before_slurm_heard_of_it(
    site: Site, make_plan: MakePlan, far_side: Any, alpha: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody can tell whether sbatch got through, it is not run again: the ticket can be taken back instead."""
    monkeypatch.setattr("pitools.launch.tickets.remote.submission._FIND_PAUSE_S", 0.05)
    path = fake(far_side, '#!/bin/sh\necho x >> "$0.ran"\nkill -9 $PPID $(ps -o ppid= -p $PPID)\n')
    plan = make_plan(command="true")
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            remote.submit_ticket(plan, site, name=name)
    assert path.with_name("sbatch.ran").read_text() == "x\n"
    assert remote.revoke(site, [name]) == {name: True}
    with pytest.raises(ClusterError, match="revoked"):
        remote.submit_ticket(plan, site, name=name)
    assert not alpha.jobs(name=name, all_states=True)


def test_a_controller_that_is_away_is_asked_again(
    site: Site, make_plan: MakePlan, far_side: Any, alpha: Client, name: str
) -> None:
    """What certainly never reached slurmctld is submitted by the next call."""
    output = "sbatch: error: Batch job submission failed: Connection refused"
    path = fake(far_side, f"#!/bin/sh\necho '{output}' >&2\nexit 1\n")
    plan = make_plan(command="true")
    with pytest.raises(Unreachable, match="Connection refused") as caught:
        remote.submit_ticket(plan, site, name=name)
    assert not isinstance(caught.value, OutcomeUnknown)
    path.unlink()
    job_id = remote.submit_ticket(plan, site, name=name).job_id
    assert [job.raw_id for job in alpha.jobs(name=name, all_states=True)] == [job_id]


def test_cut_in_the_middle_of_a_stream(
    site: Site, make_plan: MakePlan, far_side: Any, alpha: Client, name: str, tmp_path: Path
) -> None:
    """Half a snapshot is not a run, nor is it left there; the same call again sends it whole."""
    (tmp_path / "work" / "large").write_bytes(os.urandom(100 << 20))
    plan = make_plan(command="true")
    runs = Path(remote.ticket_dir(site, name)).parent
    failed: list[PitError] = []

    def submit() -> None:
        try:
            remote.submit_ticket(plan, site, name=name)
        except PitError as error:
            failed.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    while not (half := sorted(runs.glob(f".{name}.*/code/large"))) or not half[0].stat().st_size:
        assert thread.is_alive()
    far_side.cut()
    thread.join(30)
    assert isinstance(failed[0], Unreachable)
    assert not (runs / name).exists()
    deadline = time.monotonic() + 10
    while list(runs.glob(f".{name}.*")):
        assert time.monotonic() < deadline
    remote.submit_ticket(plan, site, name=name)
    assert (runs / name / "code" / "large").read_bytes() == (tmp_path / "work" / "large").read_bytes()
    assert len(alpha.jobs(name=name, all_states=True)) == 1


@pytest.fixture
def full(as_root: None, far_side: Any) -> Iterator[Path]:
    """A disk of 12 MiB there."""
    disk = far_side.root / "disk"
    disk.mkdir(exist_ok=True)
    words = ["/usr/bin/mount", "-t", "tmpfs", "-o", "size=12m,mode=777", "none", str(disk)]
    subprocess.run(words, check=True)
    yield disk
    subprocess.run(["/usr/bin/umount", str(disk)], check=True)


def test_a_full_disk_there(site: Site, full: Path, tmp_path: Path) -> None:
    """Exit code 75, and not a byte is left of what did not fit."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "large").write_bytes(os.urandom(20 << 20))
    with pytest.raises(NoSpace, match="no space left"):
        remote_files.put_tree(site, tmp_path / "in", f"{full}/run")
    with pytest.raises(NoSpace):
        remote_files.write_file(site, f"{full}/file", os.urandom(20 << 20))
    assert not list(full.iterdir())


def test_data_goes_on_where_the_disk_was_full(
    site: Site, make_plan: MakePlan, far_side: Any, full: Path, make_dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that have come are not sent again; the dataset appears when all of them have."""
    monkeypatch.setattr("pitools.launch.tickets.remote.datasets.BATCH_BYTES", 1 << 20)
    target = moved(site, data=str(full))
    version = make_dataset([1 << 20] * 15)
    (staged,) = planned(make_plan, version).data
    with pytest.raises(NoSpace):
        remote.send_dataset(staged, target)
    assert not (full / "pick").exists()
    subprocess.run(["/usr/bin/mount", "-o", "remount,size=64m", str(full)], check=True)
    sent = remote.send_dataset(staged, target)
    assert 1 << 20 <= sent.bytes <= 6 << 20
    final = full / "pick" / version.name
    assert {path.name for path in full.iterdir()} == {"pick", ".tmp"}
    assert not list((full / ".tmp").iterdir())
    assert (final / "a" / "14").read_bytes() == (version / "a" / "14").read_bytes()
    assert remote.missing_datasets(planned(make_plan, version), target) == ()
    assert remote.send_dataset(staged, target).bytes in (0, 15 << 20)


def test_data_that_changed_is_not_published(site: Site, make_plan: MakePlan, far_side: Any, make_dataset: Any) -> None:
    """A byte that differs from the manifest is found there; put right, its batch alone is sent again, and its time."""
    version = make_dataset([1000, 2000])
    (staged,) = planned(make_plan, version).data
    right = (version / "a" / "1").read_bytes()
    (version / "a" / "1").write_bytes(b"\0" * 2000)
    with pytest.raises(DataError, match="a/1"):
        remote.send_dataset(staged, site)
    final = far_side.root / "data" / "pick" / version.name
    assert not final.exists()
    (version / "a" / "1").write_bytes(right)
    os.utime(version / "manifest.json", (1000, 1000))
    assert remote.send_dataset(staged, site).bytes == 3000
    assert (final / "a" / "1").read_bytes() == right
    assert published_at(final) == published_at(version)


def test_data_that_is_sent_twice_at_once(site: Site, make_plan: MakePlan, far_side: Any, make_dataset: Any) -> None:
    """Two that bring the same version help each other, or wait for nothing; one of them publishes it."""
    version = make_dataset([5 << 20] * 4)
    (staged,) = planned(make_plan, version).data
    failed: list[BaseException] = []

    def send() -> None:
        try:
            remote.send_dataset(staged, site)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (far_side.root / "data" / "pick" / version.name / "a" / "3").stat().st_size == 5 << 20


def test_no_pitools_there(site: Site, make_plan: MakePlan, make_dataset: Any) -> None:
    """An interpreter that is none, or has no pitools, is named: nothing can be verified without."""
    (staged,) = planned(make_plan, make_dataset([10])).data
    for python in ("/usr/bin/false-python", "/usr/bin/python3"):
        with pytest.raises(ToolMissing, match="python") as caught:
            remote.send_dataset(staged, moved(site, python=python))
        assert "paths.python" in caught.value.hint


def test_a_link_in_place_of_the_root(site: Site, make_plan: MakePlan, far_side: Any, name: str, tmp_path: Path) -> None:
    """Where somebody else decides what the folder of runs is, nothing is written."""
    elsewhere = far_side.root / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    far_side.own(elsewhere)
    root = far_side.root / "linked"
    root.symlink_to(elsewhere)
    try:
        target = moved(site, runs=str(root))
        with pytest.raises(ClusterError, match="is a link, not a folder"):
            remote.submit_ticket(make_plan(), target, name=name)
        with pytest.raises(ClusterError, match="is a link, not a folder"):
            remote.revoke(target, [name])
        assert not list(elsewhere.iterdir())
    finally:
        root.unlink()


@pytest.mark.parametrize("bad", ["runs", "/a/{job}/x", "/a\nb", "/a/../b", "/a/"])
def test_roots_that_are_none(site: Site, make_plan: MakePlan, name: str, bad: str) -> None:
    """A root that is not in full, or not one line, is refused with the key that says so."""
    with pytest.raises(ConfigError):
        remote.submit_ticket(make_plan(), moved(site, runs=bad), name=name)


def test_roots_of_odd_names(site: Site, make_plan: MakePlan, far_side: Any, name: str) -> None:
    """Quotes, dollars and blanks in a path are only a path."""
    odd = far_side.root / 'it\'s "$(touch x)" `id` é;&|'
    remote.submit_ticket(make_plan(command="true"), moved(site, runs=str(odd)), name=name)
    assert (odd / name / "job.json").is_file()
    assert {path.name for path in far_side.root.iterdir()} <= {
        "home",
        "runs",
        "data",
        "nvme",
        "bin",
        "disk",
        "elsewhere",
        odd.name,
    }


def moved(site: Site, **paths: str) -> Site:
    import msgspec

    return msgspec.structs.replace(site, paths=msgspec.structs.replace(site.paths, **paths))


def planned(make_plan: MakePlan, version: Path) -> planning.Plan:
    return make_plan(data={"pick": str(version)})
