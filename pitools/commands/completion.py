"""Shell completion: run ids, site names, files. It only reads folders, and ignores errors."""

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
    import tomllib

    from click.shell_completion import CompletionItem

    from pitools.launch.request import Request

    params: list[str] = []
    try:
        tables = tomllib.loads(Path(str(ctx.params.get("request") or "")).read_text())
        params = [str(name) for name in tables.get("params", {})]
    except (OSError, ValueError, AttributeError):
        pass
    names = dict.fromkeys([*params, *sorted(Request.__struct_fields__)])
    return [CompletionItem(f"{name}=") for name in names if name.startswith(incomplete)]


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
