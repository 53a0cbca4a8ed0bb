"""Transactions of a real accounting database, parsed."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path

from pitools.slurm.parse_transactions import Transaction, parse_transactions


def test_each_change_names_its_object(repo: Path) -> None:
    """Actor, time, action, names or ids and changed columns of each kind of object."""
    text = (repo / "tests/replay/slurm-22.05/transactions.txt").read_text()
    changes = parse_transactions(text, UTC)
    assert len(changes) == text.count("\n")
    assert {each.actor for each in changes} == {"root"}

    def last(action: str, kind: str) -> Transaction:
        return [each for each in changes if (each.action, each.kind) == (action, kind)][-1]

    assert last("modify", "user").names == ("ann",)
    assert last("modify", "user").at == "2026-11-27T08:14:37.000Z"
    assert last("modify", "association").fields[:3] == ("grp_jobs_accrue", "grp_submit_jobs", "grp_wall")
    assert {"grp_tres_run_mins", "max_tres_mins_pj"} < set(last("modify", "association").fields)
    assert last("modify", "qos").names == ("low",)
    assert (last("add", "association").names, last("add", "association").fields) == (("gone", "bob", ""), ())
    assert [each.ids for each in changes if each.ids[1:]] == [("3", "4")] * 2
    for action in ("add", "remove"):
        assert (last(action, "coordinator").names, last(action, "coordinator").accounts) == (("ann",), ("vision",))
    assert last("remove", "qos").ids == ("4",)


def test_texts_of_administrators_break_no_row() -> None:
    """A description with a newline and a separator is part of its own row; an unknown row is left out."""
    row = "2026-11-27T08:14:39|Modify Accounts|eve|(name='vision')|description='two\nlines | and = more'\n"
    changes = parse_transactions(f"garbage\n{row}{row.replace('eve', 'bob')}", UTC)
    assert [(each.actor, each.names, each.fields) for each in changes] == [
        (actor, ("vision",), ("description",)) for actor in ("eve", "bob")
    ]
