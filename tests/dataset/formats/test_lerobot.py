from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pitools.core.errors import DataError
from pitools.dataset.formats import detect, parquet_reader
from pitools.dataset.formats.lerobot import store_name
from pitools.dataset.formats.readers import open_reader

CAMERA = "observation.images.top"
NAMES = {
    "action": "action",
    "observation.state": "obs/state",
    "observation.tactile": "obs/tactile",
    "next.reward": "reward",
    "next.done": "done",
    "timestamp": "timestamp",
}


def numbers(frames: np.ndarray) -> np.ndarray:
    """What number each frame says."""
    return ((frames[:, 16, 4::8, 1] > 120) << np.arange(6)).sum(axis=1)


def info(path: Path, **changes: object) -> None:
    record = json.loads((path / "meta/info.json").read_text())
    (path / "meta/info.json").write_text(json.dumps(record | changes))


def episodes(path: Path, **changes: list[object]) -> None:
    file = path / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    for name, values in changes.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    pq.write_table(table, file)


def test_a_pipe_is_refused_where_it_would_be_read(lerobot) -> None:
    """What is no part of the dataset, such as `lost+found` of a disk that holds it, is not looked at."""
    path = lerobot(3, 4).path
    os.mkfifo(path / "lost+found")
    assert len(detect.scan_recording(path, "auto").episodes) == 2
    for name in ("data/chunk-000/file-000.parquet", "meta/tasks.parquet"):
        (path / name).unlink()
        os.mkfifo(path / name)
        if name.startswith("data"):
            assert {item.reason for item in detect.scan_recording(path, "auto").rejected} == {"the file is missing"}
    with pytest.raises(DataError, match="not a regular file"):
        detect.scan_recording(path, "auto")


@pytest.mark.parametrize("video", [True, False])
@pytest.mark.parametrize("part", [0, 1, 4])
def test_every_step(lerobot, whole, video, part) -> None:
    """Every value and every frame of every episode is where it was, whether read in one go or in parts."""
    dataset = lerobot(7, 5, 30, 11, video=video)
    recording = detect.scan_recording(dataset.path, "auto")
    assert (recording.layout, recording.rejected, recording.notes) == ("lerobot", (), ())
    assert [(episode.name, episode.steps, episode.instruction) for episode in recording.episodes] == [
        ("episode_000000", 7, "do 0"),
        ("episode_000001", 5, "do 1"),
        ("episode_000002", 30, "do 0"),
        ("episode_000003", 11, "do 1"),
    ]
    first = 0
    for episode in recording.episodes:
        arrays, rows = whole(episode, part), slice(first, first + episode.steps)
        assert set(arrays) == {*NAMES.values(), "obs/top_image"}
        for key, name in NAMES.items():
            np.testing.assert_array_equal(arrays[name], dataset.values[key][rows])
            assert arrays[name].dtype == dataset.values[key].dtype
        assert numbers(arrays["obs/top_image"]).tolist() == list(range(rows.start, rows.stop))
        if not video:
            np.testing.assert_array_equal(arrays["obs/top_image"], dataset.frames[rows])
        first += episode.steps


def test_row_groups(lerobot, whole, monkeypatch) -> None:
    """Rows are the same ones, however many row groups are read at a time."""
    dataset = lerobot(7, 5, 30)
    recording, actions = detect.scan_recording(dataset.path, "auto", ["obs/top_image"]), []
    for size in (1, 100, 1 << 20):
        monkeypatch.setattr(parquet_reader, "_CACHE_BYTES", size)
        actions.append(np.concatenate([whole(episode, 4)["action"] for episode in recording.episodes]))
    assert all((values == dataset.values["action"]).all() for values in actions)


def test_any_order(lerobot) -> None:
    """Frames are the same ones whichever are read first: backwards, across key frames, from file to file."""
    recording = detect.scan_recording(lerobot(25, 14, 20).path, "lerobot")
    reader = open_reader(recording.episodes[0])
    for number, start, stop in [(2, 3, 9), (0, 20, 25), (0, 2, 4), (1, 13, 14), (2, 0, 20), (0, 0, 1), (1, 0, 14)]:
        column = recording.episodes[number].columns["obs/top_image"]
        out = np.empty((stop - start, *column.row), np.uint8)
        reader.read_into(column, out, start, stop)
        first = (0, 25, 39)[number]
        assert numbers(out).tolist() == list(range(first + start, first + stop))
    reader.close()


def test_what_it_says_of_itself(lerobot) -> None:
    """Splits are names of episodes, tasks and robot are kept, and all files that are read are named for a digest."""
    path = lerobot(3, 4, 5).path
    info(path, splits={"train": "0:2", "val": "2:3"})
    recording = detect.scan_recording(path, "auto", ["obs/state"])
    assert recording.splits == {"train": ("episode_000000", "episode_000001"), "val": ("episode_000002",)}
    assert recording.attributes == {"robot_type": "toy", "fps": 20.0, "tasks": ["do 0", "do 1"]}
    assert "obs/state" not in recording.episodes[0].columns
    assert {str(file.relative_to(path)) for file in recording.files} == {
        str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()
    }


def test_names() -> None:
    """LeRobot's names become those that all layouts have in a store."""
    assert store_name("observation.images.cam.left") == "obs/cam_left_image"
    assert store_name("observation.environment_state") == "obs/environment_state"
    assert store_name("observation.image") == "obs/image"
    assert [store_name(key) for key in ("action", "next.success", "action.gripper")] == [
        "action",
        "success",
        "action/gripper",
    ]


def test_several_tasks(lerobot) -> None:
    """Where an episode has several tasks, which of them a step belongs to is kept."""
    path = lerobot(3, 4).path
    episodes(path, tasks=[["do 0"], ["do 0", "do 1"]])
    recording = detect.scan_recording(path, "auto")
    assert "task_index" in recording.episodes[0].columns
    assert recording.episodes[1].attributes == {"tasks": ["do 0", "do 1"]}


def test_tasks_of_the_steps(lerobot, monkeypatch) -> None:
    """Where meta/episodes names no task of an episode, those that its steps have are its own, in their order."""
    dataset = lerobot(3, 4, 5)
    episodes(dataset.path, tasks=[["do 0"], [], []])
    recording = detect.scan_recording(dataset.path, "auto")
    assert [episode.instruction for episode in recording.episodes] == ["do 0", "do 1", "do 0"]
    assert (recording.notes, "task_index" in recording.episodes[0].columns) == ((), False)
    dataset.values["task_index"][7:] = [1, 1, 0, 0, 1]
    dataset.data(1, 2, 3)
    recording = detect.scan_recording(dataset.path, "auto")
    assert [episode.instruction for episode in recording.episodes] == ["do 0", "do 1", "do 1"]
    assert recording.episodes[2].attributes == {"tasks": ["do 1", "do 0"]}
    assert "task_index" in recording.episodes[2].columns


def test_an_episode_without_a_task_is_told(lerobot) -> None:
    """Where neither meta/episodes nor the table of tasks names one, a note says that instructions are missing."""
    path = lerobot(3, 4).path
    assert "task_index" not in detect.scan_recording(path, "auto").episodes[0].columns
    episodes(path, tasks=[["do 0"], []])
    tasks = path / "meta/tasks.parquet"
    pq.write_table(pq.read_table(tasks).slice(0, 1), tasks)
    recording = detect.scan_recording(path, "auto")
    assert "task_index" in recording.episodes[1].columns
    assert [episode.instruction for episode in recording.episodes] == ["do 0", ""]
    assert any(note.startswith("1 of 2 episodes") for note in recording.notes)


def test_channels_first(lerobot, whole) -> None:
    """A camera whose shape is told with its channels first is stored as the frames are: (H, W, 3)."""
    path = lerobot(3).path
    record = json.loads((path / "meta/info.json").read_text())["features"]
    record[CAMERA] |= {"shape": [3, 32, 48], "names": ["channels", "height", "width"]}
    info(path, features=record)
    recording = detect.scan_recording(path, "auto")
    assert whole(recording.episodes[0])["obs/top_image"].shape == (3, 32, 48, 3)


def test_older_version(lerobot) -> None:
    """The error of a v2.1 dataset has its version, and the script that converts it."""
    path = lerobot(3).path
    info(path, codebase_version="v2.1")
    with pytest.raises(DataError, match=r"v2\.1.*v3") as caught:
        detect.scan_recording(path, "auto")
    assert "convert_dataset_v21_to_v30" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data_path", "../../etc/{chunk_index}-{file_index}.parquet"),
        ("data_path", "/etc/{file_index}.parquet"),
        ("data_path", "data/{chunk_index.__class__}.parquet"),
        ("video_path", "videos/{video_key:>999999999}/{file_index}.mp4"),
        ("splits", {"train": "0:99"}),
        ("splits", {"train": "all"}),
        ("fps", 0),
        ("fps", "fast"),
        ("fps", "inf"),
        ("total_episodes", 7),
        ("total_frames", 8),
        ("features", {"action": 3}),
    ],
)
def test_hostile_description(lerobot, key, value) -> None:
    """Metadata with paths outside of the folder, or with contradictions, are refused by file."""
    path = lerobot(3, 4).path
    info(path, **{key: value})
    with pytest.raises(DataError) as caught:
        detect.scan_recording(path, "auto")
    assert str(path) in caught.value.where


def test_unknown_tasks(lerobot) -> None:
    """A note names a step's task that the dataset does not have."""
    made = lerobot(3, 4)
    file = next((made.path / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    tasks = np.array(table["task_index"])
    tasks[-1] = 7
    position = table.column_names.index("task_index")
    pq.write_table(table.set_column(position, "task_index", pa.array(tasks)), file)
    (note,) = detect.scan_recording(made.path, "auto").notes
    assert "task_index 7" in note


def test_text_features(lerobot) -> None:
    """A feature of text is refused by its name, and can be skipped."""
    path = lerobot(3).path
    record = json.loads((path / "meta/info.json").read_text())["features"]
    info(path, features=record | {"observation.note": {"dtype": "string", "shape": [1]}})
    with pytest.raises(DataError, match=r"obs/note: dtype string"):
        detect.scan_recording(path, "auto")
    assert detect.scan_recording(path, "auto", ["obs/note"]).episodes


def test_lost_video(lerobot) -> None:
    """A missing or too short video rejects its episodes, and no others."""
    dataset = lerobot(7, 5, 6)
    clip = dataset.path / f"videos/{CAMERA}/chunk-000/file-000.mp4"
    clip.unlink()
    recording = detect.scan_recording(dataset.path, "auto")
    assert [episode.name for episode in recording.episodes] == ["episode_000002"]
    assert recording.splits == {"train": ("episode_000002",)}
    assert [(item.name, item.reason) for item in recording.rejected] == [
        ("episode_000000", "the file is missing"),
        ("episode_000001", "the file is missing"),
    ]
    dataset.clip(clip, dataset.frames[:11])
    assert "11 frames (expected 12)" in detect.scan_recording(dataset.path, "auto").rejected[0].reason
    dataset.clip(clip, dataset.frames[:14])
    assert "2 frames of no episode" in detect.scan_recording(dataset.path, "auto").notes[0]


def test_rows_of_others(lerobot) -> None:
    """A data file whose rows contradict meta/episodes is rejected by the scan."""
    dataset = lerobot(7, 5, 6)
    dataset.data(0, 1, 2)
    recording = detect.scan_recording(dataset.path, "auto")
    assert [item.name for item in recording.rejected] == ["episode_000000", "episode_000001"]
    assert all("5 rows of episode 1 (expected 7 rows of episode 0" in item.reason for item in recording.rejected)


@pytest.mark.parametrize("start", [0.1, float("nan"), -0.2])
def test_clips_that_cannot_be(lerobot, start) -> None:
    """Episodes that share frames of a video, or whose times are negative or not finite, are rejected."""
    path = lerobot(4, 3).path
    episodes(
        path, **{f"videos/{CAMERA}/from_timestamp": [0.0, start], f"videos/{CAMERA}/to_timestamp": [0.2, start + 0.15]}
    )
    assert detect.scan_recording(path, "auto").rejected[-1].name == "episode_000001"


def test_without_the_libraries(lerobot) -> None:
    """Without pyarrow or PyAV, the error names the library, and the command that installs it."""
    path = lerobot(2).path
    code = (
        "import sys; sys.modules['av'] = None\n"
        "from pathlib import Path\n"
        "from pitools.core.errors import ToolMissing\n"
        "from pitools.dataset.formats import detect\n"
        f"try: detect.scan_recording(Path({str(path)!r}), 'auto')\n"
        "except ToolMissing as error: print(error.message, '|', error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("| pip install 'pitools-hpc[lerobot]'")
    assert "av is not installed" in done.stdout
