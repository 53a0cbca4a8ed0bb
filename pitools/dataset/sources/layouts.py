"""The layouts we read, and the names that all have in a store: `action`, `obs/…`, `obs/<camera>_image`, `reward`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pitools.core.errors import DataError
from pitools.dataset.sources.recording import Recording

EXPECTED = {
    "robomimic": "data/<demo>/actions",
    "aloha": "action and observations/",
    "lerobot": "meta/info.json",
    "zarr": "zarr.json or .zgroup",
}


def scan(path: Path, layout: str, skip: Sequence[str] = (), *, keep_next_obs: bool = False) -> Recording:
    """What a file or folder holds, by its metadata alone; `layout` may be "auto".

    Episodes that are not whole, or not like most, are in `refused`. Raises DataError for what cannot be read, or is not
    of the layout.
    """
    found = detect(path) if layout == "auto" else layout
    if found == "lerobot":
        from pitools.dataset.sources import lerobot

        return lerobot.scan(path, skip)
    if found == "zarr":
        from pitools.dataset.sources import zarr_store

        return zarr_store.scan(path, skip, keep_next_obs=keep_next_obs)
    from pitools.dataset.sources import aloha, hdf5, robomimic

    with hdf5.opened(path) as file:
        if found == "robomimic":
            return robomimic.scan(path, file, skip, keep_next_obs=keep_next_obs)
        return aloha.scan(path, file, skip, expected=EXPECTED["aloha"])


def detect(path: Path) -> str:
    """The layout of a file or folder, by what is in it. Raises DataError when it is none that we know."""
    if path.suffix == ".zip" and path.is_file():
        raise DataError("a ZIP file cannot be read from here and there", where=str(path), hint="unpack it")
    if path.is_dir():
        if (path / "meta" / "info.json").is_file():
            return "lerobot"
        if any((path / name).is_file() for name in ("zarr.json", ".zgroup", ".zmetadata")):
            return "zarr"
        names, known = sorted(entry.name for entry in path.iterdir()), ("lerobot", "zarr")
    else:
        import h5py

        from pitools.dataset.sources import hdf5

        with hdf5.opened(path) as file:
            if hdf5.child(file, "data", h5py.Group) is not None:
                return "robomimic"
            if hdf5.child(file, "action", h5py.Dataset) is not None:
                return "aloha"
            names, known = sorted(file), ("robomimic", "aloha")
    hint = "; ".join(f"{layout} has {EXPECTED[layout]}" for layout in known)
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    raise DataError(f"unknown layout: it has {shown or 'nothing'}", where=str(path), hint=hint)
