"""Find the profiles and logs among files, by what is in them, and read each with its reader."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from pitools.core.errors import DataError, UsageError
from pitools.core.fs import open_regular
from pitools.run.run_folder import attempt_dirs

_CHUNK = 8 << 20
_HEAD = 64 << 10
_MAX_LINE = 16 << 20
_MAX_FILES = 100_000
_SKIPPED_FOLDERS = ("checkpoints", "code", "submitit")
UNREADABLE = "unreadable"


class Found(NamedTuple):
    """A file, and what is in it: kineto, xplane, inspector, steps or flight; unreadable, in a folder that was named."""

    path: Path
    form: str


def read_chunks(path: Path, notes: list[str], size: int = _CHUNK) -> Iterator[bytes]:
    """Yield a file's bytes in pieces of at most `size`, decompressed if gzip made them.

    Of a cut or damaged gzip file what precedes the damage, with a note of it.
    """
    with open_regular(path.resolve()) as file:
        if file.read(2) != b"\x1f\x8b":
            file.seek(0)
            while data := file.read(size):
                yield data
            return
        file.seek(0)
        member, data, is_whole = zlib.decompressobj(31), b"", False
        try:
            while data := data or file.read(1 << 20):
                if out := member.decompress(data, size):
                    yield out
                data, is_whole = member.unconsumed_tail, member.eof
                if is_whole:
                    member, data = zlib.decompressobj(31), member.unused_data
            if not is_whole:
                yield member.flush()
                notes.append(f"{path.name}: gzip: the file is cut")
        except zlib.error as error:
            notes.append(f"{path.name}: gzip: {error}")


def read_lines(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield the complete lines of a file; a last line without an end is one, too. Raises DataError for a huge one."""
    rest = b""
    for chunk in read_chunks(path, notes):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line.strip())
        if len(rest) > _MAX_LINE:
            raise DataError(f"a line of more than {_MAX_LINE} bytes (expected JSON Lines)", where=str(path))
    if rest.strip():
        yield rest


def find_files(paths: Sequence[Path]) -> list[Found]:
    """Return the profiles and logs that the paths name or, if folders, hold; of a run, of its last attempt with any.

    Raises UsageError where there is none, DataError for a named file that is none.
    """
    found = []
    for path in paths:
        if not path.is_dir():
            form = _detect(path)
            if not form:
                expected = (
                    "a trace of PyTorch's profiler or of XLA, or a log of steps, NCCL Inspector or Flight Recorder"
                )
                raise DataError(f"unknown content (expected {expected})", where=str(path))
            found.append(Found(path, form))
            continue
        attempts = attempt_dirs(path)
        while not _has_profile(files := _search(path, attempts)) and len(attempts) > 1:
            attempts.pop()  # requeued, and before its first step
        if not _has_profile(files):
            hint = "pit perf attribute FILE of a profile that you made, or a run with a step log"
            raise UsageError(f"no profile or step log in {len(files)} files", where=str(path), hint=hint)
        found += [each for each in files if each.form]
    return found


def _has_profile(files: Sequence[Found]) -> bool:
    return any(each.form not in ("", UNREADABLE) for each in files)


def _search(folder: Path, attempts: Sequence[Path]) -> list[Found]:
    """Return the files below a folder; of a run's attempts the last's of these, and of its traces the last's alone."""
    traces = sorted((attempts[-1] if attempts else folder).glob("traces/*-*"), key=natural_key)
    others = {*attempt_dirs(folder), *traces[:-1]} - set(attempts[-1:])
    return [Found(each, _form(each)) for each in _walk(folder, others)]


def _walk(folder: Path, others: Set[Path]) -> list[Path]:
    """Return the files below a folder, in the order of their numbers, but for those below others."""
    files: list[Path] = []
    for each in sorted(folder.rglob("*"), key=natural_key):
        relative = each.relative_to(folder).parts
        if others and not others.isdisjoint((each, *each.parents)):
            continue
        if any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in relative):  # .part: not yet whole
            continue
        if each.is_file():
            files.append(each)
        if len(files) > _MAX_FILES:
            raise UsageError(f"more than {_MAX_FILES} files", where=str(folder), hint="name the folder of the profile")
    return files


def natural_key(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in paths by value."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", str(path)) if part]


def _form(path: Path) -> str:
    """Return what is in a file of a folder; "" also where it has vanished meanwhile, as those of a running job do."""
    try:
        return _detect(path)
    except FileNotFoundError:
        return ""
    except OSError:
        return UNREADABLE


def _detect(path: Path) -> str:
    """Return what is in a file; "" if no reader knows it."""
    head = next(read_chunks(path, [], _HEAD), b"")
    text = head.lstrip()
    if text.startswith(b"{"):
        line = text.partition(b"\n")[0]
        for form, mark in (
            ("steps", rb'"schema":\s*"pit\.step/1"'),
            ("inspector", rb'"coll_perf"|"inspector_output_format_version"'),
        ):
            if re.search(mark, line):
                return form
        return "kineto" if re.search(rb'"(schemaVersion|distributedInfo|deviceProperties|cat)"', head) else ""
    if re.match(rb"\x80[\x02-\x05]", head):
        return "flight" if re.search(rb"pg_config|entries|record_id|nccl_version|pg_status", head) else ""
    # XSpace: its first field is a plane, whose name follows an id, if it has one.
    return (
        "xplane" if re.match(rb"\x0a[\x00-\xff]{1,10}?(\x08[\x00-\xff]{1,10}?)?\x12.(/|Task Env)", head, re.S) else ""
    )
