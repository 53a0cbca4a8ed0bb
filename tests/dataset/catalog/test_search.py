from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from pitools.core.errors import DataError, UsageError
from pitools.dataset.catalog import index, search
from pitools.dataset.catalog.retirement import retire_version, undo_retirement
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.versions import describe_version
from pitools.loader.open import open_version
from pitools.store import manifest as manifests
from pitools.store import tags, version_state


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An index of the test's own, which believes a folder that did not change for a tenth of a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("pitools.dataset.catalog.index._TICK_NS", 100_000_000)
    return tmp_path / "cache"


@pytest.fixture
def root(publish, tmp_path) -> Path:
    """Five versions of three datasets."""
    root = tmp_path / "root"
    publish(root, "pick", 0, episodes=10, instructions={"pick up the cup": 10})
    publish(root, "pick", 1, episodes=200, instructions={"pick up the cup": 150, "Öffne die Lade": 50})
    publish(root, "reach", 2, episodes=50, arrays=("action", "obs/eye_image", "obs/state"))
    publish(root, "reach", 3, episodes=60, arrays=("action", "obs/eye_depth"))
    publish(root, "stack.v2", 4, episodes=70)
    return root


def settle() -> None:
    """Wait until no folder has changed just now."""
    time.sleep(0.12)


def find(root: Path, *conditions: str) -> list[tuple[str, int]]:
    """Name and episodes of what is found."""
    return [(actual.name, actual.episodes) for actual in search.search(root, index.load_index(root)[0], conditions)]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([], [10, 200, 50, 60, 70]),
        (["episodes>=60"], [200, 60, 70]),
        (["episodes > 60", "episodes<200"], [70]),
        (["episodes=50"], [50]),
        (["episodes!=50", "name=reach"], [60]),
        (["name=*a*"], [50, 60, 70]),
        (["name!=reach"], [10, 200, 70]),
        (["instruction~PICK up"], [10, 200]),
        (["instruction~öffne"], [200]),
        (["instruction=pick*"], [10, 200]),
        (["array=obs/*_image"], [50]),
        (["array=obs/*"], [50, 60]),
        (["array~depth"], [60]),
        (["bytes<1KiB", "files=2", "steps>=700"], [200, 70]),
        (["bytes>1GiB"], []),
        (["size<1KiB", "date>=2020-01-01"], [10, 200, 50, 60, 70]),
        (["state=live"], [10, 200, 50, 60, 70]),
        (["version!=000000"], [10, 200, 50, 60, 70]),
        (["tag=*"], []),
        (["tag="], [10, 200, 50, 60, 70]),
        (["tag!=*"], [10, 200, 50, 60, 70]),
        (["instruction=*"], [10, 200]),
        (["tag=prod"], []),
        (["published>=2020-01-01"], [10, 200, 50, 60, 70]),
        (["published<2020-01-01T00:00:00Z"], []),
        (["quarantined_episodes>0"], []),
        (["quarantined_episodes=0", "state=l*"], [10, 200, 50, 60, 70]),
    ],
    ids=str,
)
def test_conditions(root, conditions, expected) -> None:
    """Each condition finds what it says."""
    assert [episodes for _, episodes in find(root, *conditions)] == expected


def test_a_day_is_a_whole_one(root) -> None:
    """`<=` and `>` of a date mean its end, `<` and `>=` its begin."""
    moment = next(search.search(root, index.load_index(root)[0], ["episodes=50"])).published
    day = moment[:10]
    assert find(root, f"published>={day}", f"published<={day}", "name=reach") == [("reach", 50), ("reach", 60)]
    assert find(root, f"published>{day}") == find(root, f"published<{day}") == find(root, f"published!={day}") == []
    assert len(find(root, f"published={day}")) == 5
    assert ("reach", 50) in find(root, f"published={moment}", "published!=2020-01-01")


@pytest.mark.parametrize(
    "text",
    [
        "episodes",
        "episode>=5",
        "episodes~5",
        "episodes>=many",
        "instruction>=5",
        "published>=soon",
        "bytes>=1XB",
        "published=2026",
        "episodes>=²",
        "",
    ],
)
def test_refused(text) -> None:
    """What is no condition is refused."""
    with pytest.raises(UsageError) as caught:
        search.parse_condition(text)
    assert "--where" in caught.value.where
    assert text in f"{caught.value.where} {caught.value}"


def test_what_is_said_of_versions(root) -> None:
    """Tags, retirement and quarantine show at once, also with an index from before."""
    assert len(find(root)) == 5
    small, large = (Path(actual.path) for actual in search.search(root, index.load_index(root)[0], ["name=pick"]))
    tags.move_tag(root, "pick", "prod", large.name)
    tags.move_tag(root, "pick", "best", large.name)
    retire_version(small)
    settle()
    assert find(root, "tag=prod") == find(root, "tag=*") == [("pick", 200)]
    version_state.set_quarantine(
        large, version_state.Quarantine(whole_version=False, episodes={3: ("black",), 5: ()}, set_at="", set_by="")
    )
    matches = {actual.episodes: actual for actual in search.search(root, index.load_index(root)[0], ["name=pick"])}
    assert (matches[200].tags, matches[200].quarantined_episodes, matches[200].state) == (("best", "prod"), 2, "live")
    assert matches[10].state == "retired"
    assert [episodes for _, episodes in find(root, "quarantined_episodes=2")] == [200]
    undo_retirement(root, "pick", small.name)
    tags.move_tag(root, "pick", "best", small.name)
    version_state.set_quarantine(large, version_state.Quarantine(whole_version=True, set_at="", set_by=""))
    matches = {actual.episodes: actual for actual in search.search(root, index.load_index(root)[0], ["name=pick"])}
    assert (matches[200].tags, matches[200].state, matches[200].quarantined_episodes) == (("prod",), "quarantined", 200)
    assert (matches[10].tags, matches[10].state) == (("best",), "live")


def test_each_change_shows(publish, root) -> None:
    """Whatever is done to a version, alone, shows in the next search, with an index from before."""
    path = next(Path(actual.path) for actual in search.search(root, index.load_index(root)[0], ["name=stack*"]))
    version = publish(root, "stack.v2", 5, episodes=71)
    tags.move_tag(root, "stack.v2", "old", version.name)

    def held(number: int) -> version_state.Quarantine:
        return version_state.Quarantine(
            whole_version=False, episodes=dict.fromkeys(range(number), ("black",)), set_at="", set_by=""
        )

    for act, condition in (
        (lambda: tags.move_tag(root, "stack.v2", "prod", path.name), "tag=prod"),
        (lambda: tags.move_tag(root, "stack.v2", "prod", version.name), "tag!=prod"),
        (lambda: tags.move_tag(root, "stack.v2", "prod", path.name), "tag=prod"),
        (lambda: tags.move_tag(root, "stack.v2", "prod", ""), "tag!=prod"),
        (lambda: retire_version(path), "state=retired"),
        (lambda: undo_retirement(root, "stack.v2", path.name), "state=live"),
        (lambda: version_state.set_quarantine(path, held(1)), "quarantined_episodes=1"),
        (lambda: version_state.set_quarantine(path, held(2)), "quarantined_episodes=2"),
        (lambda: version_state.set_quarantine(path, None), "quarantined_episodes=0"),
    ):
        settle()
        find(root)
        act()
        key, _, value = condition.partition("=")
        actual = search.search(root, index.load_index(root)[0], ["episodes=70"])
        if key == "quarantined_episodes":
            assert [each.quarantined_episodes for each in actual] == [int(value)]
        else:
            assert ("stack.v2", 70) in find(root, condition)
    shutil.copytree(path, copy := root / "copy")
    settle()
    matches = next(search.search(root, index.load_index(root)[0], ["episodes=70"])).published
    shutil.rmtree(path)
    copy.rename(path)
    os.utime(path / "manifest.json")
    assert next(search.search(root, index.load_index(root)[0], ["episodes=70"])).published > matches


def test_only_what_changed_is_read(publish, root) -> None:
    """With nothing changed no manifest is opened, and after a new version that one alone."""
    settle()
    before = find(root)
    with (
        patch("pitools.store.manifest.load_manifest", side_effect=AssertionError),
        patch("pitools.dataset.catalog.index.index_dataset", side_effect=AssertionError),
    ):
        assert find(root) == before
    publish(root, "reach", 9, episodes=99)
    load, read = manifests.load_manifest, []
    with patch("pitools.store.manifest.load_manifest", lambda path: read.append(path) or load(path)):
        assert ("reach", 99) in find(root)
    assert len(read) == 1
    shutil.rmtree(root / "stack.v2")
    assert ("stack.v2", 70) not in find(root)


def test_a_change_is_cheap(publish, tmp_path) -> None:
    """A new version among many costs one stat of each: no record of one that has none is looked for."""
    for number in range(20):
        publish(tmp_path / "root", "x", number)
    find(tmp_path / "root")
    publish(tmp_path / "root", "x", 99)
    with patch("pitools.store.version_state.read_quarantine", side_effect=AssertionError):
        assert len(find(tmp_path / "root")) == 21


def test_changes_within_a_tick(publish, tmp_path, monkeypatch) -> None:
    """Versions that come so fast that their folder's time does not show it are all found."""
    began = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: began)
    for number in range(30):
        publish(tmp_path / "root", "x", number, episodes=number + 1)
        assert len(find(tmp_path / "root")) == number + 1
        (home,) = index._read_index(tmp_path / "root").values()
        assert home.stamps[str(tmp_path / "root/x")] == 0  # the clock of a file system may stand still


def test_times_that_were_set_back(publish, root) -> None:
    """A folder whose time of change was set to what it was, as `rsync` does, is read again all the same."""
    settle()
    find(root)
    before = (root / "reach").stat().st_mtime_ns
    publish(root, "reach", 9, episodes=99)
    os.utime(root / "reach", ns=(before, before))
    assert ("reach", 99) in find(root)


def test_another_root_in_its_place(publish, root, tmp_path) -> None:
    """An index is of the folders that were there, not of others that have got their place."""
    publish(tmp_path / "two", "pick", 7, episodes=7)
    settle()
    find(root)
    shutil.copytree(root / "reach", tmp_path / "two/reach")
    shutil.copystat(root / "pick", tmp_path / "two/pick")
    root.rename(tmp_path / "old")
    (tmp_path / "two").rename(root)
    assert [episodes for _, episodes in find(root)] == [7, 50, 60]


def test_dataset_that_cannot_be_read(root) -> None:
    """A dataset that somebody keeps to himself is told, and hides no other."""
    listdir = os.listdir

    def refused(path):
        if path == root / "reach":
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    with patch("os.listdir", refused):
        for _ in range(2):
            reference, errors = index.load_index(root)
            assert [error.where for error in errors] == [str(root / "reach")]
            assert {actual.name for actual in search.search(root, reference, [])} == {"pick", "stack.v2"}
    assert len(find(root)) == 5


@pytest.mark.parametrize("damage", ["cut", "bit", "text", "format", "root", "others", "owner", "link", "none"])
def test_index_is_only_a_shortcut(root, damage) -> None:
    """An index that is damaged, another's or cannot be written is passed over, and the answer is the same."""
    before = find(root)
    path = index.index_path(root)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[:-9])
    elif damage == "text":
        path.write_bytes(b"no index")
    elif damage == "bit":
        path.write_bytes(data.replace(b"reach", b"reacl"))
    elif damage in ("format", "root"):
        decoded = msgspec.msgpack.decode(data[4:], type=index.RootIndex)
        decoded = msgspec.structs.replace(
            decoded, **({"format": index.FORMAT - 1} if damage == "format" else {"root": "/else"})
        )
        index._write_index(root, decoded)
    elif damage == "others":
        path.chmod(0o666)
    elif damage == "link":
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real"))
    elif damage == "none":
        shutil.rmtree(path.parent)
        path.parent.write_text("no folder")
    user = os.geteuid() + (damage == "owner")
    with (
        patch("pitools.store.manifest.load_manifest", wraps=manifests.load_manifest) as load,
        patch("os.geteuid", return_value=user),
    ):
        assert find(root) == before
    assert load.call_count == 5


def test_rebuild(root) -> None:
    """Told to, it reads every manifest again."""
    find(root)
    with patch("pitools.store.manifest.load_manifest", wraps=manifests.load_manifest) as load:
        index.load_index(root, rebuild=True)
    assert load.call_count == 5


def test_strange_provenance(publish, tmp_path) -> None:
    """What a manifest says of its recordings is anything at all, and no reason not to list it."""
    path = publish(tmp_path / "root", "x") / "manifest.json"
    data = path.read_bytes()
    for text in (b'"many"', b"null", b"{}", b"[1]"):
        path.write_bytes(data.replace(b'"bytes": 1000', b'"bytes": ' + text))
        assert path.read_bytes() != data
        path = path.parent.rename(path.parent.with_name(manifests.version_of(path.read_bytes()))) / "manifest.json"
        (matches,) = search.search(tmp_path / "root", index.load_index(tmp_path / "root", rebuild=True)[0], [])
        assert matches.recording_bytes == describe_version(path.parent)[0].recording_bytes == 0


def test_changed_manifest(pit, publish, tmp_path) -> None:
    """A version whose manifest was edited, or whose folder was renamed, is refused by whoever reads its manifest."""
    path = publish(tmp_path / "root", "x") / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(data + b"\n")
    for words in (["list", "root"], ["show", "root/x"]):
        done = pit("dataset", *words)
        assert (done.returncode, path.parent.name in done.stderr) == (5, True)
    with pytest.raises(DataError):
        open_version(tmp_path / "root/x")
    path.write_bytes(data)
    renamed = path.parent.rename(tmp_path / "root/x" / ("0" * 32))
    with pytest.raises(DataError):
        describe_version(renamed)


def test_unknown_state(root) -> None:
    """A state that no version can have is a mistake, and not an empty answer."""
    with pytest.raises(UsageError):
        find(root, "state=foo")


def test_lost_manifest(pit, robomimic, tmp_path) -> None:
    """A version that has lost its manifest is named, not left out, and what no ingest made is none."""
    version = ingest([robomimic(3, 4)], root=tmp_path / "root", name="x")
    other = tmp_path / "root/x" / ("0" * 32)
    other.mkdir()
    (other / "zarr.json").write_text('{"attributes": {}}')
    (Path(version.path) / "manifest.json").unlink()
    for words in (["list", "root"], ["show", version.path], ["ingest", version.path, "--to", "new", "--name", "x"]):
        done = pit("dataset", *words)
        assert done.returncode == 5
        assert "lost its manifest.json" in done.stderr
        assert version.version in done.stderr
        assert other.name not in done.stderr


def test_lost_after_the_index(root, monkeypatch) -> None:
    """A version that loses its manifest is named each time, also by an index that was made before."""
    monkeypatch.setattr("pitools.dataset.catalog.index._TICK_NS", 0)  # each folder's time is trusted at once
    listings, errors = search.list_versions(root, ["name=pick"])
    assert (len(listings), errors) == (2, [])
    lost = Path(listings[0].path)
    (lost / "zarr.json").write_text('{"attributes": {"schema": "pit.zarr/1"}}')
    data = (lost / "manifest.json").read_bytes()
    (lost / "manifest.json").unlink()
    for _ in range(2):
        listings, errors = search.list_versions(root, [])
        assert (len(listings), [error.where for error in errors]) == (4, [str(lost)])
    (lost / "manifest.json").write_bytes(data)
    listings, errors = search.list_versions(root, [])
    assert (len(listings), errors) == (5, [])


def test_damaged_manifest(root) -> None:
    """A damaged manifest is told each time until it is whole again, and hides nothing else."""
    path = next(search.search(root, index.load_index(root)[0], ["name=stack*"])).path
    data = (Path(path) / "manifest.json").read_bytes()
    shutil.rmtree(index.index_path(root).parent)
    (Path(path) / "manifest.json").write_text("{")
    settle()
    for _ in range(2):
        reference, errors = index.load_index(root)
        assert [error.where for error in errors] == [f"{path}/manifest.json"]
        assert len(list(search.search(root, reference, []))) == 4
    (Path(path) / "manifest.json").write_bytes(data)
    assert index.load_index(root)[1] == []
    assert len(find(root)) == 5
