"""Records are decoded in any thread."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from pitools.core.record import Record, decode_json

CRASHES = """
import gc, sys, threading
import msgspec
from pitools.core.record import decode_json

sys.setswitchinterval(1e-6)
gc.set_threshold(5, 1, 1)
for _ in range(300):
    A = msgspec.defstruct("A", [("x", int), ("y", dict[str, tuple[int, ...]], {})], frozen=True)
    B = msgspec.defstruct("B", [("a", A), ("l", tuple[A, ...], ()), ("o", A | None, None)], frozen=True)
    C = msgspec.defstruct("C", [("b", B), ("m", dict[str, B], {})], frozen=True)
    together = threading.Barrier(4)
    def decode():
        together.wait()
        decode_json(b'{"b":{"a":{"x":1}},"m":{"q":{"a":{"x":2}}}}', C)
    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_that_decode_a_type_first_at_once() -> None:
    """None of them crashes the process, as msgspec's own function does in the first rounds."""
    done = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "data", [b'{"schema":"a/1","a":"\xff"}', b'{"schema":"a/1","b":' + b"[" * 200_000], ids=["bytes", "deep"]
)
def test_whatever_is_damaged_is_one_error(data: bytes) -> None:
    """Bytes that are no text, and a nest too deep, are what a cut off record is to whoever reads it."""

    class A(Record, frozen=True, kw_only=True, tag="a/1"):
        a: str = ""

    with pytest.raises(msgspec.DecodeError):
        decode_json(data, A)
