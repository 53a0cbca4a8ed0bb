"""A million jobs of `sacct` text into a store: time and memory; slurm2sql from PyPI in the same run; then what is new.

perf/run monitor_usage [--quick] [--rounds 3]      needs the network once, to install slurm2sql in .venv-peers

Limits: 60 s and 300 MB. Both times of one process are shown: by the clock, and of the CPU, for which neighbours of this
machine do not count. Nearly every row has an AllocTRES of its own (`sacct_rows.py`). slurm2sql reads the same jobs in
its own columns, of which those that `sacct` fills without steps are there; it keeps one row of a job's starts, and no
utilization. The second ingest adds an hour of new jobs to the million: its rows, of which the last hour's are read
again, and its time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from perf.harness.harness import Case, compare, from_ratios, report
from perf.harness.workspace import ENV, PEERS, REPO, arguments, print_progress, workspace
from perf.monitor.sacct_rows import BEGIN, ZONE, sacct_lines
from pitools.monitor.usage import ingest, store
from pitools.monitor.usage.sacct_text import COLUMNS
from pitools.site.schema import Site
from pitools.slurm.transport import Transport
from tests.monitor.usage.fake_sacct import FakeJob, FakeSacct

LIMIT_S, LIMIT_MB, SECOND_S = 60.0, 300.0, 1.0
THEIRS = """
import sqlite3, sys, slurm2sql
database = sqlite3.connect(sys.argv[2])
with open(sys.argv[1], errors="replace", newline="\\n") as lines:
    errors = slurm2sql.slurm2sql(database, raw_sacct=lines, jobs_only=True, update=True)
slurm2sql.create_indexes(database)
print(errors, database.execute("SELECT count(*) FROM slurm").fetchone()[0])
"""
THEIR_COLUMNS = "import slurm2sql as s; print(*[c for c in [*s.COLUMNS, *s.COLUMNS_EXTRA] if not c.startswith('_')])"


def run(argv: Sequence[str | Path]) -> tuple[float, float, float, str]:
    """Run a program; return its CPU seconds, its seconds, the most megabytes that it held, and what it printed."""
    began = time.perf_counter()
    env = {**ENV, "PYTHONPATH": str(REPO), "TZ": ZONE}
    with subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as process:
        assert process.stdout
        output = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"exit {process.returncode}: {argv}\n{output[-2000:]}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - began, usage.ru_maxrss * 1024 / 1e6, output


def install_peer() -> tuple[Path, str]:
    """Install slurm2sql where it is not; return its Python and its version."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "slurm2sql"], check=True, stdout=sys.stderr)
    version = "from importlib.metadata import version; print(version('slurm2sql'))"
    return python, subprocess.check_output([python, "-c", version], text=True).strip()


def write_texts(jobs: int, ours: Path, theirs: Path, their_columns: Sequence[str]) -> int:
    """Write the same jobs in our columns, and in slurm2sql's, by its separator; return the number of rows."""
    rows, sep = 0, b";|;"
    own = {name: i for i, name in enumerate(COLUMNS)}
    with ours.open("wb") as our_file, theirs.open("wb") as their_file:
        their_file.write(sep.join(name.encode() for name in their_columns) + b"\n")
        for number, line in enumerate(sacct_lines(jobs, "|")):
            our_file.write(line)
            if number:
                rows += 1
                cells = line[:-1].split(b"|")
                hours, seconds = divmod(int(cells[own["ElapsedRaw"]]), 3600)
                known = {"Elapsed": f"{hours // 24}-{hours % 24:02}:{seconds // 60:02}:{seconds % 60:02}".encode()}
                values = (known.get(name) or (cells[own[name]] if name in own else b"") for name in their_columns)
                their_file.write(sep.join(values) + b"\n")
    return rows


def read_what_is_new(path: Path, rows: int) -> tuple[float, ingest.Ingest, int]:
    """Ingest an hour of jobs from a stand-in of sacct on a store of a million; return CPU seconds, counts, new jobs."""
    now = int(BEGIN.timestamp()) + 301 * 86400
    old = [FakeJob(10**7 + i, now - 7200 + i, now - 7200 + i, now - 1800 + i) for i in range(3000)]
    running = [FakeJob(2 * 10**7 + i, now - 9000, now - 9000) for i in range(1000)]
    sacct = FakeSacct([*old, *running], now=now)
    with store.open_store(path) as opened:
        store.set_covered(opened, "local", now - 86400, now - 3600)
        ingest.ingest_site(opened, Site(name="local"), Transport(), now - 3600, run=sacct, now=lambda: float(sacct.now))
        sacct.now += 3600
        sacct.jobs += [FakeJob(3 * 10**7 + i, now + i, now + i, now + 1000 + i) for i in range(2000)]
        began = time.process_time()
        done = ingest.ingest_site(
            opened, Site(name="local"), Transport(), now - 3600, run=sacct, now=lambda: float(sacct.now)
        )
        took = time.process_time() - began
        assert opened.execute("SELECT count(*) FROM job").fetchone()[0] == rows + len(sacct.jobs)
    return took, done, 2000


def main() -> int:
    args = arguments(__doc__)
    jobs, rounds = (50_000, 1) if args.quick else (1_000_000, min(args.rounds, 3))
    python, version = install_peer()
    their_columns = subprocess.check_output([python, "-c", THEIR_COLUMNS], text=True).split()
    times: dict[str, list[float]] = {"ours": [], "wall": [], "theirs": []}
    memory: list[float] = []
    with workspace(args.disk, needed=2400 * jobs) as home:
        rows = write_texts(jobs, home / "ours.txt", home / "theirs.txt", their_columns)
        print_progress(f"{jobs} jobs, {rows} rows, {(home / 'ours.txt').stat().st_size >> 20} MiB")
        for number in range(rounds):
            target = home / f"{number}.sqlite"
            argv = [sys.executable, "-m", "pitools", "monitor", "usage", "--site", "local", "--store", target]
            argv += ["--from", home / "ours.txt", "--since", "52w", "--format", "jsonl"]
            took, wall_s, peak_mb, output = run(argv)
            if f"{rows} rows read, {rows} new or changed\n" not in output:
                sys.exit(f"ours read less than {rows} rows: {output[-500:]}")
            times["ours"].append(took)
            times["wall"].append(wall_s)
            memory.append(peak_mb)
            took, peer_s, peer_mb, output = run([python, "-c", THEIRS, home / "theirs.txt", home / "peer.sqlite"])
            times["theirs"].append(took)
            ours = f"ours {times['ours'][-1]:.1f} s of CPU in {wall_s:.1f} s, {peak_mb:.0f} MB"
            print_progress(f"{ours}; slurm2sql {took:.1f} s in {peer_s:.1f} s, {peer_mb:.0f} MB,")
            print_progress(f"with errors and rows: {output.split()[-2:]}")
            (home / "peer.sqlite").unlink()
        second_s, done, new = read_what_is_new(home / "0.sqlite", rows)
    size = f"{jobs:.0e} jobs"
    limit = LIMIT_S * jobs / 1_000_000
    print_progress(f"second ingest: {done}, of them {new} new, in {second_s:.2f} s")
    return report(
        [
            *(
                _case(
                    f"{size} of sacct text, with a report: {limit:.0f} s ÷ ours, {name}", [limit / s for s in seconds]
                )
                for seconds, name in ((times["ours"], "CPU"), (times["wall"], "by the clock"))
            ),
            _case(f"{size}: 300 MB ÷ the most memory of ours", [LIMIT_MB / peak for peak in memory]),
            compare(f"{size} into SQLite, CPU", "slurm2sql", version, times["ours"], times["theirs"], target=1.0),
            _case(f"second ingest on {size}, an hour later: 1 s ÷ ours, CPU", [SECOND_S / second_s]),
            _case(f"the same: rows that changed ÷ rows read ({done.rows})", [done.changed / done.rows], target=0.5),
        ]
    )


def _case(name: str, ratios: Sequence[float], target: float = 1.0) -> Case:
    return from_ratios(name, "limit", "", ratios, target=target)


if __name__ == "__main__":
    sys.exit(main())
