"""What others can change decides nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core import trust
from pitools.core.errors import ConfigError

STRANGER = 54321  # a uid and gid of nobody


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A file of one's own in a folder of one's own."""
    path = tmp_path / "folder" / "conf"
    path.parent.mkdir(mode=0o755)
    path.write_text("")
    path.chmod(0o644)
    return path


def refused(path: Path, **options: object) -> str:
    """Where the path was refused."""
    with pytest.raises(ConfigError) as caught:
        trust.require_trusted(path, "conf", **options)
    assert caught.value.exit_code == 3
    return caught.value.where


def test_what_is_ours_alone_is_taken(conf: Path) -> None:
    """Below the sticky temporary folder too, and through links of our own."""
    trust.require_trusted(conf, "conf")
    trust.require_trusted(Path("/etc/passwd"), "conf")
    link = conf.with_name("link")
    link.symlink_to("../folder/conf")
    trust.require_trusted(link, "conf")
    trust.require_trusted(conf.parent / ".." / "folder" / "conf", "conf")


@pytest.mark.parametrize("mode", [0o666, 0o646, 0o664])
def test_a_file_that_others_may_write_is_refused(conf: Path, mode: int, request: pytest.FixtureRequest) -> None:
    """By everybody, or by a group that is more than its owner."""
    if os.geteuid() == 0:
        os.chown(conf, 0, STRANGER)
    elif mode == 0o664:
        request.getfixturevalue("as_root")
    conf.chmod(mode)
    assert refused(conf) == str(conf)


@pytest.mark.parametrize(("mode", "ok"), [(0o777, False), (0o1777, True), (0o775, False), (0o1775, True)])
def test_a_folder_on_the_way_must_keep_its_entries(
    conf: Path, mode: int, ok: bool, request: pytest.FixtureRequest
) -> None:
    """Sticky ones do, for entries of their owner; a group's is taken where the site trusts the group."""
    if os.geteuid() == 0:
        os.chown(conf.parent, 0, STRANGER)
    elif mode & 0o020 and not mode & 0o002:
        request.getfixturevalue("as_root")
    conf.parent.chmod(mode)
    if ok:
        trust.require_trusted(conf, "conf")
        return
    assert refused(conf) == str(conf.parent)
    assert refused(conf, group_above=True) == str(conf.parent)  # a group that is none of ours


def test_a_folder_to_make_something_in_may_be_sticky(conf: Path) -> None:
    """As the temporary folder is; one that everybody can rename in is refused itself."""
    trust.require_trusted(Path("/tmp"), "conf", inside=True)
    assert refused(Path("/tmp")) == "/tmp"
    conf.parent.chmod(0o777)
    assert refused(conf.parent, inside=True) == str(conf.parent)


@pytest.mark.usefixtures("as_root")
def test_a_group_is_trusted_with_folders_where_that_is_said(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's folder of a group of ours, open to it: above, never the thing itself; nor out of a folder like /tmp."""
    os.chown(conf.parent, STRANGER, STRANGER)
    conf.parent.chmod(0o2770)
    assert refused(conf) == refused(conf, group_above=True) == str(conf.parent)
    monkeypatch.setattr(os, "getgroups", lambda: [STRANGER])
    trust.require_trusted(conf, "conf", group_above=True)
    assert refused(conf) == str(conf.parent)
    os.chown(conf, STRANGER, STRANGER)
    assert refused(conf, group_above=True) == str(conf)
    os.chown(conf, 0, 0)
    conf.parent.parent.chmod(0o1777)
    assert refused(conf, group_above=True) == str(conf.parent)


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("of", ["file", "folder", "link"])
def test_what_belongs_to_another_is_refused(conf: Path, of: str) -> None:
    """The file, a folder on the way, or a link on the way, whose owner could point it elsewhere."""
    link = conf.with_name("link")
    link.symlink_to("conf")
    position = {"file": conf, "folder": conf.parent, "link": link}[of]
    os.chown(position, STRANGER, -1, follow_symlinks=False)
    assert refused(link) == str(position)


@pytest.mark.usefixtures("as_root")
def test_a_trusted_account_is_as_good_as_root(conf: Path) -> None:
    """`trusted_user` names one; a name that is no account's trusts nobody."""
    os.chown(conf, 1, -1)  # daemon
    trust.require_trusted(conf, "conf", trusted_user="daemon")
    assert refused(conf, trusted_user="no such account") == str(conf)


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path.name)]
)
def test_what_cannot_be_read_is_said(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A file that is not there, a dangling link, and a link to itself."""
    make(tmp_path / "x")
    assert refused(tmp_path / "x") == str(tmp_path / "x")
