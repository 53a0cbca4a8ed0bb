"""Frames that are stored as picture files, JPEG or PNG: rows of an HDF5 recording, cells of a LeRobot one."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pitools.core.errors import DataError

END_OF_JPEG = b"\xff\xd9"
READABLE_FORMATS = ("JPEG", "PNG")
# What picture files have at which byte.
_SIGNATURES = (
    ("JPEG", 0, b"\xff\xd8\xff"),
    ("PNG", 0, b"\x89PNG\r\n\x1a\n"),
    ("JPEG XL", 0, b"\0\0\0\x0cJXL \r\n\x87\n"),
    ("JPEG 2000", 0, b"\0\0\0\x0cjP  \r\n\x87\n"),
    ("WebP", 8, b"WEBP"),
    ("AVIF or HEIF", 4, b"ftyp"),
    ("GIF", 0, b"GIF8"),
    ("TIFF", 0, b"II*\0"),
    ("TIFF", 0, b"MM\0*"),
)
# A JPEG XL without a container has no more than two bytes to know it by.
_BARE_JPEG_XL = b"\xff\x0a"
# No frame is a file of fewer bytes: a shorter row is measurements, or a colour, whatever it begins with.
_MIN_BYTES = 64
# Whatever colours a JPEG is stored in, it is RGB to who looks at it. A PNG is what it says.
_PNG_MODES: dict[str, tuple[tuple[int, ...], str]] = {
    "RGB": ((3,), "uint8"),
    "RGBA": ((4,), "uint8"),
    "L": ((), "uint8"),
    "I;16": ((), "uint16"),
}


def image_format(data: bytes) -> str:
    """The format of a picture file, by its first bytes; "" for anything else."""
    otherwise = "JPEG XL" if data.startswith(_BARE_JPEG_XL) else ""
    return next((name for name, at, mark in _SIGNATURES if data[at : at + len(mark)] == mark), otherwise)


def format_of_rows(rows: Sequence[bytes]) -> str:
    """The format of the picture files that rows are, judged by some of them; "" where they are numbers. A row of zeros,
    or one that is damaged, does not make the others numbers."""
    rows = [row for row in rows if len(row) >= _MIN_BYTES and any(row)]
    if found := {image_format(row) for row in rows if not row.startswith(_BARE_JPEG_XL)} - {""}:
        return min(found)
    bare = rows and all(row.startswith(_BARE_JPEG_XL) for row in rows)
    return "JPEG XL" if bare else ""


def require_readable(image_format: str, where: str) -> None:
    """Raises DataError for a format of pictures that is not read."""
    if image_format not in (*READABLE_FORMATS, ""):
        hint = "write it as JPEG, PNG or raw frames where it was recorded; or leave it out with --skip"
        raise DataError(f"{image_format} pictures are not read, only JPEG and PNG", where=where, hint=hint)


def describe_image(data: bytes, where: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a picture, from its header alone: (H, W, 3) uint8, or (H, W) uint16. Raises DataError."""
    with _open(data, where) as image:
        channels, dtype = _image_form(image, where)
        return (image.height, image.width, *channels), dtype


def decode_image(data: bytes, out: NDArray[Any], where: str) -> None:
    """Decode a picture, padded with zeros or not, into `out`. The GIL is free meanwhile.

    Raises DataError when it is damaged, or of another size or kind than `out`.
    """
    with _open(data, where) as image:
        # Compared before decoding: a header may claim gigapixels.
        channels, dtype = _image_form(image, where)
        if (image.height, image.width, *channels) != out.shape or dtype != out.dtype:
            mine, others = (image.height, image.width, *channels), f"{out.dtype} {out.shape}"
            problem, hint = f"the {image.format} is {dtype} {mine}, others {others}", "repair or remove the episode"
            raise DataError(problem, where=where, hint=hint)
        try:
            image.load()
            # `convert` copies even where there is nothing to convert.
            out[:] = np.asarray(image.convert("RGB") if image.format == "JPEG" and image.mode != "RGB" else image)
        except (OSError, ValueError, SyntaxError) as error:
            raise _damaged(image.format, error, where) from error


def _image_form(image: Any, where: str) -> tuple[tuple[int, ...], str]:
    known = ((3,), "uint8") if image.format == "JPEG" else _PNG_MODES.get(image.mode)
    if known is None:
        hint = "leave it out with --skip"
        raise DataError(f"a PNG of mode {image.mode}; known: {', '.join(_PNG_MODES)}", where=where, hint=hint)
    return known


def _open(data: bytes, where: str) -> Any:
    found = image_format(data)
    require_readable(found, where)
    # A decoder fills the rest of a cut JPEG with grey and says nothing; its end marker is what shows the cut.
    if found == "PNG":
        _check_png(data, where)
        # Pillow cuts 16 bits of a colour down to 8, and blows fewer bits of grey up to them.
        if data[24] != 8 and data[24:26] != b"\x10\0":
            problem, hint = f"a PNG of {data[24]} bits a channel; known: 8, and 16 of grey", "leave it out with --skip"
            raise DataError(problem, where=where, hint=hint)
    else:
        data = data.rstrip(b"\0")
        if not data.endswith(END_OF_JPEG):
            raise _damaged("JPEG", "it has no end marker", where)
    try:
        return Image.open(io.BytesIO(data), formats=(found or "JPEG",))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _damaged(found or "JPEG", error, where) from error


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
