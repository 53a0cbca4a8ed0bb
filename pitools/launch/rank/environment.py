"""Read a rank's context from its environment, and make the variables for the user's program, JAX and PyTorch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, DataError
from pitools.launch.rank import rendezvous

# Set while the module of an entry is imported, to check it or in a rank: a launch at its top level would repeat itself.
IMPORTING = "PIT_IMPORTING_ENTRY"
# Set by srun, or by the supervisor of a local run.
_SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURMD_NODENAME")
_PIT_VARIABLES = ("PIT_ATTEMPT_DIR", "PIT_JOB_SECRET", "PIT_HEAD_ADDRESS", "PIT_HEAD_NODE", "PIT_PORTS")


class RankContext(msgspec.Struct, frozen=True, kw_only=True):
    """The position of this process in its job.

    node: this rank's. head_node: the node of rank 0. head_address: rank 0's host name or IP address, without a port.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    head_node: str
    head_address: str
    job_identity: rendezvous.JobIdentity
    attempt_dir: Path
    tasks_per_node: int
    gpus_per_node: int


def load_rank_context(environ: Mapping[str, str]) -> RankContext:
    """Return this rank's context from the variables of srun and of the job script. Raises ClusterError without them."""
    missing = [name for name in (*_SLURM_VARIABLES, *_PIT_VARIABLES) if not environ.get(name)]
    if missing:
        hint = "start ranks by `pit launch run`, or by the script that `pit script render train` prints"
        raise ClusterError(f"{missing[0]} is not set: this process is not a rank", hint=hint)
    first, last = environ["PIT_PORTS"].split("-")
    key = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    world_size = int(environ["SLURM_NTASKS"])
    return RankContext(
        rank=int(environ["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(environ["SLURM_LOCALID"]),
        node=environ["SLURMD_NODENAME"],
        head_node=environ["PIT_HEAD_NODE"],
        head_address=environ["PIT_HEAD_ADDRESS"],
        job_identity=rendezvous.JobIdentity(
            " ".join(key), environ["PIT_JOB_SECRET"], world_size, (int(first), int(last))
        ),
        attempt_dir=Path(environ["PIT_ATTEMPT_DIR"]),
        tasks_per_node=int(environ.get("PIT_TASKS_PER_NODE", "1")),
        gpus_per_node=int(environ.get("PIT_GPUS_PER_NODE", "0")),
    )


def dataset_dirs(context: RankContext) -> dict[str, str]:
    """Return the datasets staged on this rank's node: name → folder. Raises DataError if a folder is missing."""
    folders = {}
    for receipt in sorted((context.attempt_dir / "nodes" / context.node).glob("*.json")):
        path = str(msgspec.json.decode(receipt.read_bytes()).get("path", ""))
        if not Path(path).is_dir():
            raise DataError(f'dataset "{receipt.stem}" is no longer on this node', where=f"{context.node}:{path}")
        folders[receipt.stem] = path
    return folders


def common_variables(context: RankContext, environ: Mapping[str, str], data: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank for every framework. data: dataset name → folder."""
    variables = {
        "PIT_RANK": str(context.rank),
        "PIT_WORLD_SIZE": str(context.world_size),
        "PIT_LOCAL_RANK": str(context.local_rank),
        "PIT_NODE": context.node,
        "PIT_RUN_ID": context.attempt_dir.parent.parent.name,
        "PIT_ATTEMPT": context.attempt_dir.name,
        "PIT_CHECKPOINT_DIR": str(context.attempt_dir.parent.parent / "checkpoints"),
        # A Python program that dies of a signal prints its stack.
        "PYTHONFAULTHANDLER": environ.get("PYTHONFAULTHANDLER", "1"),
    }
    for name, path in data.items():
        variables[f"PIT_DATA_{name.upper()}"] = path
    # By default OpenMP starts a thread per core of the node in every rank.
    if cpus := environ.get("SLURM_CPUS_PER_TASK"):
        variables["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS", cpus)
    return variables


def jax_variables(context: RankContext, environ: Mapping[str, str], coordinator: str) -> dict[str, str]:
    """Return the variables for `jax.distributed.initialize()`, which takes rank and world size from Slurm's own."""
    variables = {"JAX_COORDINATOR_ADDRESS": coordinator}
    if context.gpus_per_node:
        # Every process has access to all GPUs of the node and uses its share: JAX does not work with --gpus-per-task.
        share = max(1, context.gpus_per_node // context.tasks_per_node)
        ids = range(context.local_rank * share, min((context.local_rank + 1) * share, context.gpus_per_node))
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, ids))
    if any(re.fullmatch(r"(https?|all)_proxy", name, re.IGNORECASE) for name in environ):
        # Otherwise gRPC sends the coordinator's traffic to the proxy, and hangs.
        for name in ("no_proxy", "NO_PROXY"):
            variables[name] = ",".join(filter(None, [environ.get(name, ""), context.head_address]))
    return variables


def torch_variables(context: RankContext, coordinator: str) -> dict[str, str]:
    """Return the variables for `init_process_group("env://")`."""
    host, _, port = coordinator.rpartition(":")
    return {
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_RANK": str(context.local_rank),
        "LOCAL_WORLD_SIZE": str(context.tasks_per_node),
    }
