from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from pitools.core.errors import DataError, TryLater
from pitools.stage.cache import lease, records
from pitools.stage.cache.layout import create_root
from pitools.stage.cache.records import StageRecord
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version


def test_staging_writes_down_where_a_set_came_from(small: Path, root: Path):
    """The record has frozen keys, and says what an eviction or a repair needs."""
    stage_version(load_version(small), root)
    line = json.loads((root / ".records" / f"{small.name}.json").read_text())
    assert list(line) == ["schema", "source", "staged", "bytes", "pinned", "store_keys", "quarantine"]
    assert (line["schema"], line["source"], line["pinned"]) == ("pit.stage-record/1", str(small), False)
    assert line["bytes"] == load_version(small).manifest.total_bytes


def test_a_pin_outlives_a_repair_and_is_no_use(small: Path, root: Path):
    """Staging again keeps a pin; pinning is not taken for use."""
    final = Path(stage_version(load_version(small), root).path)
    used = lease.last_used(root, small.name)
    assert records.set_pinned(root, small.name).pinned
    assert lease.last_used(root, small.name) == used
    (final / "zarr.json").unlink()
    assert stage_version(load_version(small), root).state == "repaired"
    assert records.read_stage_record(root, small.name).pinned
    assert not records.set_pinned(root, small.name, pinned=False).pinned


def test_only_what_stands_is_pinned(root: Path):
    """A pin on nothing would wait for a set that nobody asked for."""
    create_root(root)
    with pytest.raises(DataError):
        records.set_pinned(root, "never")
    assert list((root / ".records").iterdir()) == []


@pytest.mark.parametrize("junk", [b"", b"{}", b"\xff", b'{"schema":"pit.stage-record/2","source":"x"}', b"[]", None])
def test_a_record_that_cannot_be_read_knows_nothing(root: Path, junk: bytes | None):
    """Then the set counts as one of unknown source, which is the safe side."""
    create_root(root)
    path = root / ".records/v.json"
    path.mkdir() if junk is None else path.write_bytes(junk)
    assert records.read_stage_record(root, "v") == StageRecord()


def test_changes_at_once_all_count(small: Path, root: Path):
    """A stager that writes its record while another process pins loses neither."""
    stage_version(load_version(small), root)
    for trial in range(30):
        records.set_pinned(root, small.name, pinned=False)
        threads = [
            threading.Thread(target=records.set_pinned, args=(root, small.name)),
            threading.Thread(
                target=records.write_stage_record,
                args=(root, small.name),
                kwargs={"source": str(trial), "n_bytes": trial},
            ),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stage_record = records.read_stage_record(root, small.name)
        assert (stage_record.pinned, stage_record.source, stage_record.bytes) == (True, str(trial), trial)
    assert [path.name for path in (root / ".records").iterdir()] == [f"{small.name}.json"]


def test_records_that_are_locked_are_not_waited_for_for_ever(root: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that hangs in the middle makes others give up in time."""
    create_root(root)
    monkeypatch.setattr(records, "_TIMEOUT_S", 0.1)
    descriptor = os.open(root / ".locks/.records", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(TryLater):
        records.write_stage_record(root, "v", source="/shared", n_bytes=1)
    os.close(descriptor)
    records.write_stage_record(root, "v", source="/shared", n_bytes=1)
