"""A plan against its site's limits: refused, held, or unknown."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core.errors import ClusterError, Unreachable
from pitools.launch import limit_check
from pitools.launch.plan import Plan
from pitools.limits.records import JobRequest, LimitState
from pitools.site.schema import Site
from pitools.slurm.records import Association, LimitUsage, Partition, Qos

SITE = Site(name="s")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, make_plan: Callable[..., Plan]) -> Callable[..., list[str]]:
    """The lines about a plan of two nodes at a site with this QOS, whose use is one node."""

    def run(qos: Qos, *, for_ever: bool = False, **values: Any) -> list[str]:
        def limits(request: JobRequest, _: object, *, with_usage: bool = True) -> tuple[JobRequest, LimitState]:
            assert with_usage is not for_ever
            state = LimitState(
                cluster="x",
                enforced=("associations", "limits", "qos"),
                associations=(
                    Association(cluster="x", account="lab", user="me", default_qos=qos.qos),
                    Association(cluster="x", account="lab", parent="root"),
                    Association(cluster="x", account="root"),
                ),
                qos=(qos,),
                partitions=(Partition(partition="local", state="up"),),
                usage=(LimitUsage(qos=qos.qos, jobs=1, submitted=1, tres={"node": 1, "cpu": 4}),),
                default_accounts={"me": "lab"},
            )
            return msgspec.structs.replace(request, user="me"), msgspec.structs.replace(state, **values)

        monkeypatch.setattr(limit_check, "read_limits", limits)
        function = limit_check.limits_for_ever if for_ever else limit_check.check_limits
        return function(make_plan("local", nodes=2), SITE)

    return run


def test_a_job_that_limits_let_run_is_not_spoken_of(check: Callable[..., list[str]]) -> None:
    """Nor is one at a site without Slurm, or at one that is a template."""
    assert check(Qos(qos="normal")) == []


def test_a_refusal_is_one_of_the_cluster(check: Callable[..., list[str]]) -> None:
    """With the limit and Slurm's name of it, and what to do; `run` leaves the decision to sbatch."""
    denies = Qos(qos="normal", max_tres={"node": "1"}, flags=("DenyOnLimit",))
    with pytest.raises(ClusterError) as caught:
        check(denies)
    assert (caught.value.exit_code, caught.value.where) == (4, "sbatch at s: QOSMaxNodePerJobLimit")
    assert caught.value.message == '2 nodes (at most 1 for a job of QOS "normal")'
    (line,) = check(denies, for_ever=True)
    assert line.startswith("the job would never start: 2 nodes")
    full = Qos(qos="normal", max_submit_per_account=0)
    with pytest.raises(ClusterError) as caught:
        check(full)
    assert "wait" in caught.value.hint
    with pytest.raises(ClusterError) as caught:
        check(full, associations=())
    assert "sacctmgr" in caught.value.hint


def test_a_job_that_waits_for_ever_or_for_others(check: Callable[..., list[str]]) -> None:
    """Two notes: each limit that never lets it start; else the first that others use up now."""
    never = Qos(qos="normal", max_tres={"node": "1"}, max_wall_s=60)
    lines = check(never)
    assert [line.split(";")[1].split(",")[0] for line in lines] == [
        " QOSMaxWallDurationPerJobLimit",
        " QOSMaxNodePerJobLimit",
    ]
    assert all(line.startswith("the job would never start: ") for line in lines)
    assert check(never, for_ever=True) == lines
    assert check(Qos(qos="normal", grp_tres={"cpu": "5"}), for_ever=True) == []
    (line,) = check(Qos(qos="normal", grp_tres={"cpu": "5"}))
    assert line.startswith('the job waits until others end: 2 CPUs (at most 5 for all of QOS "normal", 4 in use)')


def test_a_plan_says_what_is_not_judged(check: Callable[..., list[str]]) -> None:
    """In one line, if nothing binds."""
    (line,) = check(Qos(qos="normal", flags=("Relative",), grp_tres={"license/x": "1"}))
    assert (
        line == 'not judged: Relative of QOS "normal"; GrpTRES=license/x of QOS "normal": what the job uses is unknown'
    )


def test_a_site_that_does_not_answer_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, make_plan: Callable[..., Plan]
) -> None:
    """A plan needs no cluster: the line says that limits are unknown."""

    def silent(*_: object, **__: object) -> None:
        raise Unreachable("no answer", where="s")

    monkeypatch.setattr(limit_check, "read_limits", silent)
    (line,) = limit_check.check_limits(make_plan("local"), SITE)
    assert "not checked" in line
    assert limit_check.limits_for_ever(make_plan("local"), SITE) == [line]
    assert limit_check.check_limits(make_plan("local"), Site(name="l", scheduler="none")) == []


@pytest.mark.slurm
def test_at_a_real_cluster(
    clusters: Path, pit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """A plan of what we may do is printed without a word; one with a QOS that we do not have is refused with exit 4."""
    (tmp_path / "t.toml").write_text('name = "t"\ncommand = "true"\ntime = "4h"\npartition = "dev"\n')
    may = pit("launch", "plan", str(tmp_path / "t.toml"), "--site", "alpha")
    assert (may.returncode, may.stdout.count('"pit.plan/1"'), may.stderr) == (0, 1, "")
    (tmp_path / "u.toml").write_text('name = "u"\ncommand = "true"\n[sbatch]\nqos = "nosuch"\n')
    refused = pit("launch", "plan", str(tmp_path / "u.toml"), "--site", "alpha")
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "InvalidQOS" in refused.stderr
