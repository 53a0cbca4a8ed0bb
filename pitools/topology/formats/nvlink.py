"""NVLink domains: a record per node, read from NVML on the node; the domains are the blocks of a fabric."""

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
from pitools.topology.formats.conf import require_valid_name

_FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED: the fabric manager has registered the GPU


class NvlinkDomain(Record, frozen=True, kw_only=True, tag="pit.nvlink-domain/1"):
    """The NVLink domain of a node. cluster_uuid: "" if its NVLink stays within the node. gpus: GPUs in the domain."""

    node: str
    cluster_uuid: str = ""
    clique_id: int = 0
    gpus: int = 0


def read_domains(text: str, where: str) -> Fabric:
    """Return the blocks of `pit.nvlink-domain/1` lines, one per node. Raises ConfigError with the line number."""
    domains = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                domains.append(decode_json(line, NvlinkDomain))
            except msgspec.DecodeError as error:
                hint = "srun -N ALL --ntasks-per-node=1 pit topology show --nvlink-here"
                raise ConfigError(f"invalid record: {error}", where=f"{where}:{number}", hint=hint) from error
            require_valid_name(domains[-1].node, f"{where}:{number}")
            if domains[-1].cluster_uuid:
                require_valid_name(domains[-1].cluster_uuid, f"{where}:{number}")
    return fabric_of_domains(domains, where)


def fabric_of_domains(domains: Iterable[NvlinkDomain], where: str = "nvlink") -> Fabric:
    """Return a block per NVLink domain, ordered by first node. The base block size is that of the smallest domain.

    Nodes without a domain are omitted. Raises DataError for a node in two domains.
    """
    nodes_by_domain: dict[tuple[str, int], list[str]] = {}
    domain_by_node: dict[str, tuple[str, int]] = {}
    for domain in domains:
        key = (domain.cluster_uuid, domain.clique_id)
        if domain_by_node.setdefault(domain.node, key) != key:
            raise DataError(f'node "{domain.node}" is in two NVLink domains', where=where, hint="record them again")
        if domain.cluster_uuid:
            nodes_by_domain.setdefault(key, []).append(domain.node)
    name_counts = Counter(f"{uuid[:8]}.{clique}" for uuid, clique in nodes_by_domain)
    ordered = sorted(nodes_by_domain.items(), key=lambda item: min(map(natural_sort_key, item[1])))
    leaves = []
    for (uuid, clique), nodes in ordered:
        short_name = f"{uuid[:8]}.{clique}"
        name = short_name if name_counts[short_name] == 1 else f"{uuid}.{clique}"
        leaves.append(Leaf(path=(f"nvl-{name}",), nodes=tuple(nodes)))
    return block_fabric(leaves, {min(len(set(leaf.nodes)) for leaf in leaves)} if leaves else ())


def local_domain() -> NvlinkDomain:
    """Return this node's domain. Raises ToolMissing without NVML, ClusterError if it fails or its GPUs disagree."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    try:
        pynvml: Any = import_module("pynvml")
    except ImportError as error:
        hint = "pip install 'pitools-hpc[gpu]'"
        raise ToolMissing("reading NVLink domains needs the package nvidia-ml-py", hint=hint) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ToolMissing(f"NVML does not start: {error}", where=node, hint="run it on a node with GPUs") from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpu_counts = Counter(filter(None, (_query_domain(pynvml, handle) for handle in handles)))
    except pynvml.NVMLError as error:
        raise ClusterError(f"NVML: {error}", where=node, hint="check nvidia-smi and the fabric manager") from error
    finally:
        pynvml.nvmlShutdown()
    if not gpu_counts:
        return NvlinkDomain(node=node)
    if len(gpu_counts) > 1:
        names = ", ".join(f"{uuid}.{clique}" for uuid, clique in sorted(gpu_counts))
        raise ClusterError(f"the node's GPUs are in several NVLink domains: {names}", where=node)
    [((uuid, clique), gpus)] = gpu_counts.items()
    return NvlinkDomain(node=node, cluster_uuid=uuid, clique_id=clique, gpus=gpus)


def _query_domain(pynvml: Any, handle: Any) -> tuple[str, int] | None:
    """Return (cluster UUID, clique) of a GPU; None if its NVLink stays within the node."""
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
