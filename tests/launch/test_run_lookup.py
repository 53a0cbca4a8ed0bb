"""Which run a name means, as people type it: at whichever site, nearly right, or of a folder that has lost a part."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec
import pytest

from pitools import cli
from pitools.core import trust
from pitools.core.errors import ClusterError, DataError, PitError, UsageError
from pitools.launch import plan as planning
from pitools.launch.diagnosis import log_scan
from pitools.launch.monitor import follow_runs, rank_log, status
from pitools.launch.plan import load_plan
from pitools.launch.recovery import apply_decision, cancel_run, tick
from pitools.launch.run_lookup import find_run_dir
from pitools.launch.submission import local_process
from pitools.run import run_folder as folder
from pitools.run.attempt_records import AttemptStart, Cause
from pitools.site.load import load_site

MakePlan = Callable[..., planning.Plan]
Pit = Callable[..., subprocess.CompletedProcess[str]]
NAME = "x-20260101-000000-abc123"


@pytest.fixture
def run(make_plan: MakePlan, tmp_path: Path) -> Path:
    """A run in the folder of runs of a site of its own, `other`, that has saved 20 steps by itself."""
    created = tmp_path / "theirs" / NAME
    created.mkdir(parents=True)
    (tmp_path / "other.toml").write_text(f'name = "other"\nscheduler = "none"\n[paths]\nruns = "{created.parent}"\n')
    plan = msgspec.structs.replace(make_plan("local"), site="other", runs_dir=str(created.parent))
    (created / "plan.json").write_bytes(msgspec.json.encode(plan))
    (created / "request.toml").write_text('name = "x"\ncommand = "true"\n')
    (created / "progress").write_text("20\n")
    return created


def test_an_id_is_found_at_any_site(pit: Pit, run: Path, tmp_path: Path) -> None:
    """Without --site; the steps are those the program calls safe; a wrong character names the id that is meant."""
    sites = {"PIT_SITE_PATH": str(tmp_path)}
    done = pit("launch", "show", NAME, **sites)
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert (record["site"], record["run_dir"], record["steps"]) == ("other", str(run), 20)
    assert pit("launch", "diff", NAME, NAME, **sites).stderr == "pit: no differences\n"
    assert pit("checkpoint", "list", NAME, **sites).stderr == f"pit: no checkpoints in {run}/checkpoints\n"
    assert pit("launch", "cancel", NAME[:-1] + "4", **sites).returncode == 2


def pit_here(*words: str) -> None:
    """The command in this process: a tenth of the time. Its errors are raised."""
    cli.group.main(args=["launch", *words], prog_name="pit", standalone_mode=False)


def test_a_run_without_its_plan_is_named_as_such(run: Path) -> None:
    """What can still be had, rather than "no run"."""
    (run / "plan.json").unlink()
    for words in (("show",), ("why",), ("resume",), ("cancel",), ("logs",), ("diff", str(run))):
        with pytest.raises(DataError, match=r"plan\.json") as caught:
            pit_here(*words, str(run))
        assert f"pit checkpoint list {run}/checkpoints" in caught.value.hint, words


def test_what_an_id_begins_with_names_the_newest(run: Path) -> None:
    """A name, or the first letters of an id, is no run: one of those that begin so may be meant."""
    runs = run.parent
    assert suggestions(folder.find_run, runs, "x-2026") == (NAME,)
    assert suggestions(folder.find_run, runs, "y") == ()
    newer = ("x-long-20251231-000000-ffffff", "x-20260102-000000-000000")
    for name in newer:
        (runs / name).mkdir()
        (runs / name / "plan.json").touch()
    assert suggestions(folder.find_run, runs, "x") == (newer[1], NAME, newer[0])


def suggestions(find: Callable[..., Path], *args: object) -> tuple[str, ...]:
    """The ids that are offered for one that no run has."""
    with pytest.raises(folder.RunNotFound) as caught:
        find(*args)
    if find is find_run_dir:
        assert all(name in caught.value.hint for name in caught.value.suggestions[:1])
    return caught.value.suggestions


def test_ids_at_any_site_are_offered(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the other sites where the site itself has none."""
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    monkeypatch.delenv("PIT_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert (
        suggestions(find_run_dir, "x-2026", "local") == suggestions(find_run_dir, NAME[:-1] + "4", "local") == (NAME,)
    )
    assert suggestions(find_run_dir, "qqq", "local") == ()
    (own := tmp_path / "runs" / "x-20250101-000000-abc123").mkdir(parents=True)
    (own / "plan.json").touch()
    assert suggestions(find_run_dir, "x-2", "local") == (own.name,)
    shutil.copytree(own, newer := own.with_name("x-20250102-000000-abc123"))
    assert suggestions(find_run_dir, "x-2", "local") == (newer.name, own.name)


@pytest.fixture
def ended(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run with two attempts behind it, and its verdict."""
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    folder.write_record(
        run / "job.json", folder.JobRef(job_id="local-1", site="other", submitted="2026-01-01T00:00:00Z")
    )
    for number in "01":
        attempt_exit = folder.AttemptExit(job_id="local-1", exit_code=0, ended="2026-01-01T00:00:00Z")
        folder.write_record(run / "attempts" / number / "exit.json", attempt_exit)
    apply_decision.write_verdict(run, "succeeded", "the program ended with code 0", 0)
    return run


@pytest.mark.parametrize("part", ["plan.json", "job.json", "verdict.json"])
def test_a_damaged_part_is_named_with_what_to_do(ended: Path, part: str) -> None:
    """Whatever looks at it: the file, and what is to be had without it. Who needs no word of it goes on."""
    path = ended / part
    path.write_bytes(path.read_bytes()[:-9])
    heard: list[PitError] = []
    for command in ("show", "why", "resume", "logs", "cancel"):
        try:
            pit_here(command, str(ended))
        except PitError as error:
            heard.append(error)
    assert {(type(error), error.where) for error in heard} == {(DataError, str(path))}
    command = f"pit launch run {ended}/request.toml" if part == "plan.json" else f"mv {path} "
    assert all(command in error.hint for error in heard)


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The ids that `list` has for the site, also where it then raises."""
    with contextlib.suppress(PitError):
        pit_here("list", *(words or ("--site", "other")))
    return [json.loads(line)["run_id"] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("part", ["verdict.json", "job.json", "plan.json", "attempts/1/exit.json"])
def test_one_bad_record_hides_no_other_run(
    ended: Path, part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file, as a full disk leaves it: the others are listed, and it is said which one is damaged."""
    monkeypatch.delenv("PIT_RUNS", raising=False)
    shutil.copytree(ended, ended.with_name("y-20260102-000000-abc123"))
    (ended / part).write_bytes(b"")
    with contextlib.suppress(DataError):
        pit_here("list", "--site", "other")
    output = capsys.readouterr()
    assert "y-20260102-000000-abc123" in output.out
    assert part in output.err or ended.name in output.out


@pytest.mark.parametrize("kind", ["bytes", "folder"])
def test_what_cannot_be_read_hides_no_other_run(
    ended: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record with bytes that are no text, a plan that gives an error of the file system: the others are listed."""
    monkeypatch.delenv("PIT_RUNS", raising=False)
    shutil.copytree(ended, ended.with_name("y-20260102-000000-abc123"))
    if kind == "folder":
        (ended / "plan.json").unlink()
        (ended / "plan.json").mkdir()
    else:
        (ended / "verdict.json").write_bytes((ended / "verdict.json").read_bytes().replace(b"program", b"pr\xffgram"))
    assert listed(capsys) == ["y-20260102-000000-abc123"]


def test_a_watch_of_what_cannot_be_read_has_not_seen_it_finish(ended: Path) -> None:
    """Exit 1, though nothing is left to follow."""
    (ended / "verdict.json").write_bytes(b"{")
    assert cli.group.main(args=["launch", "watch", str(ended)], prog_name="pit", standalone_mode=False) == 1


@pytest.mark.parametrize(("part", "key"), [("verdict.json", "attempts"), ("job.json", "site"), ("plan.json", "job")])
def test_a_run_of_another_release_is_said_to_be_one(
    ended: Path, part: str, key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record with a key under another name is named with the key, not as damaged; the other runs are listed."""
    shutil.copytree(ended, ended.with_name("z-1"))
    record = json.loads((ended / part).read_text())
    (ended / part).write_text(json.dumps({f"{name}_then" if name == key else name: record[name] for name in record}))
    monkeypatch.delenv("PIT_RUNS", raising=False)
    with contextlib.suppress(click.exceptions.Exit):
        pit_here("list", "--site", "other")
    shown = capsys.readouterr()
    assert [json.loads(line)["run_id"] for line in shown.out.splitlines()] == ["z-1"]
    (line,) = [line for line in shown.err.splitlines() if line.startswith(f"pit: {ended.name}: ")]
    assert ("another release of pitools" in line, f"`{key}`" in line, "damaged" in line) == (True, True, False)


def test_a_watch_in_a_pipe_prints_a_table_where_one_is_asked_for(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its end; by itself it prints JSON Lines."""
    for words, first in (((), "{"), (("--format", "table"), "RUN ID")):
        cli.group.main(args=["launch", "watch", str(ended), *words], prog_name="pit", standalone_mode=False)
        assert capsys.readouterr().out.startswith(first)


def test_a_damaged_attempt_is_no_obstacle(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`show`, `why` and `cancel` work on a run whose last attempt left half a record, or none that can be read."""
    (ended / "verdict.json").unlink()
    for name in ("exit.json", "cause.json", "start.json"):
        (ended / "attempts" / "1" / name).write_bytes(b"{")
    pit_here("show", str(ended))
    pit_here("why", str(ended), "--format", "table")
    assert "attempt 1: cause.json is damaged" in capsys.readouterr().out
    pit_here("cancel", str(ended))
    assert json.loads(capsys.readouterr().out)["state"] == "CANCELLED"


def test_oldest_first_at_several_sites(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By when runs were made, whatever they are called; each site that was named, and not the last in silence."""
    monkeypatch.delenv("PIT_RUNS", raising=False)
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    (tmp_path / "more.toml").write_text(f'name = "more"\nscheduler = "none"\n[paths]\nruns = "{tmp_path}/more"\n')
    ids = ["z-20250101-000000-abc123", NAME, "a-20270101-000000-abc123"]
    for name, site in ((ids[0], "more"), (ids[2], "other")):
        created = (tmp_path / "more" if site == "more" else run.parent) / name
        shutil.copytree(run, created)
        plan = load_plan(created)
        (created / "plan.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(plan, site=site)))
    assert listed(capsys) == ids[1:]
    assert listed(capsys, "--site", "other", "--site", "more") == ids
    assert listed(capsys, "--site", "nosuch", "--site", "more") == ids[:1]
    with pytest.raises(click.BadParameter):
        pit_here("show", NAME, "--site", "other", "--site", "more")


def test_two_local_runs_of_one_process_id(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container counts anew, and so do hosts that share a home: the one that lives does not answer for the other."""
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    lives = run.with_name("y-20260102-000000-abc123")
    shutil.copytree(run, lives)
    ref = folder.JobRef(job_id=f"local-{os.getpid()}", site="other", submitted="2026-01-01T00:00:00Z", pid=os.getpid())
    site, dead = load_site("other"), msgspec.structs.replace(ref, start_ticks=1)
    ref = msgspec.structs.replace(ref, start_ticks=local_process._start_ticks(os.getpid()))
    for path, job in ((lives, ref), (run, dead)):
        folder.write_record(path / "job.json", job)
        (path / "attempts" / "0").mkdir(parents=True)
    for order in ([run, lives], [lives, run]):
        states = {Path(statuse.run_dir): statuse.state for statuse in status.run_statuses(order, site)}
        assert states == {run: "FAILED", lives: "RUNNING"}
        due = tick._due({path: folder.read_record(path / "job.json", folder.JobRef) for path in order}, site, no_fault)
        assert list(due) == [(run, "FAILED")]


@pytest.mark.usefixtures("as_root")
def test_a_run_of_another_user_ends_no_process_of_ours(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root who cancels a user's run ends that user's process, and not whichever its record names."""
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as process:
        ticks = local_process._start_ticks(process.pid)
        ref = folder.JobRef(
            job_id="local-1", site="other", submitted="2026-01-01T00:00:00Z", pid=process.pid, start_ticks=ticks
        )
        folder.write_record(run / "job.json", ref)
        os.chown(run, 12345, 12345)
        with pytest.raises(ClusterError):
            cancel_run.cancel_run(run, load_site("other"))
        assert process.poll() is None
        os.chown(run, 0, 0)
        cancel_run.cancel_run(run, load_site("other"))
        assert process.wait(10) == -15


def no_fault(path: Path, error: PitError) -> None:
    raise error


def test_a_folder_that_cannot_be_read_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`list` does not call it that: it fails; a folder that is not there yet has no runs."""
    assert folder.run_dirs(tmp_path / "nothing") == []
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError):
        folder.run_dirs(tmp_path / "file")

    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(folder.os, "listdir", refuse)  # root may read everything
    with pytest.raises(ClusterError):
        pit_here("list", "--site", "local")


def test_the_newest_log_is_that_of_the_newest_job(ended: Path) -> None:
    """Job ids are numbers: 100 comes after 99; and what is job 9's is not job 99's."""
    for job_id in (99, 100, 9):
        (ended / f"slurm-{job_id}.out").touch()
    (ended / "attempts" / "1" / "logs").mkdir()
    actual = rank_log.log_path(ended, 0)
    assert actual is not None
    assert actual.name == "slurm-100.out"
    start = AttemptStart(
        attempt="1", job_number=0, job_id="9", cluster="", restart_count=0, node_list="", nodes=1, started=""
    )
    own = log_scan._slurm_logs(ended, ended / "attempts" / "1", start)
    assert [path.name for path, _ in own] == ["slurm-9.out"]


def test_who_is_over_is_not_cancelled(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said that it is, and nothing is done to it; also where no job of it is known any more."""
    (ended / "job.json").unlink()
    events = (ended / "events.jsonl").read_bytes()
    pit_here("cancel", str(ended))
    output = capsys.readouterr()
    assert "pit: it has finished before, 20" in output.err
    assert json.loads(output.out)["state"] == "COMPLETED"
    assert (ended / "events.jsonl").read_bytes() == events


def test_an_attempt_has_one_name(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of its folder, in tables, records and sentences."""
    pit_here("show", str(ended), "--format", "tsv")
    head, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert dict(zip(head, row, strict=True))["attempt"] == "1"
    pit_here("why", str(ended), "--format", "table")
    output = capsys.readouterr()
    assert output.out.splitlines()[-1].startswith("attempt 1: ")
    assert f"pit launch logs {ended.name} --attempt N" in output.err
    assert status.run_status(ended, load_site("other")).attempt == "1"


def test_a_watch_in_a_pipe_has_the_form_that_was_asked_for(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table is no JSON Lines."""
    for form, first in (("table", "RUN"), ("auto", "{")):
        cli.group.main(args=["launch", "watch", str(ended), "--format", form], prog_name="pit", standalone_mode=False)
        assert capsys.readouterr().out.upper().startswith(first)


def test_a_single_run_has_no_limit_of_a_sweep(tmp_path: Path) -> None:
    """--at-a-time would do nothing: it is refused, and nothing is launched."""
    (tmp_path / "one.toml").write_text('name = "one"\ncommand = "true"\n')
    with pytest.raises(UsageError):
        pit_here("run", str(tmp_path / "one.toml"), "--at-a-time", "2")


def test_a_watch_that_is_ended(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that the runs are not."""

    def interrupted(*_: object) -> Iterator[list[folder.RunRecord]]:
        raise KeyboardInterrupt
        yield []

    monkeypatch.setattr(follow_runs, "poll_runs", interrupted)
    monkeypatch.setenv("PIT_SITE_PATH", str(run.parents[1]))
    with pytest.raises(click.Abort):
        pit_here("watch", str(run))
    assert "pit launch tick --site other" in capsys.readouterr().err


def test_what_may_not_be_read_says_whose_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the file, or of the nearest folder above it that can be seen."""

    @click.command()
    def refused() -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "gone" / "plan.json"))

    monkeypatch.setattr(sys, "argv", ["pit"])
    assert cli.run(refused, "pit") == 4
    assert f"next:  {tmp_path} is {trust.user_name(os.geteuid())}'s: ask them" in capsys.readouterr().err


def test_a_mistake_of_ours_is_no_refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """EX_SOFTWARE, with its traceback: 4 is for what the cluster refuses."""

    @click.command()
    def broken() -> None:
        raise KeyError("ours")

    monkeypatch.setattr(sys, "argv", ["pit"])
    assert cli.run(broken, "pit") == os.EX_SOFTWARE
    assert "KeyError: 'ours'" in capsys.readouterr().err


def in_terminal(*words: str, env: dict[str, str]) -> list[str]:
    """What a command writes to a terminal of 80 columns, as that says itself that it is."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    clean = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "PIT_RUNS")}
    pit = str(Path(sys.executable).parent / "pit")
    subprocess.run([pit, *words], env=clean | env, stdout=theirs, stderr=subprocess.DEVNULL, check=True, timeout=60)
    os.close(theirs)
    decoded = os.read(ours, 65536).decode()
    os.close(ours)
    return decoded.splitlines()


def test_runs_fit_a_terminal(ended: Path, tmp_path: Path) -> None:
    """Of 80 columns: ids whole, and what they are; of the reasons every word."""
    (other := ended.with_name("a-name-of-some-length-20260101-000000-abc123")).mkdir()
    (other / "plan.json").write_bytes((ended / "plan.json").read_bytes())
    env = {"PIT_SITE_PATH": str(tmp_path)}
    lines = in_terminal("launch", "list", "--site", "other", env=env)
    assert lines[0].split()[:3] == ["RUN", "ID", "STATE"]
    assert [line.split()[:2] for line in lines[1:]] == [[other.name, "UNKNOWN"], [NAME, "COMPLETED"]]
    assert max(map(len, lines)) <= 80
    reason = "a reason of a few words, " * 9
    folder.write_record(
        ended / "attempts/1/cause.json", Cause(attempt="1", kind="program", confidence="certain", reason=reason)
    )
    lines = in_terminal("launch", "why", str(ended), env=env)
    assert max(map(len, lines)) <= 80
    assert "of a few words, a reason of a few" in " ".join(line.strip() for line in lines)
