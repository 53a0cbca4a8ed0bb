"""Detect a recording's layout and scan it. Every layout maps to `action`, `obs/…`, `obs/<camera>_image`, `reward`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

import msgspec

from pitools.core.errors import DataError
from pitools.dataset.formats.model import Recording, SkipPatterns, list_files

EXPECTED_CONTENT = {
    "robomimic": "data/<demo>/actions",
    "aloha": "action and observations/",
    "lerobot": "meta/info.json",
    "zarr": "zarr.json or .zgroup",
}
_CONVERT_HINT = "unpack it, or convert it to HDF5, a folder of LeRobot v3, or Zarr"
_SIGNATURES = {
    b"\x89MCAP0\r\n": "an MCAP log",
    b"#ROSBAG V": "a ROS 1 bag",
    b"SQLite format 3\0": "a SQLite file, such as a ROS 2 bag",
    b"PK\x03\x04": "a ZIP file, such as .npz or a zipped store",
    b"\x93NUMPY": "a NumPy file",
    b"PAR1": "one Parquet file of a dataset",
    b"\x1f\x8b": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"\x1a\x45\xdf\xa3": "a Matroska or WebM video",
    **{bytes([0x80, protocol]): "a Python pickle" for protocol in range(2, 6)},
}
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_TFRECORD = "a TFRecord file (RLDS)"
_MAX_SNIFFED_FILES = 32
_SNIFFED_BYTES = 256
_TEXT_BYTES = bytes([*b"\t\r\n", *range(0x20, 0x7F)])


def scan_recording(path: Path, layout: str, skip: Sequence[str] = (), *, keep_next_obs: bool = False) -> Recording:
    """Return a recording's episodes from its metadata alone. layout: "auto" detects it.

    `rejected` has incomplete episodes, and those of an uncommon schema. Raises DataError for an unreadable recording,
    and for another layout.
    """
    patterns = SkipPatterns(skip)
    recording = _scan_layout(path, layout, patterns, keep_next_obs=keep_next_obs)
    return msgspec.structs.replace(recording, matched_skips=frozenset(patterns.matched))


def _scan_layout(path: Path, layout: str, skip: SkipPatterns, *, keep_next_obs: bool) -> Recording:
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
        raise DataError("neither a file nor a folder", where=str(path), hint="give the recording itself")
    if path.is_file() and (problem := _unsupported_format(path) or _text_format(path)):
        raise DataError(f"{problem} is not a supported format", where=str(path), hint=_CONVERT_HINT)
    detected = detect_layout(path) if layout == "auto" else layout
    if detected == "lerobot":
        from pitools.dataset.formats import lerobot

        if (path / "meta").is_dir():
            list_files(path / "meta")  # other files are opened only if `meta` names them
        return lerobot.scan_lerobot(path, skip)
    if detected == "zarr":
        if (path / "manifest.json").is_file():
            from pitools.dataset.formats import version_source

            return version_source.scan_version(path, skip)
        from pitools.dataset.formats import zarr_store

        return zarr_store.scan_zarr_store(path, skip, keep_next_obs=keep_next_obs)
    from pitools.dataset.formats import aloha, hdf5, robomimic

    with hdf5.open_hdf5(path) as file:
        if detected == "robomimic":
            return robomimic.scan_robomimic(path, file, skip, keep_next_obs=keep_next_obs)
        return aloha.scan_aloha(path, file, skip, expected=EXPECTED_CONTENT["aloha"])


def detect_layout(path: Path) -> str:
    """Return the layout of a file or folder by its contents. Raises DataError for an unknown layout."""
    if path.is_dir():
        if (path / "meta" / "info.json").is_file():
            return "lerobot"
        if any((path / name).is_file() for name in ("zarr.json", ".zgroup", ".zmetadata")):
            return "zarr"
        names, layouts = sorted(entry.name for entry in path.iterdir()), ("lerobot", "zarr")
    else:
        import h5py

        from pitools.dataset.formats import hdf5

        with hdf5.open_hdf5(path) as file:
            if hdf5.get_child(file, "data", h5py.Group) is not None:
                return "robomimic"
            if hdf5.get_child(file, "action", h5py.Dataset) is not None:
                return "aloha"
            for name in file:
                hdf5.require_local(file, name)
            names, layouts = sorted(file), ("robomimic", "aloha")
    hint = "; ".join(f"{layout} has {EXPECTED_CONTENT[layout]}" for layout in layouts)
    inside = [path / name for name in names[:_MAX_SNIFFED_FILES]] if path.is_dir() else []
    if any(map(_is_hdf5, inside)):
        raise DataError("a folder of HDF5 files", where=str(path), hint=f"name the files: {path}/*.hdf5")
    if path.is_dir():  # RLDS has a folder of each dataset's name, and in it one of each version
        inside += sorted(islice(chain(path.glob("*/*"), path.glob("*/*/*")), _MAX_SNIFFED_FILES))
    if problem := next(filter(None, map(_unsupported_format, inside)), ""):
        problem = f"the folder has a file of an unsupported format: {problem}"
        raise DataError(problem, where=str(path), hint=f"{_CONVERT_HINT}; {hint}")
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    raise DataError(f"unknown layout, with {shown or 'no members'}", where=str(path), hint=hint)


def _unsupported_format(path: Path) -> str:
    """Return the name of a known but unsupported format by a file's first bytes; else ""."""
    from crc32c import crc32c

    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            data = file.read(_SNIFFED_BYTES)
    except OSError:
        return ""  # the reader reports why the file cannot be read
    # A TFRecord has no signature: it begins with a length of 8 bytes and its masked checksum.
    checksum = crc32c(data[:8])
    masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
    if data[8:12] == masked.to_bytes(4, "little") or ".tfrecord" in path.name:
        return _TFRECORD
    if data[4:8] == b"ftyp":
        return "an MP4 video"
    return next((problem for mark, problem in _SIGNATURES.items() if data.startswith(mark)), "")


def _text_format(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_SNIFFED_BYTES)
    except OSError:
        return ""
    return "" if not data or data.translate(None, _TEXT_BYTES) else "a text file"


def _is_hdf5(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE
    except OSError:
        return False
