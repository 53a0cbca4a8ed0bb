"""A benchmark's JSON lines (stdin) → perf/results/<theme>_<machine>_<date>.md, and stdout.

python -m perf.FOLDER.bench_X | python -m perf.harness.write_results THEME "COMMAND"    exit 1 if a case falls short
"""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime

import msgspec
import psutil

import pitools
from perf.harness import write_index
from perf.harness.harness import Case


def write_results(theme: str, command: str) -> int:
    """Write the results file of a benchmark from its cases (stdin), and return the exit code."""
    cases = []
    for line in sys.stdin:
        print(line, end="", flush=True)
        cases.append(msgspec.json.decode(line, type=Case))
    if not cases:
        sys.exit(f"{theme}: no figures (see the error above)")
    machine = f"{psutil.cpu_count()}core-{platform.machine()}"
    today = datetime.now(UTC).date().isoformat()
    memory = psutil.virtual_memory().total / 2**30
    rows = [
        f"| {c.case} | {c.peer} {c.peer_version} | {c.ratio:g} | {c.ratio_min:g} to {c.ratio_max:g} "
        f"| {c.n} | {c.target:g} | {'yes' if c.ok else 'NO'} |"
        for c in cases
    ]
    commands = [f"- {peer}: `{how}`" for peer, how in sorted({(c.peer, c.command) for c in cases if c.command})]
    text = [
        f"# {theme}",
        "",
        f"`perf/run {command.strip()}` on {today}: pitools {pitools.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {psutil.cpu_count()} cores, {memory:.0f} GiB.",
        "Ours and the peer's run in turn in one process tree. The ratio is the peer's median time over ours, or what",
        "the case says; above 1, ours is better. The range is over single rounds.",
        "",
        "| case | peer | ratio | range | rounds | target | reached |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        *(["What the peers ran with:", "", *commands, ""] if commands else ()),
    ]
    (write_index.RESULTS / f"{theme}_{machine}_{today}.md").write_text("\n".join(text))
    write_index.write()
    return int(not all(case.ok for case in cases))


if __name__ == "__main__":
    sys.exit(write_results(sys.argv[1], sys.argv[2]))
