"""What is wanted of the nodes that a job gets, and how it came to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from pitools.core.errors import ClusterError
from pitools.core.record import Record
from pitools.topology.acquire.node_filter import ConstraintKind
from pitools.topology.fabric_model import Fabric

if TYPE_CHECKING:
    from pitools.topology.choose import Objective  # numpy comes with it

OnFailure = Literal["release", "keep", "cancel"]


class AcquireOptions(NamedTuple):
    """What is wanted of the nodes.

    by: how Slurm is told. tries: choices at most. timeout_s: for all of them. unreachable_s: so long it is tried then
    to lift the constraint of a Slurm that does not answer. spares: nodes beyond the job's own, whose leaves are left
    open to it too. on_failure: what becomes of the constraint, or of the job, when neither led to a start.
    """

    by: ConstraintKind = "exclude"
    tries: int = 3
    timeout_s: float = 300.0
    unreachable_s: float = 60.0
    objective: Objective = "level"
    segment: int = 0
    spares: int = 0
    on_failure: OnFailure = "release"


class Acquired(Record, frozen=True, kw_only=True, tag="pit.acquired/1"):
    """How a job came to its nodes, or why it did not.

    node_list: "" while the job waits. is_within: whether node_list lies on the chosen leaves; None without nodes or
    without a constraint. chosen: the last choice. leaves: of node_list, else of the choice. is_released: the job waits
    or was started without a constraint. reason: why the last choice failed.
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
    """Raise ClusterError where no choice can be made, or none can be kept. Asked before anything is submitted."""
    if not fabric.leaves and not fabric.torus:
        hint = "submit it with psbatch, or describe the fabric in topology.file of the site"
        raise ClusterError("the fabric is flat, or unknown: no nodes are better than others", hint=hint)
    if fabric.kind == "block" and options.by == "nodelist":
        what = "Slurm's block topology places jobs itself, and does not keep to a list of nodes"
        raise ClusterError(what, where="--by nodelist", hint="use --by exclude")
