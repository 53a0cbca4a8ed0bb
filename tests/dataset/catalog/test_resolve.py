from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pitools.core.errors import DataError, UsageError
from pitools.dataset.catalog.retirement import retire_version
from pitools.dataset.ingest.ingest import ingest
from pitools.store import tags, version_list, version_state
from pitools.store.resolve import exists, require_root, resolve_version, split_dataset_path, warning_for


def test_every_way_to_name_a_version(publish, tmp_path, monkeypatch) -> None:
    """By folder, by the beginning of its version, by a tag, and by being the newest, from wherever one stands."""
    old, new = (publish(tmp_path, "x", number) for number in range(2))
    os.utime(old / "manifest.json", (1, 1))
    tags.move_tag(tmp_path, "x", "prod", old.name)
    monkeypatch.chdir(tmp_path)
    for base in ("", f"{tmp_path}/", "./"):
        assert resolve_version(f"{base}x").resolve() == new
        assert resolve_version(f"{base}x/").resolve() == new
        assert resolve_version(f"{base}x@prod").resolve() == old
        assert resolve_version(f"{base}x/{old.name}").resolve() == old
        assert resolve_version(f"{base}x/{old.name[:6]}").resolve() == old
    monkeypatch.chdir(old)
    assert resolve_version(".").resolve() == old
    assert resolve_version("..") == new
    monkeypatch.chdir(tmp_path / "x")
    assert resolve_version(".") == new
    assert split_dataset_path(".") == (tmp_path, "x")


def test_newest_is_one_to_use(publish, tmp_path) -> None:
    """What is retired, or in quarantine as a whole, is not what a dataset's name means."""
    old, mid, new = (publish(tmp_path, "x", number) for number in range(3))
    for when, path in enumerate((old, mid, new)):
        os.utime(path / "manifest.json", (when, when))
    version_state.set_quarantine(new, version_state.Quarantine(whole_version=True, set_at="", set_by=""))
    version_state.set_quarantine(
        mid, version_state.Quarantine(whole_version=False, episodes={0: ()}, set_at="", set_by="")
    )
    assert resolve_version(str(tmp_path / "x")) == mid
    retire_version(mid)
    assert resolve_version(str(tmp_path / "x")) == old
    retire_version(old)
    with pytest.raises(UsageError, match="all versions"):
        resolve_version(str(tmp_path / "x"))
    assert resolve_version(str(new)) == new


def test_newest_has_lost_its_manifest(robomimic, tmp_path) -> None:
    """The newest version is not replaced in silence by an older one; an older one may be lost, or one not to use."""
    root = tmp_path / "root"
    old, new = (Path(ingest([robomimic(n, name=f"{n}.hdf5")], root=root, name="x").path) for n in (3, 4))
    data = {path: (path / "manifest.json").read_bytes() for path in (old, new)}
    (new / "manifest.json").unlink()
    with pytest.raises(DataError) as caught:
        resolve_version(root / "x")
    assert caught.value.where == str(new)
    with pytest.raises(DataError):
        resolve_version(f"{root}/x/{new.name[:6]}")
    (old / "manifest.json").unlink()
    with pytest.raises(DataError):
        resolve_version(root / "x")
    (new / "manifest.json").write_bytes(data[new])
    assert resolve_version(root / "x") == new
    (old / "manifest.json").write_bytes(data[old])
    retire_version(new)
    (new / "manifest.json").unlink()
    assert resolve_version(root / "x") == old


def test_links_and_what_is_said(publish, tmp_path) -> None:
    """A link to a retired version names it no longer; what others wrote of it comes to the terminal as text."""
    old, new = (publish(tmp_path, "x", number) for number in range(2))
    os.utime(old / "manifest.json", (1, 1))
    (tmp_path / "x/latest").symlink_to(new.name)
    retire_version(new, reason="blurred\x1b[2J")
    assert resolve_version(tmp_path / "x") == old
    assert warning_for(old) == ""
    assert "blurred\\x1b[2J" in warning_for(new)
    (tmp_path / f"x/.catalog/retired/{new.name}.json").write_text("{")
    assert new.name in warning_for(new)
    assert (exists(tmp_path / "x@prod"), exists(tmp_path / "y@prod")) == (True, False)
    (tmp_path / "x@prod").mkdir()
    with pytest.raises(UsageError):  # what is there is not taken for a tag
        resolve_version(tmp_path / "x@prod")


def test_a_version_where_its_dataset_is_meant(publish, tmp_path) -> None:
    """It has all that a dataset has, so what is said is not that it has none, but which folder to give."""
    path = publish(tmp_path, "x")
    with pytest.raises(UsageError, match="ROOT/NAME") as caught:
        split_dataset_path(str(path))
    assert caught.value.hint == f"pass {path.parent}"


def test_what_names_nothing(publish, tmp_path) -> None:
    """A name that fits no version, or several, is refused with what there is."""
    root = tmp_path / "root"
    path = publish(root, "reach")
    for text, hint in (
        (f"{root}/reech", "reach"),
        (str(root), "reach"),
        (f"{root}/reach@prod", "tag"),
        (f"{root}/reach/{'0' * 8}", "list"),
        (f"{root}/reach/12345", ""),
        ("s3://b/x", "pit-stage"),
        (f"{root}/reach/{'z' * 32}", "digits"),
        (f"{root}/re*", "reach"),
        (f"{root}/*", ""),
        ("/", ""),
        ("", "ROOT/NAME"),
        (f"{tmp_path}/nowhere/x", "@TAG"),
        (f"{root}/reech/123456", '"reach"'),
    ):
        with pytest.raises(UsageError) as caught:
            resolve_version(text)
        assert hint in caught.value.hint
    shutil.copytree(path, path.with_name(path.name[:31] + ("0" if path.name[31] != "0" else "1")))
    with pytest.raises(UsageError, match="2 versions begin with"):
        resolve_version(f"{root}/reach/{path.name[:6]}")
    with pytest.raises(UsageError, match="dataset: not a version"):
        resolve_version(f"{root}/reach", newest=False)


def test_tag_of_what_is_gone(publish, tmp_path) -> None:
    """A tag whose version was removed by hand is told as damage."""
    path = publish(tmp_path, "x")
    tags.move_tag(tmp_path, "x", "prod", path.name)
    shutil.rmtree(path)
    with pytest.raises(DataError, match="missing"):
        resolve_version(f"{tmp_path / 'x'}@prod")


def test_names_that_look_like_paths(publish, tmp_path) -> None:
    """A root whose own name has an @ is a folder like any other."""
    path = publish(tmp_path / "me@host", "x")
    tags.move_tag(tmp_path / "me@host", "x", "prod", path.name)
    assert resolve_version(f"{tmp_path}/me@host/x@prod") == Path(path)


def test_root(publish, tmp_path) -> None:
    """A dataset or a version in the place of its root is told; an empty folder is a root, whatever lies beside it."""
    path = publish(tmp_path / "root", "x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "step_40").mkdir()
    (tmp_path / "step_40" / "manifest.json").write_text("{}")  # of a checkpoint, say
    for good in (tmp_path / "root", tmp_path / "empty", tmp_path):
        require_root(good)
    for bad in (path, path.parent):
        with pytest.raises(UsageError) as caught:
            require_root(bad)
        assert str(tmp_path / "root") in caught.value.hint


def test_each_time_is_read_once(publish, tmp_path, monkeypatch) -> None:
    """The newest of many versions, on a network file system too, costs one small file of each."""
    paths = [publish(tmp_path, "x", number) for number in range(3)]
    real, read = version_list.published_ns, []

    def published_ns(folder: Path) -> int:
        read.append(folder)
        return real(folder)

    monkeypatch.setattr(version_list, "published_ns", published_ns)
    assert resolve_version(tmp_path / "x") in paths  # they may be of one tick of the clock
    assert sorted(read) == sorted(paths)
    read.clear()
    assert exists(tmp_path / "x")
    require_root(tmp_path)
    assert not set(read).intersection(paths)
