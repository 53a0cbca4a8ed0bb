from __future__ import annotations

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pitools.store import digest


@given(st.lists(st.binary(max_size=200)))
def test_blocks_add_up(blocks: list[bytes]) -> None:
    """A digest depends on the bytes, not on how they came in blocks."""
    hasher = digest.Hasher()
    for block in blocks:
        hasher.update(block)
    assert hasher.digest() == "xxh3_128:" + xxhash.xxh3_128(b"".join(blocks)).hexdigest()


def test_of_file_reads_every_block(tmp_path, monkeypatch) -> None:
    """A file longer than a block has the digest of all its bytes, and its progress adds up to its size."""
    monkeypatch.setattr(digest, "BLOCK_BYTES", 1000)
    data = bytes(range(256)) * 20
    (tmp_path / "a").write_bytes(data)
    advanced: list[int] = []
    assert digest.digest_file(tmp_path / "a", advanced.append) == (
        len(data),
        "xxh3_128:" + xxhash.xxh3_128(data).hexdigest(),
    )
    assert sum(advanced) == len(data)
    assert len(advanced) == 6
