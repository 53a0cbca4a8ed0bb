"""Find the versions that a rule selects in a folder or object store: the newest that fit under its cap."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pitools.core import units
from pitools.core.errors import ConfigError, PitError, suggest
from pitools.stage.sources.find import dataset_version_dirs, is_url
from pitools.stage.sources.local import read_error
from pitools.stage.sync.policy import Rule
from pitools.store.resolve import unusable_reason
from pitools.store.version_list import published_ns


class SourceVersion(NamedTuple):
    """A version at a source. location: folder or URL. published_ns: its time of publication; of a URL, of the
    upload of its manifest."""

    dataset: str
    location: Path | str
    published_ns: int

    @property
    def name(self) -> str:
        """Return its name at the source."""
        return str(self.location).rpartition("/")[2]


def newest_versions(rule: Rule, on_error: Callable[[PitError], None]) -> list[SourceVersion]:
    """Return the versions that a rule's pattern and count select, the newest first, none retired or quarantined.

    on_error: called for each version whose state cannot be read; it is left out. Raises ConfigError when nothing is
    found, as an unmounted file system looks empty; of an object store as `remote.list_datasets`.
    """

    def is_wanted(name: str) -> bool:
        return not name.startswith(".") and fnmatch.fnmatchcase(name, rule.pattern)

    if is_url(rule.source):
        from pitools.stage.sources.object_store import remote

        stored = remote.list_datasets(str(rule.source), is_wanted)
        datasets = {name: [SourceVersion(name, url, ns) for url, ns in stored[name]] for name in stored}
        hint = "are bucket and prefix the right ones?"
    else:
        datasets = _list_datasets(Path(rule.source), is_wanted, on_error)
        hint = "is it mounted on this host?"
    chosen = [version for versions in datasets.values() for version in _newest_first(versions)[: rule.newest]]
    if not chosen:
        names = [name for name in datasets if is_wanted(name)]
        unusable = f'"{names[0]}" has no version that is not retired or in quarantine' if names else ""
        message = unusable or f'no dataset matches "{rule.pattern}"'
        raise ConfigError(message, where=str(rule.source), hint=(not names and suggest(rule.pattern, datasets)) or hint)
    return _newest_first(chosen)


def _list_datasets(
    source: Path, is_wanted: Callable[[str], bool], on_error: Callable[[PitError], None]
) -> dict[str, list[SourceVersion]]:
    """Return the datasets in a folder, with the usable versions of the wanted ones."""

    def usable(name: str) -> list[SourceVersion]:
        return [*_versions(source / name, on_error)] if is_wanted(name) and (source / name).is_dir() else []

    try:
        names = [entry.name for entry in source.iterdir()]
        return {name: usable(name) for name in names}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError("no such folder", where=str(source), hint="is it mounted on this host?") from error
    except OSError as error:
        raise read_error(error, source) from error


def _versions(folder: Path, on_error: Callable[[PitError], None]) -> Iterator[SourceVersion]:
    for version in dataset_version_dirs(folder):
        try:
            if unusable_reason(version):
                continue
        except PitError as error:
            on_error(error)
            continue
        with contextlib.suppress(FileNotFoundError):  # removed by `gc` meanwhile
            yield SourceVersion(folder.name, version, published_ns(version))


def _newest_first(versions: list[SourceVersion]) -> list[SourceVersion]:
    return sorted(versions, key=lambda each: (each.published_ns, each.name, each.dataset), reverse=True)


def fit_cap(
    rule: Rule,
    versions: list[SourceVersion],
    size: Callable[[SourceVersion], int],
    on_error: Callable[[PitError], None],
) -> list[SourceVersion]:
    """Return the newest versions that together fit under the rule's cap.

    on_error: called for a version whose size cannot be read; it is left out. Raises ConfigError when the newest alone
    does not fit.
    """
    if rule.cap_bytes is None:
        return versions
    fitting: list[SourceVersion] = []
    total = 0
    for version in versions:
        try:
            total += size(version)
        except PitError as error:
            on_error(error)
            continue
        if total > rule.cap_bytes:
            if not fitting:
                message = (
                    f"the newest has {units.format_size(total)}, over the cap of {units.format_size(rule.cap_bytes)}"
                )
                raise ConfigError(message, where=str(version.location), hint="raise the rule's cap")
            break
        fitting.append(version)
    return fitting
