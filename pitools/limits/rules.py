"""Slurm's limits as a table: which jobs share each, what of a job it counts, and Slurm's name of the reason."""

from __future__ import annotations

from typing import Literal, NamedTuple

Scope = Literal["", "all", "user", "account"]
Asks = Literal["tres", "per-node", "minutes", "wall", "jobs", "submitted"]


class Rule(NamedTuple):
    """A limit. field: of the records. reason: Slurm's, `{}` for the TRES; QOS or Assoc stands before it.

    scope: whose jobs share it, "" for a limit of each job. limit_ends: TRES whose reason ends in `Limit`.
    """

    field: str
    reason: str
    scope: Scope
    asks: Asks
    limit_ends: tuple[str, ...] = ()


RULES = {
    "GrpTRES": Rule("grp_tres", "Grp{}", "all", "tres", ("cpu", "mem", "node")),
    "GrpTRESMins": Rule("grp_tres_mins", "Grp{}Minutes", "all", "minutes", ("cpu",)),
    "GrpTRESRunMins": Rule("grp_tres_run_mins", "Grp{}RunMinutes", "all", "minutes", ("cpu",)),
    "GrpJobs": Rule("grp_jobs", "GrpJobsLimit", "all", "jobs"),
    "GrpSubmit": Rule("grp_submit", "GrpSubmitJobsLimit", "all", "submitted"),
    "GrpWall": Rule("grp_wall_s", "GrpWallLimit", "all", "wall"),
    "MaxTRES": Rule("max_tres", "Max{}PerJob", "", "tres", ("cpu", "node")),
    "MaxTRESPerNode": Rule("max_tres_per_node", "Max{}PerNode", "", "per-node"),
    "MaxTRESMins": Rule("max_tres_mins", "Max{}MinutesPerJob", "", "minutes", ("cpu",)),
    "MaxWall": Rule("max_wall_s", "MaxWallDurationPerJobLimit", "", "wall"),
    "MaxJobs": Rule("max_jobs", "MaxJobsLimit", "all", "jobs"),
    "MaxSubmit": Rule("max_submit", "MaxSubmitJobLimit", "all", "submitted"),
    "MinTRES": Rule("min_tres", "Min{}", "", "tres"),
    "MaxTRESPU": Rule("max_tres_per_user", "Max{}PerUser", "user", "tres", ("cpu", "node")),
    "MaxTRESPA": Rule("max_tres_per_account", "Max{}PerAccount", "account", "tres"),
    "MaxJobsPU": Rule("max_jobs_per_user", "MaxJobsPerUserLimit", "user", "jobs"),
    "MaxJobsPA": Rule("max_jobs_per_account", "MaxJobsPerAccount", "account", "jobs"),
    "MaxSubmitPU": Rule("max_submit_per_user", "MaxSubmitJobPerUserLimit", "user", "submitted"),
    "MaxSubmitPA": Rule("max_submit_per_account", "MaxSubmitJobsPerAccount", "account", "submitted"),
}
# The order of slurmctld's tests, by kind of level. Limits joined by + are tested together, TRES by TRES.
AT_SUBMIT = {
    "qos": "MaxTRESPA MaxTRESPU+GrpTRES GrpSubmit MaxTRESMins GrpTRESMins GrpTRESRunMins MaxWall GrpWall MaxTRES"
    " MaxTRESPerNode MaxSubmitPA MaxSubmitPU MinTRES",
    "user": "GrpTRES GrpSubmit GrpTRESMins GrpTRESRunMins GrpWall MaxTRES MaxTRESPerNode MaxSubmit MaxTRESMins MaxWall",
    "account": "GrpTRES GrpSubmit GrpTRESMins GrpTRESRunMins GrpWall",
}
BEFORE_NODES = {
    "qos": "GrpJobs GrpWall MaxJobsPA MaxJobsPU MaxWall",
    "user": "GrpJobs GrpWall MaxJobs MaxWall",
    "account": "GrpJobs GrpWall",
}
FOR_NODES = {
    "qos": "GrpTRESMins GrpTRES GrpTRESRunMins MaxTRESMins MaxTRES MaxTRESPerNode MinTRES MaxTRESPA MaxTRESPU",
    "user": "GrpTRESMins GrpTRES GrpTRESRunMins MaxTRESMins MaxTRES MaxTRESPerNode",
    "account": "GrpTRESMins GrpTRES GrpTRESRunMins",
}
# An association's limit that counts only where no QOS has one of these; any other: none of its own name.
REPLACED_BY = {"MaxJobs": ("MaxJobsPU", "MaxJobsPA"), "MaxSubmit": ("MaxSubmitPU", "MaxSubmitPA")}

_TRES_ORDER = ("cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages")
_TRES_WORDS = {"cpu": "Cpu", "mem": "Mem", "node": "Node", "energy": "Energy", "billing": "Billing"}
_TRES_KINDS = {"gres": "GRES", "bb": "BB", "license": "License"}


def tres_position(tres: str) -> int:
    """Return the place of a TRES in slurmctld's tests: its id."""
    return _TRES_ORDER.index(tres) if tres in _TRES_ORDER else len(_TRES_ORDER)


def reason(name: str, tres: str, *, is_qos: bool) -> str:
    """Return Slurm's reason for a limit: `AssocGrpGRES`, `QOSMaxCpuPerUserLimit`. tres: "" for a limit not on TRES."""
    rule = RULES[name]
    word = _TRES_WORDS.get(tres) or _TRES_KINDS.get(tres.partition("/")[0], "Unknown")
    if tres == "cpu" and name in ("GrpTRESMins", "GrpTRESRunMins"):
        word = "CPU"
    if tres == "mem" and (name == "MaxTRESPA" or (is_qos and name != "GrpTRES")):
        word = "Memory"
    if (name, tres) == ("MinTRES", "cpu"):
        return "QOSMinCpuNotSatisfied"
    prefix = "" if rule.scope == "account" else "QOS" if is_qos else "Assoc"
    return prefix + rule.reason.format(word) + ("Limit" if tres in rule.limit_ends else "")
