"""The versions that a rule wants: of a folder, or of a prefix in an object store, the newest that fit under its cap."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pitools.core import units
from pitools.core.errors import ConfigError, DataError, PitError, nearest
from pitools.stage.sources.local import read_error
from pitools.stage.sources.open import is_url, versions
from pitools.stage.sync.policy import Rule
from pitools.store.manifest import FILE_NAME
from pitools.store.resolve import discarded


class Version(NamedTuple):
    """A version that stands at a source. place: folder or URL. modified_ns: of its manifest."""

    dataset: str
    place: Path | str
    modified_ns: int

    @property
    def name(self) -> str:
        """What it is called at its source."""
        return str(self.place).rpartition("/")[2]


def newest(rule: Rule, failed: Callable[[PitError], None]) -> list[Version]:
    """Return the versions that a rule's pattern and count choose, the newest first; none that is retired, or wholly in
    quarantine.

    failed: is called for a version of which that cannot be read, which is left out.
    Raises ConfigError when there is nothing: a file system that is not mounted must not look like an empty one; of an
    object store as `remote.stored`.
    """

    def wants(name: str) -> bool:
        return not name.startswith(".") and fnmatch.fnmatchcase(name, rule.pattern)

    if is_url(rule.source):
        from pitools.stage.sources.object_store import remote

        stored = remote.stored(str(rule.source), wants)
        found = {name: [Version(name, url, ns) for url, ns in stored[name]] for name in stored}
        hint = "are bucket and prefix the right ones?"
    else:
        found = _standing(Path(rule.source), wants, failed)
        hint = "is it mounted on this host?"
    chosen = [version for versions in found.values() for version in _newest_first(versions)[: rule.newest]]
    if not chosen:
        names = [name for name in found if wants(name)]
        none = f'"{names[0]}" has no version that is not retired or in quarantine' if names else ""
        what = none or f'no dataset matches "{rule.pattern}"'
        raise ConfigError(what, where=str(rule.source), hint=(not names and nearest(rule.pattern, found)) or hint)
    return _newest_first(chosen)


def _standing(
    source: Path, wants: Callable[[str], bool], failed: Callable[[PitError], None]
) -> dict[str, list[Version]]:
    """Return the datasets in a folder, and the versions of those that are wanted."""

    def usable(name: str) -> list[Version]:
        return [*_versions(source / name, failed)] if wants(name) and (source / name).is_dir() else []

    try:
        names = [entry.name for entry in source.iterdir()]
        return {name: usable(name) for name in names}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError("no such folder", where=str(source), hint="is it mounted on this host?") from error
    except OSError as error:
        raise read_error(error, source) from error


def _versions(folder: Path, failed: Callable[[PitError], None]) -> Iterator[Version]:
    for version in versions(folder):
        try:
            if discarded(version):
                continue
        except DataError as error:
            failed(error)
            continue
        with contextlib.suppress(FileNotFoundError):  # collected at this moment
            yield Version(folder.name, version, (version / FILE_NAME).lstat().st_mtime_ns)


def _newest_first(found: list[Version]) -> list[Version]:
    return sorted(found, key=lambda each: (each.modified_ns, each.name, each.dataset), reverse=True)


def within_cap(
    rule: Rule, chosen: list[Version], size: Callable[[Version], int], failed: Callable[[PitError], None]
) -> list[Version]:
    """As many of the newest as the cap has room for; what is older than the first that does not fit is left out.

    A version whose size cannot be had is told to `failed`. Raises ConfigError when even the newest does not fit.
    """
    if rule.cap_bytes is None:
        return chosen
    kept: list[Version] = []
    total = 0
    for version in chosen:
        try:
            total += size(version)
        except PitError as error:
            failed(error)
            continue
        if total > rule.cap_bytes:
            if not kept:
                what = f"the newest has {units.size_text(total)}, over the cap of {units.size_text(rule.cap_bytes)}"
                raise ConfigError(what, where=str(version.place), hint="raise the rule's cap")
            break
        kept.append(version)
    return kept
