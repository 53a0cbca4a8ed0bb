"""Readers of profiles: what they keep of whole ones, and what they do with cut, damaged and hostile ones."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.core.errors import DataError, PitError, UsageError
from pitools.perf.attribute.buckets import split_steps
from pitools.perf.attribute.verdict import judge
from pitools.perf.read import files as files_module
from pitools.perf.read import kineto
from pitools.perf.read.classify import hlo_kind, host_kind
from pitools.perf.read.files import find_files, read_chunks
from pitools.perf.read.flight_recorder import find_hangs
from pitools.perf.read.kineto import read_kineto
from pitools.perf.read.read import READERS
from pitools.perf.read.xplane import read_xplane
from pitools.perf.spans import Kind, Names, SpanTable
from pitools.run.run_folder import write_record
from pitools.run.steps import StepLog
from pitools.run.traces import RankTrace

Read = Callable[..., SpanTable]
SAMPLE = "xplane/test_data_jax_te_fused_attn_categorization/934987a2fc2f.xplane.pb"


def event(cat: str, name: str, ts: float, dur: float, tid: Any = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


EVENTS = [
    event("user_annotation", "ProfilerStep#1", 0.0, 100.0, "main"),
    event("user_annotation", "ProfilerStep#2", 100.0, 90.5, "main"),
    event("kernel", 'a "name", with }, { in it', 10.0, 20.25),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 30.0, 20.0, 8, **{
        "Process Group Name": "0", "Seq": 5, "dtype": "Float", "In msg nelems": 100, "list": [{"a": 1}, {"b": 2}],
    }),
    event("kernel", "rccl_kernel", 70.0, 2.0, 8),
    event("gpu_memcpy", "Memcpy HtoD", 50.0, 5.0, 7, bytes=640),
    event("gpu_memset", "Memset (Device)", 60.0, 1.0),
    event("cuda_sync", "Event Sync", 0.0, 300.0), event("overhead", "Instrumentation", 0.0, 300.0),
    event("gpu_user_annotation", "forward", 0.0, 300.0), event("kernel", "last", 180.0, 40.0),
    event("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 1.0, 5.0, "main"),
    event("user_annotation", "enumerate(DataLoader)#x", 1.0, 5.0, "prefetch"),
    event("cuda_runtime", "hipMemcpyWithStream", 20.0, 9.0, "main"),
    event("cpu_op", "c10d::allreduce_", 20.0, 50.0, "main"),
    event("cuda_runtime", "cudaLaunchKernel", 120.0, 9.0, "backward"),
    event("user_annotation", "nccl:all_reduce", 120.0, 9.0, "backward"),
    event("cpu_op", "outer", 200.0, 5.0, "main"), event("cpu_op", "inner", 201.0, 2.0, "main"),
]  # fmt: skip


def trace(path: Path, events: list[dict[str, Any]] = EVENTS, **more: Any) -> Path:
    info = {"schemaVersion": 1, "distributedInfo": {"rank": 3}, "traceEvents": events, **more}
    data = json.dumps({**info, "baseTimeNanoseconds": 10**18}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_events_become_spans_of_their_kind(tmp_path: Path) -> None:
    """Devices' work, collectives with group and number, and input on the thread that steps; nothing twice."""
    names = Names()
    got = read_kineto(trace(tmp_path / "t.json.gz"), names)
    texts = names.texts()
    kinds = {kind.name: [texts[i] for i in got.spans.name[got.spans.kind == kind]] for kind in Kind}
    assert kinds["COMPUTE"] == ['a "name", with }, { in it', "Memset (Device)", "last"]
    assert kinds["COMMUNICATION"] == ["ncclDevKernel_AllReduce_Sum_f32_RING_LL", "rccl_kernel"]
    assert [len(kinds[name]) for name in ("COPY", "INPUT", "OP")] == [1, 1, 0]
    assert kinds["HOST"] == ["hipMemcpyWithStream", "cudaLaunchKernel", "outer"]
    collective = got.spans.where(got.spans.kind == Kind.COMMUNICATION)
    assert collective.sequence.tolist() == [5, -1]
    assert (got.rank, got.is_unix, got.has_device) == (3, True, True)
    assert (got.spans.end_ns - got.spans.start_ns)[0] == 20_250
    # The last step is kept, and lasts until the device's work ends.
    assert (got.windows.end_ns - 10**18).tolist() == [100_000, 220_000]


def test_a_trace_is_read_the_same_in_any_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a slice ends, inside of text, lists or numbers, the same spans are read."""
    path = trace(tmp_path / "t.json", EVENTS * 3)
    whole = read_kineto(path, Names())
    for size in (1, 7, 64, 301):
        monkeypatch.setattr(kineto, "read_chunks", lambda path, notes, size=size: read_chunks(path, notes, size))
        again = read_kineto(path, Names())
        assert again.notes == ()
        assert sorted(again.spans.start_ns) == sorted(whole.spans.start_ns)
        assert again.windows.end_ns.tolist() == whole.windows.end_ns.tolist()


def test_a_cut_trace_is_read_until_there(tmp_path: Path) -> None:
    """A half-written trace, plain or compressed, gives the events before the cut, and says so."""
    plain = trace(tmp_path / "t.json", [event("kernel", f"k{i}", i * 10.0, 5.0) for i in range(2000)])
    cut = tmp_path / "cut.json"
    cut.write_bytes(plain.read_bytes()[:-5000])
    packed = tmp_path / "cut.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes())[:-2000])
    for path in (cut, packed):
        got = read_kineto(path, Names())
        assert 500 < len(got.spans) < 2000
        assert "only the events before are used" in got.notes[-1]


def test_a_damaged_trace_is_read_until_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the event before the damage, wherever in a slice it is; and little of the file after that."""
    path = trace(tmp_path / "t.json", [event("kernel", f"k{i}", i * 10.0, 5.0, list=[{}, {}]) for i in range(9000)])
    content = path.read_bytes()
    monkeypatch.setattr(kineto, "_MAX_EVENT", 1 << 18)
    for number in (1, 500, 4000):
        path.write_bytes(content.replace(f'"k{number}"'.encode(), b'"k" x "'))
        for size in (8 << 20, 1 << 16):
            chunks: list[bytes] = []
            monkeypatch.setattr(
                kineto,
                "read_chunks",
                lambda path, notes, size=size, chunks=chunks: (
                    chunks.append(each) or each for each in read_chunks(path, notes, size)
                ),
            )
            got = read_kineto(path, Names())
            assert (len(got.spans), len(got.notes)) == (number, 1)
            assert sum(map(len, chunks)) <= content.index(f'"k{number}"'.encode()) + (1 << 18) + 2 * size


def steps_of_10_ms(work: list[dict[str, Any]], count: int = 20) -> list[dict[str, Any]]:
    """Marks of steps, in each a launch of 1 ms, then the device's work: PyTorch's order."""
    marks = [event("user_annotation", f"ProfilerStep#{i}", i * 1e4, 1e4, "main") for i in range(count)]
    calls = [event("cuda_runtime", "cudaLaunchKernel", i * 1e4, 1e3, "main", correlation=i + 1) for i in range(count)]
    return [*marks, *calls, *work]


@pytest.mark.parametrize("kept", [0.5, 0.1, 0.0])
def test_a_cut_trace_has_no_steps_without_their_work(tmp_path: Path, read: Read, kept: float) -> None:
    """Steps of 95 % compute, of whose kernels the second half is cut off, are not idle: half of the steps are left."""
    work = [event("kernel", "gemm", i * 1e4, 9500, correlation=i + 1) for i in range(20)]
    path = trace(tmp_path / "t.json", steps_of_10_ms(work))
    data = path.read_bytes()
    begin = data.index(b'"kernel"')
    path.write_bytes(data[: begin + int((len(data) - begin) * kept)])
    if not kept:
        with pytest.raises(DataError, match="no step has its work"):
            read(path)
        return
    got = read(path)
    assert 0 < len(got.windows) <= 20 * kept
    assert (got.windows.end_ns - got.windows.start_ns).tolist() == [10_000_000] * len(got.windows)
    assert "steps are left out" in got.notes[-1]
    assert judge(split_steps(got)).verdict == "compute"


@pytest.mark.parametrize("has_correlation", [True, False])
def test_work_after_the_last_step_is_not_its_own(tmp_path: Path, has_correlation: bool) -> None:
    """A step's kernels end 5 ms after it, and those of an evaluation 1 s later; without launches, what began in it."""
    own = [("gemm", 25e3, 4e3, 3), ("gemm", 29e3, 6e3, 3)]
    after = [("eval", 35e3 + i * 1e3, 1e3, 10 + i) for i in range(1000)]
    work = [event("kernel", name, at, dur, correlation=number) for name, at, dur, number in own + after]
    calls = [event("cuda_runtime", "cudaLaunchKernel", 31e3, 1e3, "main", correlation=10 + i) for i in range(1000)]
    events = steps_of_10_ms([*calls, *work], 3)
    if not has_correlation:
        events = [{**each, "args": {}} for each in events]
    windows = read_kineto(trace(tmp_path / "t.json", events), Names()).windows
    assert (windows.end_ns - windows.start_ns).tolist() == [10_000_000, 10_000_000, 15_000_000]


def test_steps_with_others_between_them_end_where_they_end(tmp_path: Path) -> None:
    """Step 5 does not begin where step 2, recorded 1 s earlier, ends."""
    marks = [event("user_annotation", f"ProfilerStep#{number}", at, 1e4, "main") for number, at in ((2, 0), (5, 1e6))]
    windows = read_kineto(trace(tmp_path / "t.json", [*marks, event("cpu_op", "mm", 0, 9e3, "main")]), Names()).windows
    assert (windows.end_ns - windows.start_ns).tolist() == [10_000_000, 10_000_000]


def test_a_last_step_without_end_of_microseconds_is_exact(tmp_path: Path) -> None:
    """Whole microseconds since 1970 stay exact; a float of nanoseconds could not hold them."""
    path = tmp_path / "t.json"
    ts = 1_669_783_687_464_181
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event("kernel", "k", ts, 3)]}))
    got = read_kineto(path, Names())
    assert (int(got.spans.start_ns[0]), got.is_unix) == (ts * 1000, True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"schemaVersion": 1}', "no traceEvents"),
        ('{"schemaVersion": 1, "traceEvents": []}', "no events"),
        ('{"schemaVersion": 1, "traceEvents": [{"ph": 1}]}', "no event of PyTorch"),
        ('{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1e300}]}', "range"),
        ('{"schemaVersion": 1, "traceEvents": [' + '{"args":' * 100_000, "no valid JSON"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """Each with the reason, as an error of data."""
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(DataError, match=problem):
        read_kineto(path, Names())


def test_a_small_file_of_much_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gzip file that unpacks to an event without end is given up at a limit, not at its end."""
    sizes: list[int] = []

    def counted(path: Path, notes: list[str]) -> Iterator[bytes]:
        for chunk in read_chunks(path, notes, 1 << 16):
            sizes.append(len(chunk))
            yield chunk

    monkeypatch.setattr(kineto, "_MAX_EVENT", 1 << 20)
    monkeypatch.setattr(kineto, "read_chunks", counted)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "' + b"a" * (16 << 20)))
    with pytest.raises(DataError, match="no valid JSON after byte"):
        read_kineto(path, Names())
    assert sum(sizes) < 2 << 20


def test_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    """A kernel's name in another encoding costs that character, not the trace."""
    path = trace(tmp_path / "t.json", [event("kernel", "KERNEL", 1.0, 2.0)])
    path.write_bytes(path.read_bytes().replace(b"KERNEL", b"k\xff"))
    assert len(read_kineto(path, Names()).spans) == 1


def test_every_step_of_a_real_trace_is_kept(real: Path, read: Read) -> None:
    """216,092 events of a V100 give all five steps; HTA drops the last."""
    got = read(real / "kineto" / "df_index_resolver")
    assert got.windows.step.tolist() == [2, 3, 4, 5, 6]
    assert (int((got.spans.kind == Kind.COMMUNICATION).sum()), list(got.ranks)) == (2020, [1])
    assert got.step_of().max() == 6


@pytest.mark.own_process
def test_a_profile_of_xla_is_what_jax_reads(real: Path, profiles: Path) -> None:
    """The wire reader finds the kernels, and the steps and collectives of CPUs, that JAX's own reader finds."""
    jax = pytest.importorskip("jax")
    data = jax.profiler.ProfileData.from_file(str(real / SAMPLE))
    events = [e for plane in data.planes if plane.name == "/device:GPU:0" for line in plane.lines for e in line.events]
    got = read_xplane(real / SAMPLE, Names())
    spans = got.spans.where(got.spans.kind == Kind.COMPUTE)
    assert len(spans) == len(events) == 150
    assert int((spans.end_ns - spans.start_ns).sum()) == pytest.approx(sum(e.duration_ns for e in events), abs=150)
    packed = profiles / "jax-slow-rank" / "0.xplane.pb.gz"
    data = jax.profiler.ProfileData.from_serialized_xspace(gzip.decompress(packed.read_bytes()))
    host = [e for plane in data.planes if plane.name == "/host:CPU" for line in plane.lines for e in line.events]
    names = Names()
    own = read_xplane(packed, names)
    waits = own.spans.where(own.spans.kind == Kind.COMMUNICATION)
    expected = [e.duration_ns for e in host if e.name.startswith("all-reduce")]
    assert sorted(waits.end_ns - waits.start_ns) == pytest.approx(sorted(expected), abs=2)
    assert own.windows.step.tolist() == [1, 2, 3, 4, 5]
    assert own.is_unix


def test_a_cut_profile_of_xla_is_refused_or_said(profiles: Path, tmp_path: Path) -> None:
    """Whole planes before the cut are used; without one of work, the profile is refused."""
    data = gzip.decompress((profiles / "jax-slow-rank" / "0.xplane.pb.gz").read_bytes())
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(data[:-20])
    assert "whole planes are used" in read_xplane(path, Names()).notes[0]
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="the file is cut"):
        read_xplane(path, Names())


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """Return a message of protobuf's wire format: texts of fewer than 128 bytes, and numbers below 16384."""
    return b"".join(
        bytes([number << 3 | 2, len(value)]) + value
        if isinstance(value, bytes)
        else bytes([number << 3, value & 127 | 128, value >> 7])
        for number, value in fields
    )


def test_a_stream_of_copies_in_an_xla_profile_is_one(tmp_path: Path) -> None:
    """By its title, though the copy has the name of XLA's operation."""
    line = message((2, b"Stream #7(MemcpyH2D)"), (4, message((1, 1), (2, 0), (3, 5000))))
    metadata = message((1, 1), (2, message((1, 1), (2, b"copy.3"))))
    path = tmp_path / "0.xplane.pb"
    path.write_bytes(message((1, message((2, b"/device:GPU:0"), (3, line), (4, metadata)))))
    assert read_xplane(path, Names()).spans.kind.tolist() == [Kind.COPY]


@pytest.mark.parametrize("form", ["kineto", "xplane", "steps", "inspector", "flight"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(profiles: Path, tmp_path: Path, form: str, data: st.DataObject) -> None:
    """Bytes changed anywhere give spans or an error of data, never another exception."""
    packed = {"kineto": "torch-healthy/0.json.gz", "xplane": "jax-slow-input/0.xplane.pb.gz"}
    if form in packed:
        content = bytearray(gzip.decompress((profiles / packed[form]).read_bytes()))
    elif form == "flight":
        content = bytearray(pickle.dumps(dump({0: "completed", 1: "scheduled"})))
    elif form == "steps":
        content = bytearray(step_log(tmp_path / "log", 0).read_bytes())
    else:
        content = bytearray(inspector_lines().encode())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = tmp_path / "damaged0"
    path.write_bytes(content)
    try:
        if form == "flight":
            find_hangs([path], [])
        else:
            got = READERS[form](path, Names())
            assert (got.spans.end_ns >= got.spans.start_ns).all()
    except PitError:
        pass


def step_log(folder: Path, rank: int, extra_s: float = 0.0) -> Path:
    (folder / f"{rank}.jsonl").unlink(missing_ok=True)
    log = StepLog(folder, rank)
    for step in range(4):
        log.write(
            step=step,
            loss=1.0,
            wall_s=0.1,
            input_s=0.01,
            compute_s=0.06 + extra_s,
            comm_s=0.025 - extra_s,
            rank_samples=1,
        )
    log.close()
    return folder / f"{rank}.jsonl"


def test_waits_for_a_cpu_are_read_beside_a_trace(profiles: Path, tmp_path: Path, read: Read) -> None:
    """Each step has its wait, at most its length, whatever the status says; without a status of this trace, none."""
    path = tmp_path / "0.json.gz"
    path.write_bytes((profiles / "torch-healthy" / path.name).read_bytes())
    assert not read(tmp_path).windows.cpu_wait_ns.any()
    first = int(read(tmp_path).windows.step[0])
    status = RankTrace(
        rank=0, state="done", first_step=first, file=path.name, cpu_wait_s=[0.001, -1.0, 1e300]
    )  # fmt: skip
    for name, waits_ns in (("1.json.gz", [0, 0, 0]), (path.name, [1_000_000, 0, None])):
        write_record(tmp_path / "0.status.json", msgspec.structs.replace(status, file=name))
        windows = read(tmp_path).windows
        whole = int(windows.end_ns[2] - windows.start_ns[2])
        assert windows.cpu_wait_ns.tolist() == [*(whole if each is None else each for each in waits_ns), 0, 0]


@pytest.mark.parametrize(
    ("traced_s", "after_s", "said"),
    [
        (0.012, 0.01, "20% longer than those before and after"),
        (0.012, None, "20% longer than those before, surely 18%: by tracing, or by load"),
        (0.0104, 0.01, ""),
        (0.012, 0.012, ""),  # load that came with the trace, and stayed
        (None, 0.01, ""),  # noise of a third of a step
    ],
)
def test_what_a_trace_slowed_is_said(
    profiles: Path, tmp_path: Path, read: Read, traced_s: float | None, after_s: float | None, said: str
) -> None:
    """From 5 % on, if the step log shows it surely against the steps on both sides, without those that the profiler
    held up to start and to write; and what is not used has its name in words."""
    folder = tmp_path / "traces" / "3-7"
    folder.mkdir(parents=True)
    (folder / "0.json.gz").write_bytes((profiles / "torch-healthy" / "0.json.gz").read_bytes())
    status = RankTrace(rank=0, state="done", first_step=30, last_step=34, file="0.json.gz", slowdown=0.2, blocked_s=0.5)
    write_record(folder / "0.status.json", status)
    noise = np.random.default_rng(0).normal(0, 0.3 if traced_s is None else 0.01, 200)
    log = StepLog(tmp_path / "steps", 0)
    for step in range(35 if after_s is None else 200):
        wall_s = 0.01 if step < 29 else 0.5 if step == 29 else traced_s or 0.012 if step < 35 else after_s or 0.01
        wall_s = 0.02 if 35 <= step < 85 else wall_s * float(np.exp(noise[step]))
        log.write(step=step, loss=0, wall_s=wall_s, input_s=0, compute_s=0, comm_s=0, rank_samples=1)
    log.close()
    notes = read(tmp_path).notes
    assert [said in note for note in notes if "traced steps took" in note] == [True] * bool(said), notes
    assert "also there, and not used beside PyTorch's traces: step logs" in notes


def test_a_step_that_the_loops_end_cut_is_none(profiles: Path, tmp_path: Path, read: Read) -> None:
    """Its mark lasts until the log is closed, which can be minutes; the status names the last whole step. That steps
    are missing is said."""
    path = tmp_path / "0.json.gz"
    path.write_bytes((profiles / "torch-healthy" / path.name).read_bytes())
    first = int(read(tmp_path).windows.step[0])
    error = "3 of 9 steps: the loop ended"
    status = RankTrace(rank=0, state="done", first_step=first, last_step=first + 2, file=path.name, error=error)
    write_record(tmp_path / "0.status.json", status)
    assert read(tmp_path).windows.step.tolist() == [first, first + 1, first + 2]
    assert f"the trace has {error}" in read(tmp_path).notes


def test_a_rank_without_steps_is_not_one_long_step(tmp_path: Path, read: Read) -> None:
    """A mean over steps of 10 ms and a whole trace of 200 ms would be of neither."""
    work = [event("cpu_op", "mm", i * 1e4, 9e3, "main") for i in range(20)]
    marks = [event("user_annotation", f"ProfilerStep#{i}", i * 1e4, 1e4, "main") for i in range(20)]
    paths = [
        trace(tmp_path / f"{rank}.json", [*marks[: 20 * rank], *work], distributedInfo={"rank": rank, "world_size": 2})
        for rank in (0, 1)
    ]
    got = read(*paths)
    assert (list(got.ranks), len(got.windows), got.notes) == ([1], 20, ("ranks without steps are left out: 0",))
    assert len(read(paths[0]).windows) == 1


def test_a_requeued_run_is_read_of_its_last_attempt_with_steps(tmp_path: Path, read: Read) -> None:
    """A newer attempt that has logged no step has nothing to split; older ones than that are not read."""
    for attempt in (0, 1):
        step_log(tmp_path / "attempts" / str(attempt) / "steps", 0)
    for attempt in (2, 10):
        (tmp_path / "attempts" / str(attempt) / "steps").mkdir(parents=True)
        (tmp_path / "attempts" / str(attempt) / "steps" / "0.jsonl").touch()
    assert [str(each.path.relative_to(tmp_path)) for each in find_files([tmp_path])] == ["attempts/1/steps/0.jsonl"]


def test_step_logs_of_a_run_are_read(tmp_path: Path, read: Read) -> None:
    """Of the last attempt, every step with its parts, and the wait for a slow rank within communication."""
    step_log(tmp_path / "attempts" / "0" / "steps", 0)
    for rank in (0, 1):
        step_log(tmp_path / "attempts" / "10" / "steps", rank, 0.02 * rank)
    got = read(tmp_path)
    assert [str(each.path).split("/")[-3] for each in got.ranks.values()] == ["10", "10"]
    buckets = split_steps(got)
    first = buckets.records()[0]
    assert (first.wall_ms, first.input_ms, first.compute_ms, first.communication_ms) == (100, 10, 60, 25)
    assert first.idle_ms == 5
    waits = {rank: float(np.median(buckets.skew_ns[got.windows.rank == rank])) for rank in (0, 1)}
    assert (waits[0], waits[1]) == pytest.approx((20e6, 0), abs=2e6)  # the log's times are whole milliseconds


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_never_waits_is_the_one_that_others_wait_for(tmp_path: Path, read: Read, ranks: int) -> None:
    """Its steps log no communication; the others' is no slow transfer."""
    for rank in range(ranks):
        log = StepLog(tmp_path / "attempts" / "0" / "steps", rank)
        for step in range(12):
            late_s = 0.025 if rank == 1 else 0.001 * (step * (rank + 3) % 3)
            times = {"wall_s": 0.076, "input_s": 0.0, "compute_s": 0.05 + late_s, "comm_s": 0.025 - late_s}
            log.write(step=step, loss=1.0, rank_samples=1, **times)
        log.close()
    got = judge(split_steps(read(tmp_path)))
    assert (got.verdict, got.rank) == ("straggler", 1)
    assert got.shares["skew"] == pytest.approx(0.024 * (ranks - 1) / ranks / 0.076, abs=0.03)


@pytest.mark.parametrize("ending", [b"", b"x" * (3 << 20)])
def test_a_compressed_log_is_read_without_its_first_step(tmp_path: Path, read: Read, ending: bytes) -> None:
    """A first step of a minute does not count, which is said once for all ranks; nor does what is no line."""
    for rank in (0, 1):
        path = step_log(tmp_path / "log", rank)
        content = path.read_bytes().replace(b'"wall_s":0.1', b'"wall_s":60.0', 1) + ending
        (tmp_path / f"{rank}.jsonl.gz").write_bytes(gzip.compress(content))
    got = read(tmp_path / "0.jsonl.gz", tmp_path / "1.jsonl.gz")
    assert got.windows.step.tolist() == [1, 2, 3] * 2
    assert (got.windows.end_ns - got.windows.start_ns).max() == 100_000_000
    assert got.notes == ("step 0 is left out: a run's first step compiles and warms up",)


@pytest.mark.parametrize(("old", "new"), [('"step":2', f'"step":{1 << 70}'), ('"t":"2', '"t":"9')])
def test_a_log_beyond_64_bits_is_refused(tmp_path: Path, read: Read, old: str, new: str) -> None:
    """Numbers of steps, and times after the year 2262."""
    path = step_log(tmp_path, 0)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError):
        read(path)


def test_a_log_without_communication_has_no_collectives(tmp_path: Path, read: Read) -> None:
    """Ranks that never wait for each other are not taken for ranks whose collectives do not match."""
    for rank in (0, 1):
        log = StepLog(tmp_path / "attempts" / "0" / "steps", rank)
        for step in range(4):
            log.write(step=step, loss=1.0, wall_s=1.0 + rank, input_s=0, compute_s=1.0, comm_s=0.0, rank_samples=1)
        log.close()
    assert split_steps(read(tmp_path)).matched.notes == ()


def inspector_lines() -> str:
    header = {"id": "0x7", "rank": 1, "n_ranks": 2, "nnodes": 1}
    metadata = {"inspector_output_format_version": "v4.4", "dump_timestamp_us": 10**15}
    lines: list[Any] = [
        {"header": header, "metadata": metadata, "dump_stats": {"coll_records": 3, "coll_dropped_total": 9}}
    ]
    for number in (1, 2):
        kernel = {"kernel_start_ts": 10**15 + number * 100, "kernel_stop_ts": 10**15 + number * 100 + 50}
        record = {"coll": "AllReduce", "coll_sn": number, "coll_msg_size_bytes": 8, "coll_exec_time_us": 50}
        lines.append({"coll_perf": {**record, "event_trace_ts": {"coll_start_ts": 1, "kernel_events": [kernel]}}})
    return "\n".join(map(json.dumps, lines)) + "\n{broken\n"


def test_a_stream_of_nccl_inspector_has_its_header_and_its_drops(tmp_path: Path, read: Read) -> None:
    """Records take the marker's header, and what was dropped, is missing or unreadable is counted."""
    path = tmp_path / "dump.log"
    path.write_text(inspector_lines())
    got = read(path)
    assert (list(got.ranks), got.spans.sequence.tolist()) == ([1], [1, 2])
    assert {got.texts[each] for each in got.spans.group} == {"group 0x7"}
    assert (got.spans.end_ns - got.spans.start_ns).tolist() == [50_000, 50_000]
    assert [note.partition(": ")[2] for note in got.ranks[1].notes] == [
        "9 collectives were dropped by NCCL Inspector",
        "1 announced records are missing",
        "1 lines are unreadable",
    ]
    assert got.notes[-1] == "1 of 2 ranks are here"


def test_records_of_the_older_inspector_stand_alone(real: Path) -> None:
    """Each line of 4.0 has its header; without the event trace there is no time, and no step to split."""
    path = real / "nccl_inspector" / "doc_examples_v4.0.jsonl"
    assert [each.form for each in find_files([path])] == ["inspector"]
    names = Names()
    got = READERS["inspector"](path, names)
    assert (len(got.spans), got.is_timed, got.notes) == (3, False, ())
    assert len(set(got.spans.group.tolist())) == 3


def dump(states: dict[int, str], group: str = "0") -> dict[str, Any]:
    entries = [
        {"process_group": (group, "default"), "collective_seq_id": number, "state": state, "is_p2p": False,
         "profiling_name": "nccl:all_reduce", "time_discovered_completed_ns": 5 if state == "completed" else None}
        for number, state in states.items()
    ]  # fmt: skip
    return {"version": "2.10", "pg_config": {group: {"name": group, "ranks": "[0, 1, 2, 3]"}}, "entries": entries}


def test_a_hang_names_the_ranks_that_are_missing(tmp_path: Path) -> None:
    """Of four ranks two wait in the second all-reduce, one never started it, and of one there is no dump."""
    done, waits = {1: "completed"}, {1: "completed", 2: "started"}
    paths = []
    for rank, states in ((0, waits), (1, done), (3, waits)):
        paths.append(tmp_path / f"nccl_trace_rank_{rank}")
        paths[-1].write_bytes(pickle.dumps(dump(states)))
    (hang,) = find_hangs(paths, [])
    assert (hang.sequence, hang.operation) == (2, "nccl:all_reduce")
    assert (hang.missing, hang.waiting, hang.no_dump) == ([1], [0, 3], [2])
    for path in (paths[0], paths[2]):
        path.write_bytes(pickle.dumps(dump(done | {2: "completed"})))
    (hang,) = find_hangs(paths, [])  # as of a broadcast, which its root need not wait for
    assert (hang.sequence, hang.missing, hang.waiting) == (2, [1], [])
    paths[1].write_bytes(paths[0].read_bytes())
    assert find_hangs(paths, []) == []
    sends = dump(done)
    sends["entries"].append({**dump({3: "started"})["entries"][0], "is_p2p": True})
    paths[1].write_bytes(pickle.dumps(sends))  # a send counts by itself, and not every rank takes part
    assert find_hangs(paths[:1], []) == find_hangs(paths[1:2], []) == []


def test_a_damaged_dump_is_one_that_is_missing(tmp_path: Path) -> None:
    """As of a rank that was killed while it wrote: the others still say where they wait; two of a rank are refused."""
    paths = [tmp_path / f"dump_{rank}" for rank in range(3)]
    for rank, path in enumerate(paths):
        content = pickle.dumps(dump({1: "completed"} if rank == 1 else {1: "completed", 2: "started"}))
        path.write_bytes(content[: len(content) // 2] if rank == 2 else content)
    notes: list[str] = []
    (hang,) = find_hangs(paths, notes)
    assert (hang.sequence, hang.missing, hang.waiting, hang.no_dump) == (2, [1], [0], [2, 3])
    assert (len(notes), str(paths[2]) in notes[0]) == (1, True)
    with pytest.raises(DataError):
        find_hangs(paths[2:], [])
    (tmp_path / "b").mkdir()
    other = tmp_path / "b" / "dump_0"  # another node's, named by its local rank
    other.write_bytes(paths[0].read_bytes())
    with pytest.raises(UsageError, match="rank 0 is also in"):
        find_hangs([*paths, other], [])


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def test_a_dump_that_wants_to_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "dump_0"
    path.write_bytes(pickle.dumps({"entries": [Hostile()], "pg_config": {}}))
    with pytest.raises(DataError, match="it would run"):
        find_hangs([path], [])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["name", "group", "sequence", "ranks", "members", "index"])
def test_a_hostile_dump_takes_neither_time_nor_memory(tmp_path: Path, where: str) -> None:
    """Lists whose text doubles at each level, numbers of 5000 digits, and an index of the memo beyond all memory."""
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    content = dump({1: "completed", 2: "started"})
    entry, number = content["entries"][1], 10**5000
    if where in ("name", "group", "sequence"):
        key, value = {"name": ("profiling_name", bomb), "group": ("process_group", (bomb,)),
                      "sequence": ("collective_seq_id", number)}[where]  # fmt: skip
        entry[key] = value
    content["pg_config"]["0"]["ranks"] = {"ranks": "9" * 5000 + ", 0", "members": [bomb, number, 0]}.get(where, "0")
    data = pickle.dumps(content, 2)
    if where == "index":
        data = data[:-1] + b"r\xf0\xff\xff\x7f."  # LONG_BINPUT
    path = tmp_path / "dump_0"
    path.write_bytes(data)
    code = (
        "import resource, sys; from pathlib import Path; from pitools.perf.read.flight_recorder import find_hangs\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30,) * 2); resource.setrlimit(resource.RLIMIT_CPU, (30, 30))\n"
        "print([hang.no_dump for hang in find_hangs([Path(sys.argv[1])], [])])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n" if where == "sequence" else "[[]]\n"), done.stderr


def test_files_are_known_by_content(tmp_path: Path, profiles: Path, real: Path) -> None:
    """Whatever their names; what is unknown is passed over in a folder, and refused where it is named."""
    (tmp_path / "a.txt").write_bytes((profiles / "torch-healthy" / "0.json.gz").read_bytes())
    (tmp_path / "b").write_bytes((real / SAMPLE).read_bytes())
    (tmp_path / "c.json").write_text('{"loss": 1}\n')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "d.json").write_bytes((profiles / "torch-healthy" / "1.json.gz").read_bytes())
    assert [(each.path.name, each.form) for each in find_files([tmp_path])] == [("a.txt", "kineto"), ("b", "xplane")]
    with pytest.raises(DataError, match="unknown content"):
        find_files([tmp_path / "c.json"])
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="no profile"):
        find_files([tmp_path / "none"])


def test_a_folder_is_read_beside_what_is_not_whole_or_gone(
    profiles: Path, tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a write that was killed is not used, nor a file that vanishes; one that cannot be read is noted."""
    for name in ("0.json.gz", ".0.json.gz.part", "gone.json.gz", "secret.json.gz"):
        (tmp_path / name).write_bytes((profiles / "torch-healthy" / "0.json.gz").read_bytes())

    def opened(path: Path) -> Any:
        if path.stem.startswith(("gone", "secret")):
            raise (FileNotFoundError if path.stem.startswith("gone") else PermissionError)(str(path))
        return path.open("rb")

    monkeypatch.setattr(files_module, "open_regular", opened)
    table = read(tmp_path)
    assert list(table.ranks) == [0]
    assert f"not used: {tmp_path}/secret.json.gz: unreadable" in table.notes
    assert not any("gone" in note for note in table.notes)


def test_two_files_of_a_rank_are_refused(tmp_path: Path, read: Read) -> None:
    """Two captures of one rank would be counted twice."""
    with pytest.raises(UsageError, match="rank 3 is also in"):
        read(trace(tmp_path / "a.json"), trace(tmp_path / "b.json"))


def test_captures_one_after_the_other_are_no_ranks(profiles: Path, tmp_path: Path, read: Read) -> None:
    """XLA's profiles do not name ranks: two of one process, taken at different times, are not those of two ranks."""
    for name in ("jax-healthy", "jax-slow-rank"):
        (tmp_path / f"{name}.xplane.pb.gz").write_bytes((profiles / name / "0.xplane.pb.gz").read_bytes())
    with pytest.raises(UsageError, match="of different times"):
        read(*tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "is_annotation", "kind"),
    [
        ("gloo:all_reduce", True, Kind.COMMUNICATION),
        ("nccl:all_reduce", True, Kind.HOST),
        ("_compile.compile_inner (dynamo_timed)", False, Kind.COMPILE),
        ("PjRtCpuClient::Compile", True, Kind.COMPILE),
        ("Handle inputs", True, Kind.HOST),
        ("input_wait", True, Kind.INPUT),
        ("save_checkpoint", True, Kind.CHECKPOINT),
        ("checkpoint", False, Kind.OP),
        ("cudaDeviceSynchronize", False, None),
        ("ProfilerStep#3", True, None),
    ],
)
def test_names_of_the_host_have_their_kind(name: str, is_annotation: bool, kind: Kind | None) -> None:
    """Input and checkpoints are what the program named so; launches and waits are no work."""
    assert host_kind(name, is_annotation=is_annotation) is kind


@pytest.mark.parametrize(
    "name", ["all-reduce.1", "all-gather-start", "psum_invariant.7", "reduce_scatter", "ppermute.2"]
)
def test_collectives_of_xla_have_the_names_of_hlo_or_of_jax(name: str) -> None:
    """JAX names operations by its primitives: a loop's all-reduce by `psum` is no computation."""
    assert hlo_kind(name) is Kind.COMMUNICATION
    assert hlo_kind(f"{name}_fusion") is Kind.COMPUTE
