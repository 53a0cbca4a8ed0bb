from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path
from unittest.mock import patch

import pytest

from pitools.core.errors import ClusterError, DataError, TryLater, UsageError
from pitools.dataset.catalog.retirement import retire_version
from pitools.store import tags, version_state


def test_moves_are_a_history(publish, tmp_path) -> None:
    """A tag names what it was moved to last, removal too, and its history tells every move in order."""
    first, two = (publish(tmp_path, "x", number).name for number in range(2))
    assert tags.read_tags(tmp_path, "x") == {}
    for to, why in ((first, "first"), (two, ""), ("", "no more"), (first, "again")):
        tags.move_tag(tmp_path, "x", "prod", to, reason=why)
        assert {tag: value.version for tag, value in tags.read_tags(tmp_path, "x").items()} == (
            {"prod": to} if to else {}
        )
    assert [(move.number, move.version, move.reason) for move in tags.tag_history(tmp_path, "x", "prod")] == [
        (1, first, "first"),
        (2, two, ""),
        (3, "", "no more"),
        (4, first, "again"),
    ]
    assert {path.name for path in (version_state.tags_dir(tmp_path, "x") / "prod").iterdir()} == {
        f"{n}.json" for n in (1, 2, 3, 4)
    }


def test_again_changes_nothing(publish, tmp_path) -> None:
    """A move that was made already is a success, and no new entry, so that it is safe to repeat."""
    name = publish(tmp_path, "x").name
    first = tags.move_tag(tmp_path, "x", "prod", name)
    assert tags.move_tag(tmp_path, "x", "prod", name, expect="") == first
    assert len(tags.tag_history(tmp_path, "x", "prod")) == 1


def test_compare_and_swap(publish, tmp_path) -> None:
    """A move that expects another value than there is loses, and is told who won."""
    first, two, three = (publish(tmp_path, "x", number).name for number in range(3))
    tags.move_tag(tmp_path, "x", "prod", first, expect="")
    tags.move_tag(tmp_path, "x", "prod", two, expect=first)
    with pytest.raises(TryLater, match=rf"{version_state.current_user()} moved it to {two}"):
        tags.move_tag(tmp_path, "x", "prod", three, expect=first)
    with pytest.raises(TryLater, match="tag: not found"):
        tags.move_tag(tmp_path, "x", "other", three, expect=first)
    assert tags.read_tags(tmp_path, "x")["prod"].version == two


def test_late_loser(publish, tmp_path) -> None:
    """A move that is overtaken between its look and its link loses, whatever it expected."""
    first, two = (publish(tmp_path, "x", number).name for number in range(2))
    link = os.link

    def overtaken(*names):
        with patch("os.link", link):
            tags.move_tag(tmp_path, "x", "prod", first)
        link(*names)

    with patch("os.link", overtaken), pytest.raises(TryLater, match=f"moved it to {first}"):
        tags.move_tag(tmp_path, "x", "prod", two)
    assert [move.version for move in tags.tag_history(tmp_path, "x", "prod")] == [first]


def test_names_that_are_remembered(publish, tmp_path) -> None:
    """Where a network file system still remembers a tag's folder without the last moves, they count all the same."""
    one, two, three = (publish(tmp_path, "x", number).name for number in range(3))
    for to in (one, two, three):
        tags.move_tag(tmp_path, "x", "prod", to)
    first = [version_state.tags_dir(tmp_path, "x") / "prod/1.json"]
    with patch("pitools.store.version_state.list_names", return_value=first):
        assert tags.current_tag(tmp_path, "x", "prod").version == three


def test_survives_power_loss(publish, tmp_path) -> None:
    """A move is on disk before it can be seen, and its name before it is told."""
    name = publish(tmp_path, "x").name
    done = []
    fsync, link = os.fsync, os.link

    def synced(descriptor):
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    with patch("os.fsync", synced), patch("os.link", lambda *names: (done.append("link"), link(*names))):
        tags.move_tag(tmp_path, "x", "prod", name)
    assert done == ["file", "link", "folder"]


def test_lost_answer(publish, tmp_path) -> None:
    """Where NFS repeats a link whose answer was lost, and so meets its own file, the move is a success."""
    name = publish(tmp_path, "x").name
    link = os.link

    def twice(*names):
        link(*names)
        link(*names)

    with patch("os.link", twice):
        assert tags.move_tag(tmp_path, "x", "prod", name).number == 1
    assert tags.read_tags(tmp_path, "x")["prod"].version == name


def test_refused(publish, tmp_path) -> None:
    """A tag names no version that is missing or retired, and has a name that is one."""
    first, two = (publish(tmp_path, "x", number) for number in range(2))
    retire_version(first)
    with pytest.raises(UsageError, match="retired"):
        tags.move_tag(tmp_path, "x", "prod", first.name)
    with pytest.raises(UsageError, match="no such version"):
        tags.move_tag(tmp_path, "x", "prod", "0" * 32)
    with pytest.raises(UsageError, match="not a digest"):
        tags.move_tag(tmp_path, "x", "prod", f"../x/{two.name}")
    for bad in ("", "..", "a/b", ".hidden", "-x", "a" * 101):
        with pytest.raises(UsageError, match=r"tag .*: not a valid name"):
            tags.move_tag(tmp_path, "x", bad, two.name)
    assert tags.read_tags(tmp_path, "x") == {}


def test_a_version_with_a_damaged_manifest_is_not_tagged(publish, tmp_path) -> None:
    """Whoever asks for the tag would get nothing but an error: it goes on naming what it did."""
    first, two = (publish(tmp_path, "x", number) for number in range(2))
    tags.move_tag(tmp_path, "x", "prod", first.name)
    file = two / "manifest.json"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError) as caught:
        tags.move_tag(tmp_path, "x", "prod", two.name)
    assert two.name in caught.value.where
    assert tags.read_tags(tmp_path, "x")["prod"].version == first.name


def test_version_that_goes_meanwhile(publish, tmp_path) -> None:
    """A version that is taken away after the first look is not named in the end, and the tag is what it was."""
    first, two = (publish(tmp_path, "x", number) for number in range(2))
    tags.move_tag(tmp_path, "x", "prod", first.name)
    link = os.link

    def removed(*names):
        if two.exists():
            two.rename(tmp_path / "gone")
        link(*names)

    with patch("os.link", removed), pytest.raises(UsageError, match="no such version"):
        tags.move_tag(tmp_path, "x", "prod", two.name)
    assert [move.version for move in tags.tag_history(tmp_path, "x", "prod")] == [first.name, two.name, first.name]


def test_retire_meets_tag(publish, tmp_path) -> None:
    """A version that a tag names cannot be retired; nor where the tag is set while that is being written."""
    version = publish(tmp_path, "x")
    write = version_state.write_catalog_record

    def tagged(path, record, **settings):
        tags.move_tag(tmp_path, "x", "prod", version.name)
        write(path, record, **settings)

    with (
        patch("pitools.store.version_state.write_catalog_record", tagged),
        pytest.raises(UsageError, match="prod"),
    ):
        retire_version(version)
    with pytest.raises(UsageError, match="prod"):
        retire_version(version)
    assert not version_state.retired_file(tmp_path, "x", version.name).exists()


def test_damaged_entry(publish, tmp_path) -> None:
    """An entry that is not one, or a link to somewhere else, is named rather than passed over."""
    tags.move_tag(tmp_path, "x", "prod", publish(tmp_path, "x").name)
    path = version_state.tags_dir(tmp_path, "x") / "prod/2.json"
    path.write_text("{")
    with pytest.raises(DataError, match=str(path)):
        tags.read_tags(tmp_path, "x")
    version_state.write_catalog_record(path, tags._Move(version="../../else", moved_at="", moved_by=""))
    with pytest.raises(DataError, match="is not a version"):
        tags.read_tags(tmp_path, "x")
    path.unlink()
    path.symlink_to(path.with_name("1.json"))
    with pytest.raises(DataError, match="not a tag's value"):
        tags.read_tags(tmp_path, "x")


def _mover(root: Path, versions: list[str], seed: int, start, wins) -> None:
    start.wait()
    for i in range(20):
        to = versions[(seed * 7 + i) % len(versions)]
        observed = tags.current_tag(root, "x", "prod")
        if observed and observed.version == to:
            continue
        try:
            created = tags.move_tag(
                root, "x", "prod", to, expect=observed.version if observed else "", reason=f"{seed}.{i}"
            )
        except TryLater:
            continue
        if created.reason == f"{seed}.{i}":
            wins.put((created.number, seed, i, observed.version if observed else "", to))


def test_many_at_once(publish, tmp_path) -> None:
    """Of many processes that move one tag, every success has a number of its own, and the history is one chain."""
    versions = [publish(tmp_path, "x", number).name for number in range(5)]
    context = multiprocessing.get_context("fork")
    start, wins = context.Barrier(6), context.SimpleQueue()
    movers = [context.Process(target=_mover, args=(tmp_path, versions, seed, start, wins)) for seed in range(6)]
    for mover in movers:
        mover.start()
    won = []
    while any(mover.is_alive() for mover in movers) or not wins.empty():
        if not wins.empty():
            won.append(wins.get())
    for mover in movers:
        mover.join()
        assert mover.exitcode == 0
    while not wins.empty():
        won.append(wins.get())
    history = tags.tag_history(tmp_path, "x", "prod")
    won.sort()
    assert [number for number, *_ in won] == [*range(1, len(history) + 1)]
    assert [f"{seed}.{i}" for _, seed, i, _, _ in won] == [move.reason for move in history]
    held = ""
    for (_, _, _, expected, to), move in zip(won, history, strict=True):
        assert expected == held
        held = to
        assert move.version == to
    assert len(history) >= 20


def test_no_hard_links(publish, tmp_path) -> None:
    """Where the file system refuses links that is told, and nothing is left behind."""
    name = publish(tmp_path, "x").name
    with patch("os.link", side_effect=PermissionError(1, "no")), pytest.raises(ClusterError):
        tags.move_tag(tmp_path, "x", "prod", name)
    assert list((version_state.tags_dir(tmp_path, "x") / "prod").iterdir()) == []
