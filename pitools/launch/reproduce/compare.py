"""Two runs, compared: everything that they were made from, and what became of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pitools.launch.provenance import code_copy, provenance
from pitools.launch.reproduce import facts
from pitools.launch.reproduce.facts import Difference

_MAX_DIFF_BYTES = 1 << 20  # of a file that is compared line by line


def compare_runs(a: Path, b: Path) -> list[Difference]:
    """Every difference between two runs. Of a file that both have, `b` tells the lines that came and went.

    Raises DataError for a folder that is no run.
    """
    of_a, of_b = _files(a), _files(b)
    found = []
    for one in facts.compare_facts(facts.facts_of_run(a), facts.facts_of_run(b)):
        counted = ""
        if one.part == "code" and one.key in of_a and one.key in of_b:
            counted = _summarize_changes(_lines(a, of_a[one.key]), _lines(b, of_b[one.key]))
        found.append(msgspec.structs.replace(one, b=one.b + counted))
    return found


def code_diff(a: Path, b: Path) -> Iterator[str]:
    """The lines of a unified diff of the code of two runs, as it was when they were made."""
    of_a, of_b = _files(a), _files(b)
    for path in sorted({*of_a, *of_b}):
        if path in of_a and path in of_b and of_a[path].digest == of_b[path].digest:
            continue
        before, after = _lines(a, of_a.get(path)), _lines(b, of_b.get(path))
        if before is None or after is None:
            yield f"Binary or large files a/{path} and b/{path} differ\n"
            continue
        names = (f"a/{path}" if path in of_a else "/dev/null", f"b/{path}" if path in of_b else "/dev/null")
        for line in difflib.unified_diff(before, after, *names):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _summarize_changes(before: list[str] | None, after: list[str] | None) -> str:
    if before is None or after is None:
        return ""
    changes = [line[0] for line in difflib.unified_diff(before, after, n=0) if line[:3] not in ("---", "+++", "@@ ")]
    return f", +{changes.count('+')} -{changes.count('-')} lines"


def _files(run_dir: Path) -> dict[str, code_copy.CopiedFile]:
    record = provenance.read_provenance(run_dir)
    if record is None or not record.code:
        return {}
    return {one.path: one for one in code_copy.read_listing(run_dir).files if one.kind == "file"}


def _lines(run_dir: Path, one: code_copy.CopiedFile | None) -> list[str] | None:
    """The lines of a file; [] for none, None for one that is no text, or too large."""
    if one is None:
        return []
    if one.bytes > _MAX_DIFF_BYTES:
        return None
    try:
        return (run_dir / code_copy.CODE_DIR / one.path).read_bytes().decode().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return None
