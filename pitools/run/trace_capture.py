"""Record steps of a running rank with its framework's profiler, when a request asks for it: `StepLog` calls this.

The rank's loop never fails for it: an error is recorded and printed once. A thread compresses and copies the trace. A
request is looked for at the end of a step, by one stat a second. The profiler starts one step early: that step has its
first calls, and is not marked as one. A framework that the program has not loaded is never imported.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pitools.run import run_folder, traces
from pitools.run.traces import RankTrace, TraceRequest

_POLL_S = 1.0
_MAX_S = 60.0  # long steps: the recording ends at the first end of a step after this
_MAX_BYTES = 256 << 20  # of a rank's trace
_GZIP_LEVEL = 3
_COMPARED, _MIN_COMPARED = 20, 5  # steps before the recorded ones

_recording: _Profiler | None = None  # this process's


@contextlib.contextmanager
def annotate(name: str) -> Iterator[None]:
    """Name the block in the trace, if one is being recorded; else do nothing. As a decorator: name each call.

    name: `input` and `checkpoint` are parts of a step to `pit perf attribute`.
    """
    with _recording.annotation(name) if _recording else contextlib.nullcontext():
        yield


class _Profiler(Protocol):
    """A framework's profiler; making one starts it."""

    framework: str
    suffix: str

    def step(self, number: int) -> AbstractContextManager[Any]:
        """Return a context that marks a step."""

    def annotation(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that names a span."""

    def stop(self) -> None:
        """Stop recording."""

    def write(self, folder: Path) -> Path:
        """Write the trace below an empty folder; its path. PyTorch's holds the interpreter meanwhile."""


class _Torch:
    framework, suffix = "torch", ".json.gz"

    def __init__(self, _: Path) -> None:
        torch = sys.modules["torch"]
        if torch.autograd._profiler_enabled() or _has_scheduled(torch.profiler.profile):
            raise RuntimeError("the program's own profiler is on")
        self._profiler, self.annotation = torch.profiler, torch.profiler.record_function
        self._session = session = self._profiler.profile(activities=self._profiler.supported_activities())
        if "torch._inductor" in sys.modules:
            session.start()
            return
        # `start` would import torch._inductor, for seconds, to ask whether it captures CUDA graphs.
        session.profiler = torch.autograd.profiler.profile(use_kineto=True, use_device=session.use_device)
        session.profiler._prepare_trace()
        session.start_trace()

    def step(self, number: int) -> AbstractContextManager[Any]:
        return self.annotation(f"ProfilerStep#{number}")  # type: ignore[no-any-return]

    def stop(self) -> None:
        self._session.stop_trace()

    def write(self, folder: Path) -> Path:
        if not self._session.profiler.kineto_results.trace_start_ns():  # exporting it would be a segmentation fault
            raise RuntimeError("the program's own profiler began during the trace")
        self._session.export_chrome_trace(str(folder / "trace.json"))
        return folder / "trace.json"


def _has_scheduled(kind: type[Any]) -> bool:
    """Return whether a torch.profiler.profile waits or warms up by its schedule, which PyTorch does not call enabled:
    another's start and stop would make its next step a segmentation fault. Takes some 0.1 s a million objects."""
    found = (each for made in (kind, *kind.__subclasses__()) for each in gc.get_referrers(made))
    return any(issubclass(type(each), kind) and (each.step_rec_fn or each.profiler is None) for each in found)


class _Jax:
    framework, suffix = "jax", ".xplane.pb"

    def __init__(self, folder: Path) -> None:
        self._profiler: Any = sys.modules["jax"].profiler
        self.annotation = self._profiler.TraceAnnotation
        options = self._profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level = 0, 2  # Python's frames would be most of the trace
        self._profiler.start_trace(folder, profiler_options=options)

    def step(self, number: int) -> AbstractContextManager[Any]:
        return self._profiler.StepTraceAnnotation("train", step_num=number)  # type: ignore[no-any-return]

    def stop(self) -> None:
        self._profiler.stop_trace()  # which also writes it

    def write(self, folder: Path) -> Path:
        return next(folder.rglob("*.xplane.pb"))


def _profiler_class() -> type[_Torch] | type[_Jax]:
    """Return the profiler of the framework that computes in this process. Raises RuntimeError where none does.

    JAX counts once it has a device: else its profiler would take the memory of GPUs that another framework uses.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and "jax" in sys.modules and getattr(bridge, "backends_are_initialized", lambda: True)():
        return _Jax
    if "torch" in sys.modules:
        return _Torch
    raise RuntimeError("neither torch nor JAX runs in the process that writes the step log")


class TraceCapture:
    """A rank's requests, and the recording of one at a time."""

    def __init__(self, attempt: Path, rank: int) -> None:
        self._folder, self._rank = attempt / "traces", rank
        self._run_request = attempt.parent.parent / traces.RUN_REQUEST_FILE
        self._target, self._last_step = self._folder, 0
        self._path, self._seen, self._due = self._folder / traces.REQUEST_FILE, 0, 0.0
        self._wanted: TraceRequest | None = None
        self._profiler: _Profiler | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._mark: AbstractContextManager[Any] | None = None
        self._cpu_waits: dict[str, int] = {}
        self._walls_s: deque[float] = deque(maxlen=_COMPARED)
        self._recorded_s: list[float] = []
        self._status = RankTrace(rank=rank, state="")
        self._started = 0.0
        with self._guard():
            self._accept(run_folder.read_record(self._run_request, TraceRequest))

    def end_step(self, step: int, wall_s: float) -> None:
        """Look for a request, and start, mark or stop a recording. wall_s: the step's. Raises nothing."""
        if self._profiler is None:
            self._walls_s.append(wall_s)
        elif self._mark is not None:
            self._recorded_s.append(wall_s)
        if self._profiler is None and self._wanted is None and time.monotonic() < self._due:
            return
        with self._guard():
            self._end_step(step)

    def close(self) -> None:
        """Write what was recorded so far; a request whose steps did not come fails."""
        with self._guard():
            if self._profiler is not None:
                self._stop("the loop ended")
            elif self._wanted is not None:
                raise RuntimeError(f"the loop ended before step {self._wanted.first_step}")

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Keep errors of a profiler, of its framework, or of the disk from the loop."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _end_step(self, step: int) -> None:
        if self._profiler is None:
            self._poll()
            if self._wanted is not None and step + 2 >= self._wanted.first_step:
                self._start(step + 2)
            return
        before, self._cpu_waits = self._cpu_waits, _read_cpu_waits()
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
            longest = max((wait - before.get(thread, 0) for thread, wait in self._cpu_waits.items()), default=0)
            waits = [*self._status.cpu_wait_s, longest / 1e9]
            self._status = msgspec.structs.replace(self._status, last_step=step, cpu_wait_s=waits)
        elapsed = time.monotonic() - self._started
        if self._status.last_step is not None and (step >= self._last_step or elapsed > _MAX_S):
            self._stop(f"they took over {_MAX_S:g} s")
        else:
            self._mark = self._profiler.step(step + 1)
            self._mark.__enter__()

    def _poll(self) -> None:
        """Take a request that is new. Also sees that one is withdrawn."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + _POLL_S
        try:
            stat = self._path.stat()
        except OSError:  # most often, there is none
            if self._seen:
                self._seen, self._wanted = 0, None
            return
        if stat.st_mtime_ns != self._seen:
            self._seen = stat.st_mtime_ns
            self._accept(run_folder.read_record(self._path, TraceRequest))

    def _accept(self, request: TraceRequest | None) -> None:
        """Want a request, unless this rank has carried it out: a process may write a second log, or start again."""
        self._wanted = request if request is not None and request.includes(self._rank) else None
        if self._wanted is not None:
            found = run_folder.read_or_none(_status_path(self._folder / self._wanted.window, self._rank), RankTrace)
            if found is not None and found.state != "recording":
                self._wanted = None

    def _start(self, first_step: int) -> None:
        global _recording
        assert self._wanted is not None
        if not self._seen:  # the run's own request
            if not self._run_request.exists():
                self._wanted = None  # withdrawn
                return
            if first_step > self._wanted.first_step:  # the run was continued
                raise RuntimeError(f"the loop began after step {self._wanted.first_step - 2}")
        request, self._wanted, self._recorded_s = self._wanted, None, []
        self._target = self._folder / request.window
        self._last_step = first_step + request.last_step - request.first_step
        self._status = RankTrace(rank=self._rank, state="recording", first_step=first_step)
        kind = _profiler_class()
        self._status = msgspec.structs.replace(self._status, framework=kind.framework)
        _write_status(self._target, self._status)
        # Beside the trace, not below TMPDIR, which may be the job's memory: before compression a trace has no bound.
        self._temporary = tempfile.TemporaryDirectory(prefix=f".{self._rank}-", dir=self._target)
        self._started = time.monotonic()
        self._profiler = _recording = kind(Path(self._temporary.name))
        self._block(time.monotonic() - self._started)

    def _stop(self, why: str) -> None:
        """Stop the profiler, and write the trace in the background; the process lives until that is done.

        why: where steps are missing.
        """
        global _recording
        began = time.monotonic()
        profiler, self._profiler, _recording = self._profiler, None, None
        assert profiler is not None
        if self._mark is not None:  # an unfinished step
            self._mark.__exit__(None, None, None)
            self._mark = None
        profiler.stop()
        self._block(time.monotonic() - began)
        temporary, self._temporary = self._temporary, None
        first, last = self._status.first_step or 0, self._status.last_step
        slowdown, error = _slowdown(self._walls_s, self._recorded_s), ""
        if last is not None and last < self._last_step:
            error = f"{last - first + 1} of {self._last_step - first + 1} steps: {why}"
        status = msgspec.structs.replace(self._status, slowdown=slowdown, error=error)
        self._status = RankTrace(rank=self._rank, state="")
        threading.Thread(target=self._write, args=(profiler, temporary, self._target, status), name="pit-trace").start()

    def _write(
        self, profiler: _Profiler, temporary: tempfile.TemporaryDirectory[str], target: Path, status: RankTrace
    ) -> None:
        try:
            with temporary as folder:
                if status.last_step is None:
                    raise RuntimeError("the loop ended before a step was recorded")
                path = target / f"{self._rank}{profiler.suffix}"
                began = time.monotonic()
                written = profiler.write(Path(folder))
                blocked_s = round(status.blocked_s + time.monotonic() - began, 6)
                size = _store(written, path)
                status = msgspec.structs.replace(status, state="done", file=path.name, bytes=size, blocked_s=blocked_s)
        except Exception as error:  # noqa: BLE001
            status = _failed(status, error)
        with contextlib.suppress(Exception):
            _write_status(target, status)

    def _fail(self, error: Exception) -> None:
        """Record an error, print it, and forget the request."""
        global _recording
        wanted, self._wanted, self._mark = self._wanted, None, None
        profiler, self._profiler = self._profiler, None
        temporary, self._temporary = self._temporary, None
        if wanted is not None:
            self._target, self._status = self._folder / wanted.window, RankTrace(rank=self._rank, state="recording")
        with contextlib.suppress(Exception):
            if profiler is not None:
                _recording = None
                profiler.stop()
        status, self._status = self._status, RankTrace(rank=self._rank, state="")
        failed = _failed(status, error)
        with contextlib.suppress(Exception):
            if temporary is not None:
                temporary.cleanup()
            if status.state:
                _write_status(self._target, failed)

    def _block(self, seconds: float) -> None:
        total = round(self._status.blocked_s + seconds, 6)
        self._status = msgspec.structs.replace(self._status, blocked_s=total)


def _slowdown(before_s: Sequence[float], recorded_s: Sequence[float]) -> float | None:
    """Return how much longer recorded steps took than those before, as a share; None for too few of these."""
    if not recorded_s or len(before_s) < _MIN_COMPARED:
        return None
    before, recorded = (sorted(each)[len(each) // 2] for each in (before_s, recorded_s))
    return round(recorded / before - 1, 4) if before > 0 else None


def _failed(status: RankTrace, error: Exception) -> RankTrace:
    """Print an error; the status with it."""
    problem = str(error) or type(error).__name__
    print(f"pit: trace: rank {status.rank}: {problem}; the run goes on without", file=sys.stderr, flush=True)
    return msgspec.structs.replace(status, state="failed", error=problem[:1000])


def _read_cpu_waits() -> dict[str, int]:
    """Return thread → ns for which it has been ready to run and had no CPU, of this thread and those of libraries:
    Python's others load or save beside the step. Takes about 10 us a thread."""
    others, waits = {str(each.native_id) for each in threading.enumerate()} - {str(threading.get_native_id())}, {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        if path.parent.name in others:
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended, or the kernel does not count
            waits[path.parent.name] = int(path.read_text().split()[1])
    return waits


def _status_path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.status.json"


def _write_status(folder: Path, status: RankTrace) -> None:
    run_folder.write_record(_status_path(folder, status.rank), status)


def _store(source: Path, target: Path) -> int:
    """Copy a trace into the run's folder, compressed if its name ends so; its bytes. Raises RuntimeError for a big one.

    It appears under its name when it is whole.
    """
    partial = target.with_name(f".{target.name}.part")
    try:
        with source.open("rb") as file, _open(partial, target.suffix == ".gz") as out:
            while data := file.read(1 << 20):
                out.write(data)
                if partial.stat().st_size > _MAX_BYTES:
                    raise RuntimeError(f"the trace has more than {_MAX_BYTES >> 20} MiB: ask for fewer steps")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target.stat().st_size


def _open(path: Path, compressed: bool) -> Any:
    if not compressed:
        return path.open("wb")
    import gzip

    return gzip.open(path, "wb", compresslevel=_GZIP_LEVEL)
