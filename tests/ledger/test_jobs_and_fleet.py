"""Ledgers of jobs of other programs, of a site's runs, and the command that shows them."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner

from pitools.commands.launch_monitor import show
from pitools.commands.monitor_goodput import goodput
from pitools.core.errors import PitError, Unreachable, UsageError
from pitools.launch.sweep.sweep_folder import SweepPoint
from pitools.launch.sweep.sweep_table import sweep_rows
from pitools.ledger import evidence
from pitools.ledger import run_ledger as ledgers
from pitools.ledger.believed import believed_runs
from pitools.ledger.job_stats import gpu_utilization
from pitools.ledger.run_ledger import fleet_runs, job_ledger
from pitools.site.load import load_site
from pitools.slurm.client import Client
from pitools.slurm.records import AccountingRow
from tests.ledger.run_maker import add_attempt, add_steps, finish, make_run, row, text

GPUS = {"alloc_tres": {"gres/gpu": "4", "cpu": "8"}, "nodes": 2}


def js1(record: object, without: int = 0) -> str:
    """without: bytes at its end."""
    packed = gzip.compress(json.dumps(record).encode(), mtime=0)
    return "JS1:" + base64.b64encode(packed[: len(packed) - without]).decode()


def test_a_job_of_another_program() -> None:
    """Every start is added, its time is not accounted for, and `source` says that only sacct was asked."""
    rows = [row(10, 15, 35, **GPUS), row(0, 2, 10, **GPUS), row(35, None, None)]
    ledger = job_ledger(rows[:2], site="alpha")
    assert (ledger.source, ledger.resource, ledger.count, ledger.nodes) == ("sacct", "gpu", 2, 2)
    assert (ledger.allocated_s, ledger.queue_s, ledger.allocations) == (4 * 28, 2 + 5, 2)
    assert ledger.seconds["unaccounted"] == 4 * 28
    assert (ledger.goodput, ledger.greatest_loss) == (None, "unaccounted")
    assert job_ledger([row(20, 10, 30), row(30, 40, 50)]).queue_s == 10  # no less for a clock that was set back
    assert job_ledger([row(0, 0, 3700, elapsed_s=100)]).since == text(3600)  # not suspended: an hour that came twice
    assert job_ledger([row(0, 0, 3700, elapsed_s=99)]).since == text(0)


def test_jobstats_says_how_busy_gpus_were() -> None:
    """Busy time counts as productive, the rest as idle; a GPU without a figure, and an earlier start, as neither."""
    node = {"total_time": 9, "cpus": 4, "gpu_utilization": {"0": 50, "1": 100}}
    record = {"gpus": 0, "total_time": 20, "nodes": {"n1": node, "n2": {"total_time": 3, "gpu_utilization": {"0": 0}}}}
    ledger = job_ledger([row(0, 2, 10, **GPUS), row(10, 15, 35, **GPUS)], admin_comment=js1(record))
    seconds = {state.value: value for state, value in ledger.seconds.items() if value}
    assert seconds == pytest.approx({"productive": 30, "idle": 30, "unaccounted": 20 + 4 * 8})
    assert (ledger.source, ledger.goodput) == ("sacct+js1", pytest.approx(30 / (4 * 28)))


BUSY = {"nodes": {"n1": {"gpu_utilization": {"0": 50}}}}


@pytest.mark.parametrize(
    "comment",
    ["", "JS1:Short", "JS1:None", "JS1:####", js1([]), js1({"nodes": {"n1": {}}}), js1({})[:-9], js1(BUSY, without=4)],
)
def test_no_record_is_no_figure(comment: str) -> None:
    """What jobstats writes in place of a record, a missing key, and a damaged record are unknown, not zero."""
    assert gpu_utilization(comment) == []
    assert job_ledger([row(0, 2, 10, **GPUS)], admin_comment=comment).goodput is None


def test_a_record_that_unpacks_to_a_great_size_is_left() -> None:
    """27 kB of a comment can hold 20 MB: no more than the limit is unpacked."""
    comment = js1({"nodes": {}, "x": " " * (20 << 20)})
    tracemalloc.start()
    assert gpu_utilization(comment) == []
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs of the site `here`, from old to new, and one that is damaged."""
    (tmp_path / "sites").mkdir()
    site = f'name = "here"\nscheduler = "none"\n[paths]\nruns = "{tmp_path}/runs"\n'
    (tmp_path / "sites" / "here.toml").write_text(site)
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path / "sites"))
    for number, name in enumerate("abc"):
        run = make_run(tmp_path / name, submitted=1000 * number, site="here")
        add_steps(add_attempt(run, 1000 * number, 1000 * number + 10), 0, 1000 * number + 2, [1.0] * 6)
        finish(run, 1000 * number + 10)
        made = tmp_path / "runs" / f"bc-2027011{number}-080000-abcdef"
        made.parent.mkdir(exist_ok=True)
        run.rename(made)
    damaged = tmp_path / "runs" / "bc-20270119-080000-abcdef"
    damaged.mkdir()
    (damaged / "plan.json").write_text("{")
    return tmp_path / "runs"


def test_the_runs_of_a_site(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newest first, those that ended before are left out, and a damaged one is reported and hides no other."""
    errors: list[tuple[str, PitError]] = []
    site = load_site("here")

    def since() -> list[str]:
        found = fleet_runs(site, text(500), lambda run_dir, error: errors.append((run_dir.name, error)))
        believed = believed_runs(site, list(found), lambda *error: errors.append(error))
        return [ledger.since for _, ledger, _ in believed if ledger]

    assert since() == [text(2000), text(1000)]
    assert [name for name, _ in errors] == ["bc-20270119-080000-abcdef"]
    with pytest.raises(UsageError):
        list(fleet_runs(site, "yesterday"))
    (runs / "link").symlink_to("bc-20270112-080000-abcdef")
    real = evidence.rfc3339_to_unix
    monkeypatch.setattr(
        evidence, "rfc3339_to_unix", lambda t: 1 // 0 if t == text(2010) else real(t)
    )  # what none foresaw
    assert since() == [text(1000)]


def test_the_command(runs: Path, tmp_path: Path) -> None:
    """One record a run, a picture on request, and one line of it beside the state of a run."""
    names = sorted(os.listdir(runs))[:2]
    result = CliRunner().invoke(goodput, [*names, "--site", "here", "--plot", f"{tmp_path}/a.svg", "--format", "jsonl"])
    assert result.exception is None, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["goodput"] for record in records] == [0.6, 0.6]
    assert records[0]["schema"] == "pit.run-ledger/1"
    assert "<svg" in (tmp_path / "a.svg").read_text()
    done = CliRunner().invoke(goodput, [names[0], "--site", "here", "--plot", f"{tmp_path}/a.jpg"])
    assert isinstance(done.exception, UsageError)
    table = CliRunner().invoke(goodput, [names[0], "--site", "here", "--format", "table"]).stdout
    assert "PRODUCTIVE" in table
    assert "goodput 60 %; greatest loss: start 20 %" in CliRunner().invoke(show, [names[0], "--site", "here"]).stderr


def test_every_line_of_a_goodput_has_accounting(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`show`, a sweep's table and `goodput` say the same; what accounting has not is said, by one short query each."""
    site = runs.parent / "sites" / "here.toml"
    site.write_text(site.read_text().replace('"none"', '"slurm"'))
    name = sorted(os.listdir(runs))[0]
    answers: list[list[AccountingRow] | PitError] = []
    limits = []

    def accounting(client: Client, _ids: object) -> list[AccountingRow]:
        limits.append(client.transport.timeout_s)
        answer = answers.pop()
        if isinstance(answer, PitError):
            raise answer
        return answer

    monkeypatch.setattr(Client, "accounting", accounting)
    point = SweepPoint(index=0, name=name, point={}, site="here", run_dir=str(runs / name))
    for answer, part, note in (
        ([row(0, 0, 12)], 50, ""), ([row(0, 0, None)], 60, ", without accounting"),
        (Unreachable("no answer"), 60, ", without accounting"),
    ):  # fmt: skip
        answers[:] = [answer] * 3
        line = CliRunner().invoke(show, [name, "--site", "here"]).stderr
        assert (f"goodput {part} %; " in line, f"{note}; see" in line, "accounting" in line) == (True, True, note != "")
        notes: list[tuple[Path, PitError]] = []
        report = functools.partial(lambda to, *error: to.append(error), notes)
        (in_table,) = sweep_rows([point], {"here": load_site("here")}, report)
        assert (in_table.goodput, "accounting" in str(notes)) == (part / 100, note != "")
        result = CliRunner().invoke(goodput, [name, "--site", "here", "--format", "jsonl"])
        assert json.loads(result.stdout)["goodput"] == part / 100
    assert limits == [ledgers.SHORT_TIMEOUT_S, ledgers.SHORT_TIMEOUT_S, 20] * 3
    answers[:] = [[row(0, 0, 12, name=f"{name}.1")]]
    monkeypatch.setattr(Client, "admin_comments", lambda *_: {})
    assert (
        f"a job of a run: pit monitor goodput {name}\n" in CliRunner().invoke(goodput, ["7", "--site", "here"]).stderr
    )
