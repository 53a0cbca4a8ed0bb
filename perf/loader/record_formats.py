"""The same frames as other formats keep them, one record a frame, and how their users read windows of them.

Every reader fills `out`, (n, length, 96, 96, 3), with windows that begin at n steps.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perf.loader.loader_data import EPISODE, LENGTH, SIDE, Recording
from perf.loader.loader_peers import Variant

FRAME = (SIDE, SIDE, 3)


def mds(made: Recording, folder: Path) -> list[Variant]:
    """Mosaic's shards on local disk: one item a frame, raw; its dataset decodes one at a time."""
    # Of its examples for pictures, the only part that wants torchvision, whose builds rarely fit a CPU build of torch.
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    from streaming import MDSWriter, StreamingDataset

    columns = {"image": f"ndarray:uint8:{','.join(map(str, FRAME))}"}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for frame in made.map(made.frames):
            writer.write({"image": np.ascontiguousarray(frame)})
    dataset = StreamingDataset(local=str(folder), shuffle=False, batch_size=1)

    def fill(starts: Sequence[int], out: NDArray[Any]) -> None:
        for window, position in zip(out, starts, strict=True):
            for step in range(LENGTH):
                window[step] = dataset[position + step]["image"]

    return [Variant("StreamingDataset(local=...)[i], ndarray, no compression", fill)]


def array_record(made: Recording, folder: Path) -> list[Variant]:
    """ArrayRecord, as grain reads it: groups of one record, not compressed; one at a time, or a batch's at once."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from grain.sources import ArrayRecordDataSource

    folder.mkdir()
    writer = ArrayRecordWriter(str(folder / "frames.array_record"), "group_size:1,uncompressed")
    for frame in made.map(made.frames):
        writer.write(frame.tobytes())
    writer.close()
    source = ArrayRecordDataSource([str(folder / "frames.array_record")])

    def single(starts: Sequence[int], out: NDArray[Any]) -> None:
        for window, position in zip(out, starts, strict=True):
            for step in range(LENGTH):
                window[step] = np.frombuffer(source[position + step], np.uint8).reshape(FRAME)

    def batched(starts: Sequence[int], out: NDArray[Any]) -> None:
        for window, position in zip(out, starts, strict=True):
            for step, data in enumerate(source.__getitems__(range(position, position + LENGTH))):
                window[step] = np.frombuffer(data, np.uint8).reshape(FRAME)

    return [
        Variant("ArrayRecordDataSource[i], group_size:1, uncompressed", single),
        Variant("ArrayRecordDataSource.__getitems__ of a window, group_size:1, uncompressed", batched),
    ]


def hdf5(made: Recording, folder: Path, *, kept_open: bool) -> list[Variant]:
    """One file an episode, chunks of one frame, as ALOHA records; opened for each sample as ACT does, or kept open."""
    import h5py

    folder.mkdir()
    frames = made.map(made.frames)
    paths = [folder / f"episode_{number}.hdf5" for number in range(made.steps // EPISODE)]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            image = frames[number * EPISODE : (number + 1) * EPISODE]
            file.create_dataset("observations/images/front", data=image, chunks=(1, *FRAME))
    offsets = range(0, made.steps, EPISODE)
    retained = [h5py.File(path, "r")["observations/images/front"] for path in paths] if kept_open else []

    def fill(starts: Sequence[int], out: NDArray[Any]) -> None:
        for window, position in zip(out, starts, strict=True):
            episode = bisect_right(offsets, position) - 1
            first = position - offsets[episode]
            if retained:
                retained[episode].read_direct(window, np.s_[first : first + LENGTH])
            else:
                with h5py.File(paths[episode], "r") as file:
                    window[:] = file["observations/images/front"][first : first + LENGTH]

    return [
        Variant("read_direct from files kept open" if kept_open else "h5py.File(path)[...][a:b] for each sample", fill)
    ]
