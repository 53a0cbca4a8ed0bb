"""The environment of a rank: what every rank knows, and what JAX and torch read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, DataError
from pitools.launch.rank import rendezvous

# Inside srun, and set by our local mode alike.
_SLURM = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURMD_NODENAME")
_OURS = ("PIT_ATTEMPT_DIR", "PIT_NONCE", "PIT_COORDINATOR", "PIT_HEAD", "PIT_PORTS")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process stands in its job.

    head: node of rank 0. address: rank 0's own, without a port. gpus: per node. tasks: per node.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    head: str
    address: str
    job: rendezvous.Job
    attempt_dir: Path
    tasks: int
    gpus: int


def place(environ: Mapping[str, str]) -> Place:
    """This process's place, from the variables of srun and of the job script. Raises ClusterError."""
    missing = [name for name in (*_SLURM, *_OURS) if not environ.get(name)]
    if missing:
        hint = "ranks are started by the script that `pit script render train` prints, or by `pit launch run`"
        raise ClusterError(f"{missing[0]} is not set: this is not a rank", hint=hint)
    first, last = environ["PIT_PORTS"].split("-")
    key = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    world_size = int(environ["SLURM_NTASKS"])
    return Place(
        rank=int(environ["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(environ["SLURM_LOCALID"]),
        node=environ["SLURMD_NODENAME"],
        head=environ["PIT_HEAD"],
        address=environ["PIT_COORDINATOR"],
        job=rendezvous.Job(" ".join(key), environ["PIT_NONCE"], world_size, (int(first), int(last))),
        attempt_dir=Path(environ["PIT_ATTEMPT_DIR"]),
        tasks=int(environ.get("PIT_TASKS_PER_NODE", "1")),
        gpus=int(environ.get("PIT_GPUS_PER_NODE", "0")),
    )


def datasets(at: Place) -> dict[str, str]:
    """Name → folder of what was staged on this rank's own node. Raises DataError when a folder is gone."""
    found = {}
    for receipt in sorted((at.attempt_dir / "nodes" / at.node).glob("*.json")):
        path = str(msgspec.json.decode(receipt.read_bytes()).get("path", ""))
        if not Path(path).is_dir():
            raise DataError(f'dataset "{receipt.stem}" is no longer on this node', where=f"{at.node}:{path}")
        found[receipt.stem] = path
    return found


def common(at: Place, environ: Mapping[str, str], data: Mapping[str, str]) -> dict[str, str]:
    """Variables of every rank, whatever its framework."""
    variables = {
        "PIT_RANK": str(at.rank),
        "PIT_WORLD_SIZE": str(at.world_size),
        "PIT_LOCAL_RANK": str(at.local_rank),
        "PIT_NODE": at.node,
        "PIT_CHECKPOINT_DIR": str(at.attempt_dir.parent.parent / "checkpoints"),
        # A command's Python says where it was when it dies of a signal.
        "PYTHONFAULTHANDLER": environ.get("PYTHONFAULTHANDLER", "1"),
    }
    for name, path in data.items():
        variables[f"PIT_DATA_{name.upper()}"] = path
    # Without a limit every rank starts a thread per core of the whole node.
    if cpus := environ.get("SLURM_CPUS_PER_TASK"):
        variables["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS", cpus)
    return variables


def jax(at: Place, environ: Mapping[str, str], coordinator: str) -> dict[str, str]:
    """What `jax.distributed.initialize()` reads; the number of processes and the rank it takes from Slurm's own."""
    variables = {"JAX_COORDINATOR_ADDRESS": coordinator}
    if at.gpus:
        # Every process sees all GPUs of the node and uses its share: JAX does not work behind --gpus-per-task.
        share = max(1, at.gpus // at.tasks)
        ids = range(at.local_rank * share, min((at.local_rank + 1) * share, at.gpus))
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, ids))
    if any(re.fullmatch(r"(https?|all)_proxy", name, re.IGNORECASE) for name in environ):
        # gRPC would send the coordinator's traffic to the proxy, and hang.
        for name in ("no_proxy", "NO_PROXY"):
            variables[name] = ",".join(filter(None, [environ.get(name, ""), at.address]))
    return variables


def torch(at: Place, coordinator: str) -> dict[str, str]:
    """What `init_process_group("env://")` reads."""
    host, _, port = coordinator.rpartition(":")
    return {
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "RANK": str(at.rank),
        "WORLD_SIZE": str(at.world_size),
        "LOCAL_RANK": str(at.local_rank),
        "LOCAL_WORLD_SIZE": str(at.tasks),
    }
