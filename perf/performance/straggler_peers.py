"""Judge runs by nvidia-resiliency-ext and HolisticTraceAnalysis themselves, in the environment that has these packages.

Reads lists of runs, each (steps, ranks) of seconds, as {"nvrx": runs, "hta": runs}; writes the ranks that each names.
nvidia-resiliency-ext's Detector wants CUDA: its CUPTI profiler and torch.cuda.synchronize. What it does with the times
of sections runs here: summaries, the exchange between ranks (threads, by torch's own process group for tests), scores
and report, each with its defaults. HolisticTraceAnalysis reads traces of a device that computes and then reduces.
"""

from __future__ import annotations

import collections
import json
import logging
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from hta.trace_analysis import TraceAnalysis
from nvidia_resiliency_ext.straggler.reporting import ReportGenerator
from nvidia_resiliency_ext.straggler.straggler import CustomSection, Detector
from torch.testing._internal.distributed import multi_threaded_pg

Run = list[list[float]]


def nvrx(run: Run) -> list[int]:
    """Return the ranks whose section is a straggler, relative to the others or to their own past."""
    ranks = len(run[0])
    named: set[int] = set()
    store = dist.HashStore()
    failed: list[Exception] = []

    def judge(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            detector = type("Detector", (Detector,), {})  # its state is the class's: one for each rank
            times = collections.deque(1e3 * step[rank] for step in run)
            detector.custom_sections = {"step": CustomSection("step", "", len(run), cpu_elapsed_times=times)}
            reporter = ReportGenerator(["relative_perf_scores", "individual_perf_scores"], node_name=f"n{rank}")
            report = reporter.generate_report(detector._get_section_summaries(), {})
            if report is not None:
                slow = report.identify_stragglers()
                for kind in ("straggler_sections_relative", "straggler_sections_individual"):
                    named.update(straggler.rank for straggler in slow[kind].get("step", ()))
            dist.destroy_process_group()
        except Exception as error:  # noqa: BLE001 - of a thread, raised below
            failed.append(error)

    threads = [threading.Thread(target=judge, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if failed or any(thread.is_alive() for thread in threads):
        raise SystemExit(f"nvidia-resiliency-ext did not end: {failed[:1]}")
    return sorted(named)


def hta(run: Run) -> list[int]:
    """Return the potential stragglers, as many as are named without a request."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(len(run[0])):
            Path(folder, f"rank{rank}.json").write_text(json.dumps(trace(run, rank)))
        named = TraceAnalysis(trace_dir=folder).get_potential_stragglers()
    return sorted(int(rank) for rank in named)


def trace(run: Run, rank: int) -> dict[str, object]:
    """Return a rank's profile: each step a kernel of its own work, then a reduction that ends with the slowest's."""
    events: list[dict[str, object]] = []
    begin = 1e6
    for number, step in enumerate(run, 1):
        own, all_ = 1e5 * step[rank], 1e5 * max(step) + 2e3  # us; a step of 1 is 0.1 s
        kernels = (("compute", 7, begin + 10, own), ("ncclKernel_AllReduce", 20, begin + 10 + own, all_ - own))
        common = {"ph": "X", "pid": 1, "tid": 1}
        events.append(
            {**common, "cat": "user_annotation", "name": f"ProfilerStep#{number}", "ts": begin, "dur": all_ + 20}
        )
        for index, (name, stream, start, length) in enumerate(kernels):
            link = {"correlation": 100_000 + 2 * number + index}  # as large as real ones, by which HTA chooses a type
            launch = {
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": begin + 2 * index,
                "dur": 1,
                "args": link,
            }
            kernel = {"cat": "kernel", "name": name, "ts": start, "dur": length, "tid": stream, "pid": 0}
            events += [common | launch, {"ph": "X", **kernel, "args": link | {"stream": stream, "device": 0}}]
        begin += all_ + 20
    return {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": len(run[0])}, "traceEvents": events}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    asked = json.load(sys.stdin)
    answer = {"nvrx": [nvrx(run) for run in asked["nvrx"]], "hta": [hta(run) for run in asked["hta"]]}
    json.dump(answer, sys.stdout)
