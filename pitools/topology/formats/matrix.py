"""A measured matrix of latencies or bandwidths between nodes, clustered into a tree with lengths of links.

Average linkage merges what is nearest, again and again. Where the heights of the merges jump, a level of switches ends:
within a leaf, pairs are about as near as each other, and between leaves farther by a factor.
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
from pitools.topology.formats.conf import checked_name
from pitools.topology.formats.table import numbered_rows

_MIN_JUMP = 1.3  # from a height to the next, between levels of switches; noise within a level is less
_MAX_LEVELS = 4
_MIN_LATENCY = 1e-12  # of the farthest: what is nearer is as near
_MAX_NODES = 10_000  # 800 MB a matrix, of which there are a few at a time
_MEASURES = ("latency", "bandwidth")

Matrix = NDArray[np.float64]


def is_matrix(first_line: str) -> bool:
    """Whether a CSV that begins so is a matrix: its corner says what was measured."""
    return first_line.replace(";", ",").replace("\t", ",").split(",")[0].strip().lower().startswith(_MEASURES)


def read_matrix(text: str, where: str) -> Fabric:
    """The tree of a CSV: `latency_us,n1,n2…` (or bandwidth), then a line a node. Raises ConfigError, DataError."""
    (_, head), *rows = numbered_rows(text, where)
    _require_size(len(head) - 1, where)
    values = np.full((len(head) - 1, len(head) - 1), np.nan)
    for number, (line, row) in enumerate(rows):
        at = f"{where}:{line}"
        if number >= len(values) or len(row) != len(head) or row[0] != head[number + 1]:
            hint = "as many lines as columns, in the same order of nodes"
            raise ConfigError("the matrix is not square", where=at, hint=hint)
        try:
            values[number] = [float(cell) if cell else np.nan for cell in row[1:]]
        except ValueError as error:
            raise ConfigError(str(error), where=at) from error
    return from_matrix(head[1:], values, head[0].lower().startswith("bandwidth"), where)


def load_matrix(path: Path) -> Fabric:
    """The tree of an .npz with arrays `nodes` and `latency` or `bandwidth`, or of an .npy beside NAME.nodes.

    NAME.nodes holds a name a line; the .npy's own name says `latency` or `bandwidth`. Raises ConfigError, DataError.
    """
    try:
        with path.open("rb") as file:
            if path.suffix == ".npz":  # before it is unpacked
                largest = max((item.file_size for item in ZipFile(file).infolist()), default=0)
                _require_size(isqrt(largest // 8), str(path))
                file.seek(0)
            return _loaded(path, np.load(file, allow_pickle=False))
    except (OSError, ValueError, EOFError, KeyError, MemoryError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"no array of numbers: {error}", where=str(path)) from error


def _loaded(path: Path, array: Any) -> Fabric:
    measure = next((name for name in _MEASURES if name in (array if path.suffix == ".npz" else path.stem.lower())), "")
    if not measure:
        hint = f"call {'one of its arrays' if path.suffix == '.npz' else 'the file'} latency or bandwidth"
        raise ConfigError("is it latency or bandwidth?", where=str(path), hint=hint)
    if path.suffix == ".npz":
        names, values = [str(name) for name in array["nodes"].ravel()], array[measure]
    else:
        names, values = path.with_suffix(".nodes").read_text().split(), array
    if values.dtype.kind not in "fiu":
        raise ConfigError(f"{values.dtype} is no kind of number that is measured", where=str(path))
    return from_matrix(names, values.astype(np.float64), measure == "bandwidth", str(path))


def _require_size(count: int, where: str) -> None:
    if count > _MAX_NODES:
        raise ConfigError(f"a matrix of {count} nodes", where=where, hint=f"{_MAX_NODES} at most: measure leaves")


def from_matrix(nodes: Sequence[str], values: Matrix, is_bandwidth: bool, where: str = "matrix") -> Fabric:
    """The tree of a measured (n, n) matrix; both directions of a pair count alike, the diagonal not at all.

    The link above a leaf has length 1 on average of its level, and those above it in proportion. Raises DataError for a
    pair that was not measured.
    """
    count = len(nodes)
    if values.shape != (count, count) or not count or len(set(nodes)) != count:
        raise DataError(f"{len(set(nodes))} names for a matrix of {values.shape}", where=where)
    _require_size(count, where)
    for name in nodes:
        checked_name(name, where)
    known = np.where(np.isnan(values), values.T, values)  # one direction stands for both
    np.fill_diagonal(known, 1.0)
    bad = np.argwhere(~(np.isfinite(known) & (known > 0)))
    if len(bad):
        first, second = nodes[bad[0][0]], nodes[bad[0][1]]
        raise DataError(f'no positive number between "{first}" and "{second}"', where=where, hint="measure it again")
    np.fill_diagonal(known, known.flat[min(1, count - 1)])
    # In shares of the largest, lest their sums overflow: only what they are to each other matters.
    distance = known.min() / known if is_bandwidth else known / known.max()
    distance = np.maximum((distance + distance.T) / 2, _MIN_LATENCY)
    heights, cuts, labels = _clustered(distance)
    return _tree(nodes, labels, _lengths(heights, cuts))


def _clustered(distance: Matrix) -> tuple[Matrix, list[float], list[list[int]]]:
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
    cuts = _cuts(merges[:, 2])
    return merges[:, 2], cuts, [fcluster(merges, cut, "distance").tolist() for cut in cuts]


def _cuts(heights: Matrix) -> list[float]:
    """Heights between the levels of switches: in the widest jumps."""
    jumps = heights[1:] / heights[:-1]
    widest = [i for i in np.argsort(-jumps, kind="stable")[: _MAX_LEVELS - 1] if jumps[i] >= _MIN_JUMP]
    return [float(np.sqrt(heights[i] * heights[i + 1])) for i in sorted(widest)]


def _lengths(heights: Matrix, cuts: Sequence[float]) -> list[float]:
    """Of the links above the switches of each level, leaves first: half of what they add to the way there and back."""
    bands = np.searchsorted(np.array(cuts), heights)
    means = [float(heights[bands == band].mean()) for band in range(len(cuts) + 1)] if cuts else []
    steps = [(upper - lower) / 2 for lower, upper in pairwise(means)]
    return [round(step / steps[0], 3) for step in steps]


def _tree(nodes: Sequence[str], labels: Sequence[Sequence[int]], lengths: Sequence[float]) -> Fabric:
    """Switches `m`, `m1`, `m1.2` from the root down, numbered in the order of their first nodes."""
    named: dict[tuple[int, ...], tuple[str, ...]] = {(): ("m",)}
    children: dict[tuple[int, ...], int] = {}
    held: dict[tuple[str, ...], list[str]] = {}
    above: dict[str, float] = {}
    for index in sorted(range(len(nodes)), key=lambda index: natural_sort_key(nodes[index])):
        clusters = [label[index] for label in reversed(labels)]
        for depth in range(1, len(clusters) + 1):
            key, parent = tuple(clusters[:depth]), tuple(clusters[: depth - 1])
            if key not in named:
                children[parent] = children.get(parent, 0) + 1
                path = named[parent]
                dot = "." if depth > 1 else ""
                named[key] = (*path, f"{path[-1]}{dot}{children[parent]}")
                above[named[key][-1]] = lengths[len(labels) - depth]
        held.setdefault(named[tuple(clusters)], []).append(nodes[index])
    return tree_fabric((Leaf(path=path, nodes=tuple(group)) for path, group in held.items()), above)
