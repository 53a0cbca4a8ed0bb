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

from pitools.core.errors import ConfigError, DataError
from pitools.topology.model import Fabric, Leaf, natural, tree
from pitools.topology.sources.conf import checked_name
from pitools.topology.sources.table import numbered_rows

_JUMP = 1.3  # from a height to the next, between levels of switches; noise within a level is less
_MOST_LEVELS = 4
_NEAREST = 1e-12  # of the farthest: what is nearer is as near
_MOST_NODES = 10_000  # 800 MB a matrix, of which there are a few at a time
_MEASURES = ("latency", "bandwidth")

Matrix = NDArray[np.float64]


def is_matrix(first_line: str) -> bool:
    """Whether a CSV that begins so is a matrix: its corner says what was measured."""
    return first_line.replace(";", ",").replace("\t", ",").split(",")[0].strip().lower().startswith(_MEASURES)


def read(text: str, where: str) -> Fabric:
    """The tree of a CSV: `latency_us,n1,n2…` (or bandwidth), then a line a node. Raises ConfigError, DataError."""
    (_, head), *rows = numbered_rows(text, where)
    _checked_size(len(head) - 1, where)
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


def load(path: Path) -> Fabric:
    """The tree of an .npz with arrays `nodes` and `latency` or `bandwidth`, or of an .npy beside NAME.nodes.

    NAME.nodes holds a name a line; the .npy's own name says `latency` or `bandwidth`. Raises ConfigError, DataError.
    """
    try:
        with path.open("rb") as file:
            if path.suffix == ".npz":  # before it is unpacked
                largest = max((item.file_size for item in ZipFile(file).infolist()), default=0)
                _checked_size(isqrt(largest // 8), str(path))
                file.seek(0)
            return _loaded(path, np.load(file, allow_pickle=False))
    except (OSError, ValueError, EOFError, KeyError, MemoryError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"no array of numbers: {error}", where=str(path)) from error


def _loaded(path: Path, held: Any) -> Fabric:
    measure = next((name for name in _MEASURES if name in (held if path.suffix == ".npz" else path.stem.lower())), "")
    if not measure:
        hint = f"call {'one of its arrays' if path.suffix == '.npz' else 'the file'} latency or bandwidth"
        raise ConfigError("is it latency or bandwidth?", where=str(path), hint=hint)
    if path.suffix == ".npz":
        names, values = [str(name) for name in held["nodes"].ravel()], held[measure]
    else:
        names, values = path.with_suffix(".nodes").read_text().split(), held
    if values.dtype.kind not in "fiu":
        raise ConfigError(f"{values.dtype} is no kind of number that is measured", where=str(path))
    return from_matrix(names, values.astype(np.float64), measure == "bandwidth", str(path))


def _checked_size(count: int, where: str) -> None:
    if count > _MOST_NODES:
        raise ConfigError(f"a matrix of {count} nodes", where=where, hint=f"{_MOST_NODES} at most: measure leaves")


def from_matrix(nodes: Sequence[str], values: Matrix, is_bandwidth: bool, where: str = "matrix") -> Fabric:
    """The tree of a measured (n, n) matrix; both directions of a pair count alike, the diagonal not at all.

    The link above a leaf has length 1 on average of its level, and those above it in proportion. Raises DataError for a
    pair that was not measured.
    """
    count = len(nodes)
    if values.shape != (count, count) or not count or len(set(nodes)) != count:
        raise DataError(f"{len(set(nodes))} names for a matrix of {values.shape}", where=where)
    _checked_size(count, where)
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
    distance = np.maximum((distance + distance.T) / 2, _NEAREST)
    merges = _linkage(distance)
    cuts = _cuts(np.array([height for _, _, height in merges]))
    labels = [_clusters(count, merges, cut) for cut in cuts]
    return _tree(nodes, labels, _lengths(merges, cuts))


def _linkage(distance: Matrix) -> list[tuple[int, int, float]]:
    """Merges (a member of one cluster, a member of the other, height), ascending: nearest-neighbour chains, O(n²)."""
    far = distance.copy()
    np.fill_diagonal(far, np.inf)
    size = np.ones(len(far))
    merges: list[tuple[int, int, float]] = []
    trail: list[int] = []
    while len(merges) < len(far) - 1:
        if not trail:
            trail.append(int(np.flatnonzero(size)[0]))
        here = trail[-1]
        nearest = int(np.argmin(far[here]))
        if len(trail) > 1 and far[here, trail[-2]] <= far[here, nearest]:
            nearest = trail[-2]
        if len(trail) < 2 or nearest != trail[-2]:
            trail.append(nearest)
            continue
        merges.append((here, nearest, float(far[here, nearest])))
        joined = (size[here] * far[here] + size[nearest] * far[nearest]) / (size[here] + size[nearest])
        far[nearest], far[:, nearest] = joined, joined
        far[here], far[:, here] = np.inf, np.inf
        far[nearest, nearest] = np.inf
        size[nearest], size[here] = size[nearest] + size[here], 0
        del trail[-2:]
    return sorted(merges, key=lambda merge: merge[2])


def _cuts(heights: Matrix) -> list[float]:
    """Heights between the levels of switches: in the widest jumps."""
    jumps = heights[1:] / heights[:-1]
    widest = [i for i in np.argsort(-jumps, kind="stable")[: _MOST_LEVELS - 1] if jumps[i] >= _JUMP]
    return [float(np.sqrt(heights[i] * heights[i + 1])) for i in sorted(widest)]


def _clusters(count: int, merges: Sequence[tuple[int, int, float]], cut: float) -> list[int]:
    """For each node, a member that stands for its cluster below a height."""
    head = list(range(count))

    def find(node: int) -> int:
        while head[node] != node:
            head[node] = head[head[node]]
            node = head[node]
        return node

    for a, b, height in merges:
        if height <= cut:
            head[find(a)] = find(b)
    return [find(node) for node in range(count)]


def _lengths(merges: Sequence[tuple[int, int, float]], cuts: Sequence[float]) -> list[float]:
    """Of the links above the switches of each level, leaves first: half of what they add to the way there and back."""
    heights = np.array([height for _, _, height in merges])
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
    for index in sorted(range(len(nodes)), key=lambda index: natural(nodes[index])):
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
    return tree((Leaf(path=path, nodes=tuple(group)) for path, group in held.items()), above)
