"""A request to stage: a source, the root to stage it to, the selected part, and the root's limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pitools.core.errors import UsageError
from pitools.stage.cache.space import RootLimits
from pitools.stage.resolve import SELECT_ALL, PlainStore, Selection, resolve_source
from pitools.stage.sources.base import DatasetVersion
from pitools.stage.sources.local import LocalSource


class StageRequest(NamedTuple):
    """A version or plain store to stage, the root to stage it to, the selected part of it, and the root's limits."""

    source: DatasetVersion | PlainStore
    root: Path
    selection: Selection = SELECT_ALL
    limits: RootLimits = RootLimits()


def resolve_request(
    location: str | Path,
    root: Path,
    selection: Selection = SELECT_ALL,
    limits: RootLimits = RootLimits(),  # noqa: B008 - frozen
    warn: Callable[[str], None] = lambda _: None,
) -> StageRequest:
    """Resolve a location to a request. Raises as `resolve_source`, and UsageError for a root inside the source."""
    resolved = resolve_source(location, selection, warn)
    if isinstance(resolved.source, LocalSource):
        source = os.path.realpath(resolved.source.folder)
        if os.path.commonpath([source, os.path.realpath(root)]) == source:
            hint = "name a folder of the node's own disk, such as /nvme/{user}/pit"
            raise UsageError(f"staging folder {root}: inside the source {source}", where="--to", hint=hint)
    return StageRequest(resolved, root, selection, limits)
