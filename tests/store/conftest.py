from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.store.zarr import metadata
from pitools.store.zarr.metadata import ArrayMetadata


def write(folder: Path, name: str = "", **settings: Any) -> tuple[ArrayMetadata, np.ndarray]:
    """zarr-python writes an array of settings over these; returns our record of it, and its values."""
    import zarr

    shape = settings.pop("shape", (22, 3))
    dtype = np.dtype(settings.pop("dtype", "int32"))
    values = settings.pop("values", None)
    if values is None:
        values = np.random.default_rng(1).integers(1, 1 << 7, shape).astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python's: a type or an order of codecs that it advises against
        if "codecs" in settings:  # what create_array has no word for, such as an index's own codecs
            settings = {"chunks": (16, 3), "zarr_format": 3, "fill_value": 0} | settings
            created = zarr.create(store=folder, path=name, shape=values.shape, dtype=values.dtype, **settings)
        else:
            settings = {"chunks": (8, 3), "compressors": None, "fill_value": 0} | settings
            created = zarr.create_array(folder, name=name or None, shape=values.shape, dtype=values.dtype, **settings)
        created[...] = values
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return metadata.read_arrays(files, lambda path: (folder / path).read_bytes())[name], values


@pytest.fixture
def write_array() -> Callable[..., tuple[ArrayMetadata, np.ndarray]]:
    """`write`, above."""
    return write
