"""The kind of a span by the name that a profiler gave it."""

from __future__ import annotations

import re

from pitools.perf.spans import Kind

# Collectives' kernels by their libraries, and those of symmetric memory, which no library's name marks.
_COLLECTIVE_KERNEL = re.compile(
    r"nccl|rccl|hccl|oneccl|nvshmem|multimem_|cross_device_reduce|(one|two)_shot_all_?reduce", re.IGNORECASE
)
# What runs a collective on the host: gloo's and MPI's threads. (`nccl:…` there is the launch alone.)
_HOST_COLLECTIVE = re.compile(r"(gloo|mpi|ucc|xccl):")
# XLA's operations, and those that JAX names by its primitives.
_HLO_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|(ragged-)?all-to-all|collective-(permute|broadcast)|send|recv|psend|precv"
    r"|(unreduced_)?(psum|all_gather|reduce_scatter)(_invariant|_reduced)?|p(max|min|permute|broadcast)"
    r"|(ragged_)?all_to_all)([-_](start|done))?(\.\d+)?"
)
_ANNOTATIONS = (
    (
        Kind.INPUT,
        re.compile(
            r".*DataLoader.*|input([_ ](wait|pipeline))?|(next|get|load|fetch)[_ ]batch|data[_ ]?(load(ing|er)?|wait)",
            re.IGNORECASE,
        ),
    ),
    (Kind.CHECKPOINT, re.compile(r"((save|write|restore|load)[_ ])?checkpoint([_ ](save|wait|restore))?", re.I)),
)
_COMPILE = re.compile(r".*\(dynamo_timed\)|PjRt\w*Client::Compile\w*|backend_compile|XlaCompile\w*|compile")
# Launches of a collective, whose time is spent elsewhere; and waiting, during which the host does nothing.
_NO_WORK = re.compile(
    r"c10d::.*|record_param_comms|ProfilerStep.*|(cuda|hip)\w*Synchronize|\$.*|.*::Await|Wait for .*"
    r"|ThreadpoolListener.*|end: .*|.*\(wait for completion\)|ThunkExecutor::Execute|PythonRefManager.*"
)


def device_kind(name: str, *, is_copy: bool = False) -> Kind:
    """Return the kind of a span on a device. is_copy: whether the profiler says so; filling memory is no copy."""
    if is_copy or name.startswith("Memcpy"):
        return Kind.COPY
    return Kind.COMMUNICATION if _COLLECTIVE_KERNEL.search(name) else Kind.COMPUTE


def hlo_kind(name: str) -> Kind:
    """Return the kind of an operation of XLA."""
    return Kind.COMMUNICATION if _HLO_COLLECTIVE.fullmatch(name) else Kind.COMPUTE


def host_kind(name: str, *, is_annotation: bool) -> Kind | None:
    """Return the kind of a span of a thread; None for what is no work of that thread.

    is_annotation: whether the program named it; only such names are taken for input and checkpoints.
    """
    if _NO_WORK.fullmatch(name):
        return None
    if _COMPILE.fullmatch(name):
        return Kind.COMPILE
    if not is_annotation:
        return Kind.OP
    if _HOST_COLLECTIVE.match(name):
        return Kind.COMMUNICATION
    return next((kind for kind, pattern in _ANNOTATIONS if pattern.fullmatch(name)), Kind.HOST)
