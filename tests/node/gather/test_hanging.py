"""More rows of a table hang than are waited for: what was read is judged, the rest is unknown, never missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pitools.node.check.evaluate import evaluate
from pitools.node.check.rule import Check
from pitools.node.gather import child
from pitools.node.gather.read import Query
from pitools.node.types import NodeFacts, Row


@pytest.fixture(scope="module")
def facts() -> NodeFacts:
    """A disk that is read, two servers that hang, of which one is waited for, and a file system behind them."""

    def read(query: Query) -> Iterator[Row]:
        yield {"target": "/", "type": "ext4", "is_read_only": True, "responds": True}
        for server in {"/nfs1", "/nfs2"}.difference(query.hung):
            yield {"target": server, "type": "nfs4", "responds": False}
            time.sleep(60)
        yield {"target": "/scratch", "type": "lustre", "is_read_only": False, "responds": True}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "_MOST_HUNG", 1)
        return child.read_tables([child.Collector("mounts", "a test", read, timeout_s=1.0)], Query())


def test_a_hang_is_left_out_of_its_table_alone(tmp_path: Path) -> None:
    """Where a child hangs before a further row its table ends; a subject of the same name in the next table is read."""
    children = tmp_path / "children"

    def hang(_query: Query) -> Iterator[Row]:
        with children.open("a") as file:
            file.write("1")
        yield {"target": "/a", "responds": False}
        time.sleep(60)

    def hang_once(query: Query) -> Iterator[Row]:
        yield from () if query.hung else hang(query)

    def read(query: Query) -> Iterator[Row]:
        yield from ({"path": path, "responds": True} for path in ("/a", "/b") if path not in query.hung)

    for first in (hang, hang_once):
        collectors = [child.Collector("mounts", "a test", first, 1.0), child.Collector("files", "a test", read)]
        tables = child.read_tables(collectors, Query()).tables
        assert [row["path"] for row in tables["files"].rows] == ["/a", "/b"]
        assert bool(tables["mounts"].unknown) is (first is hang)
    assert children.read_text() == "111"


@pytest.mark.parametrize(
    ("check", "states"),
    [
        ({"where": {"target": "/scratch"}, "min_count": 1}, ["unknown"]),
        ({"where": {"type": "lustre"}, "count": 1}, ["unknown"]),
        ({"where": {"type": "lustre"}, "max_count": 0}, ["unknown"]),
        ({"where": {"type": "ext4"}, "min_count": 1}, ["passed"]),
        ({"where": {"type": "nfs4"}, "max_count": 1}, ["failed"]),
        ({"where": {"type": "lustre"}, "key": "is_read_only", "equals": False}, ["unknown"]),
        ({"where": {"target": "/"}, "key": "is_read_only", "equals": False}, ["unknown", "failed"]),
        ({"where": {"type": "nfs4"}, "key": "responds", "equals": True}, ["unknown", "failed", "failed"]),
    ],
)
def test_rows_behind_those_that_hang_are_unknown(facts: NodeFacts, check: dict[str, Any], states: list[str]) -> None:
    """A mount that should be there is not missing; one that was read is at fault all the same."""
    assert [one.state for one in evaluate([Check(name="c", table="mounts", **check)], facts)] == states
