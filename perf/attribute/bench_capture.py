"""What watching costs: the step log of a step, and the time that a trace of five steps adds to a run of two ranks.

perf/run attribute_capture [--quick]
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import ENV, REPO, arguments, execute, print_progress
from pitools.run import run_folder, traces
from pitools.run.steps import StepLog, read_step_log

STEP_S = 0.01
SHARE = 0.001
ADDED_S = 2.0
STEPS = 40
WRITES = 20_000
TIMES = {"wall_s": 0.01, "input_s": 0.001, "compute_s": 0.006, "comm_s": 0.002}


def write_s(folder: Path) -> float:
    """Return the seconds of one step's log, with the look for a request, as the mean of many."""
    log = StepLog(folder / "attempts" / "0" / "steps", 0)
    began = time.perf_counter()
    for step in range(WRITES):
        log.write(step=step, loss=1.0, rank_samples=8, **TIMES)  # type: ignore[arg-type]
    took = time.perf_counter() - began
    log.close()
    shutil.rmtree(folder)
    return took / WRITES


def train_s(framework: str, data: Path, run_dir: Path, *, traced: bool) -> float:
    """Return the seconds of a run of two ranks from its first step to its end, with a trace of five of its steps."""
    attempt = run_dir / "attempts" / "0"
    attempt.mkdir(parents=True)
    if traced:
        request = traces.TraceRequest(t="", first_step=10, last_step=14)
        run_folder.write_record(run_dir / traces.RUN_REQUEST_FILE, request)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        **ENV,
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "PIT_WORLD_SIZE": "2",
        "PIT_ATTEMPT_DIR": str(attempt),
        "PIT_DATA_DEMO": str(data),
    }
    call = f"from pitools.train.{framework}_bc import main; main(steps={STEPS}, global_batch_size=128)"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", call],
            env={**shared, "PIT_RANK": str(rank), "PIT_LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    if any(rank.wait() for rank in ranks):
        sys.exit(f"{framework}: a rank failed")
    took = time.time() - datetime.fromisoformat(read_step_log(attempt / "steps" / "0.jsonl")[0].t).timestamp()
    if traced:
        found = traces.read_traces(attempt / "traces" / "10-14")
        assert [each.state for each in found.values()] == ["done", "done"], found
        blocked = max(each.blocked_s for each in found.values())
        print_progress(f"{framework}: the profiler held ranks up for {blocked:.3f} s, {found[0].bytes} bytes a rank")
    shutil.rmtree(run_dir)
    return took


def main() -> int:
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory(prefix="pit-bench-", dir=args.disk) as name:
        folder = Path(name)
        write = [write_s(folder / "log") for _ in range(args.rounds)]
        print_progress(f"the log of a step: {1e6 * statistics.median(write):.1f} us")
        limit = "0.1 % of a step of 10 ms over the step log's time"
        cases: list[Case] = [from_ratios(limit, "limit", "", [SHARE * STEP_S / each for each in write], target=1.0)]
        execute(sys.executable, REPO / "scripts/examples/make_recording.py", folder / "a.hdf5", "--episodes", "10")
        pit = Path(sys.executable).parent / "pit"
        execute(pit, "dataset", "ingest", folder / "a.hdf5", "--to", folder / "data", "--name", "reach")
        for framework in ("torch", "jax"):
            added: list[float] = []
            for number in range(args.rounds):
                order = (False, True) if number % 2 else (True, False)
                took = {
                    traced: train_s(framework, folder / "data" / "reach", folder / "run", traced=traced)
                    for traced in order
                }
                added.append(took[True] - took[False])
                print_progress(f"{framework}: {took[False]:.2f} s, traced {took[True]:.2f} s")
            middle = statistics.median(added)
            case = f"{framework}: 2 s over what a trace of five steps adds, {middle:.2f} s in the middle"
            cases.append(from_ratios(case, "limit", "", [ADDED_S / max(middle, 0.01)], target=1.0))
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
