"""Find the references that keep a version: tags, leases, runs and derived versions."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pitools.core.errors import UsageError
from pitools.core.fs import open_regular
from pitools.core.record import decode_json
from pitools.store import tags, version_state
from pitools.store.manifest import MANIFEST_FILE
from pitools.store.version_list import is_version


class VersionKey(NamedTuple):
    """Name and version of one version in a root."""

    name: str
    version: str


class _Subset(msgspec.Struct):
    whole: str = ""


class _Recording(msgspec.Struct):
    file: Any = ""


class _Ancestors(msgspec.Struct):
    """The fields of a manifest that name the versions it came from. recordings: a re-encoded version is a recording."""

    parent: str = ""
    subset: _Subset | None = None
    recordings: tuple[_Recording, ...] = ()


class _Staged(msgspec.Struct):
    version: str


class _Plan(msgspec.Struct):
    """The fields of a run's plan that name the versions it reads."""

    data: tuple[_Staged, ...] = ()


class References:
    """References to the versions of a root, as of the last `update`. Manifests and plans never change: each is read
    once."""

    def __init__(self, root: Path, runs: Iterable[Path], moment: datetime) -> None:
        self._root, self._runs, self._moment = root, tuple(runs), moment
        for folder in self._runs:
            with contextlib.suppress(PermissionError):  # there may be runs in it: see `_list`
                if not folder.is_dir():
                    raise UsageError("folder of runs: missing", where=str(folder))
        self._parents: dict[VersionKey, tuple[str, ...]] = {}
        self._plans: dict[Path, tuple[str, ...]] = {}
        self._named: dict[str, str] = {}
        self._tagged: dict[str, dict[str, str]] = {}
        self._broken: dict[VersionKey, str] = {}
        self._unknown = ""
        self.forbidden: set[Path] = set()  # folders and plans that this user may not read

    def update(self, trashed: Iterable[tuple[VersionKey, Path]] = (), *, fresh: bool = False) -> None:
        """Read new references. trashed: folders of versions that `gc` moved aside. fresh: bypass a network file
        system's cache."""
        self._unknown, self._named, self._tagged = "", {}, {}
        homes = self._list(self._root, fresh)
        present = [(VersionKey(home.name, path.name), path) for home in homes for path in self._list(home, fresh)]
        for key, path in (*present, *trashed):
            if key not in self._parents:
                self._read(key, path / MANIFEST_FILE)
        for folder in self._runs:
            for path in self._list(folder, fresh):
                self._read_run(path, fresh)

    def reference_to(self, key: VersionKey) -> str:
        """Describe what references this version, its descendants aside; "" where nothing does. Raises DataError."""
        if self._unknown:
            return self._unknown
        if key.version in self._named:
            return self._named[key.version]
        if key.name not in self._tagged:
            version_tags = tags.read_tags(self._root, key.name)
            self._tagged[key.name] = {value.version: tag for tag, value in version_tags.items()}
        if tag := self._tagged[key.name].get(key.version):
            return f"tag {tag}"
        for reader in version_state.lease_records(self._root, key.name, key.version, self._moment):
            return f"lease of {reader.host}:{reader.pid} ({reader.purpose}) until {reader.until}"
        return ""

    def kept_descendants(self, removed: Collection[VersionKey]) -> dict[VersionKey, str]:
        """Return the versions to keep, with reasons, because a version that stays was made from them."""
        kept: dict[VersionKey, str] = {}
        by_version: dict[str, list[VersionKey]] = {}
        for key in removed:
            by_version.setdefault(key.version, []).append(key)
        stay = [key for key in self._parents if key not in removed]
        while stay:
            child = stay.pop()
            if child in self._broken:
                kept = dict.fromkeys(removed, self._broken[child]) | kept
            for parent in self._parents[child]:
                for key in by_version.get(parent, ()):
                    if key not in kept:
                        kept[key] = f"parent of {child.name}/{child.version}"
                        stay.append(key)
        return kept

    def _list(self, folder: Path, fresh: bool) -> list[Path]:
        """List a folder. An unreadable one may hold references to any version."""
        try:
            if fresh and folder.is_dir():
                version_state.revalidate_nfs(folder)
            return version_state.list_names(folder)
        except OSError as error:
            self._note_unreadable(folder, error)
            return []

    def _note_unreadable(self, path: Path, error: Exception) -> None:
        self._unknown = f"references unknown: {path} cannot be read: {error}"
        if isinstance(error, PermissionError):
            self.forbidden.add(path)

    def _read(self, key: VersionKey, path: Path) -> None:
        try:
            with open_regular(path) as file:
                ancestors = decode_json(file.read(), _Ancestors)
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            # It may name any version, unless it goes itself.
            self._broken[key] = f"references unknown: {path} cannot be read: {error}"
            self._parents[key] = ()
            return
        recordings = {recording.file for recording in ancestors.recordings if is_version(str(recording.file))}
        parents = {ancestors.parent, ancestors.subset.whole if ancestors.subset else "", *recordings}
        self._parents[key] = tuple(sorted(parents - {""}))

    def _read_run(self, path: Path, fresh: bool) -> None:
        if path not in self._plans:
            if fresh:  # an NFS client may also remember that a file was not there
                self._list(path, fresh)
            try:
                with open_regular(path / "plan.json") as file:
                    plan = decode_json(file.read(), _Plan)
            except (FileNotFoundError, NotADirectoryError):
                return
            except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                self._note_unreadable(path / "plan.json", error)
                return
            self._plans[path] = tuple(data.version for data in plan.data)
        for version in self._plans[path]:
            self._named[version] = f"run {path.name}"
