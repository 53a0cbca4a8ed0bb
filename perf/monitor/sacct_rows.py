"""Generate the accounting of a year as `sacct -P` prints it, with all that such text has on real clusters.

20,000 users, each job with a memory of its own, the rows of a day in any order, in a zone whose clocks change. Arrays,
heterogeneous and requeued jobs (several rows of one number), names of several lines and with invalid UTF-8, jobs over
midnight, running, pending and never started ones, times that are Unknown or None, and jobstats' records.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from pitools.monitor.usage.sacct_text import COLUMNS

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
ZONE, USERS = "Europe/Berlin", 20_000
_LOCAL = ZoneInfo(ZONE)
STATES = ["COMPLETED"] * 14 + ["FAILED"] * 3 + ["CANCELLED by 1000", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"]
NAMES = ["train", "eval-7b", "bc-jax-20260303-013341", "interactive", "sbatch wrap", "pre|processing"]
SIZES = [(1, 4, 0), (1, 16, 1), (1, 96, 8), (2, 192, 16), (8, 768, 64), (64, 6144, 512)]


def sacct_lines(jobs: int, sep: str, seed: int = 0) -> Iterator[bytes]:
    """Yield the header, then the rows of this many jobs, each day's in any order; some jobs have several."""
    yield (sep.join(COLUMNS) + "\n").encode()
    rng, day = random.Random(seed), max(jobs // 300, 1)
    rows = _rows(jobs, sep, rng)
    while lines := list(itertools.islice(rows, day)):
        rng.shuffle(lines)
        yield from lines


def _rows(jobs: int, sep: str, rng: random.Random) -> Iterator[bytes]:
    js1 = [_js1(rng) for _ in range(50)]
    pause_s = 300 * 86400 / jobs
    for number in range(1, jobs + 1):
        submit = BEGIN + timedelta(seconds=int(number * pause_s))
        starts = 2 if rng.random() < 0.02 else 1
        nodes, cpus, gpus = SIZES[int(len(SIZES) * rng.random() ** 2)]
        kind = rng.random()
        job_id = f"{number - number % 50}_{number % 50}" if kind < 0.3 else str(number)
        job_id = f"{number - 1}+1" if kind > 0.99 else job_id
        name = NAMES[int(rng.random() * len(NAMES))]
        name = name.replace("|", "/") if sep == "|" else name
        name += f"-{number // 20:06x}.{number % 20}" if name.startswith("bc-jax") else ""  # a run's jobs
        user = int(USERS * rng.random() ** 2)
        name += "\nsecond line" if kind > 0.999 else "\udcff\udc80" if kind > 0.998 else ""
        comment = f"model=m{user % 70}" if kind < 0.1 else ""
        admin = js1[number % 50] if gpus and kind < 0.15 else "JS1:None" if kind < 0.2 else ""
        for start_number in range(starts):
            eligible = start = submit + timedelta(seconds=start_number * 90_000)
            start += timedelta(seconds=int(rng.expovariate(1 / 600)))
            elapsed_s = int(rng.expovariate(1 / 7200))
            end = start + timedelta(seconds=elapsed_s)
            times = [_text(eligible), _text(eligible), _text(start), _text(end)]
            state = STATES[int(rng.random() * len(STATES))]
            tres = f"billing={cpus},cpu={cpus},mem={nodes * rng.randrange(1000, 500_000)}M,node={nodes}"
            tres += f",gres/gpu:h100={gpus},gres/gpu={gpus}" if gpus else ""
            if start_number < starts - 1:
                state = "REQUEUED"
            elif number > jobs - 2000 and kind < 0.5:
                state, times[3] = "RUNNING", "Unknown"
            elif number > jobs - 2000:
                state, times[2:], elapsed_s, tres = "PENDING", ["Unknown", "Unknown"], 0, ""
            elif kind > 0.98:
                state, times[2], elapsed_s = "CANCELLED by 1001", "None", 0
            values = (
                *(str(number), job_id, name, f"user{user}", f"lab{user % 9}", "normal", "gpu" if gpus else "cpu"),
                *(state, *times, str(elapsed_s), comment, admin, tres),
            )
            yield (sep.join(values) + "\n").encode(errors="surrogateescape")


def _text(moment: datetime) -> str:
    return moment.astimezone(_LOCAL).isoformat()[:19]


def _js1(rng: random.Random) -> str:
    nodes = {f"h{i}": {"cpus": 8, "gpu_utilization": {"0": rng.random() * 100}, "used_memory": 1 << 33} for i in (1, 2)}
    return "JS1:" + base64.b64encode(gzip.compress(json.dumps({"nodes": nodes, "gpus": 2}).encode())).decode()
