"""Results are kept per node, and only what this user or root wrote whole is read back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pitools.core.errors import ConfigError
from pitools.node.bench import history
from pitools.node.bench.compare import BenchResult


def row(node: str, value: float = 1.0) -> BenchResult:
    return BenchResult(node=node, measure="m", value=value)


def test_frozen_keys() -> None:
    """Released files have these."""
    keys = "schema node measure value verdict of_peers of_past problem hardware measured_at"
    assert list(msgspec.to_builtins(row("n1"))) == keys.split()


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    (tmp_path / "spool").mkdir(mode=0o700)
    return tmp_path / "spool"


def test_results_come_back_by_node_and_in_order(spool: Path) -> None:
    """Those of groups are kept in no file, and a name that is a path is no node."""
    assert history.read_past(spool, ["n1"]) == []
    history.append_results(spool, [row("n1"), row("n2"), row("n[1-2]"), row("../x")])
    history.append_results(spool, [row("n1", 2.0)])
    assert history.read_past(spool, ["n1"]) == [row("n1"), row("n1", 2.0)]
    assert history.read_past(spool, ["n3", "../x"]) == []
    assert sorted(path.name for path in spool.rglob("*.jsonl")) == ["n1.jsonl", "n2.jsonl"]


def test_what_is_damaged_or_of_another_node_is_left_out(spool: Path) -> None:
    """A line that was cut, foreign JSON, and a link."""
    history.append_results(spool, [row("n1")])
    path = spool / "bench" / "n1.jsonl"
    path.write_bytes(path.read_bytes() + b'{"schema": "pit.nod\n[1]\n\xff\n' + msgspec.json.encode(row("n2")) + b"\n")
    history.append_results(spool, [row("n1", 2.0)])
    assert history.read_past(spool, ["n1"]) == [row("n1"), row("n1", 2.0)]
    (spool / "bench" / "n4.jsonl").symlink_to(path)
    assert history.read_past(spool, ["n4"]) == []
    history.append_results(spool, [row("n4")])
    assert history.read_past(spool, ["n4"]) == [row("n4")]  # the link was replaced
    assert history.read_past(spool, ["n1"]) == [row("n1"), row("n1", 2.0)]


def test_a_folder_that_others_can_write_is_refused(spool: Path) -> None:
    """Its content would make good nodes slow, and slow ones good."""
    history.append_results(spool, [row("n1")])
    (spool / "bench").chmod(0o777)
    with pytest.raises(ConfigError):
        history.read_past(spool, ["n1"])


def test_a_file_does_not_grow_for_ever(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest results go."""
    monkeypatch.setattr(history, "_MAX_LINES", 20)
    for number in range(50):
        history.append_results(spool, [row("n1", float(number))])
    assert [each.value for each in history.read_past(spool, ["n1"])] == [float(number) for number in range(29, 50)]
