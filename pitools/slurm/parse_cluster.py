"""Parse configuration, version and topology of a cluster, and sbatch's start estimate and job id, into records."""

from __future__ import annotations

import re
from datetime import tzinfo

from pitools.slurm.fields import key_values, parse_error, parse_slurm_time
from pitools.slurm.records import Block, Config, StartEstimate, Submitted, Switch

_SETTING = re.compile(r"(\S+)\s*= ?(.*)")
_VERSION = re.compile(r"\d+(?:\.\d+)+")
# 25.05 prints ` a using`; `on nodes` is `on` if Slurm has no partition.
_ESTIMATE = re.compile(
    r"Job \d+ to start at (?P<start>\S+)(?: on cluster (?P<cluster>\S+))?(?: a)? using (?P<cpus>\d+) processors"
    r" on (?:nodes )?(?P<nodes>\S+)(?: in partition (?P<partition>\S+))?"
)
_SUBMITTED = re.compile(r"^(\d+)(?:;(\S+))?$", re.MULTILINE)


def parse_config(text: str) -> Config:
    """Parse `scontrol show config` with all its sections. Raises ClusterError."""
    values: dict[str, str] = {}
    for line in text.split("\n"):
        match = _SETTING.fullmatch(line)
        if match:
            values.setdefault(match[1], "" if match[2].strip() in ("(null)", "N/A") else match[2].strip())
    missing = [name for name in ("ClusterName", "SLURM_VERSION") if not values.get(name)]
    if missing:
        raise parse_error("scontrol show config", f"missing {' and '.join(missing)}", text)
    return Config(cluster=values["ClusterName"], version=parse_version(values["SLURM_VERSION"]), values=values)


def parse_version(text: str) -> tuple[int, ...]:
    """Parse the output of `-V`: (22, 5, 8) for `slurm-wlm 22.05.8`. Raises ClusterError."""
    match = _VERSION.search(text)
    if not match:
        raise parse_error("sinfo -V", "no version", text)
    return tuple(int(part) for part in match[0].split("."))


def parse_ping(text: str) -> list[bool]:
    """Parse the output of `scontrol ping`: whether each controller answers, as `Slurmctld(primary) at c1 is UP`."""
    return [answer == "UP" for answer in re.findall(r"^Slurmctld\(.* is (UP|DOWN)", text, re.MULTILINE)]


def parse_topology(text: str) -> list[Switch | Block]:
    """Parse the switches or blocks of `scontrol show topology`; [] if there are none.

    Lines of unknown plugins are ignored. Raises ClusterError if there are only such lines.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    records = [record for line in lines if (record := _parse_topology_line(line))]
    if lines and not records:
        raise parse_error("scontrol show topology", "neither switches nor blocks", lines[0])
    return records


def _parse_topology_line(line: str) -> Switch | Block | None:
    values = key_values(line)
    try:
        if "SwitchName" in values:
            return Switch(
                switch=values["SwitchName"],
                level=int(values["Level"]),
                node_list=values.get("Nodes", ""),
                switches=values.get("Switches", ""),
            )
        name = values.get("BlockName", values.get("AggregatedBlock"))
        if name is None:
            return None
        return Block(
            block=name,
            index=int(values["BlockIndex"]),
            node_list=values.get("Nodes", ""),
            size=int(values["BlockSize"]),
            is_aggregated="AggregatedBlock" in values,
        )
    except (KeyError, ValueError) as error:
        raise parse_error("scontrol show topology", f"missing or invalid value: {error}", line) from error


def parse_estimate(text: str, zone: tzinfo | None = None) -> StartEstimate:
    """Parse the stderr of `sbatch --test-only`. Raises ClusterError if there is no estimate."""
    match = _ESTIMATE.search(text)
    if not match:
        raise parse_error("sbatch --test-only", "no start", text.strip())
    return StartEstimate(
        start=parse_slurm_time(match["start"], zone),
        cpus=int(match["cpus"]),
        node_list=match["nodes"],
        partition=match["partition"] or "",
        cluster=match["cluster"] or "",
    )


def parse_submitted(text: str) -> Submitted:
    """Parse the output of `sbatch --parsable`: `id` or `id;cluster`. Raises ClusterError."""
    jobs = _SUBMITTED.findall(text)
    if len(jobs) != 1:
        raise parse_error("sbatch --parsable", f"{len(jobs)} jobs (expected 1)", text.strip())
    return Submitted(job_id=jobs[0][0], cluster=jobs[0][1])
