"""Write the metrics of `sync` for the textfile collector of Prometheus's node_exporter.

Counters and the time of the last success are continued from the values in the file. A run that hangs or was killed
shows as a start later than the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pitools.core.errors import ClusterError
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import lock_within

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]

PREFIX = "pit_stage_sync_"
METRICS = {
    "last_start_timestamp_seconds": ("gauge", "When sync was last started."),
    "last_end_timestamp_seconds": ("gauge", "When sync last came to an end, good or bad."),
    "last_success_timestamp_seconds": ("gauge", "When sync last ended with exit code 0; 0 if never."),
    "last_duration_seconds": ("gauge", "How long the run that last ended took."),
    "last_exit_code": ("gauge", "Exit code of that run: 0, 3 policy, 4 refused, 5 data, 75 later, 128+n signal."),
    "kept_sets": ("gauge", "Sets that a rule keeps on this node, as far as its last run found them whole."),
    "kept_bytes": ("gauge", "Bytes of these sets."),
    "free_bytes": ("gauge", "Bytes free on the disk of a staging root."),
    "staged_sets_total": ("counter", "Sets staged or repaired."),
    "copied_bytes_total": ("counter", "Bytes read from the source and written."),
    "evicted_sets_total": ("counter", "Sets removed, as no rule selects them any more or to make room."),
    "evicted_bytes_total": ("counter", "Bytes of these sets."),
    "errors_total": ("counter", "Errors by what to do: policy, refused, data, later."),
}
ERROR_KINDS = {3: "policy", 4: "refused", 5: "data", 75: "later"}

_TIMEOUT_S = 2.0
_LINE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)",?')
_ESCAPES = {"\\": r"\\", "\n": r"\n", '"': r"\""}


class SyncTotals(NamedTuple):
    """The totals of one run. kept_by_rule: sets and bytes by rule. free: bytes by root. errors: count by exit code."""

    staged: int = 0
    copied_bytes: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    kept_by_rule: Mapping[str, tuple[int, int]] = {}
    free: Mapping[str, int] = {}
    errors: Mapping[int, int] = {}


def write_started(path: Path, policy: str, now: float) -> None:
    """Write that a run has begun. Raises NoSpace, ClusterError."""
    with _lock_metrics(path):
        samples = read_samples(path)
        samples[PREFIX + "last_start_timestamp_seconds", _labels(policy=policy)] = now
        samples.setdefault((PREFIX + "last_success_timestamp_seconds", _labels(policy=policy)), 0.0)
        _write(path, samples)


def write_ended(
    path: Path, policy: str, totals: SyncTotals, code: int, *, started_s: float, now: float, wall_s: float
) -> None:
    """Write the end of a run, and replace the kept sets by its own. wall_s: duration, of a monotonic clock.

    Raises NoSpace, ClusterError.
    """
    with _lock_metrics(path):
        _write(
            path, _ended_samples(read_samples(path), policy, totals, code, started_s=started_s, now=now, wall_s=wall_s)
        )


def _ended_samples(
    previous: Samples, policy: str, totals: SyncTotals, code: int, *, started_s: float, now: float, wall_s: float
) -> Samples:
    samples = {key: value for key, value in previous.items() if _outlives_run(key, policy)}

    def put(name: str, value: float, **labels: str) -> None:
        samples[PREFIX + name, _labels(policy=policy, **labels)] = value

    def add(name: str, value: float, **labels: str) -> None:
        put(name, previous.get((PREFIX + name, _labels(policy=policy, **labels)), 0.0) + value, **labels)

    put("last_start_timestamp_seconds", started_s)
    put("last_end_timestamp_seconds", now)
    put("last_duration_seconds", wall_s)
    put("last_exit_code", code)
    if code == 0:
        put("last_success_timestamp_seconds", now)
    else:
        samples.setdefault((PREFIX + "last_success_timestamp_seconds", _labels(policy=policy)), 0.0)
    for rule, (sets, n_bytes) in totals.kept_by_rule.items():
        put("kept_sets", sets, rule=rule)
        put("kept_bytes", n_bytes, rule=rule)
    for root, n_bytes in totals.free.items():
        put("free_bytes", n_bytes, root=root)
    add("staged_sets_total", totals.staged)
    add("copied_bytes_total", totals.copied_bytes)
    add("evicted_sets_total", totals.evicted)
    add("evicted_bytes_total", totals.evicted_bytes)
    for number, kind in ERROR_KINDS.items():
        add("errors_total", totals.errors.get(number, 0), kind=kind)
    return samples


@contextmanager
def _lock_metrics(path: Path) -> Iterator[None]:
    """Lock the folder of a metrics file, so that runs that write to one file do not lose each other's samples.

    After a short time-out it continues without the lock: metrics must not block a run.
    """
    try:
        descriptor = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, path) from error
    try:
        with contextlib.suppress(ClusterError):  # a file system without locks
            lock_within(descriptor, fcntl.LOCK_EX, timeout_s=_TIMEOUT_S)
        yield
    finally:
        os.close(descriptor)


def _outlives_run(key: tuple[str, Labels], policy: str) -> bool:
    """Return whether a sample is kept: a counter, the last success, or one of another policy."""
    name, labels = key
    is_ours = ("policy", policy) in labels
    return not is_ours or name.endswith(("_total", "last_success_timestamp_seconds"))


def render(samples: Samples) -> str:
    """Return the samples as text, each metric with its help and type."""
    return "".join(_format_lines(samples))


def _format_lines(samples: Samples) -> Iterator[str]:
    for name, (kind, text) in METRICS.items():
        metric_samples = sorted(
            (labels, value) for (metric, labels), value in samples.items() if metric == PREFIX + name
        )
        if metric_samples:
            yield f"# HELP {PREFIX}{name} {text}\n# TYPE {PREFIX}{name} {kind}\n"
        for labels, value in metric_samples:
            label_text = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            yield f"{PREFIX}{name}{{{label_text}}} {_number(value)}\n"


def read_samples(path: Path) -> Samples:
    """Read the samples of a file written by `render`; none if there is no file. Other lines are ignored."""
    try:
        lines = path.read_bytes().decode(errors="replace").split("\n")
    except OSError:
        return {}
    samples: Samples = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match and match[1].removeprefix(PREFIX) in METRICS:
            labels = tuple((key, _unescaped(text)) for key, text in _LABEL.findall(match[2]))
            with contextlib.suppress(ValueError):
                samples[match[1], labels] = float(match[3])
    return samples


def _write(path: Path, samples: Samples) -> None:
    # The collector reads every *.prom of its folder; the name of the temporary file does not end so.
    write_atomic(path, render(samples), durable=False)


def _labels(**labels: str) -> Labels:
    # The collector refuses a whole file for one byte that is not UTF-8, as a folder's name may have.
    return tuple((key, text.encode(errors="replace").decode()) for key, text in labels.items())


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(round(value, 3))


def _escaped(text: str) -> str:
    return re.sub(r'[\\\n"]', lambda match: _ESCAPES[match[0]], text)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)
