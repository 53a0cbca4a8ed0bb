"""What `sacct -P` prints, its header line included, with whatever columns were asked for."""

from __future__ import annotations

from collections.abc import Iterator

from pitools.core.errors import PitError
from pitools.place.simulate.traces.row import Row, lines, moment
from pitools.slurm.fields import count, plain, span_s, tres

NEEDED = ("JobID", "Submit")

_COUNTED = "counted"  # a column of ours; sacct's begin with a capital


def rows(text: str) -> Iterator[tuple[int, dict[str, str] | None]]:
    """(line, columns by name) of each row, None where a line has not as many; steps of jobs are passed over."""
    first, *others = lines(text)
    header = [*first.split("|"), _COUNTED]
    counted = "gres/gpu" if "gres/gpu" in text else "node"  # without GPUs, nodes: as a scenario of such sites
    for line, found in enumerate(others, start=2):
        cells = [*found.split("|"), counted]
        if found and "." not in cells[0]:
            yield line, dict(zip(header, cells, strict=True)) if len(cells) == len(header) else None


def row(raw: dict[str, str] | None) -> Row | None:
    """A job; None for one that held no GPU (node, where none has GPUs), runs still or never ran. Raises ValueError."""
    if raw is None:
        raise ValueError("it has not as many columns as the header")
    try:
        run_s = span_s(raw.get("ElapsedRaw") or raw.get("Elapsed", ""))
        limit_s = span_s(raw.get("TimelimitRaw", ""), unit_s=60) or span_s(raw.get("Timelimit", ""))
        gpus = _gpus(raw)
    except PitError as error:
        raise ValueError(f"{error.what} ({error.where})") from error
    if run_s is None:
        raise ValueError("it does not say how long the job ran")
    ends = raw.get("State", "").split(" ")[0]
    if not run_s or not gpus or ends in ("RUNNING", "PENDING", "REQUEUED"):
        return None
    return Row(
        job_id=raw["JobID"],
        submit_s=moment(raw["Submit"], "Submit"),
        gpus=gpus,
        run_s=run_s,
        limit_s=limit_s or 0.0,
        owner=plain(raw.get("User", "")) or plain(raw.get("Account", "")),
        title=raw.get("JobName", ""),
        group=plain(raw.get("QOS", "")),
    )


def _gpus(raw: dict[str, str]) -> int:
    asked = tres(raw.get("AllocTRES", "")) or tres(raw.get("ReqTRES", ""))
    if raw[_COUNTED] in asked:
        return count(asked[raw[_COUNTED]]) or 0
    return sum(count(amount) or 0 for name, amount in asked.items() if name.startswith("gres/gpu:"))
