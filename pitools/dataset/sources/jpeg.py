"""JPEG rows of an ALOHA recording: each a JPEG file padded with zeros to the longest."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pitools.core.errors import DataError

END_OF_IMAGE = b"\xff\xd9"


def size(row: NDArray[np.uint8], where: str) -> tuple[int, int, int]:
    """(height, width, 3) of a row, from its header alone. Raises DataError."""
    with _open(row, where) as image:
        return image.height, image.width, 3


def decode(row: NDArray[np.uint8], out: NDArray[np.uint8], where: str) -> None:
    """Decode a row to RGB into `out` (H, W, 3). Raises DataError when it is damaged or of another size."""
    with _open(row, where) as image:
        # Compared before decoding: a header may claim gigapixels.
        if (image.height, image.width, 3) != out.shape:
            raise DataError(f"the JPEG is {image.height} x {image.width}, others {out.shape[:2]}", where=where)
        try:
            out[:] = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError) as error:
            raise _damaged(error, where) from error


def _open(row: NDArray[np.uint8], where: str) -> Any:
    data = row.tobytes().rstrip(b"\0")
    # A decoder fills the rest of a cut JPEG with grey and says nothing; its end marker is what shows the cut.
    if not data.endswith(END_OF_IMAGE):
        raise _damaged("it has no end marker", where)
    try:
        return Image.open(io.BytesIO(data), formats=("JPEG",))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _damaged(error, where) from error


def _damaged(reason: object, where: str) -> DataError:
    return DataError(f"not a whole JPEG: {reason}", where=where, hint="repair or remove the episode")
