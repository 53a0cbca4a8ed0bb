"""`pit place plan`: live on two clusters, with far sides that lie, and one that says nothing at all."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core.output import Output
from pitools.place.clusters.snapshot import SkippedSite
from pitools.place.estimate import report
from pitools.place.estimate.candidates import Candidate
from pitools.place.estimate.data_transfer import DataTransfer
from pitools.place.estimate.estimate import CandidateEstimate, RunEstimate, WaitEstimate
from pitools.place.estimate.plan import PlacementPlan
from pitools.slurm.client import Client, Transport

HELLO = 'name = "hello"\ncommand = "true"\nnodes = {}\ntime = "{}"\n'


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def asked(far: Any) -> Path:
    """A request for two nodes and two minutes."""
    path = far.folder / "hello.toml"
    path.write_text(HELLO.format(2, "2m"))
    return path


@pytest.fixture
def busy(clusters: Path) -> Iterator[Client]:
    """Beta, all its nodes taken for three minutes."""
    beta = Client(Transport(env={"SLURM_CONF": str(clusters / "beta" / "slurm.conf")}, timeout_s=20))
    args = ["--nodes=8", "--exclusive", "--time=3", "--account=lab", "--qos=high", "--output=/dev/null"]
    job = beta.submit("#!/bin/sh\nsleep 180\n", args=args)
    deadline = time.monotonic() + 30
    while (beta.jobs([job.job_id]) or [None])[0].state != "RUNNING" and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.2)
    yield beta
    beta.cancel([job.job_id])


@pytest.mark.slurm
def test_the_free_cluster_is_before_the_busy_one(far: Any, busy: Client) -> None:
    """Slurm's own estimate of the very script: beta starts when the job there ends, and the table says so."""
    (far.folder / "r.toml").write_text(HELLO.format(8, "2m"))
    done = far.pit("place", "plan", "r.toml", "--site", "alpha", "--site", "beta", "--max-age", "0s")
    assert done.returncode == 0, done.stderr
    output = {(row["site"], row["partition"]): row for row in rows(done)}
    assert len(output) == 4
    beta, best = output["beta", "train"], rows(done)[0]
    assert best["site"] == "alpha"
    assert 60 < beta["start_q50_s"] - best["start_q50_s"] < 200
    assert beta["end_s"] == pytest.approx(beta["start_q50_s"] + 120, abs=1)
    assert "waits" in beta["reason"]
    assert "after alpha/" in beta["reason"]
    table = far.pit("place", "plan", "r.toml", "--site", "alpha", "--site", "beta", "--explain", "--format", "table")
    lines = table.stdout.splitlines()
    assert lines[0].split("  ")[0].strip() == "RANK"
    assert "now / now / now" in lines[1]
    assert "m / " in next(line for line in lines if "beta" in line)


@pytest.mark.slurm
def test_the_best_is_a_plan_that_runs(far: Any, asked: Path) -> None:
    """`pit place plan --best | pit launch run -` runs it there."""
    done = far.pit("place", "plan", str(asked), "--site", "alpha", "--site", "beta", "--best")
    (plan,) = rows(done)
    assert (plan["schema"], plan["name"], plan["job"]["nodes"]) == ("pit.plan/1", "hello", 2)
    assert (plan["site"], plan["job"]["partition"]) in {("alpha", "train"), ("beta", "train")}
    pit = [str(Path(__import__("sys").executable).parent / "pit"), "launch", "run", "-", "--wait"]
    ran = subprocess.run(
        pit, cwd=far.folder, env=far.env, input=done.stdout, text=True, capture_output=True, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    (run,) = rows(ran)
    assert (run["state"], run["site"]) == ("COMPLETED", plan["site"])


@pytest.mark.slurm
def test_four_calls_a_site_and_one_a_candidate(far: Any, asked: Path) -> None:
    """The first time; then, for as long as the answers are young, one a candidate alone."""
    far.site("a", "true")
    done = far.pit("place", "plan", str(asked), "--site", "a", "--timeout", "30s")
    assert [row["rank"] for row in rows(done)] == [1, 2], done.stderr
    assert len(far.called()) <= 4 + 2
    far.pit("place", "plan", str(asked), "--site", "a", "--timeout", "30s")
    assert len(far.called()) == 2


@pytest.mark.slurm
@pytest.mark.parametrize("host", ["dark", "closed", "garbage", "nothing", "half", "lines", "twice", "wrong"])
def test_a_site_that_makes_no_sense_is_skipped(far: Any, asked: Path, host: str) -> None:
    """With its reason, on stderr and as a record; the plan is of the others, in the time that was given."""
    far.without_accounting()
    far.site("odd", host)
    done = far.pit("place", "plan", str(asked), "--site", "odd", "--site", "alpha", "--timeout", "6s")
    assert done.returncode == 0, done.stderr
    output = rows(done)
    assert [row["site"] for row in output] == ["alpha", "alpha", "odd"]
    assert (output[2]["rank"], output[2]["partition"]) == (0, "")
    assert output[2]["reason"].startswith("skipped: ")
    assert ("no answer within" in output[2]["reason"]) == (host == "dark")
    assert "odd is skipped" in done.stderr


@pytest.mark.slurm
def test_a_plan_without_a_place_for_what_is_learnt(far: Any, asked: Path) -> None:
    """Without a usable state folder a site is planned without its past waits, and a warning names the folder."""
    far.without_accounting()
    (far.folder / "state").write_text("no folder")
    far.env["XDG_STATE_HOME"] = str(far.folder / "state")
    done = far.pit("place", "plan", str(asked), "--site", "alpha")
    assert done.returncode == 0, done.stderr
    assert {row["site"]: row["rank"] > 0 for row in rows(done)} == {"alpha": True}
    assert "state/pitools/place-wait-log" in done.stderr


@pytest.mark.slurm
def test_what_did_not_answer_in_time_may_fit_later(far: Any, asked: Path) -> None:
    """Exit 75 and no plan, whether a site said nothing, says it too slowly, or says everything but when it starts."""
    far.without_accounting()

    def plan(host: str) -> subprocess.CompletedProcess[str]:
        name = far.site(f"odd-{host}", host)
        return far.pit("place", "plan", str(asked), "--site", name, "--best", "--timeout", "6s")  # type: ignore[no-any-return]

    hosts = ("closed", "drip", "slow")
    with ThreadPoolExecutor(len(hosts)) as pool:  # each is waited for to the end of its time
        output = dict(zip(hosts, pool.map(plan, hosts), strict=True))
    for host, done in output.items():
        assert (done.returncode, done.stdout) == (75, ""), host
        assert "hello fits none of what has answered" in done.stderr, host
    slow = output["slow"].stderr  # one by one, though it is silent to all of them
    assert slow.count("pit: odd-slow/") == 2
    assert "no answer within" in slow


@pytest.mark.slurm
@pytest.mark.parametrize(("host", "reason"), [("liar", "(expected 2 of the partition)"), ("late", "start at ")])
def test_an_estimate_that_cannot_be_is_no_estimate(far: Any, asked: Path, host: str, reason: str) -> None:
    """Nodes of another cluster, a start in another century: the candidate does not fit."""
    far.without_accounting()
    far.site("odd", host)
    done = far.pit("place", "plan", str(asked), "--site", "odd", "--timeout", "30s")
    assert done.returncode == 1, done.stderr
    assert all(reason in row["reason"] for row in rows(done)), done.stdout


@pytest.mark.slurm
def test_what_fits_nowhere_says_why(far: Any) -> None:
    """Exit 1, and a table with every reason though nobody asked for it."""
    far.without_accounting()
    (far.folder / "r.toml").write_text(HELLO.format(9, "5h"))
    done = far.pit("place", "plan", "r.toml", "--site", "alpha", "--format", "table")
    assert done.returncode == 1
    assert done.stdout.count("nodes = 9, but partition") == 2
    assert "fits nowhere" in done.stderr
    best = far.pit("place", "plan", "r.toml", "--site", "alpha", "--best")
    assert (best.returncode, best.stdout) == (1, "")
    assert best.stderr.count("nodes = 9, but partition") == 2
    never = far.pit("place", "plan", "r.toml", "--site", "alpha", "--timeout", "0s")
    assert (never.returncode, never.stdout) == (2, "")


def test_a_plan_as_hosts_is_refused(pit: Any, tmp_path: Path) -> None:
    """A plan names no nodes; an empty line and exit 0 would read as an answer."""
    (tmp_path / "r.toml").write_text(HELLO.format(1, "5m"))
    done = pit("place", "plan", "r.toml", "--best", "--format", "hosts")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("sites", "code"), [(["silent"], 75), (["no_conf"], 3), (["no_conf", "silent"], 75), (["no_conf", "invalid"], 3)]
)
def test_where_no_site_answers_the_code_says_whether_to_try_later(
    pit: Any, tmp_path: Path, sites: list[str], code: int
) -> None:
    """75 if a site is unreachable; 3 if only site files are wrong, whatever part of them: no later try mends those."""
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "r.toml").write_text(HELLO.format(1, "5m"))
    keys = {
        "silent": '[connection]\nkind = "ssh"\nhost = "h"\n',
        "no_conf": '[slurm]\nconf = "/no.conf"\n',
        "invalid": "x\n",
    }
    (tmp_path / "sites").mkdir()
    for name in sites:
        text = f'name = "{name}"\nscheduler = "slurm"\n{keys[name]}'
        (tmp_path / "sites" / f"{name}.toml").write_text(text)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CONFIG_HOME": "", "PIT_SITE_PATH": str(tmp_path / "sites")}
    done = pit("place", "plan", "r.toml", "--best", "--timeout", "5s", HOME=str(tmp_path), **env)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr


# The table, without any cluster.


def survey(made: Any, *said: tuple[str, float, float, float, float, float]) -> PlacementPlan:
    """Candidates by site: (name, wait, copy, run, loss, cost)."""
    from pitools.launch.request import Request
    from pitools.place.estimate.candidates import candidates

    actual: list[Candidate] = []
    estimates = {}
    for name, wait_s, copy_s, run_s, loss_s, cost in said:
        (candidate,) = candidates(Request(name="r", command="true"), made.site(name=name), made.snapshot())
        start = WaitEstimate(q10_s=wait_s / 2, q50_s=wait_s, q90_s=wait_s * 2, slurm_s=wait_s, basis="Slurm's estimate")
        work = RunEstimate(run_s=run_s, loss_s=loss_s, p_fail=0.25, cost=cost, basis="its time limit")
        actual.append(candidate)
        missing = DataTransfer(bytes=int(copy_s), wall_s=copy_s)
        estimates[candidate.pool] = CandidateEstimate(wait=start, run=work, transfer=missing)
    unfit = Candidate(site=made.site(name="u"), partition="gpu", reasons=("too small", "too slow"))
    skipped_site = SkippedSite(site="d", reason="no answer")
    return PlacementPlan(candidates=(*actual, unfit), estimates=estimates, skipped=(skipped_site,), notes=())


def test_each_that_was_not_chosen_has_its_reason(made: Any) -> None:
    """What takes it longer, the longest first, and what takes less; what does not fit; what was skipped."""
    actual = survey(
        made, ("a", 0, 0, 3600, 0, 5), ("b", 0, 0, 3600, 0, 7), ("c", 7200, 0, 1800, 0, 0), ("e", 60, 9000, 3600, 90, 0)
    )
    why = {row.site: row.reason for row in report.rank_candidates(actual)}
    assert why == {
        "a": "earliest end; start: Slurm's estimate, run: its time limit",
        "b": "as good as a/gpu, but costs 2.00 more",
        "c": "ends 1h30m after a/gpu: waits 2h00m longer, runs 30m00s less",
        "e": "ends 2h31m after a/gpu: copies 2h29m longer, loses to failures 1m30s longer, waits 1m00s longer",
        "u": "too small; too slow",
        "d": "skipped: no answer",
    }


def test_a_wrong_file_does_not_hide_that_a_site_said_no(made: Any) -> None:
    """1 is no, whatever is wrong with other sites' files; 75 only if one of them may say yes later."""
    plan = survey(made)
    for answered, skipped, code in ((True, 3, 1), (True, 75, 75), (False, 3, 3)):
        one = msgspec.structs.replace(plan, skipped=(), candidates=plan.candidates if answered else ())
        assert report.unfit_exit_code(one, [SkippedSite(site="d", reason="", exit_code=skipped)]) == code


def test_the_table_is_for_eyes(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Durations as people say them; what does not fit only where it is explained."""
    candidate = report.rank_candidates(survey(made, ("a", 0, 0, 200_000, 0, 5), ("b", 5400, 3600, 45, 0, 0)))
    lines = list(report.plan_table(candidate, all_candidates=False))
    assert lines[0].split() == [
        "RANK",
        "SITE",
        "PARTITION",
        "START",
        "10/50/90%",
        "COPY",
        "RUN",
        "END",
        "COST",
        "P",
        "FAIL",
    ]
    assert lines[1].split() == [
        "1",
        "a",
        "gpu",
        "now",
        "/",
        "now",
        "/",
        "now",
        "-",
        "2d07h",
        "2d07h",
        "5.00",
        "USD",
        "25.0%",
    ]
    assert lines[2].split() == [
        "2",
        "b",
        "gpu",
        "45m",
        "/",
        "1h30m",
        "/",
        "3h00m",
        "1h00m",
        "(3.5",
        "KiB)",
        "45s",
        "1h31m",
        "-",
        "25.0%",
    ]
    assert len(lines) == 3
    everything = list(report.plan_table(candidate, all_candidates=True))
    assert everything[-1].split()[:3] == ["-", "d", "-"]
    narrow = list(report.plan_table(candidate, all_candidates=True, width=80))
    assert max(map(len, narrow)) <= 80
    assert [line.split(":")[0] for line in narrow[3:] if line[0] != " "] == ["a/gpu", "b/gpu", "u/gpu", "d/-"]
    with Output("jsonl") as out:
        out(candidate[0])
    assert capsys.readouterr().out.startswith(
        '{"schema":"pit.ranked-candidate/1","rank":1,"site":"a","partition":"gpu",'
    )
