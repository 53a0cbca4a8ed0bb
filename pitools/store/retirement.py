"""Read the retirement records of versions: a retired version must not be used, and `gc` removes it after its grace."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import DataError
from pitools.core.fs import open_regular
from pitools.core.output import format_cell
from pitools.core.record import Record, decode_json
from pitools.store import version_state
from pitools.store.version_list import published_at


class Retirement(Record, frozen=True, kw_only=True, tag="pit.dataset-retirement/1"):
    """The retirement of a version. grace_s: the least time in seconds from `retired_at` to its removal by `gc`.

    published: time of publication of the retired version. The same content, ingested later, is not retired.
    """

    name: str
    version: str
    published: str
    retired_at: str
    retired_by: str
    reason: str = ""
    grace_s: int = 0

    def grace_ends(self, grace_s: int) -> datetime:
        """Return the end of the grace, the longer of the record's and `grace_s` seconds."""
        return datetime.fromisoformat(self.retired_at) + timedelta(seconds=max(self.grace_s, grace_s))


def read_retirements(root: Path, name: str) -> dict[str, Retirement]:
    """Return the existing retired versions of a dataset, by version. Raises DataError for an unreadable record."""
    retirements = (
        retirement_of(root, name, path.stem, root / name / path.stem) for path in retirement_files(root, name)
    )
    return {record.version: record for record in retirements if record}


def retirement_files(root: Path, name: str) -> list[Path]:
    """Return the dataset's retirement records, also of removed versions."""
    return version_state.list_names(version_state.retired_file(root, name, "").parent, ".json")


def retirement_of(root: Path, name: str, version: str, folder: Path) -> Retirement | None:
    """Return the retirement of the version in `folder`; None if it is not retired. Raises DataError."""
    path = version_state.retired_file(root, name, version)
    try:
        with open_regular(path) as file:
            record = decode_json(file.read(), Retirement)
            written = datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime, UTC)
        if datetime.fromisoformat(record.retired_at) < written - version_state.SKEW:
            # A clock that was slow must not shorten the grace.
            record = msgspec.structs.replace(record, retired_at=timestamps.to_rfc3339(written))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, ValueError, TypeError) as error:  # TypeError: a time without a zone
        hint = f"remove the file, and run `pit dataset retire {folder}` again"
        raise DataError(f"not a retirement record: {error}", where=str(path), hint=hint) from error
    try:
        is_meant = record.published == published_at(folder)
    except OSError:
        return None
    return record if is_meant else None


def retirement_reason(path: Path) -> str:
    """Return time and reason of the retirement of the version in folder `path`; "" if not retired. Raises DataError."""
    resolved = path.resolve()
    record = retirement_of(resolved.parent.parent, resolved.parent.name, resolved.name, resolved)
    if record is None:
        return ""
    why = f": {format_cell(record.reason)}" if record.reason else ""
    return f"retired since {record.retired_at}{why} (`pit dataset retire --undo {path}`)"
