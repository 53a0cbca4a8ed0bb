"""Frames that are stored as picture files, JPEG or PNG: rows of an ALOHA recording, cells of a LeRobot one."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pitools.core.errors import DataError

END_OF_JPEG = b"\xff\xd9"
_PNG = b"\x89PNG"
# Whatever colours a JPEG is stored in, it is RGB to who looks at it. A PNG is what it says.
_PNG_MODES: dict[str, tuple[tuple[int, ...], str]] = {
    "RGB": ((3,), "uint8"), "RGBA": ((4,), "uint8"), "L": ((), "uint8"), "I;16": ((), "uint16"),
}  # fmt: skip


def describe(data: bytes, where: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a picture, from its header alone: (H, W, 3) uint8, or (H, W) uint16. Raises DataError."""
    with _open(data, where) as image:
        channels, dtype = _form(image, where)
        return (image.height, image.width, *channels), dtype


def decode(data: bytes, out: NDArray[Any], where: str) -> None:
    """Decode a picture, padded with zeros or not, into `out`. The GIL is free meanwhile.

    Raises DataError when it is damaged, or of another size or kind than `out`.
    """
    with _open(data, where) as image:
        # Compared before decoding: a header may claim gigapixels.
        channels, dtype = _form(image, where)
        if (image.height, image.width, *channels) != out.shape or dtype != out.dtype:
            mine, others = (image.height, image.width, *channels), f"{out.dtype} {out.shape}"
            what, hint = f"the {image.format} is {dtype} {mine}, others {others}", "repair or remove the episode"
            raise DataError(what, where=where, hint=hint)
        try:
            image.load()
            # `convert` copies even where there is nothing to convert.
            out[:] = np.asarray(image.convert("RGB") if image.format == "JPEG" and image.mode != "RGB" else image)
        except (OSError, ValueError, SyntaxError) as error:
            raise _damaged(image.format, error, where) from error


def _form(image: Any, where: str) -> tuple[tuple[int, ...], str]:
    known = ((3,), "uint8") if image.format == "JPEG" else _PNG_MODES.get(image.mode)
    if known is None:
        hint = "leave it out with --skip"
        raise DataError(f"a PNG of mode {image.mode}; known: {', '.join(_PNG_MODES)}", where=where, hint=hint)
    return known


def _open(data: bytes, where: str) -> Any:
    kind = "PNG" if data.startswith(_PNG) else "JPEG"
    # A decoder fills the rest of a cut JPEG with grey and says nothing; its end marker is what shows the cut.
    if kind == "PNG":
        _check_png(data, where)
        # Pillow cuts 16 bits of a colour down to 8, and blows fewer bits of grey up to them.
        if data[24] != 8 and data[24:26] != b"\x10\0":
            what, hint = f"a PNG of {data[24]} bits a channel; known: 8, and 16 of grey", "leave it out with --skip"
            raise DataError(what, where=where, hint=hint)
    else:
        data = data.rstrip(b"\0")
        if not data.endswith(END_OF_JPEG):
            raise _damaged(kind, "it has no end marker", where)
    try:
        return Image.open(io.BytesIO(data), formats=(kind,))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _damaged(kind, error, where) from error


def _check_png(data: bytes, where: str) -> None:
    """Raises DataError unless all its parts are there and are what their checksums say: Pillow does not compare those
    of the pixels."""
    at, view = 8, memoryview(data)
    if data[12:16] != b"IHDR":
        raise _damaged("PNG", "it does not begin with its size", where)
    while True:
        length, kind = int.from_bytes(view[at : at + 4], "big"), bytes(view[at + 4 : at + 8])
        end = at + 12 + length
        if end > len(data):
            raise _damaged("PNG", "it is cut short", where)
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            raise _damaged("PNG", f"its {kind.decode(errors='replace')} is not what its checksum says", where)
        if kind == b"IEND":
            return
        at = end


def _damaged(kind: str, reason: object, where: str) -> DataError:
    return DataError(f"not a whole {kind}: {reason}", where=where, hint="repair or remove the episode")
