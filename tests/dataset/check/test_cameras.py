from __future__ import annotations

import numpy as np
import pytest

from pitools.dataset.check.cameras import is_camera


def test_black(make, found, places) -> None:
    """Black frames at an episode's start are found without a deep check, and how many of those looked at."""
    findings = found(make(lambda demos: demos[3]["obs/eye_image"].__setitem__(slice(0, 4), 1)))
    assert places(findings) == {("blank", "obs/eye_image", 3, 0)}
    assert (findings[0].level, findings[0].got) == ("fault", "mean 1.0, deviation 0.0")


def test_blank_between(make, found, places) -> None:
    """A single white frame in the middle of a chunk is found by a deep check."""
    path = make(lambda demos: demos[3]["obs/eye_image"].__setitem__(17, 255))
    assert found(path) == []
    assert places(found(path, deep=True)) == {("blank", "obs/eye_image", 3, 17)}


@pytest.mark.parametrize("first", [False, True])
def test_one_colour(make, found, places, first) -> None:
    """A frame of one colour, as decoders make of what is lost, shows nothing, wherever its channels are."""

    def change(demos) -> None:
        demos[3]["obs/eye_image"][0] = [0, 135, 0]
        for reference in demos if first else ():
            reference["obs/eye_image"] = np.moveaxis(reference["obs/eye_image"], -1, 1).copy()

    assert places(found(make(change))) == {("blank", "obs/eye_image", 3, 0)}


def test_something_small(make, found) -> None:
    """A frame in which there is something, be it but a few pixels of one colour, is not blank."""

    def change(demos) -> None:
        del demos[2:]
        for demo in demos:
            demo["obs/eye_image"] = frames = np.full((len(demo["actions"]), 240, 320, 3), (70, 90, 110), np.uint8)
            for step in range(len(frames)):
                frames[step, 101:104, 3 * step + 1 : 3 * step + 4] = 200

    assert found(make(change)) == []


def test_slow_camera(make, found, places) -> None:
    """A camera of a lower rate than the robot's repeats its frames; one that lasts for many more is frozen."""

    def change(demos, stop: int = 0) -> None:
        for demo in demos:
            demo["obs/eye_image"] = np.repeat(demo["obs/eye_image"], 11, axis=0)
            for key in [key for key, value in demo.items() if not isinstance(value, str) and "image" not in key]:
                demo[key] = np.linspace(demo[key][0], demo[key][-1], len(demo["obs/eye_image"])).astype(demo[key].dtype)
        demos[4]["obs/eye_image"][110 : 110 + stop] = demos[4]["obs/eye_image"][110]

    assert found(make(change)) == []
    path = make(lambda demos: change(demos, 80), name="stop")
    assert places(found(path)) == {("frozen", "obs/eye_image", 4, 110)}


def test_always_frozen(make, found) -> None:
    """A camera that gives one frame through each episode is no slow one."""
    findings = found(
        make(
            lambda demos: [
                known["obs/eye_image"].__setitem__(slice(None), known["obs/eye_image"][:1]) for known in demos
            ]
        )
    )
    assert [(finding.check, finding.episode) for finding in findings] == [("frozen", number) for number in range(8)]


def test_dark_is_not_black(make, found) -> None:
    """A dark room in which something can be seen is no black frame."""

    def change(demos) -> None:
        for demo in demos:
            demo["obs/eye_image"] //= 8

    assert found(make(change), deep=True) == []


@pytest.mark.parametrize("start", [0, 8, 20])
def test_frozen(make, found, places, start) -> None:
    """A frame that lasts while the robot moves is found at its first step, over chunks too."""

    def change(demos) -> None:
        frames = demos[4]["obs/eye_image"]
        frames[start : start + 15] = frames[start]

    findings = found(make(change))
    assert places(findings) == {("frozen", "obs/eye_image", 4, start)}
    assert findings[0].got == "15 steps"


def test_frozen_while_nothing_moves(make, found) -> None:
    """Where the robot waits, a frame may well stay the same; so may one for a moment, or from episode to episode."""

    def change(demos) -> None:
        demos[4]["obs/eye_image"][10:30] = demos[4]["obs/eye_image"][10]
        demos[4]["actions"][10:30] = demos[4]["actions"][10]
        demos[5]["obs/eye_image"][10:19] = demos[5]["obs/eye_image"][10]
        demos[6]["obs/eye_image"][-7:] = 150
        demos[7]["obs/eye_image"][:7] = 150
        demos[6]["obs/eye_image"][-7:, 0, 0] = demos[7]["obs/eye_image"][:7, 0, 0] = 20

    assert found(make(change)) == []


@pytest.mark.parametrize(
    ("name", "row", "dtype", "expected"),
    [
        ("obs/top", (480, 640, 3), "uint8", True),
        ("obs/top", (3, 84, 84), "uint8", True),
        ("obs/gray_image", (84, 84), "uint8", True),
        ("obs/gray_image", (84, 84, 1), "uint8", True),
        ("obs/tactile", (16, 16), "uint8", False),
        ("obs/depth_image", (84, 84, 1), "uint8", False),
        ("obs/image", (84, 84, 3), "float32", False),
        ("obs/segmentation_image", (84, 84, 3), "uint8", False),
    ],
)
def test_is_camera(name, row, dtype, expected) -> None:
    """Pictures of light are told from depth, masks and other grids, by form and name."""
    assert is_camera(name, row, dtype) is expected


def test_large_frames(make, found, places) -> None:
    """Frames that each have a chunk of their own, and rows of no multiple of eight bytes, are compared as well."""

    def change(demos) -> None:
        del demos[3:]
        rng = np.random.default_rng(1)
        for demo in demos:
            steps = len(demo["actions"])
            demo["obs/eye_image"] = rng.integers(60, 200, (steps, 61, 83, 3), np.uint8)
        demos[1]["obs/eye_image"][5:25] = demos[1]["obs/eye_image"][5]
        demos[2]["obs/eye_image"][3] = 0

    with pytest.MonkeyPatch.context() as patched:
        from pitools.dataset.ingest import chunking

        patched.setattr(chunking, "CHUNK_BYTES", 20_000)
        patched.setattr(chunking, "SHARD_BYTES", 120_000)
        path = make(change)
    assert places(found(path)) == {("frozen", "obs/eye_image", 1, 5), ("blank", "obs/eye_image", 2, 3)}
