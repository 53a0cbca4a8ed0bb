"""The reports of a day and of a run: what is in them, who may read them, and what a browser makes of them."""

from __future__ import annotations

import html.parser
import math
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pitools.commands.monitor_report import report
from pitools.core import html_page
from pitools.core.errors import PitError, UsageError
from pitools.ledger import believed
from pitools.ledger.run_ledger import run_ledger
from pitools.monitor.report import svg
from pitools.monitor.report.day import read_day
from pitools.monitor.report.day_page import day_page
from pitools.monitor.report.run import run_page
from pitools.monitor.report.write import parse_day, write_private
from pitools.node.control.incidents import EntryKind, IncidentEntry, append_entry
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, Cause
from pitools.slurm.records import AccountingRow
from pitools.stage.stage import StageResult
from tests.monitor.fleet import Runs, write_site
from tests.monitor.report.chromium import Chromium

MakeSite = Callable[..., Runs]
HOSTILE = (
    "</title></svg></style><script>console.error(1)</script>"
    '<img src="http://127.0.0.1:8/x" onerror=console.error(2)>\x1b'
)
NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)


class Tags(html.parser.HTMLParser):
    """The tags of a page with the names of their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text = list[tuple[str, tuple[str, ...]]](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def fill(runs: Runs) -> Path:
    """Runs of a day with all that there is to say; the returned one has two attempts and a hostile end."""
    for number in range(3):
        run_dir = runs.add(age_s=4000 + number)
        for rank in range(3):
            runs.log(run_dir, 0, 80, rank=rank, age_s=60, wall_s=1.0 + 0.3 * (rank == 1))
        runs.end(run_dir, 0, "COMPLETED", 30)
    run_dir = runs.add(age_s=3000)
    runs.log(run_dir, 0, 500, age_s=2000)
    runs.end(run_dir, 0, "PREEMPTED", 1990, HOSTILE)
    runs.start(run_dir, 1, 1900)
    runs.log(run_dir, 480, 900, attempt=1, age_s=100)
    runs.end(run_dir, 1, "FAILED", 90, HOSTILE)
    return run_dir


def begin(runs: Runs, run_dir: Path, attempt: int | str, age_s: float, ranks_s: float) -> None:
    """An attempt begins, and later its ranks."""
    runs.start(run_dir, attempt, age_s)
    rank = run_folder.RankRecord(
        rank=0, world_size=1, local_rank=0, node="n1", pid=1, coordinator="", data={}, t=runs.at(ranks_s)
    )
    run_folder.write_record(run_dir / "attempts" / str(attempt) / "ranks" / "0.json", rank)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A real one, without a window."""
    if not shutil.which("chromium"):
        pytest.skip("chromium is not installed")
    with Chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def test_a_browser_shows_them_and_asks_nobody(make_site: MakeSite, browser: Chromium, tmp_path: Path) -> None:
    """Chromium says nothing on its console and requests nothing, also for a hostile text; of another page it does."""
    make_site("east")
    east = Runs("east", NOON)
    run_dir = fill(east)
    day = read_day([east.site], NOON.date())
    for name, page in (("day", day_page(day, "root", NOON)), ("run", run_page(run_dir, east.site))):
        (tmp_path / f"{name}.html").write_text(page)
        seen = browser.open(f"file://{tmp_path}/{name}.html")
        assert (seen.problems, seen.requests) == ([], [])
        assert seen.title.endswith("east" if name == "day" else run_dir.name)
        assert len(seen.screenshot) > 30_000
    (tmp_path / "open.html").write_text(HOSTILE)
    seen = browser.open(f"file://{tmp_path}/open.html")
    assert len(seen.problems) > 1
    assert seen.requests == ["http://127.0.0.1:8/x"]
    (tmp_path / "unescaped.html").write_text(html_page.page("x", [HOSTILE]))
    seen = browser.open(f"file://{tmp_path}/unescaped.html")
    assert sum("violates the following Content Security Policy" in problem for problem in seen.problems) >= 2
    assert not any("Failed to load" in problem for problem in seen.problems)


def test_hostile_text_makes_no_tag(make_site: MakeSite) -> None:
    """Nothing that loads or runs is in the pages, and the text is there, as text."""
    make_site("east")
    east = Runs("east", NOON)
    run_dir = fill(east)
    allowed = {"href", "src", "onerror", "onload", "srcset", "data", "action"}
    for page in (run_page(run_dir, east.site), day_page(read_day([east.site], NOON.date()), "root", NOON)):
        tags = Tags(page)
        names = {name for name, _ in tags.tags}
        assert names.isdisjoint({"script", "img", "link", "iframe", "object", "embed", "image", "use", "foreignobject"})
        assert not allowed.intersection(name for _, attributes in tags.tags for name in attributes)
        assert "<script>console.error(1)</script>" in tags.text


@settings(max_examples=60)
@given(st.text(max_size=80))
@example(HOSTILE)
def test_any_text_is_text(text: str) -> None:
    """In a table, a plot, its tooltips and its legend any text leaves the page's tags as they are."""

    def tags(word: str) -> Tags:
        part = svg.Part(0, 1, "#000000", word)
        plots = svg.bars([(word, [part])], 0, 1, {0: word}), svg.legend({word: "#000000"})
        return Tags(html_page.page(word, [html_page.table([word or "x"], [[word]]), *plots]))

    assert [name for name, _ in tags(text).tags] == [name for name, _ in tags("plain").tags]
    assert not {'"', "'", "<"}.intersection(html_page.text(text))  # ends no attribute either


def test_the_day_has_what_was_on_that_day(make_site: MakeSite) -> None:
    """Runs that touch the day are in it, others not; the goodput is the ledgers'; damage and silence are said."""
    make_site("east")
    runs, west = Runs("east", NOON), make_site("west")
    west.root.rmdir()
    inside, over_midnight = runs.add(age_s=7200, state="COMPLETED"), runs.add(age_s=50_000, state="COMPLETED")
    before, after = runs.add(age_s=200_000, state="COMPLETED"), runs.add(age_s=-50_000)
    runs.log(inside, 0, 1800, age_s=4000)
    damaged = runs.add("damaged", age_s=100)
    (damaged / "plan.json").write_bytes(b"{")
    start = (inside / "attempts/0/start.json").read_text()
    (inside / "attempts/0/start.json").write_text(start.replace("2026-11", "9998-11"))  # unknown, not in the future
    day = read_day([runs.site, west.site], date(2026, 11, 26))
    assert {run.run_id for run in day.runs if run.attempts} == {inside.name, over_midnight.name}
    text = Tags(day_page(day, "ada", NOON)).text
    ledger = run_ledger(inside)
    assert ledger.goodput
    assert f"{ledger.goodput:.1%}" in text
    assert before.name not in text
    assert after.name not in text
    assert "damaged" in text
    assert "of what ada may see" in text
    assert any(note.startswith("west: no runs: ") for note in day.notes)


def test_the_day_names_recoveries_incidents_and_staging(make_site: MakeSite, tmp_path: Path) -> None:
    """Until the next attempt, and the steps it repeats; a node's incident; what was copied, of that day alone."""
    spool, config = tmp_path / "spool", tmp_path / "node.toml"
    (spool / "control").mkdir(parents=True)
    config.write_text(f'spool = "{spool}"\n')
    make_site("east", more=f'[node]\nconfig = "{config}"')
    runs = Runs("east", NOON)
    run_dir = runs.add(age_s=3000)
    runs.end(run_dir, 0, "PREEMPTED", 2000)
    begin(runs, run_dir, 1, 1970, ranks_s=1940)
    cause = run_folder.read_record(run_dir / "attempts/0/cause.json", Cause)
    run_folder.write_record(run_dir / "attempts/0/cause.json", msgspec.structs.replace(cause, steps=37))
    staged = StageResult(
        dataset="bridge", version="v1", source="/d", path="/n", state="staged", files=1, bytes=3 << 20,
        copied_bytes=3 << 20, verified_bytes=0, wall_s=4.0, node="n01",
    )  # fmt: skip
    path = run_dir / "attempts/1/nodes/n01/bridge.json"
    run_folder.write_record(path, staged)
    os.utime(path, (NOON.timestamp(), NOON.timestamp()))
    for name, hours in (("now", 3), ("past", 300)):
        entry = IncidentEntry(
            at=runs.at(3600 * hours), kind=EntryKind.OPENED, incident=f"n0-{name}", node=f"n-{name}", check="ecc"
        )
        append_entry(spool / "control" / "journal.jsonl", entry)
        over = msgspec.structs.replace(entry, at=runs.at(3600 * hours - 60), kind=EntryKind.RETURNED)
        append_entry(spool / "control" / "journal.jsonl", over)
    page = day_page(read_day([runs.site], NOON.date()), "ada", NOON)
    for cells in (
        ("preempted", "it raised KeyError", "-", "1m00s", "37"),
        ("bridge v1", "1", "0", "1", "0", "3.0 MiB"),
    ):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page.replace(' class="n"', "")
    assert "n-now" in page
    assert "n-past" not in page


def test_a_killed_attempt_is_not_in_every_later_report(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a record of its end it was over when the next began, at its time limit, or when Slurm's row says so."""
    make_site("east")
    runs = Runs("east", NOON)
    rows: list[AccountingRow] = []
    monkeypatch.setattr(believed, "read_rows", lambda *_: rows)
    limited, retried, killed = runs.add("limited", age_s=3600), runs.add("retried", age_s=3 * 86400), runs.add("killed")
    for run_dir, limit in ((limited, runs.at(60)), (killed, "2999-01-01T00:00:00Z")):
        path = run_dir / "attempts/0/start.json"
        start = run_folder.read_record(path, AttemptStart)
        assert start
        run_folder.write_record(path, msgspec.structs.replace(start, time_limit_at=limit))
    runs.start(retried, 1, 600)
    runs.end(retried, 1, "COMPLETED", 60)
    assert shown(runs, NOON) == {limited.name, retried.name, killed.name}
    assert shown(runs, NOON + timedelta(days=1)) == {killed.name}
    times = {"submit": runs.at(600), "start": runs.at(600), "end": runs.at(300)}
    of_it = {"name": killed.name, "user": killed.owner()}
    rows.append(AccountingRow(job_id="7", raw_id="7", state="NODE_FAIL", nodes=1, **times, **of_it))
    site, runs.site = runs.site, msgspec.structs.replace(runs.site, scheduler="slurm")
    assert shown(runs, NOON + timedelta(days=1)) == set()
    shutil.copytree(killed, killed.with_name(f"{killed.name[:-1]}f"))
    (runs.root / f"{killed.name[:-1]}e").symlink_to(killed)
    day = read_day([runs.site], NOON.date())
    assert [run.run_id for run in day.runs] == [killed.name]  # the others' folders say that they are of its job
    assert "east: 3 folders are left out: sacct has no job of their owners for them" in day.notes
    runs.site = site
    runs.start(retried, 1, -86400)
    runs.end(retried, 1, "COMPLETED", -86401)
    assert retried.name not in shown(runs, NOON - timedelta(days=4))
    assert retried.name in shown(runs, NOON)


def shown(runs: Runs, at: datetime) -> set[str]:
    """The runs in the report of a day."""
    return {run.run_id for run in read_day([runs.site], at.date()).runs}


def test_a_run_that_ended_before_an_attempt_is_in_the_report(make_site: MakeSite) -> None:
    """Its job failed before its ranks began: it has stopped on that day, and on no other."""
    make_site("east")
    runs = Runs("east", NOON)
    run_dir = runs.add(state="FAILED")
    shutil.rmtree(run_dir / "attempts")
    day = read_day([runs.site], NOON.date())
    stopped = day_page(day, "ada", NOON).partition("<h2>Runs that stopped</h2>")[2].partition("<h2>")[0]
    assert run_dir.name in stopped
    assert shown(runs, NOON - timedelta(days=1)) == shown(runs, NOON + timedelta(days=1)) == set()


def test_tasks_of_an_array_recover_each_by_itself(make_site: MakeSite) -> None:
    """A task that began after another had failed is no recovery of that one; its own next attempt is."""
    make_site("east")
    runs = Runs("east", NOON)
    run_dir = runs.add(age_s=3000)
    shutil.rmtree(run_dir / "attempts/0")
    for name, began_s, how in (("3.0", 900, "PREEMPTED"), ("3.1", 500, "FAILED"), ("4.0", 300, "COMPLETED")):
        begin(runs, run_dir, name, began_s, ranks_s=began_s)
        runs.end(run_dir, name, how, began_s - 100)
    page = day_page(read_day([runs.site], NOON.date()), "ada", NOON)
    recoveries = page.partition("<h2>Recoveries</h2>")[2].partition("<h2>")[0]
    assert recoveries.count("<tr>") == 2
    assert "<td>5m00s</td>" in recoveries.replace(' class="n"', "")
    assert "attempt 3.1" in run_page(run_dir, runs.site)


def test_the_run_has_its_story(make_site: MakeSite) -> None:
    """Its goodput, both attempts, a curve of losses, and of another run the slow rank."""
    east = make_site("east")
    run_dir = fill(east)
    text = Tags(run_page(run_dir, east.site)).text
    goodput = run_ledger(run_dir).goodput
    assert goodput
    assert f"Goodput {goodput:.1%}" in text
    assert "preempted" in text
    assert text.count("attempt ") >= 2
    slow = next(path for path in east.root.iterdir() if (path / "attempts/0/steps/1.jsonl").exists())
    page = run_page(slow, east.site)
    assert page.count("<polyline") == 3
    assert "what is longer" in page


def test_it_is_private(make_site: MakeSite, tmp_path: Path) -> None:
    """The file is its owner's alone under any umask; one that was readable stays so; a pipe is no file."""
    east = make_site("east")
    fill(east)
    target = tmp_path / "day.html"

    def write() -> int:
        done = CliRunner().invoke(report, ["--day", "today", "--site", "east", "--to", str(target)])
        assert done.exit_code == 0, done.output
        return stat.S_IMODE(target.stat().st_mode)

    before = os.umask(0)
    try:
        assert write() == 0o600
        target.chmod(0o644)
        assert write() == 0o644
    finally:
        os.umask(before)
    done = CliRunner().invoke(report, ["--day", "today", "--site", "east", "--to", str(tmp_path / "day.pdf")])
    assert isinstance(done.exception, UsageError)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PitError):
        write_private(tmp_path / "pipe", "x")


def test_another_user_sees_what_they_may(as_root: None, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose run's folder is its owner's alone is not in the report of another user, not even by its name."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        folder = Path(name)
        folder.chmod(0o755)
        write_site(folder, "east", folder / "runs")
        monkeypatch.setenv("PIT_SITE_PATH", name)
        runs = Runs("east", NOON)
        seen, *hidden = (runs.add(name, state="COMPLETED") for name in ("seen", "folder", "plan", "verdict"))
        hidden[0].chmod(0o700)
        for run_dir in hidden[1:]:
            (run_dir / f"{run_dir.name.partition('-')[0]}.json").chmod(0o600)
        code = (
            "import os; from datetime import date; import pitools.monitor.report.day_page as page\n"
            "from pitools.monitor.live.followed_runs import FollowedRuns; from pathlib import Path\n"
            "from pitools.monitor.report.day import read_day; from pitools.site.load import load_site\n"
            "site = load_site('east'); os.setgid(65534); os.setuid(65534)\n"
            "print(page.day_page(read_day([site], date(2026, 11, 26)), 'nobody'))\n"
            "print('watched:', *(run.run_dir.name for run in FollowedRuns(Path(site.paths.runs), site).poll({})))"
        )
        env = {**os.environ, "PYTHONPATH": str(repo), "HOME": name}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert seen.name in done.stdout
        assert not [run_dir.name for run_dir in hidden if run_dir.name in done.stdout]
        assert "east: 3 runs are left out" in done.stdout
        assert f"watched: {seen.name}\n" in done.stdout


def test_days_by_name() -> None:
    """today, yesterday, a date; another word and a day to come are refused."""
    assert [parse_day(name, NOON).day for name in ("today", "yesterday", "2026-11-01")] == [26, 25, 1]
    for name in ("tomorrow", "2026-11-31", "2026-11-27"):
        with pytest.raises(UsageError):
            parse_day(name, NOON)


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
def test_ticks_enclose(low: float, size: float) -> None:
    """An axis has a few round ticks, the first not above its begin, the last not below its end."""
    high = low + size
    found = svg.ticks(low, high)
    assert 2 <= len(found) <= 14
    tolerance = 1e-9 * max(abs(low), abs(high), 1.0) + 1e-12
    assert found[0] <= low + tolerance
    assert found[-1] >= high - tolerance


def test_a_long_curve_keeps_its_extremes() -> None:
    """Of 100,000 points some are left out, but neither the highest nor the lowest; NaN and infinity are no points."""
    values = [(float(x), math.sin(x / 5000)) for x in range(100_000)]
    values[77_777], values[33_333] = (77_777.0, 9.0), (33_333.0, -9.0)
    kept = svg.thin(values)
    assert len(kept) <= 2000
    assert {values[77_777], values[33_333]} <= set(kept)
    assert svg.lines({"x": [(0.0, math.nan), (1.0, math.inf)]}, {}, "x", "y") == ""
    for first, second in ((2.0, 2.0), (1e-13, 2e-14), (5e-324, 0.0), (1e299, -1e299), (-1e-9, 1e9), (1e308, -1e308)):
        plots = svg.lines({"x": [(1.0, 2.0), (2.0, first), (3.0, second)]}, {}, "x", "y")
        assert plots.count("<polyline") == 1
        assert "nan" not in plots
