"""The stream of `sacct -P`: what real text has, and that no bad record hides a good one."""

from __future__ import annotations

import base64
import gzip
import io
import json
from datetime import UTC
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pitools.core.errors import DataError
from pitools.monitor.usage.sacct_text import COLUMNS, BadRecord, JobRow, read_jobs
from tests.monitor.usage.fake_sacct import T0, FakeJob
from tests.monitor.usage.fake_sacct import text as slurm_time

HEADER = "|".join(COLUMNS) + "\n"


def read(data: bytes | str, sep: str = "|", zone: str = "") -> tuple[list[JobRow], list[BadRecord]]:
    """The jobs and the bad records of a text."""
    raw = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
    rows = list(read_jobs(io.BytesIO(raw), sep, ZoneInfo(zone) if zone else UTC))
    return [row for row in rows if isinstance(row, JobRow)], [row for row in rows if isinstance(row, BadRecord)]


def line(sep: str = "|", **values: str) -> str:
    """The text of an ended job."""
    return sep.join(FakeJob(7, T0, T0 + 5, T0 + 65, gpus=8, values=values).cells(T0 + 100)) + "\n"


@pytest.mark.parametrize("version", ["22.05", "23.11", "25.05"])
def test_every_recorded_version_is_read(repo: Path, version: str) -> None:
    """Arrays, parts, pending and running jobs of real clusters, each with its state and its GPUs."""
    text = (repo / "tests" / "replay" / f"slurm-{version}" / "sacct_portable.txt").read_bytes()
    rows, bad = read(text)
    assert (len(rows), bad) == (text.count(b"\n") - 1, [])
    jobs = {row.job_id: row for row in rows}
    assert (jobs["4"].state, jobs["4"].gpus, jobs["4"].end) == ("RUNNING", 32, None)
    assert (jobs["7"].state, jobs["7"].start, jobs["11+1"].raw_id) == ("PENDING", None, "12")
    assert (jobs["3"].end is None, jobs["6_0"].raw_id) == (False, "13")


def test_a_file_without_the_columns_names_them() -> None:
    """A file of other columns, an empty one, and Slurm's refusal are refused, with what to type."""
    for text in ("JobID|State\n1|COMPLETED\n", "", "sacct: fatal: Bad field requested\n"):
        with pytest.raises(DataError, match="ElapsedRaw") as error:
            read(text)
        assert "sacct -a -X -D -P" in error.value.hint


def test_a_file_of_two_clusters_is_refused() -> None:
    """Their jobs have the same numbers; a file of one has the column too."""
    lines = [f"{line()[:-1]}|{name}\n" for name in ("a", "a", "b")]
    header = f"{HEADER[:-1]}|Cluster\n"
    assert len(read(header + "".join(lines[:2]))[0]) == 2
    with pytest.raises(DataError) as error:
        read(header + "".join(lines))
    assert error.value.where == "sacct, line 4"


def test_the_last_column_may_have_lines() -> None:
    """In a file that someone else wrote, a comment is the last column, and its line break is the record's."""
    columns = [*COLUMNS[:-3], "AllocTRES", "Comment"]
    first, second = ("|".join(FakeJob(raw, T0, T0, T0 + 9).cells(T0 + 99, columns)) for raw in (7, 8))
    header = "|".join(columns)
    rows, bad = read(f"{header}\n{first}model=a\n12 more\n{second}\n")
    assert ([(row.raw_id, row.tag) for row in rows], bad) == ([("7", "a"), ("8", "")], [])
    rows, bad = read(f"{header}\n{first}\nx{first}\n{second}\n")  # a damaged number
    assert ([row.raw_id for row in rows], [record.line for record in bad]) == (["7", "8"], [3])


def test_memory_of_gpus_is_no_gpu() -> None:
    """Of typed GPUs without their sum, those alone are added."""
    rows, _ = read(HEADER + line(AllocTRES="node=1,gres/gpu:a100=2,gres/gpu:h100=3,gres/gpumem=80G"))
    assert rows[0].gpus == 5


def test_steps_are_left_out_and_never_started_jobs_have_no_start() -> None:
    """`sacct` without -X lists steps; a job that was cancelled while pending has the time of that as its start.

    Slurm 22.05 lists one that was requeued before as if it still ran: without an end, and longer each time.
    """
    steps = line(JobIDRaw="7.batch", JobID="7.batch") + line(JobIDRaw="7.0", JobID="7.0")
    cancelled = line(State="CANCELLED by 1000", ElapsedRaw="0")
    forever = line(State="CANCELLED by 1000", End="Unknown", ElapsedRaw="4711", AllocTRES="")
    rows, bad = read(HEADER + line() + steps + cancelled + forever)
    shown = [(row.state, row.start, row.elapsed_s, row.nodes) for row in rows]
    assert (shown, bad) == ([("COMPLETED", T0 + 5, 60, 1), ("CANCELLED", None, 0, 1), ("CANCELLED", None, 0, 0)], [])


def test_no_text_colours_a_terminal() -> None:
    """What is not printable in a name is stored as a space."""
    (row,), _ = read(HEADER + line(User="a\x1b[31mb", QOS="x\ty"))
    assert (row.user, row.qos) == ("a [31mb", "x y")


def test_a_tag_is_the_models_or_the_runs() -> None:
    """model=TAG of the comment, else the name of the run whose id the job's name is."""
    named = line(JobName="bc-jax-20260303-013341-9f3c2a.2")
    rows, _ = read(HEADER + named + line(Comment="for Ada, model=llama-7b;x", JobName="x-20260303-013341-9f3c2a.0"))
    assert [(row.run, row.tag) for row in rows] == [
        ("bc-jax-20260303-013341-9f3c2a", "bc-jax"),
        ("x-20260303-013341-9f3c2a", "llama-7b"),
    ]


def test_the_hour_that_comes_twice() -> None:
    """Where clocks go back, start and end are those that are as far apart as the job took."""
    start, hour_later, after = "2026-10-25T02:30:00", "2026-10-25T02:30:00", "2026-10-25T03:30:00"
    for end, elapsed_s in (("2026-10-25T02:40:00", 600), (hour_later, 3600), (after, 3600), (after, 7200)):
        rows, _ = read(HEADER + line(Start=start, End=end, ElapsedRaw=str(elapsed_s)), zone="Europe/Berlin")
        assert (rows[0].end or 0) - (rows[0].start or 0) == elapsed_s
    suspended = line(Start="2026-10-25T01:30:00", End="2026-10-25T02:30:00", ElapsedRaw="5400")  # for 30 min of 120
    (row,), _ = read(HEADER + suspended, zone="Europe/Berlin")
    assert (row.end or 0) - (row.start or 0) == 7200
    for set_back_s, stored in ((3600, 1), (3601, 0)):  # by UTC: a start that slurmdbd took for the later one
        rows, bad = read(HEADER + line(End=slurm_time(T0 + 5 - set_back_s)))
        assert (len(rows), len(bad)) == (stored, 1 - stored)
    before = line(Start="2026-10-24T22:00:00", End="2026-10-25T03:00:00", ElapsedRaw="21600")
    (row,), _ = read(HEADER + before, zone="Europe/Berlin")
    assert (row.end or 0) - (row.start or 0) == 21600


def test_a_jobstats_record_gives_the_utilization() -> None:
    """The mean over all GPUs; None for what says nothing of them."""
    nodes = {"a": {"gpu_utilization": {"0": 80, "1": 40.0}}, "b": {"gpu_utilization": {"0": 0}, "cpus": 4}}
    packed = base64.b64encode(gzip.compress(json.dumps({"gpus": 3, "nodes": nodes}).encode())).decode()
    rows, _ = read(HEADER + "".join(line(AdminComment=text) for text in (f"JS1:{packed}", "JS1:None", "mine", "")))
    assert [row.gpu_util for row in rows] == [pytest.approx(0.4), None, None, None]


NASTY = st.text(st.sampled_from("ab|\n\r 7\udcff_é"), max_size=12)


@given(names=st.lists(NASTY, min_size=1, max_size=8), comments=st.data())
def test_any_names_are_read_back(names: list[str], comments: st.DataObject) -> None:
    """With a separator that no text has, every job is read, whatever its user wrote into names and comments."""
    sep = "|f00d|"
    jobs = [
        FakeJob(i + 1, T0, T0, T0 + 60, values={"JobName": name, "Comment": comments.draw(NASTY)})
        for i, name in enumerate(names)
    ]
    text = "".join(sep.join(cells) + "\n" for cells in [list(COLUMNS), *(job.cells(T0 + 99) for job in jobs)])
    rows, bad = read(text, sep)
    assert ([row.raw_id for row in rows], bad) == ([str(job.raw_id) for job in jobs], [])
    assert {row.elapsed_s for row in rows} == {60}


@given(
    st.lists(st.sampled_from(["good", "lines", "short", "long", "number", "time", "junk", "id", "back"]), max_size=10),
    st.booleans(),
)
@example(["short", "lines", "id"], False)
def test_bad_records_are_counted_and_hide_none(kinds: list[str], is_torn: bool) -> None:
    """Of a file with torn, overlong and wrong records all good ones are read, and each bad one has its line."""
    good = line()
    texts = {
        "good": good,
        "lines": line(JobName="two\nlines"),
        "short": good[:20] + "\n",
        "long": line(JobName="a|b"),
        "number": line(ElapsedRaw="many"),
        "time": line(Start="2026-02-30T00:00:00"),
        "junk": line(Submit="Unknown"),
        "id": "x" + good,
        "back": line(ElapsedRaw="-50"),
    }
    text = HEADER + "".join(texts[kind] for kind in kinds) + (good[:-9] if is_torn else "")
    rows, bad = read(text)
    n_bad = sum(kind not in ("good", "lines") for kind in kinds) + is_torn
    assert len(rows) == len(kinds) + is_torn - n_bad
    assert min(n_bad, 1) <= len(bad) <= n_bad  # torn ones that follow each other are one
    lines = text.split("\n")
    assert all(lines[record.line - 1].startswith(("7|", "x7|")) and record.problem for record in bad)
