"""Compare two runs: what they were made from, and their outcome."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pitools.launch.provenance import code_copy, provenance
from pitools.launch.reproduce import facts
from pitools.launch.reproduce.facts import Difference

_MAX_DIFF_BYTES = 1 << 20  # larger files are not compared line by line


def compare_runs(a: Path, b: Path) -> list[Difference]:
    """Return every difference between two runs. For a changed file, field `b` also counts the added and removed lines.

    Raises DataError for a folder that is no run.
    """
    files_a, files_b = _copied_files(a), _copied_files(b)
    differences = []
    for difference in facts.compare_facts(facts.facts_of_run(a), facts.facts_of_run(b)):
        changes = ""
        if difference.part == "code" and difference.key in files_a and difference.key in files_b:
            changes = _summarize_changes(
                _read_lines(a, files_a[difference.key]), _read_lines(b, files_b[difference.key])
            )
        differences.append(msgspec.structs.replace(difference, b=difference.b + changes))
    return differences


def code_diff(a: Path, b: Path) -> Iterator[str]:
    """Yield the lines of a unified diff of two runs' code copies."""
    files_a, files_b = _copied_files(a), _copied_files(b)
    for path in sorted({*files_a, *files_b}):
        if path in files_a and path in files_b and files_a[path].digest == files_b[path].digest:
            continue
        lines_a, lines_b = _read_lines(a, files_a.get(path)), _read_lines(b, files_b.get(path))
        if lines_a is None or lines_b is None:
            yield f"Binary or large files a/{path} and b/{path} differ\n"
            continue
        names = (f"a/{path}" if path in files_a else "/dev/null", f"b/{path}" if path in files_b else "/dev/null")
        for line in difflib.unified_diff(lines_a, lines_b, *names):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _summarize_changes(lines_a: list[str] | None, lines_b: list[str] | None) -> str:
    if lines_a is None or lines_b is None:
        return ""
    changes = [line[0] for line in difflib.unified_diff(lines_a, lines_b, n=0) if line[:3] not in ("---", "+++", "@@ ")]
    return f", +{changes.count('+')} -{changes.count('-')} lines"


def _copied_files(run_dir: Path) -> dict[str, code_copy.CopiedFile]:
    record = provenance.read_provenance(run_dir)
    if record is None or not record.code:
        return {}
    return {file.path: file for file in code_copy.read_listing(run_dir).files if file.kind == "file"}


def _read_lines(run_dir: Path, file: code_copy.CopiedFile | None) -> list[str] | None:
    """Return the lines of a copied file; [] if `file` is None, None for a binary or large file."""
    if file is None:
        return []
    if file.bytes > _MAX_DIFF_BYTES:
        return None
    try:
        return (run_dir / code_copy.CODE_DIR / file.path).read_bytes().decode().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return None
