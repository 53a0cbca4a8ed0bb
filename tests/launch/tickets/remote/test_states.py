"""What decides at a remote site who may run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pitools.core.errors import NoSpace
from pitools.launch.tickets import remote
from pitools.site.schema import Paths, Site


@pytest.mark.parametrize("write", [remote.revoke, remote.withdraw_grants])
def test_a_full_quota_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Site, Sequence[str]], object]
) -> None:
    """A grant that cannot be written for want of room says so, to be tried again: its ticket may yet go on."""
    site = Site(name="s", paths=Paths(runs=str(tmp_path / "runs")))
    tool = tmp_path / "bin" / "ln"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho \"ln: failed to create symbolic link 'grant': Disk quota exceeded\" >&2; exit 1\n")
    tool.chmod(0o755)
    (tmp_path / "runs" / "a.1").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        with pytest.raises(NoSpace):
            write(site, ["a.1"])
    write(site, ["a.1"])
    assert (tmp_path / "runs" / "a.1" / "grant").readlink() == Path("revoked")
    assert remote.revoke(site, ["a.1", "b.1"]) == {"a.1": True, "b.1": True}
