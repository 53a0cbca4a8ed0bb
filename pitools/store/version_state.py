"""Read and write the mutable state of published versions, in files that a reader needs no lock for, also on NFS and
Lustre.

<root>/<name>/.catalog/
    tags/<tag>/<n>.json             n = 1, 2, …: a tag's history; the highest is current
    retired/<version>.json          pit.dataset-retirement/1: `gc` may remove the version after its grace
    quarantine/<version>.json       pit.quarantine/1: episodes to be excluded from training, with reasons
    leases/<version>/<unique>.json  a reader of the version, and the end of its lease
<root>/.trash/                      versions that `gc` is removing
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

from pitools.core import locks, timestamps, trust
from pitools.core.errors import ClusterError, DataError, UsageError
from pitools.core.fs import access_error, from_os_error, open_regular, write_atomic
from pitools.core.record import Record, decode_json
from pitools.store.manifest import MANIFEST_FILE

CATALOG, TRASH = ".catalog", ".trash"
# Tolerated clock difference of two hosts: a lease expires this long after its end.
SKEW = timedelta(minutes=10)
_LOCK_S = 60.0


class Quarantine(Record, frozen=True, kw_only=True, tag="pit.quarantine/1"):
    """Exclusion from training: of the whole version, with `reasons`, or of episodes: number → reasons."""

    whole_version: bool
    set_at: str
    set_by: str
    episodes: dict[int, tuple[str, ...]] = {}
    reasons: tuple[str, ...] = ()


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A lease. until: its end, RFC 3339. purpose: of the holder, such as a run's name."""

    until: str
    host: str
    pid: int
    purpose: str


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def current_user() -> str:
    """Return the user of this process, as `user@host`."""
    return f"{trust.user_name(os.geteuid())}@{os.uname().nodename}"


def catalog_dir(root: Path, name: str) -> Path:
    """Return the folder of the mutable state of a dataset's versions."""
    return root / name / CATALOG


def tags_dir(root: Path, name: str) -> Path:
    """Return the folder of the dataset's tags."""
    return catalog_dir(root, name) / "tags"


def retired_file(root: Path, name: str, version: str) -> Path:
    """Return the file of a version's retirement."""
    return catalog_dir(root, name) / "retired" / f"{version}.json"


def quarantine_file(root: Path, name: str, version: str) -> Path:
    """Return the file of a version's quarantine."""
    return catalog_dir(root, name) / "quarantine" / f"{version}.json"


def leases_dir(root: Path, name: str, version: str) -> Path:
    """Return the folder of the leases on a version."""
    return catalog_dir(root, name) / "leases" / version


def write_catalog_record(path: Path, record: msgspec.Struct, *, durable: bool = True) -> None:
    """Write one record of the catalog atomically. Raises NoSpace or ClusterError."""
    try:
        make_dir(path.parent)
    except OSError as error:
        raise from_os_error(error, path) from error
    write_atomic(path, msgspec.json.encode(record) + b"\n", durable=durable)


def make_dir(path: Path) -> None:
    """Create a folder of the catalog with its parent's mode: users who may add a version may tag it. Raises OSError."""
    if path.is_dir():
        return
    make_dir(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        path.chmod(stat.S_IMODE(path.parent.stat().st_mode))


def read_quarantine(path: Path) -> Quarantine | None:
    """Return the quarantine of the version in folder `path`; None if there is none. Raises DataError; ClusterError or
    Unreachable where it cannot be read."""
    file = quarantine_file(*_split_path(path))
    try:
        with open_regular(file) as opened:
            return decode_json(opened.read(), Quarantine)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and (access := access_error(error, file)):
            raise access from error
        hint = f"remove the file, and repeat `pit dataset check {path} --quarantine`"
        raise DataError(f"not a record of a quarantine: {error}", where=str(file), hint=hint) from error


@contextmanager
def quarantine_lock(path: Path) -> Iterator[None]:
    """Hold the lock for reading and then changing a quarantine of the dataset. Raises TryLater, NoSpace or
    ClusterError."""
    file = quarantine_file(*_split_path(path))
    try:
        make_dir(file.parent)
    except OSError as error:
        raise from_os_error(error, file) from error
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.lock(file.with_name(".lock"), "quarantine", timeout_s=_LOCK_S))
        except ClusterError as error:
            raise from_os_error(error.__cause__, file) if isinstance(error.__cause__, OSError) else error from error
        yield


def set_quarantine(path: Path, record: Quarantine | None) -> None:
    """Write the quarantine of the version in folder `path`; None removes it. Raises NoSpace or ClusterError."""
    file = quarantine_file(*_split_path(path))
    if record is not None:
        write_catalog_record(file, record)
        return
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise from_os_error(error, file) from error


class Lease:
    """A lease on a version, which `gc` does not remove before its end or release."""

    def __init__(self, file: Path, purpose: str, clock: Callable[[], datetime]) -> None:
        self.file, self._purpose, self._present = file, purpose, clock

    def extend(self, duration_s: float) -> None:
        """Set the end to `duration_s` seconds from now. Raises NoSpace or ClusterError."""
        until = timestamps.to_rfc3339(self._present() + timedelta(seconds=duration_s))
        # Not synced: after a crash of the host, the lease's holder is gone, too.
        write_catalog_record(
            self.file,
            LeaseRecord(until=until, host=os.uname().nodename, pid=os.getpid(), purpose=self._purpose),
            durable=False,
        )

    def release(self) -> None:
        """End the lease."""
        with contextlib.suppress(OSError):  # then it expires
            self.file.unlink()


@contextmanager
def leased_version(
    path: Path, duration_s: float, purpose: str, *, clock: Callable[[], datetime] = utc_now
) -> Iterator[Lease]:
    """Protect the version in folder `path` from `gc` for the block, and for at most `duration_s` seconds.

    purpose: of the holder, such as a run's name. Raises DataError if the version is missing, NoSpace or ClusterError if
    the catalog cannot be written.
    """
    if duration_s <= 0:
        raise UsageError(f"lease: expected a positive duration, got {duration_s} s")
    _require_exists(path)
    root, name, version = _split_path(path)
    unique = f"{os.uname().nodename}.{os.getpid()}.{os.urandom(4).hex()}.json"
    lease = Lease(leases_dir(root, name, version) / unique, purpose, clock)
    lease.extend(duration_s)
    try:
        _require_exists(path)  # `gc` reads leases after it moved a version: one of the two detects the other
        yield lease
    finally:
        lease.release()


def lease_records(root: Path, name: str, version: str, moment: datetime) -> list[LeaseRecord]:
    """Return the leases on a version that have not expired at `moment`, with SKEW of tolerance."""
    records = ((file, _read_lease(file)) for file in list_names(leases_dir(root, name, version), ".json"))
    return [reader for _, reader in records if reader and not _has_expired(reader, moment)]


def remove_expired_leases(folder: Path, moment: datetime) -> None:
    """Remove the expired leases of one version, which killed processes leave."""
    for file in list_names(folder, ".json"):
        if (reader := _read_lease(file)) and _has_expired(reader, moment):
            with contextlib.suppress(OSError):
                file.unlink()


def _read_lease(file: Path) -> LeaseRecord | None:
    """Return the lease in a file; None if it was just removed. An unreadable file counts as a lease without an end."""
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
    """Return the files of a catalog folder with this suffix, sorted; none if the folder is missing."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if name.endswith(suffix) and not name.startswith(".")]


def revalidate_nfs(folder: Path) -> None:
    """Revalidate a folder's names on NFS; without write permission they stay as they are.

    An NFS client may cache names for a minute, but revalidates them after its own change.
    """
    file_system_time(folder)


def file_system_time(folder: Path) -> datetime | None:
    """Return the time of a folder's file system, on NFS the server's, by a file made there; None without write
    permission."""
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
    """Return root, name and version of a version's folder."""
    resolved = path.resolve()
    return resolved.parent.parent, resolved.parent.name, resolved.name


def _require_exists(path: Path) -> None:
    try:
        # Opened, since an NFS client may answer a stat from its cache.
        with open_regular(path / MANIFEST_FILE):
            return
    except OSError as error:
        hint = "see `pit dataset list`; if `gc` took it, ingest or rebuild it again"
        raise DataError(f"version: missing: {error.strerror}", where=str(path), hint=hint) from error
