from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pitools.core.errors import DataError
from pitools.dataset.formats import detect


def column(path: Path, key: str, values: list[object], kind: pa.DataType | None = None) -> Path:
    """Other values for a column of the first data file."""
    file = path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.column_names.index(key), key, pa.array(values, kind)), file)
    return file


@pytest.mark.parametrize(
    ("key", "values", "why"),
    [
        ("frame_index", [0, 1, 2, 3, 0, 2, 1], "row 1 has frame_index 2"),
        ("timestamp", [0.0, 0.05, 0.1, 0.15, 0.0, 0.05, 0.15], "step 2 has the time 0.1500 s"),
        ("timestamp", [0.0, 0.05, 0.1, 0.15, 0.0, float("nan"), 0.1], "step 1 has the time nan s"),
    ],
)
def test_rows_in_disorder(lerobot, key, values, why) -> None:
    """An episode with rows out of order, or times that are not its frames', is rejected, and no other."""
    path = lerobot(4, 3).path
    column(path, key, values)
    recording = detect.scan_recording(path, "auto")
    assert [episode.name for episode in recording.episodes] == ["episode_000000"]
    (item,) = recording.rejected
    assert item.name == "episode_000001"
    assert why in item.reason


@pytest.mark.parametrize(
    ("key", "values", "kind", "what"),
    [
        # Three rows of one value have as many values as one row of three.
        ("action", [[1.0], [2.0], [3.0]], pa.list_(pa.float32()), r"rows of 1 values .*\(3,\)"),
        ("action", [[1.0] * 6] * 3, pa.list_(pa.float32()), r"rows of 6 values .*\(3,\)"),
        ("action", [[1.0] * 3, [2.0] * 2, [3.0]], pa.list_(pa.float32()), "rows of 1 to 3 values"),
        ("next.reward", [0, 300, 0], pa.int64(), "int64 .*uint8"),
        ("next.reward", [0.0, 0.5, 1.0], pa.float64(), "float64 .*uint8"),
    ],
)
def test_rows_of_another_form(lerobot, whole, key, values, kind, what) -> None:
    """Rows whose length or dtype contradicts meta/info.json are refused, and not spread, truncated or wrapped."""
    path = lerobot(3, 4).path
    record = json.loads((path / "meta/info.json").read_text())
    record["features"]["next.reward"]["dtype"] = "uint8"
    (path / "meta/info.json").write_text(json.dumps(record))
    rest = pq.read_table(path / "data/chunk-000/file-000.parquet")[key].to_pylist()[3:]
    file = column(path, key, [*values, *rest], kind)
    with pytest.raises(DataError, match=what) as caught:
        whole(detect.scan_recording(path, "auto").episodes[0])
    assert caught.value.where == f"{file}: {key}: row 0"


def test_wider_numbers(lerobot, whole) -> None:
    """Numbers stored in a wider dtype than meta/info.json gives are read unchanged."""
    dataset = lerobot(3)
    column(dataset.path, "next.reward", dataset.values["next.reward"].tolist(), pa.float64())
    contents = whole(detect.scan_recording(dataset.path, "auto").episodes[0])["reward"]
    np.testing.assert_array_equal(contents, dataset.values["next.reward"])


def test_missing_value(lerobot, whole) -> None:
    """The error of a null in a column names file, column and row."""
    dataset = lerobot(4)
    path = dataset.path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    values = [[1.0, 2.0, 3.0], None, [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    position = table.column_names.index("action")
    pq.write_table(table.set_column(position, "action", pa.array(values, pa.list_(pa.float32()))), path)
    with pytest.raises(DataError) as caught:
        whole(detect.scan_recording(dataset.path, "auto").episodes[0])
    assert caught.value.where == f"{path}: action: row 0"
