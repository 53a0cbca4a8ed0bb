from __future__ import annotations

import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np

from pitools.dataset.check.quarantine import lift_quarantine, quarantine_episodes
from pitools.store import version_state


def test_episodes(make, found) -> None:
    """Episodes with faults are kept from training, each with its reasons; warnings are not."""

    def change(demos) -> None:
        demos[2]["actions"][7] = np.nan
        demos[2]["obs/eye_image"][:2] = 0
        demos[5]["obs/timestamp"][9] = 0
        demos[6].pop("language")

    path = make(change)
    record = quarantine_episodes(path, found(path))
    assert record == version_state.read_quarantine(path)
    assert (record.whole_version, list(record.episodes), record.reasons) == (False, [2, 5], ())
    assert record.episodes[2][0] == "nan: action, step 7: 1 steps have a NaN or an infinity"
    assert record.episodes[2][1].startswith("blank: obs/eye_image, step 0: ")
    assert lift_quarantine(path) == record
    assert version_state.read_quarantine(path) is None
    assert lift_quarantine(path) is None


def test_added(copy) -> None:
    """What an earlier check, which looked closer, put in quarantine stays there beside what is found now."""
    from pitools.dataset.check.finding import Finding

    def fault(episode: int, what: str) -> Finding:
        return Finding(level="fault", check="nan", episode=episode, problem=what)

    quarantine_episodes(copy, [fault(1, "bad"), fault(3, "bad")])
    record = quarantine_episodes(copy, [fault(1, "bad"), fault(1, "worse"), fault(2, "bad")])
    assert record == version_state.read_quarantine(copy)
    assert record.episodes == {1: ("nan: bad", "nan: worse"), 2: ("nan: bad",), 3: ("nan: bad",)}
    quarantined = quarantine_episodes(copy, [Finding(level="damage", check="shard", problem="rot")])
    assert (quarantined.whole_version, set(quarantined.episodes)) == (True, {1, 2, 3})
    again = quarantine_episodes(copy, [fault(4, "bad")])
    assert (again.whole_version, again.reasons, set(again.episodes)) == (True, ("shard: rot",), {1, 2, 3, 4})


def test_added_at_once(copy) -> None:
    """Of several checks that finish at once, each adds its episodes."""
    read = version_state.read_quarantine

    def slow(path):
        record = read(path)
        time.sleep(0.05)
        return record

    with patch("pitools.store.version_state.read_quarantine", slow), ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda episode: quarantine_episodes(copy, _fault(episode)), range(4)))
    assert set(read(copy).episodes) == set(range(4))


def test_damaged_record(copy) -> None:
    """Where the record cannot be read, the whole version is kept, until that is released."""
    quarantine_episodes(copy, _fault())
    (file,) = (copy.parent / ".catalog/quarantine").glob("*.json")
    file.write_text("{")
    record = quarantine_episodes(copy, _fault())
    assert (record.whole_version, set(record.episodes)) == (True, {1})
    assert lift_quarantine(copy) == record


def test_whole(copy, found) -> None:
    """A damaged version is kept from training as a whole."""
    (copy / "action/c/0/0").unlink()
    record = quarantine_episodes(copy, found(copy))
    assert record.whole_version
    assert record.reasons == ("file: the file is missing (action/c/0/0)",)


def test_a_damaged_parent(make, resign) -> None:
    """What `--quarantine` is to keep from training is kept, though the parent's manifest is damaged."""
    from click.testing import CliRunner

    from pitools.commands.dataset_check import check

    parent = make()
    child = resign(make(lambda demos: demos[3]["actions"].__setitem__(5, np.nan), seed=1), parent=parent.name)
    (parent / "manifest.json").write_text("{")
    assert CliRunner().invoke(check, [str(child), "--quarantine"], standalone_mode=False).return_value == 1
    assert list(version_state.read_quarantine(child).episodes) == [3]


def test_nothing(copy, found) -> None:
    """Where nothing is wrong, nothing is written, and what was in quarantine stays there."""
    assert quarantine_episodes(copy, found(copy)) is None
    assert not (copy.parent / ".catalog").exists()
    record = quarantine_episodes(copy, [*found(copy), *_fault()])
    assert quarantine_episodes(copy, found(copy)) is None
    assert version_state.read_quarantine(copy) == record


def _fault(episode=1):
    from pitools.dataset.check.finding import Finding

    return [Finding(level="fault", check="nan", episode=episode, problem="bad")]


def test_the_version_is_not_touched(copy, found) -> None:
    """Nothing in the version's own folder changes, not even a time."""

    def state() -> dict[str, tuple[int, int, int]]:
        reference = {}
        for folder, folders, names in os.walk(copy):
            for name in (*folders, *names, "."):
                status = os.lstat(f"{folder}/{name}")
                reference[f"{folder}/{name}"] = (status.st_mtime_ns, status.st_ino, stat.S_IMODE(status.st_mode))
        return reference

    before = state()
    quarantine_episodes(copy, [*found(copy, deep=True), *_fault()])
    lift_quarantine(copy)
    assert state() == before


def test_record(copy, found) -> None:
    """The record is JSON with its schema first, as every reader of the catalog expects it."""
    quarantine_episodes(copy, _fault())
    (file,) = (copy.parent / ".catalog/quarantine").glob("*.json")
    assert file.name == f"{copy.name}.json"
    record = json.loads(file.read_text())
    assert next(iter(record.items())) == ("schema", "pit.quarantine/1")
    assert record["episodes"] == {"1": ["nan: bad"]}
