"""Files of the spool: which the controller and the nodes use, and which they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pitools.node import spool
from pitools.node.types import NodeReport


@pytest.mark.parametrize("how", ["hard link", "others may write", "of another node"])
def test_a_report_that_another_could_have_written_is_none(tmp_path: Path, how: str) -> None:
    """Nor one with a second name: where fs.protected_hardlinks is 0, any user gives a file of root's one."""
    spool.write_report(tmp_path, NodeReport(node="n1", boot_id="b", checked_at="2026-11-01T00:00:00.000Z"))
    path = tmp_path / "n1.json"
    assert spool.read_reports(tmp_path, ["n1"])[0].keys() == {"n1"}
    if how == "hard link":
        (tmp_path / "elsewhere").hardlink_to(path)
    elif how == "others may write":
        path.chmod(0o664)
    else:
        path.write_text(path.read_text().replace("n1", "n2"))
    reports, problems = spool.read_reports(tmp_path, ["n1"])
    assert (reports, len(problems)) == ({}, 1)


@pytest.mark.parametrize(("mode", "expected"), [(0o755, "2026-11-01T00:00:00.000Z"), (0o777, None)])
def test_what_was_dealt_with_is_read_from_a_spool_of_ours_alone(
    tmp_path: Path, mode: int, expected: str | None
) -> None:
    """Otherwise any user who may replace the folder keeps a broken node in use."""
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "handled.json").write_text(json.dumps({"n1": "2026-11-01T00:00:00.000Z"}))
    tmp_path.chmod(mode)
    assert spool.handled_until(tmp_path, "n1") == expected
