"""Options and result of acquiring nodes for a job."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from pitools.core.errors import ClusterError
from pitools.core.record import Record
from pitools.topology.acquire.node_filter import ConstraintKind
from pitools.topology.fabric_model import Fabric

if TYPE_CHECKING:
    from pitools.topology.choose import Objective  # imports numpy

OnFailure = Literal["release", "keep", "cancel"]


class AcquireOptions(NamedTuple):
    """Options of an acquisition.

    by: kind of constraint. tries: most choices. timeout_s: for all tries. unreachable_s: how long after that to retry
    removing the constraint while Slurm is unreachable. objective, segment: of `select_nodes`. on_failure: after the
    last try, remove or keep the constraint, or cancel the job. avoid: costs of nodes, as for `avoid_nodes`.
    """

    by: ConstraintKind = "exclude"
    tries: int = 3
    timeout_s: float = 300.0
    unreachable_s: float = 60.0
    objective: Objective = "level"
    segment: int = 0
    on_failure: OnFailure = "release"
    avoid: Mapping[str, float] = MappingProxyType({})


class Acquired(Record, frozen=True, kw_only=True, tag="pit.acquired/1"):
    """The result of an acquisition.

    node_list: "" while the job is pending. is_within: whether node_list is within the constraint; None without nodes or
    constraint. chosen: the last choice. leaves: of node_list, else of the choice. tries: choices made. is_released: the
    job has no constraint. reason: why the last choice failed. waited_s: duration of the acquisition.
    """

    job_id: str
    state: str
    node_list: str = ""
    leaves: int = 0
    is_within: bool | None = None
    chosen: str = ""
    by: str = "exclude"
    tries: int = 0
    is_released: bool = False
    reason: str = ""
    waited_s: float = 0.0


def require_choosable(fabric: Fabric, options: AcquireOptions) -> None:
    """Raise ClusterError if the fabric allows no choice or no such constraint. Call before submission."""
    if not fabric.leaves and not fabric.torus:
        hint = "submit the script with psbatch, or set topology.file of the site"
        raise ClusterError("the fabric is flat or unknown: all nodes are equal", hint=hint)
    if fabric.kind == "block" and options.by == "nodelist":
        raise ClusterError("Slurm's block plugin ignores node lists", where="--by nodelist", hint="use --by exclude")
