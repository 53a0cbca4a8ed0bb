"""Cluster a measured matrix of latencies or bandwidths between nodes into a tree with link lengths.

Average linkage merges the closest clusters repeatedly. A jump in the merge heights separates two levels of switches:
distances within a leaf are similar, and distances between leaves are larger by a factor.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, DataError, ToolMissing
from pitools.topology.fabric_model import Fabric, Leaf, natural_sort_key, tree_fabric
from pitools.topology.formats.conf import require_valid_name
from pitools.topology.formats.table import numbered_rows

_MIN_JUMP = 1.3  # least ratio of merge heights between two levels of switches; noise within a level is less
_MAX_LEVELS = 4
_MIN_LATENCY = 1e-12  # smallest distance, as a share of the largest
_MAX_NODES = 10_000  # 800 MB per matrix; several are in memory at a time
_MEASURES = ("latency", "bandwidth")

Matrix = NDArray[np.float64]


def is_matrix(first_line: str) -> bool:
    """Return whether a CSV with this first line is a matrix: its first cell names the measure."""
    return first_line.replace(";", ",").replace("\t", ",").split(",")[0].strip().lower().startswith(_MEASURES)


def read_matrix(text: str, where: str) -> Fabric:
    """Read a CSV of `latency_us,n1,n2…` (or bandwidth), then a line per node. Raises ConfigError and DataError."""
    (_, header), *rows = numbered_rows(text, where)
    _require_size(len(header) - 1, where)
    values = np.full((len(header) - 1, len(header) - 1), np.nan)
    for number, (line, row) in enumerate(rows):
        origin = f"{where}:{line}"
        if number >= len(values) or len(row) != len(header) or row[0] != header[number + 1]:
            hint = "write a line per column, in the same order of nodes"
            raise ConfigError("the matrix is not square, or its rows and columns differ", where=origin, hint=hint)
        try:
            values[number] = [float(cell) if cell else np.nan for cell in row[1:]]
        except ValueError as error:
            raise ConfigError(str(error), where=origin) from error
    return from_matrix(header[1:], values, header[0].lower().startswith("bandwidth"), where)


def load_matrix(path: Path) -> Fabric:
    """Read an .npz with arrays `nodes` and `latency` or `bandwidth`, or an .npy with NAME.nodes beside it.

    NAME.nodes has a node name per line; the name of the .npy contains `latency` or `bandwidth`.
    Raises ConfigError and DataError.
    """
    try:
        with path.open("rb") as file:
            if path.suffix == ".npz":  # check the size before decompression
                largest = max((item.file_size for item in ZipFile(file).infolist()), default=0)
                _require_size(isqrt(largest // 8), str(path))
                file.seek(0)
            return _parse_array(path, np.load(file, allow_pickle=False))
    except (OSError, ValueError, EOFError, KeyError, MemoryError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"not an array of numbers: {error}", where=str(path)) from error


def _parse_array(path: Path, array: Any) -> Fabric:
    measure = next((name for name in _MEASURES if name in (array if path.suffix == ".npz" else path.stem.lower())), "")
    if not measure:
        hint = f"call {'one of its arrays' if path.suffix == '.npz' else 'the file'} latency or bandwidth"
        raise ConfigError("no measure named (expected latency or bandwidth)", where=str(path), hint=hint)
    if path.suffix == ".npz":
        names, values = [str(name) for name in array["nodes"].ravel()], array[measure]
    else:
        names, values = path.with_suffix(".nodes").read_text().split(), array
    if values.dtype.kind not in "fiu":
        raise ConfigError(f"array of {values.dtype} (expected real numbers)", where=str(path))
    return from_matrix(names, values.astype(np.float64), measure == "bandwidth", str(path))


def _require_size(count: int, where: str) -> None:
    if count > _MAX_NODES:
        raise ConfigError(
            f"a matrix of {count} nodes (at most {_MAX_NODES})", where=where, hint="measure one node per leaf"
        )


def from_matrix(nodes: Sequence[str], values: Matrix, is_bandwidth: bool, where: str = "matrix") -> Fabric:
    """Return the tree of a measured (n, n) matrix. Both directions of a pair are averaged; the diagonal is ignored.

    Leaf uplinks have length 1, those of higher levels are in proportion. Raises DataError for an unmeasured pair.
    """
    count = len(nodes)
    if values.shape != (count, count) or not count or len(set(nodes)) != count:
        raise DataError(f"{len(set(nodes))} distinct names for a matrix of {values.shape}", where=where)
    _require_size(count, where)
    for name in nodes:
        require_valid_name(name, where)
    measured = np.where(np.isnan(values), values.T, values)  # one measured direction is enough
    np.fill_diagonal(measured, 1.0)
    invalid = np.argwhere(~(np.isfinite(measured) & (measured > 0)))
    if len(invalid):
        first, second = nodes[invalid[0][0]], nodes[invalid[0][1]]
        raise DataError(f'no positive number between "{first}" and "{second}"', where=where, hint="measure it again")
    np.fill_diagonal(measured, measured.flat[min(1, count - 1)])
    # Normalized by the largest, so that sums do not overflow; only ratios matter.
    distance = measured.min() / measured if is_bandwidth else measured / measured.max()
    distance = np.maximum((distance + distance.T) / 2, _MIN_LATENCY)
    heights, cuts, labels = _cluster(distance)
    return _build_tree(nodes, labels, _uplink_lengths(heights, cuts))


def _cluster(distance: Matrix) -> tuple[Matrix, list[float], list[list[int]]]:
    """Return the heights of the merges, ascending, the cuts between them, and for each cut every node's cluster.

    Raises ToolMissing without SciPy.
    """
    try:
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform
    except ImportError as error:
        hint = "pip install 'pitools-hpc[data]'"
        raise ToolMissing("a measured matrix is clustered with the package scipy", hint=hint) from error
    pairs = squareform(distance, checks=False)
    merges = linkage(pairs, "average") if len(pairs) else np.empty((0, 4))
    cuts = _cut_heights(merges[:, 2])
    return merges[:, 2], cuts, [fcluster(merges, cut, "distance").tolist() for cut in cuts]


def _cut_heights(heights: Matrix) -> list[float]:
    """Return the heights that separate levels of switches: the widest jumps."""
    jumps = heights[1:] / heights[:-1]
    widest = [i for i in np.argsort(-jumps, kind="stable")[: _MAX_LEVELS - 1] if jumps[i] >= _MIN_JUMP]
    return [float(np.sqrt(heights[i] * heights[i + 1])) for i in sorted(widest)]


def _uplink_lengths(heights: Matrix, cuts: Sequence[float]) -> list[float]:
    """Return the uplink length of each level, leaves first: half the difference of adjacent mean heights."""
    bands = np.searchsorted(np.array(cuts), heights)
    means = [float(heights[bands == band].mean()) for band in range(len(cuts) + 1)] if cuts else []
    steps = [(upper - lower) / 2 for lower, upper in pairwise(means)]
    return [round(step / steps[0], 3) for step in steps]


def _build_tree(nodes: Sequence[str], labels: Sequence[Sequence[int]], lengths: Sequence[float]) -> Fabric:
    """Return the tree, with switches `m`, `m1`, `m1.2` from the root down, numbered by their first nodes."""
    path_by_clusters: dict[tuple[int, ...], tuple[str, ...]] = {(): ("m",)}
    children: dict[tuple[int, ...], int] = {}
    nodes_by_path: dict[tuple[str, ...], list[str]] = {}
    uplink_lengths: dict[str, float] = {}
    for index in sorted(range(len(nodes)), key=lambda index: natural_sort_key(nodes[index])):
        clusters = [label[index] for label in reversed(labels)]
        for depth in range(1, len(clusters) + 1):
            key, parent = tuple(clusters[:depth]), tuple(clusters[: depth - 1])
            if key not in path_by_clusters:
                children[parent] = children.get(parent, 0) + 1
                path = path_by_clusters[parent]
                dot = "." if depth > 1 else ""
                path_by_clusters[key] = (*path, f"{path[-1]}{dot}{children[parent]}")
                uplink_lengths[path_by_clusters[key][-1]] = lengths[len(labels) - depth]
        nodes_by_path.setdefault(path_by_clusters[tuple(clusters)], []).append(nodes[index])
    return tree_fabric((Leaf(path=path, nodes=tuple(group)) for path, group in nodes_by_path.items()), uplink_lengths)
