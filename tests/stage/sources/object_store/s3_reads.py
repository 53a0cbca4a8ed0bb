"""What the tests of the object stores share: an object, how it is read, and what an error may say."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable

from s3_server import KEY_ID, SECRET

from pitools.core.errors import PitError
from pitools.stage.sources.object_store import remote
from pitools.stage.sources.object_store.remote import ObjectStoreSource

OBJECT = os.urandom(300_000)


def read(url: str, path: str, *, known: dict[str, tuple[int, str]] | None = None, then: Callable = lambda: None):
    """The whole object, read 100,000 bytes at a time in a forked process; `then` is called after the first read."""

    def work(_: object) -> bytes:
        reader = ObjectStoreSource(url, known or {}).connect()
        file = reader.open(path)
        actual, view = b"", memoryview(bytearray(100_000))
        while count := file.read_into(view, len(actual)):
            actual += view[:count]
            if len(actual) == count:
                then()
        return actual

    return remote.run_isolated(work)


def refused(error: PitError) -> str:
    """Everything an error says, also where it is printed with its causes; no secret is in it."""
    text = "".join(traceback.format_exception(error)) + repr(error) + error.hint
    for secret in (SECRET, KEY_ID, "hunter2", "Signature=", "X-Amz", "authorization:", "Debug source"):
        assert secret not in text
    assert re.search("Traceback", text)
    return f"{error}; {error.hint}"
