"""A real GPU trace of 216,092 events: time and memory until its steps are split; and the parts of five traces. HTA too.

perf/run attribute_trace [--quick]      needs ../shared/data, and the network once, to install HTA in .venv-peers
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from perf.harness.harness import Case, compare, from_ratios, interleave, report
from perf.harness.workspace import ENV, PEERS, REPO, arguments, print_progress
from pitools.perf.attribute.buckets import split_steps
from pitools.perf.read.files import find_files
from pitools.perf.read.read import read_table
from pitools.perf.spans import Kind, make_windows

TRACES = REPO.parent / "shared" / "data" / "perf" / "kineto"
LARGE = TRACES / "df_index_resolver" / "df_index_resolver.json.gz"
LIMIT_BYTES = 300 << 20
HTA = """
import gzip, json, logging, os, sys, tempfile
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
path, unnamed = sys.argv[1], len(sys.argv) > 2
if unnamed:  # without names of steps HTA keeps them all
    trace = json.load(gzip.open(path))
    for event in trace["traceEvents"]:
        if str(event.get("name", "")).startswith("ProfilerStep"):
            event["name"] = "step"
    path = os.path.join(tempfile.mkdtemp(dir=os.environ["TMPDIR"]), "trace.json.gz")
    json.dump(trace, gzip.open(path, "wt", compresslevel=1))
analysis = TraceAnalysis(trace_files={0: path}, trace_dir=os.path.dirname(path))
parts = analysis.get_temporal_breakdown(visualize=False).iloc[0]
overlap = analysis.get_comm_comp_overlap(visualize=False)
print(json.dumps([float(parts[f"{name}_time(us)"]) for name in ("compute", "non_compute", "idle", "kernel")]))
"""


def run(argv: Sequence[str | Path], peak_bytes: list[int], **env: str) -> str:
    """Run a program to its end, and append the most memory that it held. Returns what it printed."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(list(map(str, argv)), stdout=out, stderr=subprocess.DEVNULL, env={**ENV, **env})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"exit {process.returncode}: {argv}")
        peak_bytes.append(usage.ru_maxrss << 10)
        out.seek(0)
        return out.read()


def hta_version() -> str:
    """Install HTA if it is not there; its version."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "HolisticTraceAnalysis"], check=True)
    show = "from importlib.metadata import version; print(version('HolisticTraceAnalysis'))"
    return subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.strip()


def own_parts(path: Path) -> list[float]:
    """Return compute, other work, idle and total of a whole trace, us; filling memory is copying, as HTA has it."""
    table = read_table(find_files([path]))
    fills = np.array([text.startswith("Memset") for text in table.texts])[table.spans.name]
    spans = replace(table.spans, kind=np.where(fills, Kind.COPY, table.spans.kind).astype(np.uint8))
    device = np.isin(spans.kind, (Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY))
    window = make_windows([(-1, spans.start_ns[device].min(), spans.end_ns[device].max())])
    window = replace(window, rank=np.array(list(table.ranks), np.int32))
    buckets = split_steps(replace(table, spans=spans, windows=window))
    compute, communication, copy = (int(part) / 1e3 for part in buckets.parts_ns[0, :3])
    total = int(buckets.wall_ns[0]) / 1e3
    return [compute, communication + copy, total - compute - communication - copy, total]


def main() -> int:
    args = arguments(__doc__)
    if not LARGE.is_file():
        sys.exit(f"{LARGE} is missing: the traces are not beside the checkout")
    hta, python = hta_version(), PEERS / "bin" / "python"
    memory: dict[str, list[int]] = {"ours": [], "hta": []}
    ours = [Path(sys.executable).parent / "pit", "perf", "attribute", LARGE]
    times = interleave(
        args.rounds,
        {
            "ours": lambda: run(ours, memory["ours"], PYTHONPATH=str(REPO)),
            "hta": lambda: run([python, "-c", HTA, LARGE], memory["hta"]),
        },
    )
    ratios = [theirs / own for own, theirs in zip(memory["ours"], memory["hta"], strict=True)]
    cases: list[Case] = [
        compare("216,092 events: time", "HTA", hta, times["ours"], times["hta"], target=3.0),
        from_ratios("216,092 events: peak memory", "HTA", hta, ratios, target=2.0),
        from_ratios(
            "216,092 events: 300 MiB over our peak memory",
            "limit",
            "",
            [LIMIT_BYTES / each for each in memory["ours"]],
            target=1.0,
        ),
        from_ratios(
            "216,092 events: 1.5 s over our time", "limit", "", [1.5 / each for each in times["ours"]], target=1.0
        ),
    ]
    for path in sorted(TRACES.rglob("*.json.gz")):
        with tempfile.TemporaryDirectory() as folder:
            printed = run([python, "-c", HTA, path, "unnamed"], [], TMPDIR=folder, HTA_DISABLE_NS_ROUNDING="1")
        theirs, own = json.loads(printed), own_parts(path)
        print_progress(f"{path.name}: ours {own}, HTA {theirs} us: compute, other work, idle, total")
        worst = max(abs(a - b) for a, b in zip(own, theirs, strict=True)) / own[-1]
        case = f"{path.parent.name}: 0.5 % over the largest difference of a part"
        cases.append(from_ratios(case, "HTA, all steps, ns", hta, [0.005 / max(worst, 1e-6)], target=1.0))
    return report(cases)


if __name__ == "__main__":
    print_progress(f"numpy {version('numpy')}")
    sys.exit(main())
