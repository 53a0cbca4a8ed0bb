"""Traces in each form as published, and broken ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pitools.core.errors import DataError
from pitools.place.simulate import trace

HELIOS = """\
job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1,u1,vcA,8,64,1,COMPLETED,2020-09-01 00:00:53,2020-09-01 00:01:00,2020-09-01 00:02:42,102,7
2,u2,vcB,0,4,1,COMPLETED,2020-09-01 00:01:00,2020-09-01 00:01:00,2020-09-01 00:02:42,102,0
3,u2,vcB,1,4,1,FAILED,2020-09-01 00:01:53,2020-09-01 00:02:00,2020-09-01 00:03:40,100,7
"""
PHILLY = """[
 {"status": "Pass", "vc": "ee9e8c", "jobid": "application_1506638472019_10258",
  "attempts": [
   {"start_time": "2017-10-07 01:11:29", "end_time": "2017-10-07 01:21:29",
    "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu3"]}]},
   {"start_time": "2017-10-07 02:00:00", "end_time": "2017-10-07 02:00:30",
    "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": []}]}],
  "submitted_time": "2017-10-07 01:11:00", "user": "ce2f4c"},
 {"status": "Killed", "vc": "ee9e8c", "jobid": "application_2", "attempts": [],
  "submitted_time": "2017-10-07 01:00:00", "user": "x"},
 {"status": "Failed", "vc": "b436b2", "jobid": "application_3",
  "attempts": [{"start_time": "2017-10-07 01:20:00", "end_time": "2017-10-07 01:20:10",
    "detail": [{"ip": "m3", "gpus": ["gpu0"]}]}],
  "submitted_time": "2017-10-07 01:10:00", "user": "ce2f4c"}
]
"""
SWF = """\
; Version: 2.2
; UnixStartTime: 1300000000
  1     0    5   100   64  -1 -1   64  3600 -1 1  7 3 9 2 -1 -1 -1
  2    60   -1    -1   -1  -1 -1   32  7200 -1 5  8 3 9 2 -1 -1 -1
  3    90    0    30   -1  -1 -1   16    -1 -1 0  8 3 -1 2 -1 -1 -1
"""
SACCT = """\
JobID|User|JobName|QOS|Submit|State|Elapsed|Timelimit|AllocTRES
101|ann|train|high|2026-10-01T08:00:00|COMPLETED|01:00:00|1-00:00:00|billing=8,cpu=8,gres/gpu=8,node=1
101.batch||batch||2026-10-01T08:00:00|COMPLETED|01:00:00||cpu=8
102|bob|x|normal|2026-10-01T08:00:10|CANCELLED by 0|00:00:00|UNLIMITED|
103_2|bob|x|normal|2026-10-01T08:00:20|TIMEOUT|2-00:00:01|2-00:00:00|cpu=8,gres/gpu:h100=4
104|bob|x|normal|2026-10-01T09:00:20|RUNNING|00:10:00|2-00:00:00|cpu=8,gres/gpu:h100=4
"""


def rows(folder: Path, text: str, name: str = "t", **more: bool) -> list[tuple[object, ...]]:
    (folder / name).write_text(text)
    trace_jobs = trace.read_trace(folder / name, **more)
    columns = (
        trace_jobs.job_id,
        trace_jobs.submit_s,
        trace_jobs.gpus,
        trace_jobs.run_s,
        trace_jobs.limit_s,
        trace_jobs.owner,
        trace_jobs.queue,
    )
    return list(zip(*columns, strict=True))


def test_helios_as_published(tmp_path: Path) -> None:
    """Jobs with GPUs, by their own durations; those of CPUs alone are left out, and counted."""
    assert rows(tmp_path, HELIOS) == [("1", 0, 8, 102, 0, "u1", "vcA"), ("3", 60, 1, 100, 0, "u2", "vcB")]
    assert trace.read_trace(tmp_path / "t").unallocated == 1


def test_the_helios_month(repo: Path) -> None:
    """All 25,596 jobs of September 2020 are read, and what they ask for adds up."""
    path = repo / "../shared/data/traces/helios_venus_2020-09.csv"
    if not path.exists():
        pytest.skip("../shared/data is not here")
    trace_jobs = trace.read_trace(path)
    assert (len(trace_jobs), trace_jobs.unallocated, trace_jobs.skipped) == (25596, 0, 0)
    assert sum(n * run for n, run in zip(trace_jobs.gpus, trace_jobs.run_s, strict=True)) == 1557525650
    assert sum(1 for guess in trace_jobs.rank_score if not guess) / len(trace_jobs) == pytest.approx(0.07, abs=0.01)


def test_philly_as_published(tmp_path: Path) -> None:
    """A job has the run time of all its attempts and the GPUs of the largest; one without attempts is left out."""
    assert rows(tmp_path, PHILLY) == [
        ("application_3", 0, 1, 10, 0, "ce2f4c", "b436b2"),
        ("application_1506638472019_10258", 60, 3, 630, 0, "ce2f4c", "ee9e8c"),
    ]


def test_swf_also_compressed(tmp_path: Path) -> None:
    """Processors held, else asked for; what was cancelled before it ran is left out."""
    actual = [("1", 0, 64, 100, 3600, "7", "2"), ("3", 90, 16, 30, 0, "8", "2")]
    assert rows(tmp_path, SWF) == actual
    (tmp_path / "t.gz").write_bytes(gzip.compress(SWF.encode()))
    assert len(trace.read_trace(tmp_path / "t.gz")) == 2


def test_what_sacct_prints(tmp_path: Path) -> None:
    """GPUs of any type, limits, and QOS; steps, what runs still and what never ran are left out."""
    assert rows(tmp_path, SACCT) == [
        ("101", 0, 8, 3600, 86400, "ann", "high"),
        ("103_2", 20, 4, 172801, 172800, "bob", "normal"),
    ]


@pytest.mark.parametrize(
    ("text", "line", "value"),
    [
        (HELIOS.replace(",102,7", ",,7"), 2, "duration_s"),
        (HELIOS.replace(",102,7", ",nan,7"), 2, "nan"),
        (HELIOS.replace("2020-09-01 00:01:53", "yesterday"), 4, "yesterday"),
        (HELIOS.replace("\n3,", "\n1,"), 4, "2"),
        (HELIOS.replace("3,u2,vcB,1,4,1,FAILED", "3,u2,vcB"), 4, ""),
        (HELIOS.replace(",1,4,1,FAILED", ",-1,4,1,FAILED"), 4, "-1"),
        (HELIOS.replace(",1,4,1,FAILED", ",1.5,4,1,FAILED"), 4, "1.5"),
        (SWF.replace("   30   -1", "   -1   -1"), 5, "run time is -1 s (expected above 0"),
        (SWF.replace("   16    -1", "   16  9e99"), 5, "limit is 9e+99 s (expected 0"),
        (SWF.replace(" -1 -1 -1\n  2", "\n  2"), 3, "15"),
        (SACCT.replace("103_2|bob|x|", "103_2|bob|"), 5, "number of columns"),
        (SACCT + SACCT.splitlines()[1].replace("01:00:00", "02:00:00"), 7, "duplicate of line 2"),
        (SACCT.replace("2-00:00:01", "two days"), 5, "Elapsed is 'two days', no duration"),
        (SACCT.replace("2-00:00:01|2-00:00:00", "1-00:00:00|-5"), 5, "Timelimit is '-5', no duration"),
        (SACCT.replace("h100=4\n104", "h100=-4\n104"), 5, "AllocTRES is 'cpu=8,gres/gpu:h100=-4', no number"),
        (SACCT.replace("2-00:00:01", ""), 5, "no run time"),
        (PHILLY.replace("01:20:10", "01:10:10"), 11, ""),
        (PHILLY.replace(', "gpus": ["gpu0"]', ""), 11, "gpus"),
        (SWF.replace("   30   -1", "1e308   -1"), 5, "1e+308"),
        (SWF.replace("  3    90", "  3 -1e300"), 5, "-1e+300"),
    ],
)
def test_a_hole_names_its_line(tmp_path: Path, text: str, line: int, value: str) -> None:
    """Garbage is an error with its line and value; asked to, it is left out and counted."""
    (tmp_path / "t").write_text(text)
    with pytest.raises(DataError) as caught:
        trace.read_trace(tmp_path / "t")
    assert value in caught.value.message
    assert caught.value.where == f"{tmp_path / 't'}:{line}"
    trace_jobs = trace.read_trace(tmp_path / "t", skip_bad=True)
    assert trace_jobs.skipped == 1
    assert len(trace_jobs) >= 1


def test_jobs_that_are_left_out_are_counted_by_reason(tmp_path: Path) -> None:
    """With the GPU hours so far of those that have not ended; what a requeue ended has."""
    (tmp_path / "t").write_text(
        "JobID|Submit|State|ElapsedRaw|AllocTRES\n"
        + "1|2026-01-01|COMPLETED|60|gres/gpu=1\n2|2026-01-01|RUNNING|7200|gres/gpu=8\n"
        + "3|2026-01-01|RUNNING|3600|gres/gpu=2\n4|2026-01-01|PENDING|0|\n5|2026-01-01|CANCELLED by 0|0|\n"
        + "6|2026-01-01|COMPLETED|60|cpu=2\n7|2026-01-01|RUNNING|60|cpu=2\n8|2026-01-01|SUSPENDED|3600|gres/gpu=4\n"
        + "9|2026-01-01|FROBNICATED|3600|gres/gpu=3\n10|2026-01-01|REQUEUED|3600|gres/gpu=3\n"
        + "11|2026-01-01|RESIZING|60|gres/gpu=2\n"
    )
    jobs = trace.read_trace(tmp_path / "t")
    assert (jobs.job_id, jobs.unallocated) == (["1", "10", "11"], 8)
    assert jobs.left_out == {
        "run still": [16.0, 2.0], "wait still": [0.0], "never ran": [0.0], "held no GPU": [0.0, 0.0],
        "are SUSPENDED still": [4.0], "have the unknown state FROBNICATED": [3.0],
    }  # fmt: skip


def test_every_attempt_of_a_requeued_job_is_kept(tmp_path: Path) -> None:
    """As of `sacct -D`: the same job id, submitted again; each has an id of its own in the trace."""
    again = "101|ann|train|high|2026-10-01T09:30:00|COMPLETED|00:30:00|1-00:00:00|gres/gpu=8\n"
    attempts = rows(tmp_path, SACCT.replace("COMPLETED", "NODE_FAIL") + again)
    assert [(gpus, run_s) for _, _, gpus, run_s, *_ in attempts] == [(8, 3600), (4, 172801), (8, 1800)]
    assert len({job_id for job_id, *_ in attempts}) == 3


def test_times_are_seconds_since_the_epoch_or_on_one_clock(tmp_path: Path) -> None:
    """Seconds, as of SLURM_TIME_FORMAT=%s, know no change of clocks; a start before the submission is a bad row."""
    text = "JobID|Submit|Start|ElapsedRaw|AllocTRES\n1|{}|{}|60|gres/gpu=8\n2|20260101|Unknown|60|gres/gpu=8\n"
    (tmp_path / "t").write_text(text.format(1774745940, 1774746060))  # 01:59 and 03:01 in Berlin
    seconds = trace.read_trace(tmp_path / "t")
    assert (seconds.began_s, seconds.submit_s[1], seconds.wait_s) == (1767225600, 7520340, [-1.0, 120.0])
    (tmp_path / "t").write_text(text.format("2026-10-25T02:30:00", "2026-10-25T02:10:00"))
    with pytest.raises(DataError, match=r"Start is '2026-10-25T02:10:00', before .*SLURM_TIME_FORMAT=%s") as error:
        trace.read_trace(tmp_path / "t")
    assert error.value.where.endswith(":2")
    assert trace.read_trace(tmp_path / "t", skip_bad=True).skipped == 1


@pytest.mark.parametrize("name", ["a|b", "two\nlines", "a|\n\n|b|c\n"])
def test_a_name_may_hold_separators(tmp_path: Path, name: str) -> None:
    """Separators and ends of lines in a job's name hide neither the job nor its neighbours; lines are counted on."""
    text = SACCT.replace("train", name).replace("bob|x", f"bob|{name}")
    assert rows(tmp_path, text) == rows(tmp_path, SACCT)
    with pytest.raises(DataError) as error:
        rows(tmp_path, f"{text}x|y\n")
    assert error.value.where.endswith(f":{text.count(chr(10)) + 1}")


def test_without_gpus_sacct_tells_of_nodes(tmp_path: Path) -> None:
    """Of a cluster where no job holds a GPU, nodes are counted, as in its scenario."""
    (tmp_path / "t").write_text(
        "JobID|User|Submit|State|ElapsedRaw|AllocTRES\n"
        "1|me|2026-01-01T00:00:00|COMPLETED|60|billing=8,cpu=8,node=2\n"
        "2|me|2026-01-01T00:00:01|CANCELLED|0|\n"
    )
    trace_jobs = trace.read_trace(tmp_path / "t")
    assert (trace_jobs.gpus, trace_jobs.unallocated) == ([2], 1)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ("\n \n", "empty"),
        ("a,b\n1,2\n", "unknown trace format"),
        ("JobID|Submit|Elapsed|AllocTRES\n", "no job that ran"),
        ("JobID|Submit|Elapsed\n1|2026-01-01|60\n", "AllocTRES or ReqTRES"),
        ("JobID|Submit|AllocTRES\n1|2026-01-01|node=1\n", "ElapsedRaw or Elapsed"),
        ("JobID|Elapsed|AllocTRES\n1|60|node=1\n", "no column Submit"),
        ("JobID,Submit,Elapsed,AllocTRES\n", "no column JobID, Submit"),
        ("1|2026-01-01|60|node=1\n", "no column JobID, Submit"),
        (PHILLY[:400], "line 7: Expecting value"),
        (PHILLY.rstrip()[:-1], "truncated"),
        ('["x"', "truncated"),
        ('{"a": 1}', "not a list"),
        ("[" * 100_000, "recursion"),
        (HELIOS + "4," + "u" * 200_000 + ",vcB,1,4,1,FAILED,2020-09-01 00:01:53,,,100,7", "field larger"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, what: str) -> None:
    """A file that is cut short, empty, or of no known form says so."""
    (tmp_path / "t").write_text(text)
    with pytest.raises(DataError, match=what):
        trace.read_trace(tmp_path / "t", skip_bad=True)


def test_odd_marks_in_a_text_change_nothing(tmp_path: Path) -> None:
    """A byte-order mark, CRLF, and separators within a job's name that only Unicode takes for the end of a line."""
    assert rows(tmp_path, "\ufeff" + HELIOS.replace("\n", "\r\n")) == rows(tmp_path, HELIOS)
    assert rows(tmp_path, SACCT.replace("train", "tr\u2028a\x85in")) == rows(tmp_path, SACCT)


def test_bytes_are_refused(tmp_path: Path) -> None:
    """A binary file, a broken .gz and a missing file are data errors, not tracebacks."""
    (tmp_path / "t").write_bytes(b"\xff\xfe\x00")
    packed = gzip.compress(SWF.encode())
    (tmp_path / "t.gz").write_bytes(packed[:40])
    (tmp_path / "u.gz").write_bytes(packed[:30] + b"\xff" * 30 + packed[60:])
    for name in ("t", "t.gz", "u.gz", "missing"):
        with pytest.raises(DataError):
            trace.read_trace(tmp_path / name)
    (tmp_path / "t").write_bytes(SACCT.replace("train", "tr\xe4in").encode("latin-1"))
    with pytest.raises(DataError) as error:
        trace.read_trace(tmp_path / "t")
    assert error.value.where.endswith(f":{SACCT.partition('train')[0].count(chr(10)) + 1}")
    assert len(trace.read_trace(tmp_path / "t", skip_bad=True)) == len(rows(tmp_path, SACCT))


def test_real_waits_accounts_and_dates_are_kept(tmp_path: Path) -> None:
    """The wait is that of the format, from when a job was eligible; without a start it is unknown; SWF has a date."""
    sacct = """\
JobID|Account|Submit|Eligible|Start|State|ElapsedRaw|AllocTRES
1|a|2026-10-01T00:00:00|2026-10-01T00:00:00|2026-10-01T00:00:30|COMPLETED|60|gres/gpu=8
2|b|2026-10-01T00:01:00|2026-10-01T01:01:00|2026-10-01T01:01:20|COMPLETED|60|gres/gpu=8
3|b|2026-10-01T00:02:00|Unknown|Unknown|COMPLETED|60|gres/gpu=8
"""
    alibaba = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
p0,12000,16384,1,460,,LS,Running,0,900,0
p1,12000,16384,0,0,,LS,Running,5,900,6
p2,12000,16384,8,1000,,BE,Pending,10,900,
p3,12000,16384,2,1000,,BE,Failed,20,900,300
"""
    jobs = []
    for name, text in (("month", sacct), ("pods", alibaba), ("log", SWF), ("helios", HELIOS), ("philly", PHILLY)):
        (tmp_path / name).write_text(text)
        jobs.append(trace.read_trace(tmp_path / name))
    assert (jobs[0].wait_s, jobs[0].account) == ([30.0, 20.0, -1.0], ["a", "b", "b"])
    assert (jobs[1].wait_s, jobs[1].run_s, jobs[1].gpus) == ([0.0, 280.0], [900.0, 600.0], [1, 2])
    assert jobs[1].unallocated == 2
    assert (jobs[2].wait_s, jobs[2].account, jobs[2].began_s) == ([5.0, 0.0], ["3", "3"], 1300000000.0)
    assert (jobs[3].wait_s, jobs[4].wait_s) == ([7.0, 7.0], [600.0, 29.0])
