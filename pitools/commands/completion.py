"""Shell completion: run ids, site names, datasets, files. It only reads folders, and ignores errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_MAX_ITEMS = 50  # more are no help, and each costs a look
_STAMP = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{6}$")


def complete_runs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Runs of all sites, newest first, with their names and how they ended; folders where a path is begun."""
    from click.shell_completion import CompletionItem

    if "/" in incomplete or incomplete.startswith((".", "~")):
        return [CompletionItem(incomplete, type="dir")]
    candidates = sorted({candidate for root in _run_roots() for candidate in _run_ids(root, incomplete)}, reverse=True)
    items: list[CompletionItem[str]] = []
    for _, path in candidates:
        if len(items) == _MAX_ITEMS:
            break
        if (path / "plan.json").is_file():
            name = _STAMP.sub("", path.name)
            items.append(CompletionItem(path.name, help=f"{name}: {_state(path)}"))
    return items


def complete_sites(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Names of sites."""
    from click.shell_completion import CompletionItem

    from pitools.site.load import site_names

    return [CompletionItem(name) for name in site_names() if name.startswith(incomplete)]


def complete_files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Files, by the shell itself."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_sweeps(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Names of the sweeps of all sites."""
    from click.shell_completion import CompletionItem

    names = {path.parent.name for root in _run_roots() for path in root.glob("sweeps*/*/sweep.json")}
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def complete_request_keys(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Parameters of the request that was typed before, then the keys of every request; with `=` at their ends."""
    from click.shell_completion import CompletionItem

    from pitools.launch.request import Request

    names = dict.fromkeys([*_request_table(ctx, "params"), *sorted(Request.__struct_fields__)])
    return [CompletionItem(f"{name}=") for name in names if name.startswith(incomplete)]


def complete_datasets(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Datasets of a root, ROOT/NAME; after an `@` their tags, after a `/` their versions; else folders."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(text) for text in _dataset_texts(incomplete)] or [CompletionItem(incomplete, type="dir")]


def complete_data(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """NAME= of the request's datasets; after it, datasets."""
    from click.shell_completion import CompletionItem

    name, equals, path = incomplete.partition("=")
    if equals:
        return [CompletionItem(f"{name}={text}") for text in _dataset_texts(path)]
    names = _request_table(ctx, "data")
    return [CompletionItem(f"{key}=") for key in names if key.startswith(name)]


def _dataset_texts(text: str) -> list[str]:
    """Return the completions of a dataset's path."""
    from pitools.core.errors import PitError
    from pitools.store.tags import read_tags
    from pitools.store.version_list import is_version

    home, at, prefix = text.rpartition("@")
    if at:
        path = Path(home).expanduser()
        try:
            return [f"{home}@{tag}" for tag in sorted(read_tags(path.parent, path.name)) if tag.startswith(prefix)]
        except (PitError, OSError):
            return []
    parent, slash, prefix = text.rpartition("/")
    folder = Path(f"{parent}{slash}" or ".").expanduser()
    try:
        entries = [entry for entry in sorted(folder.iterdir()) if entry.name.startswith(prefix) and entry.is_dir()]
        datasets = [
            entry.name
            for entry in entries[: 4 * _MAX_ITEMS]
            if is_version(entry.name) or any(is_version(each.name) for each in entry.iterdir())
        ]
    except OSError:
        return []
    return [f"{parent}{slash}{name}" for name in datasets[:_MAX_ITEMS]]


def _request_table(ctx: click.Context, name: str) -> list[str]:
    """Return the keys of a table of the request that was typed before; [] without it."""
    import tomllib

    # After an option without its value, click leaves the arguments where they are.
    request = ctx.params.get("request") or next(iter(ctx.args), "")
    try:
        return [str(key) for key in tomllib.loads(Path(str(request)).read_text()).get(name, {})]
    except (OSError, ValueError, AttributeError, TypeError):
        return []


def _run_roots() -> set[Path]:
    import contextlib

    from pitools.core.errors import PitError
    from pitools.launch.run_lookup import runs_dir
    from pitools.site.load import load_site, site_names

    roots = set()
    for name in site_names():
        with contextlib.suppress(PitError):  # another site's file may be wrong
            roots.add(runs_dir(load_site(name)))
    return roots


def _run_ids(root: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    """Yield the folders that may be runs, each with its creation time."""
    import os

    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.name.startswith(prefix) and not entry.name.startswith("."):
                    stamp = _STAMP.search(entry.name)
                    yield (stamp[1] if stamp else ""), root / entry.name
    except OSError:
        return


def _state(run_dir: Path) -> str:
    """Return a run's final state, from its own folder only."""
    import json

    try:
        verdict = json.loads((run_dir / "verdict.json").read_bytes())
        return "succeeded" if verdict["state"] == "succeeded" else f"stopped, {verdict['kind']}"
    except FileNotFoundError:
        return "unfinished"
    except (OSError, ValueError, KeyError, TypeError):
        return "?"


def complete_nodes(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Nodes that have a report."""
    from click.shell_completion import CompletionItem

    from pitools.core.errors import PitError
    from pitools.node.check.config import load_config
    from pitools.site.load import load_site

    try:
        path = ctx.params.get("config_path") or load_site(str(ctx.params.get("site_name") or "local")).node.config
        spool = load_config(Path(path) if path else None).spool
        reports = sorted(Path(spool).glob("*.json")) if spool else []
    except (PitError, OSError):
        return []
    names = [report.stem for report in reports if report.stem.startswith(incomplete)]
    return [CompletionItem(name) for name in names[:_MAX_ITEMS]]


def complete_tables(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Tables of facts about a node."""
    from click.shell_completion import CompletionItem

    from pitools.node.tables import TABLES

    return [CompletionItem(name) for name in TABLES if name.startswith(incomplete)]
