"""Decode frames that are stored as JPEG or PNG files: rows of an HDF5 dataset, cells of a LeRobot dataset."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pitools.core.errors import DataError

END_OF_JPEG = b"\xff\xd9"
READABLE_FORMATS = ("JPEG", "PNG")
# Format, offset and bytes of each signature.
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
# A JPEG XL without a container has a signature of only two bytes.
_BARE_JPEG_XL = b"\xff\x0a"
# Every image file is longer: a shorter row holds measurements, or a colour, even if its first bytes match.
_MIN_BYTES = 64
# Row shape and dtype by PNG mode. A JPEG is always decoded to RGB.
_PNG_MODES: dict[str, tuple[tuple[int, ...], str]] = {
    "RGB": ((3,), "uint8"),
    "RGBA": ((4,), "uint8"),
    "L": ((), "uint8"),
    "I;16": ((), "uint16"),
}


def image_format(data: bytes) -> str:
    """Return the format of an image file by its first bytes; "" for anything else."""
    default = "JPEG XL" if data.startswith(_BARE_JPEG_XL) else ""
    return next((name for name, offset, mark in _SIGNATURES if data[offset : offset + len(mark)] == mark), default)


def format_of_rows(dataset: Any) -> str:
    """Return the image format of a dataset's first, middle and last row, "" if they hold numbers.

    A row of zeros or a damaged row does not change the result for the others.
    """
    last = dataset.shape[0] - 1
    rows = [bytes(dataset[number]) for number in sorted({0, last // 2, last}) if last >= 0]
    rows = [row for row in rows if len(row) >= _MIN_BYTES and any(row)]
    if formats := {image_format(row) for row in rows if not row.startswith(_BARE_JPEG_XL)} - {""}:
        return min(formats)
    bare = rows and all(row.startswith(_BARE_JPEG_XL) for row in rows)
    return "JPEG XL" if bare else ""


def require_readable(image_format: str, where: str) -> None:
    """Raise DataError for an unsupported image format."""
    if image_format not in (*READABLE_FORMATS, ""):
        hint = "record JPEG, PNG or raw frames; or leave it out with --skip-array"
        raise DataError(f"unsupported image format {image_format} (expected JPEG or PNG)", where=where, hint=hint)


def describe_image(data: bytes, where: str) -> tuple[tuple[int, ...], str]:
    """Return an image's shape and dtype from its header, such as (H, W, 3), "uint8". Raises DataError."""
    with _open(data, where) as image:
        channels, dtype = _image_form(image, where)
        return (image.height, image.width, *channels), dtype


def decode_image(data: bytes, out: NDArray[Any], where: str) -> None:
    """Decode an image into `out`, without the GIL. data: may be padded with zeros.

    Raises DataError if the image is damaged, or its shape or dtype differs from that of `out`.
    """
    with _open(data, where) as image:
        # Compared before decoding: a header may claim gigapixels.
        channels, dtype = _image_form(image, where)
        if (image.height, image.width, *channels) != out.shape or dtype != out.dtype:
            shape, expected = (image.height, image.width, *channels), f"{out.dtype} {out.shape}"
            problem = f"the {image.format} has {dtype} {shape} (expected {expected})"
            raise DataError(problem, where=where, hint="repair or remove the episode")
        try:
            image.load()
            # `convert` copies even an RGB image.
            out[:] = np.asarray(image.convert("RGB") if image.format == "JPEG" and image.mode != "RGB" else image)
        except (OSError, ValueError, SyntaxError) as error:
            raise _damaged_image(image.format, error, where) from error


def _image_form(image: Any, where: str) -> tuple[tuple[int, ...], str]:
    form = ((3,), "uint8") if image.format == "JPEG" else _PNG_MODES.get(image.mode)
    if form is None:
        hint = "leave it out with --skip-array"
        problem = f"unsupported PNG mode {image.mode} (expected {', '.join(_PNG_MODES)})"
        raise DataError(problem, where=where, hint=hint)
    return form


def _open(data: bytes, where: str) -> Any:
    format_name = image_format(data)
    require_readable(format_name, where)
    # A decoder silently fills the rest of a truncated JPEG with grey, so the end marker is checked.
    if format_name == "PNG":
        _check_png(data, where)
        # Pillow truncates 16-bit colour to 8 bits, and scales up grey of fewer than 8 bits.
        if data[24] != 8 and data[24:26] != b"\x10\0":
            problem = f"unsupported PNG with {data[24]} bits per channel (expected 8, or 16 for greyscale)"
            raise DataError(problem, where=where, hint="leave it out with --skip-array")
    else:
        data = data.rstrip(b"\0")
        if not data.endswith(END_OF_JPEG):
            raise _damaged_image("JPEG", "no end marker", where)
    try:
        return Image.open(io.BytesIO(data), formats=(format_name or "JPEG",))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _damaged_image(format_name or "JPEG", error, where) from error


def _check_png(data: bytes, where: str) -> None:
    """Raise DataError unless a PNG has all its chunks, with correct checksums: Pillow does not verify pixel data."""
    offset, view = 8, memoryview(data)
    if data[12:16] != b"IHDR":
        raise _damaged_image("PNG", "the first chunk is not IHDR", where)
    while True:
        length, kind = int.from_bytes(view[offset : offset + 4], "big"), bytes(view[offset + 4 : offset + 8])
        end = offset + 12 + length
        if end > len(data):
            raise _damaged_image("PNG", "truncated", where)
        if zlib.crc32(view[offset + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            raise _damaged_image("PNG", f"wrong checksum of chunk {kind.decode(errors='replace')}", where)
        if kind == b"IEND":
            return
        offset = end


def _damaged_image(kind: str, reason: object, where: str) -> DataError:
    return DataError(f"damaged {kind}: {reason}", where=where, hint="repair or remove the episode")
