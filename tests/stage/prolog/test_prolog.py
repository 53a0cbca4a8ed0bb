from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pitools.core import subprocesses
from pitools.core.errors import ConfigError
from pitools.stage.cache import lease
from pitools.stage.cache.evict import EvictionCandidate, KeptReason, evict_item
from pitools.stage.cache.layout import create_root, touch_lease
from pitools.stage.prolog import lease_holder, prolog
from pitools.stage.prolog.lease_holder import MAX_SETS, NodeJob
from pitools.stage.prolog.prolog import StagingRoot, disk_problem, job_root

AS_ROOT = pytest.mark.usefixtures("as_root")
NOBODY = 65534
JOB = NodeJob(
    id=77, uid=os.geteuid(), gid=os.getegid(), user="ada", node="n01", cluster="alpha", time_limit_at=float("inf")
)


class Node:
    """A node's staging disk and configuration, and the jobs that begin and end there; `call` runs the real script."""

    def __init__(self, folder: Path, repo: Path) -> None:
        self.disk, self.state, self.script = folder / "nvme", folder / "state", repo / "scripts" / "pit-prolog"
        self.root = self.disk / "ada" / "pit"
        self.config = folder / "prolog.toml"
        self.disk.mkdir()
        self.configure()

    def configure(self, more: str = "", root: str = "") -> None:
        text = f'state = "{self.state}"\n{more}\n'
        self.config.write_text(text + (root or f'[[roots]]\npath = "{self.disk}/{{user}}/pit"\n'))

    def call(self, context: str = "prolog", **more: str) -> subprocess.CompletedProcess[str]:
        env = {
            "SLURM_SCRIPT_CONTEXT": f"{context}_slurmd",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_USER": "ada",
            "SLURM_JOB_UID": str(JOB.uid),
            "SLURM_JOB_GID": str(JOB.gid),
            "SLURMD_NODENAME": "n01",
            "SLURM_CLUSTER_NAME": "alpha",
            "PIT_PYTHON": sys.executable,
            "PIT_PROLOG_CONFIG": str(self.config),
        }
        env = {name: value for name, value in {**env, **more}.items() if value}
        return subprocess.run(
            [str(self.script)], env=env, cwd="/", capture_output=True, text=True, timeout=30, check=False
        )

    def put(self, *versions: str, uid: int | None = None) -> None:
        """Sets as a stager leaves them; nothing here reads their content."""
        create_root(self.root)
        for version in versions:
            (self.root / "objects" / version).mkdir()
            touch_lease(self.root, version)
        if uid is not None:
            for path in [self.root.parent, *self.root.parent.rglob("*")]:
                os.chown(path, uid, uid)

    def leased(self, *versions: str) -> list[bool]:
        return [lease.is_leased(self.root, version) for version in versions]

    def is_held(self, job: int = 77) -> bool:
        """Whether the holder of a job lives; its lock goes before its zombie does."""
        with (self.state / f"alpha.n01.{job}").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def holder(self, job: int = 77) -> int:
        return int((self.state / f"alpha.n01.{job}").read_text())


@pytest.fixture
def node(repo: Path) -> Iterator[Node]:
    """A node in a folder that every user can reach; its jobs' holders end with the test."""
    folder = Path(tempfile.mkdtemp(prefix="pit-prolog-"))
    folder.chmod(0o755)
    created = Node(folder, repo)
    yield created
    for path in created.state.glob("alpha.*"):
        created.call("epilog", SLURM_JOB_ID=path.suffix[1:])
    shutil.rmtree(folder)


@pytest.fixture
def mount(as_root: None) -> Iterator[Callable[..., None]]:
    """Mounts tmpfs on folders, with options, and remounts them."""
    mounted: list[Path] = []

    def call(folder: Path, options: str) -> None:
        done = subprocesses.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], timeout_s=10)
        if done.code:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(folder)

    yield call
    for folder in reversed(mounted):
        subprocesses.run(["umount", "-l", str(folder)], timeout_s=10)


def said_nothing(done: subprocess.CompletedProcess[str]) -> bool:
    return (done.returncode, done.stdout, done.stderr) == (0, "", "")


def ends(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_what_is_staged_is_leased_until_the_epilog(node: Node):
    """Every set of the job's user is leased when the prolog returns, no use is noted, and free after the epilog."""
    node.put("a" * 32, "b" * 32)
    assert said_nothing(node.call())
    assert node.leased("a" * 32, "b" * 32) == [True, True]
    item = EvictionCandidate("a" * 32, node.root / "objects" / ("a" * 32))
    assert evict_item(node.root, item, grace_s=0, force=True) == KeptReason.KEPT_FOR_JOB
    assert said_nothing(node.call("epilog"))
    assert node.leased("a" * 32, "b" * 32) == [False, False]
    assert list(node.state.iterdir()) == []
    assert said_nothing(node.call("epilog"))


def test_a_prolog_is_not_a_use(node: Node):
    """The order in which sets are evicted stays what the jobs' own leases made it."""
    node.put("a" * 32)
    os.utime(node.root / ".leases" / ("a" * 32), (1000, 1000))
    node.call()
    node.call("epilog")
    assert lease.last_used(node.root, "a" * 32) == 1000


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_job_evicts_what_only_its_own_prolog_leases(node: Node, monkeypatch: pytest.MonkeyPatch, dry_run: bool):
    """Another job's prolog keeps a set, and its last use stays; a process that reads the set keeps it from all."""
    node.put("a" * 32)
    final = node.root / "objects" / ("a" * 32)
    os.utime(node.root / ".leases" / final.name, (1000, 1000))
    item = EvictionCandidate(final.name, final)
    assert said_nothing(node.call())
    for job, reason in (("", KeptReason.KEPT_FOR_JOB), ("76", KeptReason.KEPT_FOR_JOB), ("77", None)):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        with lease.leased_set(final, touch=False):
            assert evict_item(node.root, item, grace_s=0, force=True, dry_run=True) == KeptReason.LEASED
        assert evict_item(node.root, item, grace_s=0, force=True, dry_run=dry_run) == reason
        assert lease.last_used(node.root, final.name) == 1000


def test_a_step_leases_beside_the_prolog(node: Node):
    """The first step's own lease is had at once, and goes on when the job's is gone."""
    node.put("a" * 32)
    node.call()
    with lease.leased_set(node.root / "objects" / ("a" * 32)):
        node.call("epilog")
        assert node.leased("a" * 32) == [True]
    assert node.leased("a" * 32) == [False]


@AS_ROOT
def test_the_holder_is_the_users_process(node: Node):
    """It has the job's user and groups, a session of its own, and no descriptor but its lock, leases and /dev/null."""
    node.put("a" * 32, uid=NOBODY)
    assert said_nothing(node.call(SLURM_JOB_UID=str(NOBODY), SLURM_JOB_GID=str(NOBODY)))
    assert node.leased("a" * 32) == [True]
    pid = node.holder()
    status = Path(f"/proc/{pid}/status").read_text()
    assert re.search(rf"^Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}$", status, re.M)
    assert re.search(rf"^Gid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}$", status, re.M)
    assert re.search(rf"^Groups:\t{NOBODY} ?$", status, re.M)
    assert os.getsid(pid) == pid
    open_files = sorted(str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())
    assert open_files == sorted(
        ["/dev/null"] * 3 + [str(node.state / "alpha.n01.77"), str(node.root / ".leases" / ("a" * 32))]
    )
    assert not any(
        int(flags[1], 8) & os.O_ACCMODE
        for path in Path(f"/proc/{pid}/fdinfo").iterdir()
        if int(path.name) > 2 and (flags := re.search(r"flags:\t(\d+)", path.read_text()))
    )


@AS_ROOT
def test_links_of_a_hostile_user_lead_nowhere(node: Node):
    """A user's links to others' folders, and their FIFOs, give no lease, no hang and no drained node."""
    folder = node.disk / "bob" / "pit"
    (folder / "objects" / ("c" * 32)).mkdir(parents=True)
    (folder / ".leases").mkdir()
    (folder / ".leases" / ("c" * 32)).touch()
    node.put("a" * 32, "d" * 32)
    shutil.rmtree(node.root / ".leases")
    (node.root / ".leases").symlink_to(folder / ".leases")
    (node.root / "objects" / ("c" * 32)).mkdir()
    done = node.call(SLURM_JOB_UID=str(NOBODY), SLURM_JOB_GID=str(NOBODY))
    assert (done.returncode, "not leased" in done.stderr) == (0, True)
    for path in [node.root.parent, *node.root.parent.rglob("*")]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    done = node.call(SLURM_JOB_UID=str(NOBODY), SLURM_JOB_GID=str(NOBODY))
    assert (done.returncode, "symbolic link" in done.stderr) == (0, True)
    assert not lease.is_leased(folder, "c" * 32)
    (node.root / ".leases").unlink()
    (node.root / ".leases").mkdir()
    os.mkfifo(node.root / ".leases" / ("a" * 32))
    for path in (node.root / ".leases", node.root / ".leases" / ("a" * 32)):
        os.chown(path, NOBODY, NOBODY)
    assert node.call(SLURM_JOB_UID=str(NOBODY), SLURM_JOB_GID=str(NOBODY)).returncode == 0
    assert node.leased("d" * 32) == [True]


def test_nothing_staged_is_no_finding(node: Node):
    """A user who never staged has no holder and no word; a root with nothing in it neither."""
    assert said_nothing(node.call())
    (node.root / "objects").mkdir(parents=True)
    assert said_nothing(node.call())
    assert ends(lambda: not node.is_held())


def test_a_disk_that_is_not_there_is_a_finding(node: Node):
    """Exit 1, and slurmd's log says which folder; of a configured mount point also when nothing is mounted there."""
    node.configure(root=f'[[roots]]\npath = "{node.disk}/{{user}}"\ndisk = "{node.disk}"\n')
    done = node.call()
    assert (done.returncode, done.stderr) == (1, f"pit-prolog: {node.disk} is not mounted\n")
    node.configure()
    node.disk.rmdir()
    done = node.call()
    assert (done.returncode, done.stderr) == (1, f"pit-prolog: {node.disk} is missing\n")
    assert said_nothing(node.call("epilog"))  # the job is over: nothing is gained by a drained node


@AS_ROOT
def test_a_read_only_disk_is_a_finding(node: Node, mount: Callable[..., None]):
    """A file system that turned read-only, as one with errors does, fails the prolog; made writable it passes."""
    mount(node.disk, "size=4m")
    node.configure(root=f'[[roots]]\npath = "{node.disk}/{{user}}/pit"\ndisk = "{node.disk}"\n')
    node.put("a" * 32)
    assert subprocesses.run(["mount", "-o", "remount,ro", str(node.disk)], timeout_s=10).code == 0
    done = node.call()
    assert (done.returncode, done.stderr) == (1, f"pit-prolog: {node.disk} is read-only\n")
    assert subprocesses.run(["mount", "-o", "remount,rw", str(node.disk)], timeout_s=10).code == 0
    assert said_nothing(node.call())
    assert node.leased("a" * 32) == [True]


@AS_ROOT
def test_a_full_disk_is_no_finding(node: Node, mount: Callable[..., None]):
    """It is said, the job starts, and what is staged is leased."""
    mount(node.disk, "size=1m")
    node.put("a" * 32)
    with (node.disk / "fill").open("wb", buffering=0) as file:
        assert file.write(bytes(2 << 20)) < 2 << 20
    done = node.call()
    assert (done.returncode, "No space left" in done.stderr) == (0, True)
    assert node.leased("a" * 32) == [True]


@pytest.mark.parametrize(
    ("number", "finding"),
    [
        (errno.EIO, "broken"),
        (errno.EUCLEAN, "broken"),
        (errno.ENODEV, "broken"),
        (errno.EROFS, "broken"),
        (errno.ENOENT, "missing"),
        (errno.ENOTDIR, "missing"),
        (errno.EACCES, ""),
        (errno.ENOSPC, ""),
        (errno.ENOMEM, ""),
    ],
)
def test_only_what_a_broken_disk_answers_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, finding: str
):
    """I/O errors are the node's; refusals, lack of space and lack of memory are not."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(prolog, "_write_test_block", refuse)
    actual = disk_problem(tmp_path, mounted=False)
    assert finding in actual
    assert bool(actual) == bool(finding)


BAD_PYTHON = "#!/bin/sh\n"


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("exit 1", "failed (1)"),
        ("echo Traceback; exit 3", "Traceback"),
        ("kill -SEGV $$", "failed (139)"),
        ("exec /nowhere/at/all", "failed (127)"),
    ],
    ids=["fails", "talks", "crashes", "vanishes"],
)
def test_a_broken_installation_drains_no_node(node: Node, python: str, said: str):
    """Whatever the interpreter does but find something wrong, the job starts, and why there is no lease is said."""
    bad = node.state.parent / "python"
    bad.write_text(BAD_PYTHON + python + "\n")
    bad.chmod(0o755)
    done = node.call(PIT_PYTHON=str(bad))
    assert (done.returncode, said in done.stderr) == (0, True), done.stderr


def test_a_wrong_python_is_named_with_the_file_that_names_it(node: Node):
    """A misspelt key too, for which another Python is taken."""
    node.script = Path(shutil.copy(node.script, node.state.parent / "copy"))
    node.configure('python = "/bin/false"')
    done = node.call(PIT_PYTHON="")
    assert (done.returncode, f'python = "/bin/false" in {node.config}' in done.stderr) == (0, True), done.stderr


def test_a_disk_without_a_path_drains_no_node(node: Node):
    """A disk that cannot be one is a wrong file, and no finding."""
    node.configure(root=f'[[roots]]\npath = "{node.disk}/{{user}}/pit"\ndisk = "1h"\n')
    done = node.call()
    assert (done.returncode, 'disk = "1h"' in done.stderr) == (0, True), done.stderr


def test_no_installation_drains_no_node(node: Node):
    """A copy of the script alone, on a machine whose python3 has no pitools, or where the named one is not there."""
    node.script = Path(shutil.copy(node.script, node.state.parent / "copy"))
    done = node.call(PIT_PYTHON="/nowhere/bin/python")
    assert (done.returncode, "without leases" in done.stderr) == (0, True), done.stderr


def test_a_finding_without_words_is_one(node: Node):
    """Where the words are lost, as on a full /run, the node is drained all the same; but not by an epilog."""
    bad = node.state.parent / "python"
    bad.write_text(BAD_PYTHON + "exit 100\n")
    bad.chmod(0o755)
    done = node.call(PIT_PYTHON=str(bad))
    assert (done.returncode, "the staging disk cannot be used" in done.stderr) == (1, True)
    assert node.call("epilog", PIT_PYTHON=str(bad)).returncode == 0


def test_an_installation_that_hangs_is_given_up(node: Node):
    """After the time-out the job starts; the interpreter and what it started are gone, and the pipe is free."""
    bad, pids = node.state.parent / "python", node.state.parent / "pids"
    bad.write_text(f"{BAD_PYTHON}sleep 600 & echo $! > {pids}; echo $$ >> {pids}; wait\n")
    bad.chmod(0o755)
    node.configure("timeout_s = 1")
    done = node.call(PIT_PYTHON=str(bad))
    assert (done.returncode, "gave up after 1 s" in done.stderr) == (0, True)
    assert ends(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()))


def test_the_script_finds_its_python_in_the_file(node: Node):
    """A copy of the script on the node's own disk needs no variable: the file names the interpreter."""
    node.put("a" * 32)
    node.configure(f'python = "{sys.executable}"  # installed\ntimeout_s = 9')
    node.script = Path(shutil.copy(node.script, node.state.parent / "copy"))
    assert said_nothing(node.call(PIT_PYTHON=""))
    assert node.leased("a" * 32) == [True]


@pytest.mark.parametrize("line", ["python = '{}'", '  python="{}"', '# python = "/nowhere"\npython\t=\t"{}" # 3.11'])
def test_whatever_toml_says_the_script_reads(node: Node, line: str):
    """Both kinds of quotes, spaces or none, and no key of a table further below."""
    node.put("a" * 32)
    node.configure(line.format(sys.executable), f'[[roots]]\npath = "{node.disk}/{{user}}/pit"\n# x\ndisk = ""\n')
    node.script = Path(shutil.copy(node.script, node.state.parent / "copy"))
    assert said_nothing(node.call(PIT_PYTHON=""))
    assert node.leased("a" * 32) == [True]


def test_an_installed_script_finds_its_own_python(node: Node):
    """Where pip puts it, the interpreter needs no name."""
    prefix = node.state.parent / "opt"
    shipped = "lib/python3.11/site-packages/pitools/shipped/scripts"
    for folder in ("bin", shipped):
        (prefix / folder).mkdir(parents=True)
    (prefix / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (prefix / "bin/python").chmod(0o755)
    node.script = Path(shutil.copy(node.script, prefix / shipped))
    node.put("a" * 32)
    assert said_nothing(node.call(PIT_PYTHON=""))
    assert node.leased("a" * 32) == [True]


@pytest.mark.parametrize(
    ("more", "environment", "said"),
    [
        ("root = 1", {}, 'unknown key "root"'),
        ("timeout_s = 'x'", {}, 'key "timeout_s"'),
        ("max_lease = 'long'", {}, 'prolog.toml: max_lease: "long" is not a duration'),
        ("idle_time = '7D'", {}, 'prolog.toml: idle_time: "7D" is not a duration'),
        ("", {"SLURM_JOB_USER": "../../etc"}, "no name of a user"),
        ("", {"SLURM_JOB_USER": "..", "PIT_PROLOG_ROOTS": "/{user}"}, "no name of a user"),
        ("", {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
        ("", {"SLURM_JOB_UID": "ada"}, "not a number"),
        ("", {"SLURM_JOB_USER": "", "SLURM_JOB_UID": "4294967000"}, "unknown"),
        ("", {"SLURM_SCRIPT_CONTEXT": "prolog_task"}, "Prolog= and Epilog= of slurm.conf"),
        ("", {"PIT_PROLOG_ROOTS": "nvme/{user}"}, "absolute path"),
        ("", {"PIT_PROLOG_ROOTS": "/tmp/{usr}"}, 'did you mean "user"?'),
        ("", {"PIT_PROLOG_CONFIG": "/nowhere/prolog.toml"}, "no such file"),
    ],
)
def test_mistakes_of_people_drain_no_node(node: Node, more: str, environment: dict[str, str], said: str):
    """A wrong file, or variables that make no sense, are said, and the job starts."""
    node.configure(more)
    done = node.call(**environment)
    assert (done.returncode, said in done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_state_folder_that_others_write_is_refused(node: Node, mode: int):
    """Whoever could write a pid there could have root end any process."""
    node.put("a" * 32)
    node.state.mkdir()
    node.state.chmod(mode)
    done = node.call()
    assert (done.returncode, "others may write here" in done.stderr) == (0, True)
    node.state.chmod(0o700)


def test_a_configuration_that_others_write_is_refused(node: Node):
    """Root takes no orders from a file that anybody can write; the job starts, without leases."""
    node.put("a" * 32)
    node.config.chmod(0o666)
    done = node.call()
    assert (done.returncode, str(node.config) in done.stderr) == (0, True)
    assert node.leased("a" * 32) == [False]


@AS_ROOT
@pytest.mark.parametrize(
    ("mode", "folder_mode", "uid", "runs"),
    [
        (0o644, 0o755, 0, True),
        (0o664, 0o755, 0, True),
        (0o666, 0o755, 0, False),
        (0o644, 0o777, 0, False),
        (0o644, 0o1777, 0, True),
        (0o600, 0o755, NOBODY, False),
    ],
)
def test_no_program_of_an_untrusted_configuration_is_run(node: Node, mode: int, folder_mode: int, uid: int, runs: bool):
    """The interpreter that the file names is root's choice, also where the file is a link to another folder."""
    folder, ran = node.config.parent / "etc", node.config.parent / "ran"
    folder.mkdir()
    program = node.config.parent / "program"
    program.write_text(f"#!/bin/sh\n: > {ran}\n")
    program.chmod(0o755)
    node.configure(f'python = "{program}"')
    config = node.config.rename(folder / "prolog.toml")
    node.config.symlink_to(config)
    config.chmod(mode)
    os.chown(config, uid, -1)
    folder.chmod(folder_mode)
    done = node.call(PIT_PYTHON="")
    assert (done.returncode, done.stderr == "", ran.exists()) == (0, runs, runs)


def test_a_second_prolog_replaces_the_first_and_sweeps_the_dead(node: Node):
    """A requeued job has one holder; the files of holders that were killed go, those of other jobs stay."""
    node.put("a" * 32)
    node.call()
    first = node.holder()
    node.call(SLURM_JOB_ID="78")
    node.call(SLURM_JOB_ID="79")
    os.kill(node.holder(79), 9)
    assert ends(lambda: not node.is_held(79))
    node.call()
    assert node.holder() != first
    assert sorted(path.name for path in node.state.iterdir()) == ["alpha.n01.77", "alpha.n01.78"]
    node.call("epilog")
    assert node.leased("a" * 32) == [True]  # by job 78
    node.call("epilog", SLURM_JOB_ID="78")
    assert node.leased("a" * 32) == [False]


def test_a_pid_that_is_not_the_holders_is_left_alone(node: Node):
    """After a holder's death its number may be anybody's: without the lock nobody is signalled."""
    process = subprocess.Popen(["sleep", "60"])
    node.state.mkdir(mode=0o700)
    (node.state / "alpha.n01.77").write_text(str(process.pid))
    assert said_nothing(node.call("epilog"))
    assert process.poll() is None
    process.kill()
    process.wait()


def test_a_lock_of_another_prolog_does_not_make_an_old_pid_the_holders(node: Node, monkeypatch: pytest.MonkeyPatch):
    """While another job's prolog looks at the file of a dead holder, its number is still anybody's."""
    monkeypatch.setattr(lease_holder, "_EXIT_TIMEOUT_S", 0.1)
    node.state.mkdir(mode=0o700)
    path = node.state / "alpha.n01.77"
    with subprocess.Popen(["sleep", "60"]) as process:
        path.write_text(str(process.pid))
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            lease_holder.stop_holder(node.state, JOB)
        assert process.poll() is None
        process.kill()
    assert path.exists()
    lease_holder.stop_holder(node.state, JOB)
    assert not path.exists()


def test_the_file_of_a_new_holder_is_not_swept(node: Node, monkeypatch: pytest.MonkeyPatch):
    """A job that is requeued while another's prolog sweeps the file of its dead holder keeps its new one."""
    node.state.mkdir(mode=0o700)
    path = node.state / "alpha.n01.77"
    path.touch()

    def replaced(_: int) -> bool:
        path.unlink()
        path.write_text("new")
        return True

    monkeypatch.setattr(lease_holder, "_has_ended", replaced)
    lease_holder.stop_holder(node.state, JOB._replace(id=78))
    assert path.read_text() == "new"


def test_the_sets_used_last_are_leased_where_there_are_too_many(node: Node):
    """A thousand leases cost a job's start less than a second; of more sets the rest is said to be without."""
    names = [f"{number:032x}" for number in range(MAX_SETS + 5)]
    node.put(*names)
    for number, name in enumerate(names):
        os.utime(node.root / ".leases" / name, (number, number))
    done = node.call()
    assert (done.returncode, f"{MAX_SETS} used last are leased" in done.stderr) == (0, True)
    assert node.leased(names[0], names[4], names[5], names[-1]) == [False, False, True, True]


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Starts processes that look like Slurm's step daemons: their program's name and title are all that is seen."""
    program = Path(shutil.copy(str(shutil.which("sleep")), tmp_path / "slurmstepd"))
    started: list[subprocess.Popen[bytes]] = []

    def start(job: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([f"slurmstepd: [{job}.batch]", "60"], executable=program))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_leases_end_with_the_last_step_where_no_epilog_runs(node: Node, step: Callable):
    """While a step of the job runs its leases stay, however long it idled before; then they go by themselves."""
    node.put("a" * 32)
    node.configure('idle_time = "1s"')
    batch, other = step(77), step(770)
    assert said_nothing(node.call())
    time.sleep(1.5)
    assert node.leased("a" * 32) == [True]
    batch.kill()
    batch.wait()
    assert ends(lambda: node.leased("a" * 32) == [False])
    assert other.poll() is None


class Clock:
    """Time as it is, and what passed asleep, in no time."""

    def __init__(self) -> None:
        self.passed_s, self._began_s = 0.0, time.monotonic()

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s

    def time(self) -> float:
        return time.time() + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds

    def elapsed_s(self) -> float:
        return self.monotonic() - self._began_s


@pytest.mark.parametrize(("end", "idle_s"), [(300, 1000), (float("inf"), 300)])
def test_leases_end_at_the_jobs_end(monkeypatch: pytest.MonkeyPatch, end: float, idle_s: float):
    """Past it, or when it has been without steps for so long, a job has none; and no sooner or later."""
    clock = Clock()
    monkeypatch.setattr(lease_holder, "time", clock)
    lease_holder.wait_for_job_end(JOB._replace(time_limit_at=time.time() + end), max_lease_s=2000, idle_s=idle_s)
    assert clock.elapsed_s() >= 299.9
    assert clock.passed_s < 301


def test_leases_end_at_the_latest_time(step: Callable):
    """`max_lease` ends them even of a running job, and nothing else does."""
    running, began = step(77), time.monotonic()
    lease_holder.wait_for_job_end(JOB._replace(time_limit_at=time.time() + 0.1), max_lease_s=0.5, idle_s=0.1)
    assert time.monotonic() - began > 0.4
    assert running.poll() is None


@pytest.mark.parametrize("end", ["", "0", "Unknown", "UNLIMITED", str(2**32 - 2)])
def test_a_job_without_a_limit_is_leased(node: Node, end: str):
    """Whatever Slurm calls an end that is not known, it is not past."""
    node.put("a" * 32)
    assert said_nothing(node.call(SLURM_JOB_END_TIME=end))
    time.sleep(0.1)
    assert node.leased("a" * 32) == [True]


@pytest.mark.parametrize(
    ("path", "disk", "found"),
    [
        ("/nvme/{user}/pit", "", ("/nvme/ada/pit", "/nvme", False)),
        ("/nvme/pit-{user}", "", ("/nvme/pit-ada", "/nvme", False)),
        ("/{node}/{user}/{job}", "", ("/n01/ada/77", "/", False)),
        ("/nvme/pit", "", ("/nvme/pit", "/nvme", False)),
        ("/nvme/a/{user}", "/nvme", ("/nvme/a/ada", "/nvme", True)),
    ],
)
def test_the_disk_is_what_no_user_makes(path: str, disk: str, found: tuple[str, str, bool]):
    """What is judged lies above the first placeholder, or is named; it is never a folder that a user can remove."""
    assert job_root(StagingRoot(path=path, disk=disk), JOB) == (Path(found[0]), Path(found[1]), found[2])


@pytest.mark.parametrize("path", ["/nvme/../{user}", "pit", "/nvme/{home}"])
def test_a_root_that_could_be_anywhere_is_refused(path: str):
    """Relative paths, `..` and unknown placeholders."""
    with pytest.raises(ConfigError):
        job_root(StagingRoot(path=path), JOB)


def test_it_is_executable_and_plain_sh(repo: Path):
    """slurmd starts the file itself, and /bin/sh is any."""
    script = repo / "scripts" / "pit-prolog"
    assert script.stat().st_mode & stat.S_IXUSR
    assert script.read_text().startswith("#!/bin/sh\n")
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
