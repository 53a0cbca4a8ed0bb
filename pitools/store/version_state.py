"""What may change about a published version lies beside it, in files that need no lock, on NFS and Lustre too.

<root>/<name>/.catalog/
    tags/<tag>/<n>.json             n = 1, 2, …: a tag's history; the highest is what it names now
    retired/<version>.json          when, why, by whom: `gc` may take it once the grace is over
    quarantine/<version>.json       pit.quarantine/1: episodes that are not to be trained on, and why
    leases/<version>/<unique>.json  who reads the version, and until when at most
<root>/.trash/                      what `gc` is removing
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from pitools.core import timestamps, trust
from pitools.core.errors import DataError, UsageError
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.record import Record, decode_json
from pitools.store.manifest import FILE_NAME

CATALOG, TRASH = ".catalog", ".trash"
# Clocks of two hosts may differ by so much: a lease is taken for over only this long after its end.
SKEW = timedelta(minutes=10)


class Quarantine(Record, frozen=True, kw_only=True, tag="pit.quarantine/1"):
    """What is not to be trained on: the whole version, for `reasons`, or episodes by number, each with its reasons."""

    whole_version: bool
    set_at: str
    set_by: str
    episodes: dict[int, tuple[str, ...]] = {}
    reasons: tuple[str, ...] = ()


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a lease, for `purpose`, and until when (RFC 3339) at most."""

    until: str
    host: str
    pid: int
    purpose: str


def utc_now() -> datetime:
    """The present, in UTC."""
    return datetime.now(UTC)


def current_user() -> str:
    """Who is doing this, as `user@host`."""
    return f"{trust.user_name(os.geteuid())}@{os.uname().nodename}"


def catalog_dir(root: Path, name: str) -> Path:
    """Where all lies that may change about the versions of a dataset."""
    return root / name / CATALOG


def tags_dir(root: Path, name: str) -> Path:
    """Folders of the dataset's tags."""
    return catalog_dir(root, name) / "tags"


def retired_file(root: Path, name: str, version: str) -> Path:
    """The record of a version's retirement."""
    return catalog_dir(root, name) / "retired" / f"{version}.json"


def quarantine_file(root: Path, name: str, version: str) -> Path:
    """The record of a version's quarantine."""
    return catalog_dir(root, name) / "quarantine" / f"{version}.json"


def leases_dir(root: Path, name: str, version: str) -> Path:
    """The leases on a version."""
    return catalog_dir(root, name) / "leases" / version


def write_annotation(path: Path, record: msgspec.Struct, *, durable: bool = True) -> None:
    """Write one record of the catalog, whole or not at all. Raises NoSpace or ClusterError."""
    try:
        make_dir(path.parent)
    except OSError as error:
        raise from_os_error(error, path) from error
    write_atomic(path, msgspec.json.encode(record) + b"\n", durable=durable)


def make_dir(path: Path) -> None:
    """Make a folder of the catalog, with the permissions of the one it is in: whoever may add a version may tag one.

    Raises OSError.
    """
    if path.is_dir():
        return
    make_dir(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        path.chmod(stat.S_IMODE(path.parent.stat().st_mode))


def read_quarantine(path: Path) -> Quarantine | None:
    """What is in quarantine of the version in folder `path`; None where nothing is. Raises DataError."""
    file = quarantine_file(*_split_path(path))
    try:
        with open_regular(file) as opened:
            return decode_json(opened.read(), Quarantine)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = f"remove it, and find the faults again: pit dataset check {path} --quarantine"
        raise DataError(f"not a record of a quarantine: {error}", where=str(file), hint=hint) from error


def set_quarantine(path: Path, record: Quarantine | None) -> None:
    """Put the version in folder `path` in quarantine, wholly or in part, or (None) take it out of it.

    Raises NoSpace or ClusterError.
    """
    file = quarantine_file(*_split_path(path))
    if record is not None:
        write_annotation(file, record)
        return
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise from_os_error(error, file) from error


class Lease:
    """A version that `gc` leaves alone until a given time, or until the lease is ended."""

    def __init__(self, file: Path, purpose: str, clock: Callable[[], datetime]) -> None:
        self.file, self._purpose, self._present = file, purpose, clock

    def extend(self, until_s: float) -> None:
        """Let it end `until_s` seconds from now. Nobody else renews it. Raises NoSpace or ClusterError."""
        until = timestamps.to_rfc3339(self._present() + timedelta(seconds=until_s))
        # Not synced: where the host dies, so does who holds the lease.
        write_annotation(
            self.file,
            LeaseRecord(until=until, host=os.uname().nodename, pid=os.getpid(), purpose=self._purpose),
            durable=False,
        )

    def release(self) -> None:
        """Let go of the version."""
        with contextlib.suppress(OSError):  # then it ends by itself
            self.file.unlink()


@contextmanager
def leased_version(
    path: Path, until_s: float, purpose: str, *, clock: Callable[[], datetime] = utc_now
) -> Iterator[Lease]:
    """Keep the version in folder `path` from `gc` for `until_s` seconds at most, or to the end of the block.

    purpose: whom to ask about it, such as a run's name. Raises DataError when it is not there (any more), NoSpace or
    ClusterError where its catalog cannot be written.
    """
    if until_s <= 0:
        raise UsageError(f"a lease cannot last {until_s} s")
    _require_exists(path)
    root, name, version = _split_path(path)
    unique = f"{os.uname().nodename}.{os.getpid()}.{os.urandom(4).hex()}.json"
    held = Lease(leases_dir(root, name, version) / unique, purpose, clock)
    held.extend(until_s)
    try:
        _require_exists(path)  # `gc` looks at leases after it took a version: one of the two sees the other
        yield held
    finally:
        held.release()


def lease_records(root: Path, name: str, version: str, moment: datetime) -> list[LeaseRecord]:
    """Who holds a lease on a version at this moment, or did so within the last minutes: clocks differ."""
    found = ((file, _read_lease(file)) for file in list_names(leases_dir(root, name, version), ".json"))
    return [reader for _, reader in found if reader and not _has_expired(reader, moment)]


def remove_expired_leases(folder: Path, moment: datetime) -> None:
    """Remove the leases of one version that are over, as killed processes leave them."""
    for file in list_names(folder, ".json"):
        if (reader := _read_lease(file)) and _has_expired(reader, moment):
            with contextlib.suppress(OSError):
                file.unlink()


def _read_lease(file: Path) -> LeaseRecord | None:
    """The lease in a file, None where it has just ended. What cannot be read may well be one, without an end."""
    try:
        with open_regular(file) as opened:
            reader = decode_json(opened.read(), LeaseRecord)
        datetime.fromisoformat(reader.until).astimezone(UTC)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, msgspec.DecodeError):
        return LeaseRecord(until="9999-12-31T00:00:00Z", host="?", pid=0, purpose=file.name)
    return reader


def _has_expired(reader: LeaseRecord, moment: datetime) -> bool:
    return datetime.fromisoformat(reader.until).astimezone(UTC) < moment - SKEW


def list_names(folder: Path, suffix: str = "") -> list[Path]:
    """What a folder of the catalog holds under names that end so, sorted; nothing where there is no folder."""
    try:
        found = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(found) if name.endswith(suffix) and not name.startswith(".")]


def revalidate_nfs(folder: Path) -> datetime | None:
    """See a folder of a network file system as it is now; what its server's clock says, None where we may not write.

    An NFS client may go by names up to a minute old, but asks again after a change of its own.
    """
    probe = folder / f".probe.{os.urandom(8).hex()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        return datetime.fromtimestamp(os.fstat(descriptor).st_mtime, UTC)
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            probe.unlink()


def _split_path(path: Path) -> tuple[Path, str, str]:
    """Root, name and version of a version's folder."""
    whole = path.resolve()
    return whole.parent.parent, whole.parent.name, whole.name


def _require_exists(path: Path) -> None:
    try:
        # Opened, since on NFS a look at the name alone may be answered from memory.
        with open_regular(path / FILE_NAME):
            return
    except OSError as error:
        hint = "see `pit dataset list`; if `gc` took it, ingest or rebuild it again"
        raise DataError(f"the version is not there: {error.strerror}", where=str(path), hint=hint) from error
