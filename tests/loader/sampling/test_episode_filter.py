from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pitools.core.errors import ConfigError, DataError, UsageError
from pitools.dataset.catalog.retirement import retire_version
from pitools.dataset.reader import open_dataset
from pitools.loader.loader import Loader
from pitools.loader.open import open_version
from pitools.loader.sampling.episode_filter import EpisodeFilters, are_complete, filter_episodes
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.stage.cache import records
from pitools.stage.cache.layout import staged_path
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.store import manifest, tags, version_state
from pitools.store.reader.version_reader import VersionReader

LENGTHS = (40, 300, 25, 260, 17, 280)
TASKS = ("pick the cube", "pick the ball", "place the cube", "pick the cube", "stack", "place the ball")


@pytest.fixture
def version(record: Callable[..., Path]) -> Path:
    return record(
        LENGTHS,
        masks={"train": [0, 1, 2, 3], "valid": [4, 5], "no steps": []},
        tasks=TASKS,
        succeeded=[1, 3, 4],
        attributes=[{"operator": "ann" if number % 2 else "bob", "grade": number} for number in range(6)],
    )


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"splits": ("train",)}, [0, 1, 2, 3]),
        ({"splits": ("train", "valid")}, [0, 1, 2, 3, 4, 5]),
        ({"instructions": ("pick*",)}, [0, 1, 3]),
        ({"instructions": ("*ball", "stack")}, [1, 4, 5]),
        ({"instructions": ("re:^p.*cube$",)}, [0, 2, 3]),
        ({"names": ("*demo_[0-2]",)}, [0, 1, 2]),
        ({"min_steps": 40, "max_steps": 280}, [0, 3, 5]),
        ({"success": True}, [1, 3, 4]),
        ({"success": False}, [0, 2, 5]),
        ({"success": True, "success_by": "grade", "success_at": 4}, [4, 5]),
        ({"success": True, "success_by": "reward", "success_at": 1.0}, [1, 3, 4]),
        ({"splits": ("train",), "instructions": ("pick*",), "success": True, "max_steps": 280}, [3]),
    ],
)
def test_filters_take_what_they_say(version: Path, filters: dict, expected: list[int]):
    """Each alone, and some together."""
    assert filter_episodes(VersionReader(version), EpisodeFilters(**filters)).tolist() == expected


@pytest.mark.parametrize(
    ("filters", "message", "hint"),
    [
        (
            {"splits": ("valid",), "instructions": ("pick*",)},
            "6 episodes, 2 of split valid, 0 of instruction pick",
            "stack",
        ),
        ({"names": ("nobody",)}, "0 of name nobody", "demo_0"),
        ({"min_steps": 301}, "0 of at least 301 steps", "17 to 300 steps"),
        ({"min_steps": 18, "max_steps": 20}, "0 of 18 to 20 steps", "17 to 300 steps"),
        ({"splits": ("no steps",)}, "0 of split no steps", ""),
        ({"instructions": ("place*",), "success": True}, "2 of instruction place\\*, 0 that succeeded", ""),
    ],
)
def test_the_filter_that_leaves_nothing_is_named(version: Path, filters: dict, message: str, hint: str):
    """With how many each before it left, and what there would have been."""
    with pytest.raises(ConfigError, match=message) as error:
        filter_episodes(VersionReader(version), EpisodeFilters(**filters))
    assert hint in error.value.hint
    assert bool(hint) == bool(error.value.hint)


def test_what_is_no_filter(version: Path, record: Callable[..., Path]):
    """An unknown split, a broken expression, and success where nothing tells of it."""
    with pytest.raises(UsageError, match="split 'vald'") as error:
        filter_episodes(VersionReader(version), EpisodeFilters(splits=("vald",)))
    assert "valid" in error.value.hint
    with pytest.raises(UsageError, match=r"re:\("):
        filter_episodes(VersionReader(version), EpisodeFilters(instructions=("re:(",)))
    plain = VersionReader(record((5, 6)))
    with pytest.raises(UsageError, match="success: "):
        filter_episodes(plain, EpisodeFilters(success=True))
    with pytest.raises(UsageError, match="'won': "):
        filter_episodes(plain, EpisodeFilters(success=True, success_by="won"))


def test_an_attribute_of_the_recording_tells_of_success(record: Callable[..., Path]):
    """Before any array, in whatever form it was written."""
    path = record((5, 6, 7, 8), succeeded=[0], attributes=[{"success": value} for value in (False, True, 1, "no")])
    assert filter_episodes(VersionReader(path), EpisodeFilters(success=True)).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("text", "succeeded"), [("failed", False), ("Failure", False), ("0.0", False), ("", False), ("Succeeded", True)]
)
def test_success_as_a_text(record: Callable[..., Path], text: str, succeeded: bool):
    """The words of failure are no success, and those of neither are refused."""
    path = record((5, 6), attributes=[{"success": text}, {"success": True}])
    assert filter_episodes(VersionReader(path), EpisodeFilters(success=True)).tolist() == [0, 1][not succeeded :]
    path = record((5, 6), attributes=[{"success": "in part"}, {"success": True}])
    with pytest.raises(UsageError, match="in part"):
        filter_episodes(VersionReader(path), EpisodeFilters(success=True))


def test_quarantine_is_left_out_unless_asked_for(version: Path, tmp_path: Path):
    """Single episodes, a copy's by the version it is of, and the whole version."""
    record = version_state.Quarantine(
        whole_version=False, set_at="", set_by="", episodes={1: ("black",), 4: ("frozen",)}
    )
    version_state.set_quarantine(version, record)
    assert filter_episodes(VersionReader(version)).tolist() == [0, 2, 3, 5]
    assert filter_episodes(VersionReader(version), EpisodeFilters(quarantined=True)).tolist() == [0, 1, 2, 3, 4, 5]
    copy = tmp_path / "objects" / version.name
    shutil.copytree(version, copy)
    assert len(filter_episodes(VersionReader(copy))) == 6
    assert filter_episodes(VersionReader(copy), source_dir=version).tolist() == [0, 2, 3, 5]
    version_state.set_quarantine(version, msgspec.structs.replace(record, whole_version=True))
    with pytest.raises(ConfigError, match="0 not in quarantine"):
        filter_episodes(VersionReader(version))


def test_a_retired_version_is_not_trained_on_without_a_word(record: Callable[..., Path], tmp_path: Path):
    """A warning is given of the version, and of a staged copy of it; a name means another one."""
    old, new = record([5, 6]), record([5, 6], seed=1)
    stage_version(load_version(new), tmp_path)
    home = tmp_path / "root/pick"
    for number, path in enumerate((old, new)):
        shutil.copytree(path, home / path.name)
        os.utime(home / path.name / "manifest.json", (number, number))
    records.write_stage_record(tmp_path, new.name, source=str(home / new.name), n_bytes=1)
    assert open_version(str(home)).version == new.name
    retire_version(home / new.name, reason="blurred")
    for path in (home / new.name, staged_path(tmp_path, new.name)):
        with pytest.warns(UserWarning, match="blurred"):
            assert filter_episodes(open_version(path)).tolist() == [0, 1]
    tags.move_tag(home.parent, "pick", "good", old.name)
    for text in (str(home), f"{home}@good", f"{home}/{old.name[:6]}"):
        assert filter_episodes(open_version(text)).tolist() == [0, 1]
        assert open_version(text).version == open_dataset(text).version.version == old.name


def test_a_staged_set_keeps_to_the_quarantine_of_where_it_came_from(version: Path, tmp_path: Path):
    """Jobs read copies on their nodes; without the source, its quarantine as of the last staging applies."""
    stage_version(load_version(version), tmp_path)
    copy = staged_path(tmp_path, version.name)
    assert len(filter_episodes(VersionReader(copy))) == 6
    record = version_state.Quarantine(whole_version=False, set_at="", set_by="", episodes={1: ("black",)})
    version_state.set_quarantine(version, record)
    assert filter_episodes(VersionReader(copy)).tolist() == [0, 2, 3, 4, 5]
    stage_version(load_version(version), tmp_path)
    stage_version(load_version(copy), tmp_path / "second")
    home = version.parent.rename(tmp_path / "away")
    for root in (tmp_path, tmp_path / "second"):
        assert filter_episodes(VersionReader(staged_path(root, version.name))).tolist() == [0, 2, 3, 4, 5]
    home.rename(version.parent)
    version_state.set_quarantine(version, None)
    assert stage_version(load_version(version), tmp_path).state == "present"
    version.parent.rename(home)
    assert len(filter_episodes(VersionReader(copy))) == 6
    (tmp_path / ".records" / f"{version.name}.json").write_bytes(b"{")
    with pytest.raises(DataError):
        filter_episodes(VersionReader(copy))


def staged(version: Path, to: Path, steps: tuple[tuple[int, int], ...]) -> Path:
    """A part of a version as staging leaves it, but that its files hold more: a manifest says which steps are here."""
    shutil.copytree(version, to)
    reference, data = manifest.load_manifest(version)
    part = manifest.Subset(whole=manifest.version_of(data), arrays=tuple(reference.arrays), steps=steps)
    (to / manifest.MANIFEST_FILE).write_bytes(manifest.encode_manifest(msgspec.structs.replace(reference, subset=part)))
    return to


@pytest.mark.parametrize("resident", [0, 64 << 20])
def test_windows_of_a_staged_subset_are_those_of_the_whole(version: Path, tmp_path: Path, resident: int):
    """Only the episodes that came whole are taken, and batches of them are equal, from memory and from files."""
    version_reader = VersionReader(version)
    part = VersionReader(staged(version, tmp_path / "part", ((32, 341), (640, 922))), resident_bytes=resident)
    assert are_complete(part).tolist() == [number in (1, 5) for number in range(6)]
    assert are_complete(version_reader).all()
    episodes = filter_episodes(part)
    assert episodes.tolist() == [1, 5]
    assert filter_episodes(part, EpisodeFilters(instructions=("place*",))).tolist() == [5]
    with pytest.raises(ConfigError, match="2 staged here, 0 of instruction stack"):
        filter_episodes(part, EpisodeFilters(instructions=("stack",)))
    spans = {"action": WindowSpan(0, 4), "obs/image": WindowSpan(1, 1)}
    loader = Loader(WindowSamples(part, Windows(part.offsets, episodes, spans, pad=True)), global_batch_size=32)
    for batch in islice(loader, 3):
        anchors = Windows(version_reader.offsets, episodes, spans, pad=True).locate(batch.sample_indices)
        for row, (start, stop, anchor) in enumerate(zip(*(field.tolist() for field in anchors[1:]), strict=True)):
            steps = np.clip(np.arange(anchor, anchor + 4), start, stop - 1) - start
            assert np.array_equal(batch.arrays["action"][row], version_reader.read("action", start, stop)[steps])
    assert (part.resident_rows("action") is not None) == bool(resident)
    loader.close()
