"""NVLink domains: one record a node, as NVML tells it there; all of them are the blocks of a fabric."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import msgspec

from pitools.core.errors import ClusterError, ConfigError, DataError, ToolMissing
from pitools.core.record import Record, decode_json
from pitools.topology.fabric_model import Fabric, Leaf, block_fabric, natural_sort_key
from pitools.topology.formats.conf import checked_name

_FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED: the fabric manager has registered the GPU


class NvlinkDomain(Record, frozen=True, kw_only=True, tag="pit.nvlink-domain/1"):
    """The NVLink domain of a node. cluster_uuid: "" for one whose links end in the node. gpus: how many are in it."""

    node: str
    cluster_uuid: str = ""
    clique_id: int = 0
    gpus: int = 0


def read_domains(text: str, where: str) -> Fabric:
    """Return the blocks of `pit.nvlink-domain/1` lines, one of each node. Raises ConfigError naming the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(decode_json(line, NvlinkDomain))
            except msgspec.DecodeError as error:
                hint = "srun -N ALL --ntasks-per-node=1 pit topology show --nvlink-here"
                raise ConfigError(f"no pit.nvlink-domain/1: {error}", where=f"{where}:{number}", hint=hint) from error
            checked_name(found[-1].node, f"{where}:{number}")
            if found[-1].cluster_uuid:
                checked_name(found[-1].cluster_uuid, f"{where}:{number}")
    return fabric_of_domains(found, where)


def fabric_of_domains(domains: Iterable[NvlinkDomain], where: str = "nvlink") -> Fabric:
    """A block for each NVLink domain, in the order of their first nodes; its base size is the smallest one's.

    A node whose links end in it is in no block. Raises DataError for a node that is in two.
    """
    held: dict[tuple[str, int], list[str]] = {}
    seen: dict[str, tuple[str, int]] = {}
    for domain in domains:
        key = (domain.cluster_uuid, domain.clique_id)
        if seen.setdefault(domain.node, key) != key:
            raise DataError(f'node "{domain.node}" is in two NVLink domains', where=where, hint="gather it again")
        if domain.cluster_uuid:
            held.setdefault(key, []).append(domain.node)
    heads = Counter(f"{uuid[:8]}.{clique}" for uuid, clique in held)
    ordered = sorted(held.items(), key=lambda item: min(map(natural_sort_key, item[1])))
    leaves = []
    for (uuid, clique), nodes in ordered:
        short = f"{uuid[:8]}.{clique}"
        leaves.append(Leaf(path=(f"nvl-{short if heads[short] == 1 else f'{uuid}.{clique}'}",), nodes=tuple(nodes)))
    return block_fabric(leaves, {min(len(set(leaf.nodes)) for leaf in leaves)} if leaves else ())


def local_domain() -> NvlinkDomain:
    """This node's domain. Raises ToolMissing without NVML, ClusterError where it fails or its GPUs disagree."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    try:
        pynvml: Any = import_module("pynvml")
    except ImportError as error:
        hint = "pip install 'pitools-hpc[gpu]'"
        raise ToolMissing("NVLink domains are read with the package nvidia-ml-py", hint=hint) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ToolMissing(f"NVML does not start: {error}", where=node, hint="run it on a node with GPUs") from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = Counter(filter(None, (_domain(pynvml, handle) for handle in handles)))
    except pynvml.NVMLError as error:
        raise ClusterError(f"NVML: {error}", where=node, hint="look at nvidia-smi and the fabric manager") from error
    finally:
        pynvml.nvmlShutdown()
    if not found:
        return NvlinkDomain(node=node)
    if len(found) > 1:
        told = ", ".join(f"{uuid}.{clique}" for uuid, clique in sorted(found))
        raise ClusterError(f"GPUs of one node are in several NVLink domains: {told}", where=node)
    [((uuid, clique), gpus)] = found.items()
    return NvlinkDomain(node=node, cluster_uuid=uuid, clique_id=clique, gpus=gpus)


def _domain(pynvml: Any, handle: Any) -> tuple[str, int] | None:
    """(cluster UUID, clique) of one GPU; None where its links end in the node."""
    import ctypes
    import uuid

    try:
        if hasattr(pynvml, "nvmlDeviceGetGpuFabricInfoV"):
            info = pynvml.c_nvmlGpuFabricInfoV_t()
            pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        else:
            info = pynvml.c_nvmlGpuFabricInfo_t()
            pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None
    cluster = bytes(info.clusterUuid)
    if info.state != _FABRIC_COMPLETED or not any(cluster):
        return None
    if info.status:
        raise pynvml.NVMLError(info.status)
    return str(uuid.UUID(bytes=cluster.ljust(16, b"\0")[:16])), int(info.cliqueId)
