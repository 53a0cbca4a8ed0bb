"""From a chunk's encoded bytes to its items, in place."""

from __future__ import annotations

from collections.abc import Callable

from pitools.store.layout import Codec

Decode = Callable[[memoryview, memoryview], object]


def decoder(codec: Codec) -> Decode:
    """What fills its second argument, of exactly the decoded size, with what its first encodes. It releases the GIL.

    It raises ValueError or RuntimeError for bytes that are not of the codec, or of another size.
    """
    if codec == "raw":
        return _copy
    if codec == "blosc":
        from numcodecs import blosc

        return _sized(blosc.decompress)
    from numcodecs import zstd

    return _sized(zstd.decompress)


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source


def _sized(decompress: Callable[[memoryview, memoryview], object]) -> Decode:
    def decode(source: memoryview, target: memoryview) -> None:
        decompress(source, target)

    return decode
