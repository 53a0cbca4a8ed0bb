from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from pitools.core.errors import ClusterError, DataError, ToolMissing, UsageError
from pitools.dataset import plot
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.plot.content import read_content
from pitools.store import version_state
from pitools.store.version_state import Quarantine


@pytest.fixture
def make(tmp_path):
    """Ingests episodes of these lengths, with so many columns of actions and these cameras (H, W, channels)."""

    def run(*lengths: int, columns: int = 7, cameras=((12, 16, 3),), language: str = "pick", **more) -> Path:
        rng = np.random.default_rng(0)
        with h5py.File(tmp_path / "a.hdf5", "w") as file:
            for i, steps in enumerate(lengths):
                group = file.create_group(f"data/demo_{i}")
                group.attrs["language"] = language
                group["actions"] = np.cumsum(rng.normal(size=(steps, columns)), axis=0)
                for number, row in enumerate(cameras):
                    group[f"obs/cam{number}_image"] = rng.integers(0, 256, (steps, *row), np.uint8)
                for name, values in more.items():
                    group[f"obs/{name}"] = values[:steps]
        return Path(ingest([tmp_path / "a.hdf5"], root=tmp_path / "root", name="x").path)

    return run


def red(png: Path) -> int:
    """Pixels that are clearly red."""
    pixels = np.asarray(Image.open(png).convert("RGB")).astype(int)
    return int(((pixels[..., 0] > 170) & (pixels[..., 1] < 100) & (pixels[..., 2] < 100)).sum())


@pytest.mark.parametrize(
    ("steps", "columns", "cameras"),
    [
        (1, 1, ()),
        (1, 7, ((12, 16, 3),)),
        (2, 14, ((24, 24, 1), (3, 16, 12))),
        (30, 16, ((48, 64, 3),) * 4),
        (2000, 60, ((20, 90, 3), (90, 20, 4))),
        (400, 33, ()),
    ],
)
def test_any_episode(make, tmp_path, steps, columns, cameras) -> None:
    """Short or long, of no camera or four, of 1 to 60 columns: a picture of a size that a screen shows."""
    plot.draw_episode(make(3, steps, columns=columns, cameras=cameras), 1, tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as image:
        image.load()
        assert image.format == "PNG"
        assert image.width == 1430
        assert 150 <= image.height <= 2200
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20
    assert not list(tmp_path.glob(".out*"))


def test_real_episode(bridge, tmp_path) -> None:
    """A real episode shows its instruction, eight frames as they were recorded, and all that moves."""
    path = Path(ingest([bridge], root=tmp_path, name="bridge").path)
    shown = read_content(path, 3)
    assert shown.header[0].text == "turn lever vertical to front"
    assert "episode 3 of 25   10 steps   split train" in shown.header[1].text
    assert shown.frame_steps == [0, 1, 3, 4, 5, 6, 8, 9]
    with h5py.File(bridge) as file:
        demo = file[f"data/{sorted(file['data'], key=lambda name: int(name.split('_')[1]))[3]}"]
        assert np.array_equal(shown.frames["obs/agentview_image"][2], demo["obs/agentview_image"][3])
        actions = demo["actions"][:]
    drawn = {column for panel in shown.panels if panel.array == "action" for column in panel.columns}
    assert drawn == {0, 1, 2, 3, 4, 5}  # the gripper stays where it is: that is said beside the curves
    assert [panel.note for panel in shown.panels if panel.array == "action"][-1] == f"6 = {actions[0, 6]:g}"
    plot.draw_episode(path, 3, tmp_path / "out.png")


def test_columns_of_like_range_share_a_panel(make) -> None:
    """A column that moves by a hundredth is not drawn as a flat line under one that moves by a hundred."""
    t = np.linspace(0, 1, 50)[:, None]
    shown = read_content(make(50, columns=1, cameras=(), joints=t * [0.01, 100, 0.02, 150, 0, 0.03]), 0)
    assert [panel.columns for panel in shown.panels if panel.array == "obs/joints"] == [(0, 2, 5), (1, 3)]


def test_quarantine_is_said_in_red(make, tmp_path) -> None:
    """Why an episode is in quarantine stands above it, and not above others."""
    path = make(20, 20, cameras=())
    for episode in (0, 1):
        plot.draw_episode(path, episode, tmp_path / f"{episode}.png")
    before = red(tmp_path / "0.png"), red(tmp_path / "1.png")
    quarantine = Quarantine(
        whole_version=False, set_at="2026-01-01T00:00:00Z", set_by="me", episodes={0: ("nan: action: bad",)}
    )
    version_state.set_quarantine(path, quarantine)
    assert [line.text for line in read_content(path, 0).header if line.colour == "firebrick"] == [
        "in quarantine: nan: action: bad"
    ]
    for episode in (0, 1):
        plot.draw_episode(path, episode, tmp_path / f"{episode}.png")
    assert red(tmp_path / "0.png") > before[0] + 100
    assert red(tmp_path / "1.png") == before[1]
    version_state.set_quarantine(
        path, Quarantine(whole_version=True, set_at="", set_by="", reasons=("shard: bad checksum",))
    )
    assert "the whole version: shard: bad checksum" in read_content(path, 1).header[-1].text


@pytest.mark.parametrize("columns", [3, 40])
def test_nan_is_marked(make, tmp_path, columns) -> None:
    """A single step without a number, in thousands, is to be seen."""
    values = np.cumsum(np.random.default_rng(1).normal(size=(3000, columns)), axis=0)
    plot.draw_episode(make(3000, cameras=(), joints=values), 0, tmp_path / "without.png")
    values[1234] = np.nan
    plot.draw_episode(make(3000, cameras=(), joints=values), 0, tmp_path / "with.png")
    first, second = (np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB")) for name in ("without", "with"))
    assert (first != second).any(axis=(0, 2)).sum() > 40  # the label, and the line


def test_instruction_is_text(make, tmp_path) -> None:
    """An instruction of dollars, brackets, control characters or letters that the font lacks does not stop it."""
    path = make(5, language="put $\\frac{1}{2 in the box^ \x07 ピック\n" + "and on " * 100)
    plot.draw_episode(path, 0, tmp_path / "out.png")
    assert len([line for line in read_content(path, 0).header if line.size > 10]) == 3
    assert read_content(make(4, language=""), 0).header[0].text == "no instruction"


@pytest.mark.parametrize("episode", [-1, 2, 99])
def test_no_such_episode(make, tmp_path, episode) -> None:
    """An episode that is not there is named, with those that are, and no file is made."""
    with pytest.raises(UsageError, match=str(episode)) as caught:
        plot.draw_episode(make(3, 4), episode, tmp_path / "out.png")
    assert caught.value.hint == "episodes are 0 to 1"
    assert not (tmp_path / "out.png").exists()


def test_damage(make, tmp_path) -> None:
    """Damaged data are no picture."""
    path = make(5)
    shard = path / "obs/cam0_image/c/0/0/0/0"
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError):
        plot.draw_episode(path, 0, tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_where_it_cannot_be_written(make, tmp_path) -> None:
    """A folder that is not there is a refusal that names it; an old picture stays whole."""
    with pytest.raises(ClusterError, match=r"out\.png"):
        plot.draw_episode(make(5), 0, tmp_path / "absent/out.png")


def test_without_matplotlib(make, tmp_path, monkeypatch) -> None:
    """Without matplotlib it is said how to get it."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ToolMissing) as caught:
        plot.draw_episode(make(5), 0, tmp_path / "out.png")
    assert caught.value.hint == "pip install 'pitools-hpc[plot]'"


def test_every_column_is_drawn(make) -> None:
    """Columns of like range are drawn in the order of their numbers, eight to a panel, each of them once."""
    path = make(50, columns=2, joints=np.sin(np.arange(50)[:, None] / np.linspace(5, 7, 13)))
    panels = [panel.columns for panel in read_content(path, 0).panels if panel.array == "obs/joints"]
    assert panels == [tuple(range(8)), tuple(range(8, 13))]
