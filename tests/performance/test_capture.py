"""What a rank records when a trace of its steps is asked for, and that its loop neither fails nor waits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pitools.core.errors import TryLater, UsageError
from pitools.perf import trace_run
from pitools.perf.attribute.buckets import BUCKETS, split_steps
from pitools.perf.read.files import find_files
from pitools.perf.spans import SpanTable
from pitools.run import run_folder, trace_capture, traces
from pitools.run.steps import StepLog
from pitools.run.trace_capture import annotate
from pitools.run.traces import RankTrace, TraceRequest

Read = Callable[..., SpanTable]


def ask(attempt: Path, first: int, last: int, ranks: str = "", name: str = "traces/request.json") -> TraceRequest:
    request = TraceRequest(t="2026-11-26T19:00:00Z", first_step=first, last_step=last, ranks=ranks)
    run_folder.write_record(attempt / name, request)
    return request


def loop(
    attempt: Path, steps: range = range(12), *, rank: int = 0, work: Callable[[int], Any] = lambda _: None
) -> None:
    """Run a program's loop to its end, and wait for its traces."""
    log = StepLog(attempt / "steps", rank)
    for step in steps:
        with annotate("input"):
            sum(range(2000))
        work(step)
        log.write(step=step, loss=0, wall_s=0.01, input_s=0, compute_s=0, comm_s=0, rank_samples=1)
    log.close()
    for thread in [each for each in threading.enumerate() if each.name == "pit-trace"]:
        thread.join(60)


def status(attempt: Path, window: str, rank: int = 0) -> RankTrace:
    return traces.read_traces(attempt / "traces" / window)[rank]


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    return tmp_path / "run" / "attempts" / "0"


@pytest.fixture(autouse=True)
def polled_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_capture, "_POLL_S", 0.0)


class Recorder:
    """A profiler that fails in one of its calls; it counts those of `stop`."""

    framework, suffix = "fake", ".json.gz"
    fails, stopped, folder = "", 0, Path()

    def __init__(self, folder: Path) -> None:
        Recorder.folder = folder
        self._may_fail("start")

    @classmethod
    def _may_fail(cls, call: str) -> None:
        if call == cls.fails:
            raise RuntimeError(f"{call} is broken")

    def step(self, _: int) -> contextlib.AbstractContextManager[None]:
        self._may_fail("step")
        return contextlib.nullcontext()

    def annotation(self, _: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stop(self) -> None:
        Recorder.stopped += 1
        self._may_fail("stop")

    def write(self, folder: Path) -> Path:
        self._may_fail("write")
        (folder / "trace").write_bytes(bytes(3 << 20))
        return folder / "trace"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recorder]]:
    monkeypatch.setattr(trace_capture, "_profiler_class", lambda: Recorder)
    Recorder.fails, Recorder.stopped = "", 0
    yield Recorder
    assert trace_capture._recording is None


def torch_work() -> Callable[[int], Any]:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(64, 64)
    return lambda _: model(torch.ones(8, 64)).sum().backward()


def jax_work() -> Callable[[int], Any]:
    jax = pytest.importorskip("jax")
    function = jax.jit(lambda x: (x @ x).sum())
    array = jax.numpy.ones((100, 100))
    return lambda _: function(array).block_until_ready()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (torch_work, trace_capture._Torch),
        pytest.param(jax_work, trace_capture._Jax, marks=pytest.mark.own_process),
    ],
)
def test_the_steps_asked_for_are_recorded(
    attempt: Path, read: Read, make: Callable[[], Any], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the loop's own numbers, parts that sum, and the input that it names; a later request is recorded too."""
    work = make()
    before = "torch._inductor" in sys.modules
    monkeypatch.setattr(trace_capture, "_profiler_class", lambda: kind)
    ask(attempt, 4, 6)
    loop(attempt, range(16), work=lambda step: (work(step), step == 9 and ask(attempt, 13, 13)))
    for window, steps in (("4-6", [4, 5, 6]), ("13-13", [13])):
        found = status(attempt, window)
        assert (found.state, found.framework, found.first_step, found.last_step) == (
            "done", kind.framework, steps[0], steps[-1],
        )  # fmt: skip
        assert found.bytes == (attempt / "traces" / window / found.file).stat().st_size > 0
        table = read(attempt / "traces" / window)
        buckets = split_steps(table)
        assert table.windows.step.tolist() == steps
        assert (buckets.parts_ns.sum(axis=1) == buckets.wall_ns).all()
        assert (buckets.parts_ns[:, [BUCKETS.index("compute"), BUCKETS.index("input")]] > 0).all()
    assert {each.path.parent.name for each in find_files([attempt.parents[1]]) if each.form != "steps"} == {"13-13"}
    assert {path.name for path in (attempt / "traces" / "4-6").iterdir()} == {"0.status.json", f"0{kind.suffix}"}
    assert ("torch._inductor" in sys.modules) is before  # its import would hold up a step for seconds


def test_the_framework_that_computes_is_traced(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX once it has a device; without, its profiler would make it take the memory of another framework's GPUs."""

    class Bridge:
        ready = False

        @classmethod
        def backends_are_initialized(cls) -> bool:
            return cls.ready

    loaded: dict[str, Any] = {"jax": 0, "jax._src.xla_bridge": Bridge, "torch": 0}
    monkeypatch.setattr(sys, "modules", loaded)
    assert trace_capture._profiler_class() is trace_capture._Torch
    Bridge.ready = True
    assert trace_capture._profiler_class() is trace_capture._Jax
    loaded.clear()
    with pytest.raises(RuntimeError, match="neither torch nor JAX"):
        trace_capture._profiler_class()


def test_a_request_that_is_seen_late_moves(attempt: Path, recorder: type[Recorder]) -> None:
    """As many steps, from the first that a profiler started now can record."""
    ask(attempt, 3, 5)
    loop(attempt, range(7, 20))
    found = status(attempt, "3-5")
    assert (found.state, found.first_step, found.last_step) == ("done", 9, 11)


@pytest.mark.parametrize(("first", "slowdown"), [(8, 0.5), (4, None)])
def test_a_trace_says_how_much_it_slowed_the_steps(
    attempt: Path, recorder: type[Recorder], first: int, slowdown: float | None
) -> None:
    """Against the median of the steps before, whose first compiles; not of so few, nor of that in which it starts."""
    ask(attempt, first, first)
    log = StepLog(attempt / "steps", 0)
    for step in range(14):
        wall_s = 9.0 if step in (0, first - 1) else 0.03 if step == first else 0.02
        log.write(step=step, loss=0, wall_s=wall_s, input_s=0, compute_s=0, comm_s=0, rank_samples=1)
    log.close()
    for thread in [each for each in threading.enumerate() if each.name == "pit-trace"]:
        thread.join(60)
    assert status(attempt, f"{first}-{first}").slowdown == slowdown


def test_a_trace_is_written_in_the_runs_folder(attempt: Path, recorder: type[Recorder]) -> None:
    """Also before it is compressed: TMPDIR may be the memory of the job. Under a name that readers skip."""
    ask(attempt, 3, 5)
    loop(attempt)
    assert (recorder.folder.parent, recorder.folder.name[0]) == (attempt / "traces" / "3-5", ".")
    assert not recorder.folder.exists()


def test_the_longest_wait_for_a_cpu_of_each_step_is_recorded(
    attempt: Path, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the thread that waited longest, also of one that began during the step; the kernel says it of each thread.
    Python's other threads, such as a loader's, do not compute the step."""
    with ThreadPoolExecutor(1) as loader:
        of_loader = loader.submit(threading.get_native_id).result()
        waits_s = trace_capture._read_cpu_waits()
    assert all(wait >= 0 for wait in waits_s.values())
    assert (str(os.getpid()) in waits_s, str(of_loader) in waits_s) == (True, False)
    waits = iter([{"1": 5 * 10**9}, {"1": 6 * 10**9}, {"1": 6 * 10**9, "2": 2 * 10**9}, {}])
    monkeypatch.setattr(trace_capture, "_read_cpu_waits", lambda: next(waits))
    ask(attempt, 5, 7)
    loop(attempt, range(10))
    assert status(attempt, "5-7").cpu_wait_s == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("call", ["start", "step", "stop", "write"])
def test_a_broken_profiler_is_not_the_loops_problem(
    attempt: Path, recorder: type[Recorder], call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The loop goes on; the error is printed once, and recorded; nothing is left half written."""
    recorder.fails = call
    ask(attempt, 3, 5)
    loop(attempt)
    assert trace_run.position(attempt, 0).step == 11
    assert (status(attempt, "3-5").state, status(attempt, "3-5").error) == ("failed", f"{call} is broken")
    assert capfd.readouterr().err.count(f"trace: rank 0: {call} is broken") == 1
    assert [path.name for path in (attempt / "traces" / "3-5").iterdir()] == ["0.status.json"]


def test_the_programs_own_profiler_is_left_alone(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what it records; the trace is refused."""
    torch = pytest.importorskip("torch")
    work = torch_work()
    monkeypatch.setattr(trace_capture, "_profiler_class", lambda: trace_capture._Torch)
    ask(attempt, 3, 5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        loop(attempt, work=work)
    assert status(attempt, "3-5").error == "the program's own profiler is on"
    assert sum(event.count for event in own.key_averages() if event.key == "aten::linear") == 12


WITH_SCHEDULE = """
import sys, torch
from pathlib import Path
from torch.profiler import profile, schedule
from pitools.run import trace_capture
from tests.performance.test_capture import loop
trace_capture._POLL_S = 0.0
attempt, made_at, wait, warmup = Path(sys.argv[1]), *map(int, sys.argv[2:])
own = None
def work(step):
    global own
    if step == made_at:
        own = profile(schedule=schedule(wait=wait, warmup=warmup, active=2, repeat=1)).__enter__()
    torch.ones(8, 8).sum()
    if step > made_at:
        own.step()
loop(attempt, range(25), work=work)
own.stop()
print(sum(event.count for event in own.key_averages() if event.key == "aten::ones"))
"""


@pytest.mark.parametrize(
    ("made_at", "wait", "warmup", "error"),
    [(0, 4, 3, "is on"), (0, 1, 12, "is on"), (5, 0, 6, "began during")],  # warms up during the trace, before, later
)
def test_a_profiler_that_waits_or_warms_up_survives(
    attempt: Path, made_at: int, wait: int, warmup: int, error: str
) -> None:
    """It is not on by PyTorch's word, and a second one would end the process by a signal."""
    pytest.importorskip("torch")
    ask(attempt, 4, 6)
    command = [sys.executable, "-c", WITH_SCHEDULE, str(attempt), *map(str, (made_at, wait, warmup))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert error in status(attempt, "4-6").error


def test_damage_and_a_full_disk_are_not_the_loops_problem(attempt: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A request that is no JSON, and a folder that cannot be made, are printed once."""
    (attempt / "traces").mkdir(parents=True)
    (attempt / "traces" / "request.json").write_text("{")
    loop(attempt)
    assert capfd.readouterr().err.count("pit: trace: rank 0") == 1
    ask(attempt, 3, 5)
    (attempt / "traces" / "3-5").write_text("")
    loop(attempt)
    assert capfd.readouterr().err.count("pit: trace: rank 0") == 1


def test_a_later_error_leaves_what_is_done(attempt: Path, recorder: type[Recorder]) -> None:
    """A damaged request after a trace is no failure of that trace."""
    ask(attempt, 3, 5)
    loop(attempt, work=lambda step: step == 8 and (attempt / "traces" / "request.json").write_text("{"))
    assert status(attempt, "3-5").state == "done"


def test_a_trace_is_bounded(attempt: Path, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, which are compressed ones, and by time for long steps."""
    monkeypatch.setattr(trace_capture, "_MAX_BYTES", 100 << 10)
    ask(attempt, 3, 5)
    loop(attempt)
    assert (status(attempt, "3-5").state, status(attempt, "3-5").bytes < 100 << 10) == ("done", True)
    recorder.suffix = ".xplane.pb"
    ask(attempt, 4, 6)
    loop(attempt)
    assert "ask for fewer steps" in status(attempt, "4-6").error
    assert [path.name for path in (attempt / "traces" / "4-6").iterdir()] == ["0.status.json"]
    recorder.suffix = ".json.gz"
    monkeypatch.setattr(trace_capture, "_MAX_S", 0.0)
    ask(attempt, 5, 9)
    loop(attempt)
    assert (status(attempt, "5-9").last_step, status(attempt, "5-9").error) == (5, "1 of 5 steps: they took over 0 s")


@pytest.mark.parametrize(
    ("steps", "state", "last", "error"),
    [
        (5, "done", 4, "2 of 7 steps: the loop ended"),
        (12, "done", 9, ""),
        (3, "failed", None, "before a step was recorded"),
        (1, "failed", None, "before step 3"),
        (2, "failed", None, "before a step was recorded"),
    ],
)
def test_a_loop_that_ends_early_keeps_what_it_has(
    attempt: Path, recorder: type[Recorder], steps: int, state: str, last: int | None, error: str
) -> None:
    """Whole steps are kept; none of them, or fewer than were asked for, is said."""
    ask(attempt, 3, 9)
    loop(attempt, range(steps))
    found = status(attempt, "3-9")
    assert (found.state, found.last_step, error in found.error, not found.error) == (state, last, True, not error)


def test_who_is_not_asked_records_nothing(attempt: Path, recorder: type[Recorder]) -> None:
    """Ranks outside of the list; all of them once the request is withdrawn; and outside of a run's own steps."""
    ask(attempt, 6, 8, "0,2-3")
    for rank in range(5):
        loop(attempt, rank=rank)
    assert sorted(traces.read_traces(attempt / "traces" / "6-8")) == [0, 2, 3]
    for name in ("traces/request.json", "../../trace.json"):
        ask(attempt, 7, 9, name=name)
        loop(attempt, work=lambda step: step == 3 and trace_run.withdraw(attempt))
    assert not (attempt / "traces" / "7-9").exists()


def test_a_request_for_no_ranks_is_damaged(attempt: Path) -> None:
    """Whoever wrote it: neither the loop nor `pit perf trace` fails for it."""
    ask(attempt, 6, 8)
    path = attempt / "traces" / "request.json"
    path.write_text(path.read_text().replace('"ranks":""', '"ranks":"0,x"'))
    (attempt / "steps").mkdir()
    (attempt / "steps" / "1.jsonl").touch()
    assert trace_run.pending(attempt) is None


def test_a_run_is_traced_from_its_start(attempt: Path, recorder: type[Recorder]) -> None:
    """By a request in its folder, for all attempts; one that continues after these steps does not repeat them."""
    ask(attempt.parents[1], 6, 8, name="trace.json")
    loop(attempt)
    assert status(attempt, "6-8").first_step == 6
    later = attempt.with_name("1")
    loop(later, range(9, 20))
    assert "began after step 4" in status(later, "6-8").error


def test_a_request_is_carried_out_once(attempt: Path, recorder: type[Recorder]) -> None:
    """Not again by a rank's second log, such as of an evaluation, or a loop that starts again."""
    ask(attempt, 3, 5)
    loop(attempt)
    loop(attempt, range(20, 30))
    assert (status(attempt, "3-5").first_step, recorder.stopped) == (3, 1)


def test_a_request_does_not_replace_the_runs_own(attempt: Path, recorder: type[Recorder]) -> None:
    """It is refused while that waits, with the file to remove."""
    ask(attempt.parents[1], 60, 61, name="trace.json")
    write_steps(attempt, 20, 5.0)
    (attempt / "traces" / "60-61" / "0.status.json").unlink()  # as if the loop were not over
    with pytest.raises(TryLater, match="steps 60-61 is going on") as error:
        trace_run.ask(attempt, trace_run.position(attempt, 0), steps=5, ranks="", after=None)
    assert error.value.hint.endswith("run/trace.json")
    loop(attempt, range(50, 70))
    assert status(attempt, "60-61").first_step == 60
    trace_run.ask(attempt, trace_run.position(attempt, 0), steps=5, ranks="", after=None)


@pytest.mark.parametrize("first_step", [0, 1000])
def test_a_log_asks_the_file_system_once_a_second(
    attempt: Path, first_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps it writes, also before those of a request: 300 steps of 10 ms are three looks."""
    if first_step:
        ask(attempt.parents[1], first_step, first_step, name="trace.json")
    monkeypatch.setattr(trace_capture, "_POLL_S", 1.0)
    now, looks = [0.0], [0]
    capture = trace_capture.TraceCapture(attempt, 0)

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    class Request:
        @staticmethod
        def stat() -> Any:
            looks[0] += 1
            raise FileNotFoundError

    monkeypatch.setattr(trace_capture, "time", Clock)
    capture._path = Request()  # type: ignore[assignment]
    for step in range(300):
        capture.end_step(step, 0.01)
        now[0] += 0.01
    assert looks[0] == 3


def write_steps(attempt: Path, count: int, wall_s: float) -> None:
    log, times = StepLog(attempt / "steps", 0), {"input_s": 0.0, "compute_s": 0.0, "comm_s": 0.0}
    for step in range(count):
        log.write(step=step, loss=0, wall_s=wall_s if step > 1 else 9.0, rank_samples=1, **times)
    log.close()


def test_the_first_step_is_ahead_of_all_ranks(attempt: Path) -> None:
    """Three seconds of steps as fast as they get, and of long steps those that are begun and not yet seen."""
    assert not trace_run.position(attempt, 0).is_steady
    write_steps(attempt, 4, 0.1)
    assert not trace_run.position(attempt, 0).is_steady
    write_steps(attempt, 40, 0.1)
    now = trace_run.position(attempt, 0)
    assert (now.step, now.wall_s, now.is_steady) == (39, 0.1, True)
    assert trace_run.first_possible(now) in (71, 72)
    assert trace_run.first_possible(trace_run.Position(step=39, wall_s=30.0, count=1)) == 42
    assert trace_run.first_possible(trace_run.Position(step=39, wall_s=0.0, count=8)) == 3042
    request = trace_run.ask(attempt, now, steps=5, ranks="", after=99)
    assert (request.first_step, request.last_step) == (100, 104)


def test_a_withdrawn_request_leaves_no_empty_folder(attempt: Path, recorder: type[Recorder]) -> None:
    """Of steps that no rank has begun; what one has recorded stays."""
    write_steps(attempt, 20, 0.1)
    for _ in range(2):
        trace_run.ask(attempt, trace_run.position(attempt, 0), steps=2, ranks="", after=None)
        trace_run.withdraw(attempt)
        assert [path.name for path in (attempt / "traces").iterdir()] == []
    request = trace_run.ask(attempt, trace_run.position(attempt, 0), steps=2, ranks="", after=None)
    loop(attempt, range(20, 120))
    trace_run.withdraw(attempt)
    assert status(attempt, request.window).state == "done"


def test_a_second_request_is_refused_while_one_is_going_on(attempt: Path, recorder: type[Recorder]) -> None:
    """Until each rank that logs has its trace or an error; a step that is over is refused as well."""
    write_steps(attempt, 10, 5.0)
    now = trace_run.position(attempt, 0)
    with pytest.raises(UsageError, match="step 5 is too early"):
        trace_run.ask(attempt, now, steps=5, ranks="", after=4)
    first = trace_run.ask(attempt, now, steps=2, ranks="", after=None)
    with pytest.raises(TryLater, match=f"steps {first.window} is going on"):
        trace_run.ask(attempt, now, steps=5, ranks="", after=None)
    assert "waits for steps" in trace_run.describe(attempt, first, [0])
    loop(attempt, range(10, 20))
    assert trace_run.pending(attempt) is None
    (found, silent) = trace_run.results(attempt, first, [0, 1], "time is up")
    assert (found.state, silent.error) == ("done", "it writes no step log")
    trace_run.ask(attempt, trace_run.position(attempt, 0), steps=5, ranks="", after=None)


def test_a_named_function_is_the_same_outside_of_a_trace() -> None:
    """It loses neither its result nor its error."""

    @annotate("checkpoint")
    def save(value: int) -> int:
        return 1 // value

    assert save(1) == 1
    with pytest.raises(ZeroDivisionError):
        save(0)
