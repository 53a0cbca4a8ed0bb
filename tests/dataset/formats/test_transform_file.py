from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from pitools.core.errors import ConfigError, DataError
from pitools.dataset.formats import derive_functions, detect, transform_file
from pitools.dataset.formats.readers import open_reader
from pitools.store import digest

FUNCTIONS = """
import numpy as np
calls = []
def speed(action, reward):
    calls.append(len(action))
    return np.linalg.norm(action, axis=1).astype(np.float32) + reward
def mean(image): return image.mean(axis=(1, 2)).astype(np.float32)
def short(action): return action[1:, 0]
def wide(action): return action[:, 0].astype(np.float64)
def bad(action): return np.where(np.arange(len(action)) == 2, np.nan, action[:, 0])
def broken(action): return 1 / 0
def greedy(action): action[:] = 0
value = 3
"""


@pytest.fixture
def lab(tmp_path, monkeypatch) -> str:
    """A module of a user's, to be imported by its name."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/lab_features.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.delitem(sys.modules, "lab_features", raising=False)
    derive_functions.find_function.cache_clear()
    return "lab_features"


@pytest.fixture
def load(tmp_path) -> Callable[[str], transform_file.TransformFile]:
    """Writes a transform file, and reads it."""

    def write(text: str) -> transform_file.TransformFile:
        (tmp_path / "transform.toml").write_text(text)
        return transform_file.load_transform(tmp_path / "transform.toml")

    return write


def raw(path: Path, key: str) -> np.ndarray:
    with h5py.File(path) as file:
        return file[key][:]


def test_rename_drop_cast(robomimic, whole, load) -> None:
    """Arrays are renamed first, and go by their new names from there; every episode alike."""
    path = robomimic(5, 6)
    loaded = load(
        'drop = ["obs/*_depth", "done"]\n[rename]\n"obs/eye_image" = "obs/top_image"\n'
        '[cast]\naction = "float16"\nreward = "float64"'
    )
    transform = transform_file.apply_transform(loaded, detect.scan_recording(path, "auto"))
    assert transform.splits == {"train": ("demo_1",), "valid": ("demo_0",)}
    for number, episode in enumerate(transform.episodes):
        contents = whole(episode, 2)
        assert set(contents) == {"action", "obs/top_image", "reward"}
        assert (contents["action"].dtype, contents["reward"].dtype) == (np.float16, np.float64)
        np.testing.assert_array_equal(contents["action"], raw(path, f"data/demo_{number}/actions").astype(np.float16))
        np.testing.assert_array_equal(contents["obs/top_image"], raw(path, f"data/demo_{number}/obs/eye_image"))


def test_next_obs(robomimic, load) -> None:
    """next_obs is kept where the transform says so."""
    path = robomimic(3)
    for text, kept in (("keep_next_obs = true", {"next_obs/eye_image"}), ("", set())):
        loaded = load(text)
        scanned = detect.scan_recording(path, "auto", ["done"], keep_next_obs=loaded.keep_next_obs)
        assert (
            set(transform_file.apply_transform(loaded, scanned).episodes[0].columns)
            == {"action", "reward", "obs/eye_image"} | kept
        )


@pytest.mark.parametrize(("size", "method"), [((12, 16), "bilinear"), ((10, 40), "bilinear"), ((12, 16), "area")])
def test_resize_colour(aloha, whole, load, size, method) -> None:
    """Colour images are resized as Pillow does it, from raw frames as from JPEG rows; a mean is a mean."""
    for compressed in (False, True):
        path = aloha(int(compressed), 9, compressed=compressed)
        contents = whole(detect.scan_recording(path, "auto").episodes[0])["obs/top_image"]
        loaded = load(f'[resize]\n"obs/top_image" = {{ size = {list(size)}, method = "{method}" }}\n')
        actual = whole(transform_file.apply_transform(loaded, detect.scan_recording(path, "auto")).episodes[0], 4)
        chosen = {"bilinear": Image.Resampling.BILINEAR, "area": Image.Resampling.BOX}[method]
        expected = [np.asarray(Image.fromarray(frame).resize(size[::-1], chosen)) for frame in contents]
        np.testing.assert_array_equal(actual["obs/top_image"], np.stack(expected))
        if method == "area":
            mean = contents.reshape(9, 12, 2, 16, 2, 3).mean(axis=(2, 4))
            assert np.abs(actual["obs/top_image"] - mean).max() <= 1
        assert actual["obs/wrist_image"].shape == (9, 24, 32, 3)


@pytest.mark.parametrize("dtype", ["uint16", "float32", "uint8"])
def test_resize_depth(aloha, whole, load, dtype) -> None:
    """Of depth and labels every value that results was measured: the nearest, of none a mean."""
    path, depth = aloha(0, 4), np.random.default_rng(0).integers(0, 200, (4, 24, 32)).astype(dtype)
    with h5py.File(path, "r+") as file:
        file["observations/depth/top"] = depth
    loaded = load('[resize]\n"obs/top_depth" = [8, 8]')
    contents = whole(transform_file.apply_transform(loaded, detect.scan_recording(path, "auto")).episodes[0])[
        "obs/top_depth"
    ]
    np.testing.assert_array_equal(contents, depth[:, 1::3][:, :, 2::4])


def test_derive(robomimic, whole, load, lab) -> None:
    """A derived feature is what the function gives for the whole episode, in whatever parts it is read, and is computed
    once for consecutive shards; what it is made of may be dropped."""
    path = robomimic(50, 60)
    loaded = load(
        f'drop = ["reward"]\n[derive.speed]\nfunction = "{lab}:speed"\ninputs = ["action", "reward"]\n'
        f'dtype = "float32"\n[derive."obs/colour"]\nfunction = "{lab}:mean"\ninputs = ["obs/eye_image"]\n'
        'shape = [3]\ndtype = "float32"\n[resize]\n"obs/eye_image" = [4, 4]'
    )
    transform = transform_file.apply_transform(loaded, detect.scan_recording(path, "auto"))
    assert "reward" not in transform.episodes[0].columns
    for number, episode in enumerate(transform.episodes):
        episode = pickle.loads(pickle.dumps(episode))
        contents = whole(episode, 13)
        action, image = (raw(path, f"data/demo_{number}/{key}") for key in ("actions", "obs/eye_image"))
        np.testing.assert_array_equal(contents["speed"], np.linalg.norm(action, axis=1).astype(np.float32))
        # Inputs are as recorded, not as resized.
        np.testing.assert_array_equal(contents["obs/colour"], image.mean(axis=(1, 2)).astype(np.float32))
    assert sys.modules[lab].calls == [50, 60]


def test_derived_anew(robomimic, whole, load, lab) -> None:
    """What was derived from a recording is not what is derived from it after it was changed."""
    path = robomimic(50)
    loaded = load(f'[derive.speed]\nfunction = "{lab}:speed"\ninputs = ["action", "reward"]\ndtype = "float32"')
    contents = whole(transform_file.apply_transform(loaded, detect.scan_recording(path, "auto")).episodes[0])["speed"]
    with h5py.File(path, "r+") as file:
        file["data/demo_0/rewards"][:] = 5
    after = whole(transform_file.apply_transform(loaded, detect.scan_recording(path, "auto")).episodes[0])["speed"]
    np.testing.assert_allclose(after, contents + 5, rtol=1e-6)


def test_channels_first_are_not_resized(robomimic, load) -> None:
    """Images with the channel axis first, which would be resized along the wrong axes, are refused."""
    path = robomimic(3, row=(3, 8, 8))
    with pytest.raises(ConfigError, match=r"\(3, 8, 8\)"):
        transform_file.apply_transform(load('[resize]\n"obs/eye_image" = [4, 4]'), detect.scan_recording(path, "auto"))


def test_cast_of_whole_numbers(robomimic, whole, load) -> None:
    """A cast of integers to floats is exact, or refused."""
    path = robomimic(3)
    with h5py.File(path, "r+") as file:
        file["data/demo_0/states"] = np.array([1, -2, 1 << 24])
    for dtype, add in (("float32", 0), ("float64", 1), ("float64", 1 << 60)):
        with h5py.File(path, "r+") as file:
            file["data/demo_0/states"][2] += add
        (episode,) = transform_file.apply_transform(
            load(f'[cast]\nstate = "{dtype}"'), detect.scan_recording(path, "auto")
        ).episodes
        if add < 1 << 60:
            assert whole(episode)["state"].tolist() == [1, -2, (1 << 24) + add]
    with pytest.raises(DataError, match="float64"):
        whole(episode)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("short", r"gave float32 \(4,\), expected float32 \(5,\)"),
        ("wide", r"gave float64 \(5,\), expected float32 \(5,\)"),
        ("broken", "raised ZeroDivisionError: division by zero"),
        ("greedy", "read-only"),
        ("bad", "gave a value that is not finite at step 2"),
    ],
)
def test_derive_refuses(robomimic, load, lab, function, what) -> None:
    """The error of a function that raises, or returns another shape or dtype, names function, episode and file."""
    path = robomimic(5)
    loaded = load(f'[derive.x]\nfunction = "{lab}:{function}"\ninputs = ["action"]\ndtype = "float32"')
    (episode,) = transform_file.apply_transform(loaded, detect.scan_recording(path, "auto")).episodes
    reader, out = open_reader(episode), np.empty(5, np.float32)
    with pytest.raises(DataError, match=what) as caught:
        reader.read_into(episode.columns["x"], out, 0, 5)
    assert f"{lab}:{function} for x" in caught.value.message
    assert caught.value.where == f"{path}: demo_0"
    reader.close()


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("dorp = []", 'unknown key "dorp"', "drop"),
        ('[derive.x]\nfunction = "a:b"\ninputs = []\ndtpye = "f4"', 'unknown key "derive.*dtpye"', "dtype"),
        ("[resize]\na = [0, 4]", r"\[0, 4\]", ""),
        ("[resize]\na = [4]", "resize", ""),
        ('[cast]\na = "flaot32"', "'flaot32'", "float32"),
        ('[cast]\na = "object"', "'object'", ""),
        ('[derive.x]\nfunction = "no_such:f"\ninputs = ["a"]\ndtype = "float32"', "No module named", "PYTHONPATH"),
        ('[derive.x]\nfunction = "lab_features:sped"\ninputs = ["a"]\ndtype = "float32"', "has no sped", "speed"),
        ('[derive.x]\nfunction = "lab_features:value"\ninputs = ["a"]\ndtype = "float32"', "is not a function", ""),
        ('[derive.x]\nfunction = "gripper"\ninputs = ["a"]\ndtype = "float32"', "no entry point 'gripper'", "module:"),
        ("drop = [", "not TOML", ""),
    ],
)
def test_bad_file(load, lab, tmp_path, text, what, hint) -> None:
    """The error of a mistake in the file names the key and the nearest valid name, before a recording is opened."""
    with pytest.raises(ConfigError, match=what) as caught:
        load(text)
    assert str(tmp_path / "transform.toml") in caught.value.where
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ('[rename]\n"obs/eye_imgae" = "obs/top_image"', "no array 'obs/eye_imgae'", "obs/eye_image"),
        ('[cast]\nactoin = "float16"', "no array 'actoin'", "action"),
        ('[cast]\naction = "int32"', "float32, .* int32", "derive"),
        ("[resize]\naction = [4, 4]", r"action has the shape \(7,\)", ""),
        ('drop = ["*"]', "no array is left", "fewer"),
        ('[derive.x]\nfunction = "lab_features:speed"\ninputs = ["ob"]\ndtype = "float32"', "no array 'ob'", ""),
    ],
)
def test_does_not_fit(robomimic, load, lab, text, what, hint) -> None:
    """The error of an unknown array, or an impossible transform, names its key in the transform."""
    loaded = load(text)
    with pytest.raises(ConfigError, match=what) as caught:
        transform_file.apply_transform(loaded, detect.scan_recording(robomimic(3, 4), "auto"))
    assert str(loaded.path) in caught.value.where
    assert hint in caught.value.hint


def test_odd_one(aloha, load) -> None:
    """Of recordings of one episode each, the one without an array that the transform names is rejected by it."""
    with h5py.File(aloha(1, 3), "r+") as file:
        del file["observations/images/wrist"]
        path = Path(file.filename)
    loaded = load('[resize]\n"obs/wrist_image" = [4, 4]')
    assert len(transform_file.apply_transform(loaded, detect.scan_recording(aloha(0, 3), "auto")).episodes) == 1
    transform = transform_file.apply_transform(loaded, detect.scan_recording(path, "auto"))
    assert transform.episodes == ()
    (item,) = transform.rejected
    assert (item.name, item.path) == ("episode_1", path)
    assert "resize.obs/wrist_image" in item.reason


def test_two_of_a_name(robomimic, load) -> None:
    """A rename that gives two arrays the same name is refused."""
    with pytest.raises(DataError, match="'reward'"):
        transform_file.apply_transform(load('[rename]\ndone = "reward"'), detect.scan_recording(robomimic(3), "auto"))


def test_cast_that_does_not_fit(robomimic, load) -> None:
    """The error of a value that does not fit the new dtype names file, array and step."""
    path = robomimic(6)
    with h5py.File(path, "r+") as file:
        file["data/demo_0/states"] = np.array([1, 2, 3, 300, 5, 6])
        file["data/demo_0/obs/far"] = np.array([1.0, np.inf, 1e30, 1e300, 0, 0])
    loaded = load('[cast]\nstate = "uint8"\n"obs/far" = "float32"\ndone = "uint8"')
    (episode,) = transform_file.apply_transform(loaded, detect.scan_recording(path, "auto")).episodes
    reader = open_reader(episode)
    for name, key in (("state", "states"), ("obs/far", "obs/far")):
        column = episode.columns[name]
        with pytest.raises(DataError) as caught:
            reader.read_into(column, np.empty(6, column.dtype), 0, 6)
        assert caught.value.where == f"{path}: /data/demo_0/{key}: step 3"
    out = np.empty(6, np.uint8)
    reader.read_into(episode.columns["done"], out, 0, 6)
    assert out.tolist() == [0, 0, 0, 0, 0, 1]
    reader.close()


def test_provenance(load, lab, tmp_path) -> None:
    """The provenance has the transform's text, and the digest of each function's module."""
    text = f'[derive.x]\nfunction = "{lab}:speed"\ninputs = ["action"]\ndtype = "float32"'
    retained = transform_file.transform_provenance(load(text))
    assert retained["text"] == text
    assert retained["functions"] == [
        {
            "function": f"{lab}:speed",
            "distribution": "",
            "source": digest.digest_file(tmp_path / "code/lab_features.py")[1],
        }
    ]
    assert derive_functions.function_provenance("numpy:sqrt")["distribution"].startswith("numpy ")


def test_schema_of_a_pipe(tmp_path) -> None:
    """A transform that a process writes into a pipe is recorded as it is applied."""
    text, pipe = 'drop = ["reward"]\n', tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,), daemon=True)
    writer.start()
    transform = transform_file.load_transform(pipe)
    assert (transform.tables.drop, transform.text) == (("reward",), text)


def test_entry_point(robomimic, whole, load, lab, tmp_path) -> None:
    """A function of an installed package is found by its entry point, and its version is recorded."""
    info = tmp_path / "code/lab_features-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-features\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[pitools.derive]\nfast = lab_features:speed\n")
    loaded = load('[derive.x]\nfunction = "fast"\ninputs = ["action", "reward"]\ndtype = "float32"')
    assert whole(transform_file.apply_transform(loaded, detect.scan_recording(robomimic(3), "auto")).episodes[0])[
        "x"
    ].shape == (3,)
    assert transform_file.transform_provenance(loaded)["functions"][0]["distribution"] == "lab-features 1.2"
    with pytest.raises(ConfigError, match="'fats'") as caught:
        load('[derive.x]\nfunction = "fats"\ninputs = ["action"]\ndtype = "float32"')
    assert "fast" in caught.value.hint
