"""The queue over two real clusters: every job runs once, whatever becomes of ticks and answers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pitools.core import hostlist
from pitools.core.errors import ClusterError
from pitools.launch import plan as planning
from pitools.launch.request import Request, Topology
from pitools.launch.submission import grant
from pitools.launch.tickets import shared_fs
from pitools.place.dispatch import store
from pitools.site.connect import client
from pitools.site.load import load_site
from pitools.site.schema import Site
from pitools.slurm.client import Client, Transport
from tests.conftest import CLUSTERS

pytestmark = pytest.mark.slurm

Pit = Callable[..., subprocess.CompletedProcess[str]]
PIT = str(Path(sys.executable).with_name("pit"))
# As short as a script can be: what is tested is who runs, not what.
TEMPLATE = """\
#!/bin/bash
{% for flag in directives %}
{{ flag }}
{% endfor %}
{% for name, value in environment %}
export {{ name }}={{ value | q }}
{% endfor %}
echo "$SLURM_JOB_NAME $SLURM_CLUSTER_NAME" >> "$RAN"
sleep "$LENGTH_S"
"""
REQUEST = """\
name = "{name}"
command = "the site's template runs it"
time = "2m"
partition = "train"
[env]
RAN = "{ran}"
LENGTH_S = "{length_s}"
"""


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of a user with a queue of their own, all of whose files are in this folder."""
    sites = folder / "sites"
    sites.mkdir(parents=True)
    (sites / "short.sbatch.j2").write_text(TEMPLATE)
    for name in ("alpha", "beta"):
        changes = (
            f'[paths]\nruns = "{folder}/runs"\n[connection]\ntimeout_s = 5\n[templates]\ntrain = "short.sbatch.j2"\n'
        )
        (sites / f"{name}.toml").write_text(changes)
    home = folder / "home"
    home.mkdir(mode=0o700)
    return {
        "PIT_SITE_PATH": str(sites),
        "PIT_QUEUE": str(folder / "place"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_STATE_HOME": str(home / "state"),
        "PIT_SITES": "alpha beta",
    }


def clear(clusters: Path, folder: Path) -> None:
    """Cancel what is left in the clusters."""
    for name in ("alpha", "beta"):
        slurm = Client(Transport(env={"SLURM_CONF": str(clusters / name / "slurm.conf")}))
        if left := [job.raw_id for job in slurm.jobs() if str(folder) in job.work_dir or "dispatch" in job.name]:
            slurm.cancel(left)


@pytest.fixture
def env(clusters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of a user with a queue of their own; what is left in the clusters at the end is cancelled."""
    ours = surroundings(tmp_path)
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    yield {**os.environ, **ours}
    clear(clusters, tmp_path)


def add(tmp_path: Path, env: dict[str, str], count: int, length_s: float = 0.2) -> list[str]:
    """Put so many jobs into the queue; their ids."""
    paths = []
    for number in range(count):
        paths.append(tmp_path / f"{number}.toml")
        paths[-1].write_text(REQUEST.format(name=f"dispatch-{number}", ran=tmp_path / "ran", length_s=length_s))
    done = pit(env, "run", *map(str, paths))
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["job_id"] for line in done.stdout.splitlines()]


def pit(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    argv = [PIT, "place", *words]
    return subprocess.run(argv, env=env, cwd=env["HOME"], text=True, capture_output=True, timeout=90, check=False)


def drain(env: dict[str, str], timeout_s: float = 60.0) -> None:
    """Tick until every job is over."""
    done = subprocess.run(
        [PIT, "place", "watch", "--every", "0.5s", "--until-empty"],
        env=env,
        text=True,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def ran(tmp_path: Path) -> Counter[str]:
    """How often each job ran."""
    path = tmp_path / "ran"
    return Counter(line.split(".")[0] for line in path.read_text().splitlines()) if path.exists() else Counter()


def states(job_ids: list[str]) -> set[str]:
    return {store.find_job(store.queue_dir(), job_id).state for job_id in job_ids}


def test_jobs_run_once_each_over_both_clusters(env: dict[str, str], tmp_path: Path) -> None:
    """More jobs than one cluster holds: each runs once, and `list` knows them to the end."""
    job_ids = add(tmp_path, env, 12, length_s=1.0)
    drain(env)
    assert ran(tmp_path) == Counter(job_ids)
    assert states(job_ids) == {"done"}
    places = {line.split()[1] for line in (tmp_path / "ran").read_text().splitlines()}
    assert places == {"alpha", "beta"}
    rows = [json.loads(line) for line in pit(env, "list", "--all").stdout.splitlines()]
    assert {row["job_id"]: (row["state"], row["exit_code"]) for row in rows} == dict.fromkeys(job_ids, ("done", 0))
    assert pit(env, "list").stdout == ""


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_a_tick_killed_at_any_line_loses_nothing(env: dict[str, str], tmp_path: Path, lines: int) -> None:
    """kill -9 as soon as the journal has so many lines: what was in flight is found again, and runs once."""
    (job_id,) = add(tmp_path, env, 1, length_s=3.0 if lines == 3 else 0.2)  # the third line is that it was seen running
    journal = Path(env["PIT_QUEUE"]) / "jobs" / job_id / "journal.jsonl"
    watch = subprocess.Popen([PIT, "place", "watch", "--every", "0.2s"], env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while _lines(journal) < lines:
        assert time.monotonic() < deadline, "there were fewer lines"
        time.sleep(0.001)
    watch.send_signal(signal.SIGKILL)
    watch.wait()
    drain(env)
    assert ran(tmp_path) == Counter([job_id])
    assert states([job_id]) == {"done"}


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def test_ticks_at_once_do_no_harm(env: dict[str, str], tmp_path: Path) -> None:
    """One works, the others say so and are content; the job has one ticket."""
    (job_id,) = add(tmp_path, env, 1)
    argv = [PIT, "place", "tick"]
    ticks = [subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    output = [tick.communicate(timeout=60)[1] for tick in ticks]
    assert [tick.returncode for tick in ticks] == [0] * 4
    assert any("another tick is at work" in text for text in output)
    drain(env)
    assert ran(tmp_path) == Counter([job_id])
    assert len(store.find_job(store.queue_dir(), job_id).tickets) == 1


FAULTS = [(when, how) for when in ("before", "after") for how in ("exit 1", "sleep 60")]


@pytest.fixture(scope="module")
def unanswered(clusters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Path]]:
    """A folder for each of FAULTS, whose queue was drained with an sbatch that has it once. They wait together."""
    base = tmp_path_factory.mktemp("unanswered")
    folders = {fault: base / str(number) for number, fault in enumerate(FAULTS)}
    with ThreadPoolExecutor(len(FAULTS)) as pool:
        list(pool.map(lambda fault: _fail(folders[fault], *fault), FAULTS))
    yield folders
    clear(clusters, base)


def _fail(folder: Path, when: str, how: str) -> None:
    env = {**os.environ, **surroundings(folder)}
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    real = shutil.which("sbatch")
    submit = f'{real} "$@" > {folder}/answer' if when == "after" else ":"
    (bin_folder / "sbatch").write_text(
        f"#!/bin/sh\nif mkdir {folder}/once 2>/dev/null; then {submit}\n"
        f'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2\n{how}; fi\n'
        f'exec {real} "$@"\n'
    )
    (bin_folder / "sbatch").chmod(0o755)
    add(folder, env, 1)
    drain({**env, "PATH": f"{bin_folder}:{env['PATH']}"})


@pytest.mark.parametrize(("when", "how"), FAULTS)
def test_an_unanswered_submission_makes_one_run(unanswered: dict[tuple[str, str], Path], when: str, how: str) -> None:
    """sbatch that queues the job, or not, and then fails or hangs: there is one run in the end."""
    folder = unanswered[when, how]
    assert (folder / "once").exists()
    ((job,), _) = store.read_jobs(folder / "place", done=True)
    assert ran(folder) == Counter([job.job_id])
    # Where it was queued its ticket was found by its name; else it was taken back, and another made.
    assert len(job.tickets) == (1 if when == "after" else 2)


def test_a_ticket_that_was_taken_back_does_nothing_on_its_nodes(env: dict[str, str], tmp_path: Path) -> None:
    """Two tickets for one node, taken back while one runs and one waits: the first ends, the other does not begin."""
    site = load_site("alpha")
    names = [f"dispatch-back-{os.getpid()}.{n}" for n in (1, 2)]
    plan = _plan(site, tmp_path, nodelist="alpha01", length_s=2)
    refs = [shared_fs.submit_ticket(plan, site, name=name) for name in names]
    _until(lambda: (tmp_path / "ran").exists())
    assert shared_fs.revoke(site, names) == {names[0]: False, names[1]: True}
    _until(lambda: all(shared_fs.ticket_states(site, names)[name].is_over for name in names))
    assert (tmp_path / "ran").read_text() == f"{names[0]} alpha\n"
    observed = shared_fs.ticket_states(site, names)
    assert [observed[name].state for name in names] == ["COMPLETED", "FAILED"]
    assert [grant.is_granted(observed[name].grant) for name in names] == [True, False]
    # By the same name nothing is submitted again.
    assert shared_fs.submit_ticket(plan, site, name=names[0]).job_id == refs[0].job_id


def test_a_job_gets_the_best_of_the_free_nodes(env: dict[str, str], tmp_path: Path) -> None:
    """Its ticket is told the leaf that has room for it, and runs there; the run's own events say so."""
    (tmp_path / "tree.toml").write_text(
        REQUEST.format(name="dispatch-tree", ran=tmp_path / "ran", length_s=0).replace(
            "[env]", 'nodes = 3\ntopology = "exclude"\n[env]'
        )
    )
    done = pit(env, "run", str(tmp_path / "tree.toml"), "--site", "alpha")
    assert (done.returncode, done.stderr) == (0, "")
    job_id = json.loads(done.stdout)["job_id"]
    drain(env)
    assert ran(tmp_path) == Counter([job_id])
    events = (tmp_path / "runs" / f"{job_id}.1" / "events.jsonl").read_text().splitlines()
    (reported,) = [item["detail"] for item in map(json.loads, events) if item["event"] == "topology"]
    assert (reported["by"], reported["leaves"], reported["is_within"], reported["is_released"]) == (
        "exclude",
        1,
        True,
        False,
    )


def test_a_job_that_is_put_back_may_start_anywhere(env: dict[str, str], tmp_path: Path) -> None:
    """Its nodes were chosen for its first start: on the next tick it waits for none of them."""
    (tmp_path / "tree.toml").write_text(
        REQUEST.format(name="dispatch-tree", ran=tmp_path / "ran", length_s=60).replace(
            "[env]", 'topology = "exclude"\nexclude = "alpha08"\n[env]'
        )
    )
    done = pit(env, "run", str(tmp_path / "tree.toml"), "--site", "alpha")
    job_id = json.loads(done.stdout)["job_id"]
    _until(lambda: pit(env, "tick").returncode == 0 and states([job_id]) == {"running"})
    slurm, slurm_id = client(load_site("alpha")), store.find_job(store.queue_dir(), job_id).tickets[0].slurm_id
    slurm.requeue([slurm_id])
    _until(lambda: slurm.job(slurm_id)[0].state == "PENDING")
    assert "alpha08" in hostlist.expand(slurm.job(slurm_id)[0].excluded_nodes)
    assert len(hostlist.expand(slurm.job(slurm_id)[0].excluded_nodes)) > 1
    assert pit(env, "tick").returncode == 0
    assert slurm.job(slurm_id)[0].excluded_nodes == "alpha08"
    assert states([job_id]) == {"running"}
    slurm.cancel([slurm_id])


def test_nodes_that_cannot_be_reserved(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only operators reserve nodes the ticket is refused, and its job is out of the queue and does nothing."""
    refuse = "slurm_create_reservation error: Access/permission denied"
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "scontrol").write_text(
        f'#!/bin/sh\ncase "$*" in *reservation*) echo "{refuse}" >&2; exit 1;; esac\n'
        f'exec {shutil.which("scontrol")} "$@"\n'
    )
    (bin_folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{env['PATH']}")
    site, name = load_site("alpha"), f"dispatch-kept-{os.getpid()}.1"
    with pytest.raises(ClusterError, match="--by reservation"):
        shared_fs.submit_ticket(_plan(site, tmp_path, topology="reservation"), site, name=name)
    assert shared_fs.revoke(site, [name]) == {name: True}
    assert shared_fs.ticket_states(site, [name])[name].state == "CANCELLED"
    assert not ran(tmp_path)


def test_what_fits_no_site_is_not_queued(env: dict[str, str], tmp_path: Path) -> None:
    """More CPUs than any node has: each partition's reason. No node that serves now: queued, and `list` says why."""
    large, small = tmp_path / "large.toml", tmp_path / "small.toml"
    small.write_text(REQUEST.format(name="dispatch-small", ran=tmp_path / "ran", length_s=0))
    large.write_text(f"cpus_per_task = 640\n{small.read_text()}")
    slurm = {**os.environ, "SLURM_CONF": str(CLUSTERS / "beta" / "slurm.conf")}
    update = ["scontrol", "update", "nodename=beta[01-08]"]
    subprocess.run([*update, "state=drain", "reason=test"], env=slurm, check=True)
    try:
        done = pit(env, "run", str(small), str(large))
        assert (done.returncode, done.stdout) == (3, "")
        assert all(f"{name}/train: 0 of its 8 nodes" in done.stderr for name in ("alpha", "beta"))
        assert pit(env, "list", "--all").stdout == ""
        assert pit({**env, "PIT_SITES": "beta"}, "run", str(small)).returncode == 0
        assert pit(env, "tick").returncode == 0
        assert "fits nowhere now: beta/train: 0 of 8 nodes can run" in pit(env, "list").stdout
    finally:
        subprocess.run([*update, "state=resume"], env=slurm, check=True)
    shutil.rmtree(env["XDG_CACHE_HOME"])  # what beta said of itself before
    _until(lambda: pit(env, "tick").returncode == 0 and bool(ran(tmp_path)))


def test_cancel_withdraws_a_running_job(env: dict[str, str], tmp_path: Path) -> None:
    """`cancel` ends it where it runs, and says what became of it."""
    (job_id,) = add(tmp_path, env, 1, length_s=60)
    _until(lambda: pit(env, "tick").returncode == 0 and states([job_id]) == {"running"})
    assert pit(env, "cancel", job_id).returncode == 0
    drain(env)
    assert states([job_id]) == {"cancelled"}
    assert pit(env, "cancel", job_id).returncode == 0
    assert pit(env, "cancel", "nosuch").returncode == 2


STOPPING = """\
name = "dispatch-stopping"
command = '''
done=$(cat "$PIT_CHECKPOINT_DIR/steps" 2>/dev/null || echo 0)
echo "$SLURM_JOB_NAME $done" >> {ran}
echo $((done + 5)) > "$PIT_CHECKPOINT_DIR/steps"; cp "$PIT_CHECKPOINT_DIR/steps" "$PIT_RUN_DIR/progress"
[ "$done" -ge 10 ] || exit 95
'''
time = "2m"
partition = "train"
"""


def test_a_job_that_saves_and_stops_goes_on_in_another_ticket(env: dict[str, str], tmp_path: Path) -> None:
    """Each of its runs begins with the checkpoint of the one before, at whichever site, until it has finished."""
    for name in ("alpha", "beta"):
        (tmp_path / "sites" / f"{name}.toml").write_text(f'[paths]\nruns = "{tmp_path}/runs"\n')
    (tmp_path / "stopping.toml").write_text(STOPPING.format(ran=tmp_path / "ran"))
    done = pit(env, "run", str(tmp_path / "stopping.toml"))
    job_id = json.loads(done.stdout)["job_id"]
    drain(env, timeout_s=90.0)
    assert (tmp_path / "ran").read_text().splitlines() == [f"{job_id}.1 0", f"{job_id}.2 5", f"{job_id}.3 10"]
    assert states([job_id]) == {"done"}


def _plan(
    site: Site, tmp_path: Path, topology: Topology = "none", nodelist: str = "", length_s: float = 0
) -> planning.Plan:
    variables = {"RAN": str(tmp_path / "ran"), "LENGTH_S": str(length_s)}
    request = Request(
        name="dispatch", command="true", time="2m", env=variables, topology=topology, nodelist=nodelist, cpus_per_task=4
    )
    return planning.make_plan(request, site, "test")


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)
