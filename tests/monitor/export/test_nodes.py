"""What nodes become, and why GPUs are out of use."""

from __future__ import annotations

from typing import Any

import pytest
from slurm_texts import node_text

from pitools.monitor.export import nodes
from pitools.monitor.export.samples import Samples
from pitools.slurm.parse_nodes import parse_nodes

OURS = "Reason=pit node [n03-20261126231500] gpu-count: gpus: 3 [root@2026-11-26T23:15:00]"


def gauges(*texts: str) -> Samples:
    return nodes.node_gauges(parse_nodes("".join(texts)))


def test_free_gpus_have_the_state_of_their_node() -> None:
    """A GPU that a job holds is allocated, also on a drained node; only the free ones there are out of use."""
    found: dict[Any, list[float]] = gauges(
        node_text("n01", "MIXED", used=1, partitions="gpu,all"),
        node_text("n02", "IDLE+DRAIN", tail=f" {OURS}"),
        node_text("n03", "MIXED+DRAIN", used=3, tail=" Reason=dusty [root@2026-11-26T23:15:00]"),
        node_text("n04", "DOWN*"),
        node_text("n05", "IDLE", gpus=0),
    )
    assert {key[1]: value[0] for key, value in found.items() if key[0] == "pit_gpus"} == {
        ("allocated",): 4,
        ("idle",): 3,
        ("drained",): 5,
        ("down",): 4,
    }
    assert {key[1]: value[0] for key, value in found.items() if key[0] == "pit_drained_gpus"} == {
        ("gpu-count",): 4,
        ("other",): 1,
        ("down",): 4,
    }
    assert found["pit_partition_gpus", ("all", "idle")] == [3]
    assert found["pit_nodes", ("drained",)] == [2]


@pytest.mark.parametrize(
    ("state", "exported"),
    [
        ("IDLE+CLOUD+POWERING_DOWN", "idle"),
        ("IDLE+CLOUD+NOT_RESPONDING+POWERING_DOWN", "idle"),
        ("IDLE+CLOUD+POWER_DOWN", "idle"),
        ("IDLE+CLOUD+DRAIN+POWERING_DOWN", "drained"),
        ("DOWN+CLOUD+POWERING_DOWN", "down"),
        ("IDLE+NOT_RESPONDING", "down"),
        ("FUTURE", None),
    ],
)
def test_saving_power_is_no_drain(state: str, exported: str | None) -> None:
    """Of cloud nodes that Slurm shuts down because no job needs them; future ones are not there."""
    found = gauges(node_text("n01", state))
    for metric in ("pit_nodes", "pit_gpus"):
        states = [labels[0] for (name, labels), values in found.items() if name == metric and values[0]]
        assert states == ([exported] if exported else [])


def test_unknown_gpus_are_absent() -> None:
    """Of a node whose allocated GPUs Slurm does not print, none is called idle."""
    text = node_text("n01").replace("GresUsed=gpu:0(IDX:N/A) ", "")
    assert ("pit_gpus", ("idle",)) not in gauges(text)


@pytest.mark.parametrize(("gap_s", "counted"), [(60, 240), (0, 0), (-30, 0), (nodes.MAX_GAP_S + 1, 0)])
def test_drained_time_is_counted_where_it_was_looked_at(gap_s: float, counted: float) -> None:
    """Over the time since the look before; nothing after a long absence, or where the clock went back."""
    found = nodes.node_counts(gauges(node_text("n02", "IDLE+DRAIN", tail=f" {OURS}")), 1000.0, 1000.0 + gap_s)
    assert sum(values[0] for values in found.values()) == counted
    assert not any(map(sum, nodes.node_counts(gauges(node_text("n02", "DOWN")), 0.0, 1000.0).values()))
