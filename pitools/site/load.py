"""Finding and merging site files: shipped → /etc → yours → PIT_SITE_PATH → PIT_* variables; the last one wins.

A later file of the same name may hold only the keys it changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

import pitools
from pitools.core import strict_toml, trust, units, user_dirs
from pitools.core.errors import ConfigError, PitError, UsageError, suggest
from pitools.site import dialect
from pitools.site.schema import Site, SiteSetting

# Variables that stand in for one key each. Flags come later still: they change the request, not the site. A variable
# is set for every site and few can use its value, so `dialect` judges it where it is used, not `load`.
VARIABLE_KEYS = {
    "PIT_ACCOUNT": "defaults.account",
    "PIT_PARTITION": "defaults.partition",
    "PIT_TIER": "defaults.tier",
    "PIT_RUNS": "paths.runs",
}


def bundled_dir(folder: str) -> Path:
    """`site_configs`, `sbatch_templates` or `scripts`: part of the package, so that they are wherever it is.

    In a checkout they are links to the folders of these names. Raises ConfigError where they were left out.
    """
    # Not by importlib.resources, whose import takes longer than `pit site list`; a package in a zip has no folders.
    path = Path(pitools.__file__).parent / "shipped" / folder
    if not path.is_dir():
        raise ConfigError("pitools is installed without its files", where=str(path), hint="install it anew with pip")
    return path


def search_path() -> list[Path]:
    """Folders that may hold site files, weakest first."""
    extra = os.environ.get("PIT_SITE_PATH", "")
    return [
        bundled_dir("site_configs"),
        Path("/etc/pitools/sites"),
        user_dirs.xdg_dir("XDG_CONFIG_HOME", ".config") / "pitools" / "sites",
        *(Path(part) for part in extra.split(os.pathsep) if part),
    ]


def site_names() -> list[str]:
    """Every site that some layer has a file for."""
    found: set[str] = set()
    for folder in search_path():
        if folder.is_dir():
            found.update(path.stem for path in folder.glob("*.toml"))
    return sorted(found)


def load_site(name: str, *, variables: bool = True) -> Site:
    """The site of this name, its files merged and checked, then the variables. Raises UsageError or ConfigError."""
    return _load(name, variables)[0]


def setting_origins(name: str) -> list[SiteSetting]:
    """Every key of the site in force, with where its value came from."""
    site, came_from = _load(name, variables=True)
    values = msgspec.to_builtins(site)
    return [
        SiteSetting(key=key, value=json.dumps(value, ensure_ascii=False), origin=_origin(key, came_from))
        for key, value in _flatten(values, "")
    ]


def site_files(name: str) -> list[Path]:
    """The files of a site, weakest first. Raises UsageError when there is none."""
    # A name becomes a path: it must be one plain component.
    found = (
        [path for folder in search_path() if os.path.lexists(path := folder / f"{name}.toml")]
        if _is_plain(name)
        else []
    )
    if not found:
        hint = suggest(name, site_names()) or "write one: see site_configs/README.md"
        raise UsageError(f'no site "{name}"', where="--site or PIT_SITE", hint=hint)
    return found


def _is_plain(name: str) -> bool:
    return bool(name) and name == Path(name).name and name not in {".", ".."} and name.isprintable()


def _load(name: str, variables: bool) -> tuple[Site, dict[str, str]]:
    merged: dict[str, Any] = {}
    came_from: dict[str, str] = {}
    for path in site_files(name):
        tables = _tables(path)
        # Checked one by one, so that an error names the file it stands in.
        said = strict_toml.convert_tables({"name": name, **tables}, Site, str(path))
        if said.templates:
            tables["templates"] = {
                script: _relative_to_file(path, template) for script, template in said.templates.items()
            }
        if said.topology.file:
            tables["topology"]["file"] = _relative_to_file(path, said.topology.file)
        _merge(merged, tables, came_from, str(path), "")
    where = " + ".join(str(path) for path in site_files(name))
    site = strict_toml.convert_tables(merged, Site, where)
    _check(site, name, where)
    if site.connection.kind == "ssh":
        _check_remote_paths(site, came_from)
    for variable, key in VARIABLE_KEYS.items():
        if variables and (value := os.environ.get(variable)):
            section, field = key.split(".")
            _merge(merged, {section: {field: value}}, came_from, f"env {variable}", "")
    return strict_toml.convert_tables(merged, Site, where), came_from


def _tables(path: Path) -> dict[str, Any]:
    """What a site file says, if nobody else could have written it. Raises ConfigError."""
    if path.parent != bundled_dir("site_configs"):  # who could write there could write this program
        trust.require_trusted(path, "site file")
    if not path.is_file():
        raise ConfigError("a site is a file, and this is none", where=str(path), hint="move it away, or write the file")
    return strict_toml.read_toml(path)


def _relative_to_file(file: Path, path: str) -> str:
    """A path in a file, relative to the file's own folder."""
    return str((file.parent / Path(path).expanduser()).absolute())


def _merge(into: dict[str, Any], tables: Mapping[str, Any], origins: dict[str, str], origin: str, at: str) -> None:
    for key, value in tables.items():
        path = f"{at}.{key}" if at else key
        if isinstance(value, dict) and isinstance(into.get(key, {}), dict):
            _merge(into.setdefault(key, {}), value, origins, origin, path)
        else:
            into[key] = value
            origins[path] = origin


def _flatten(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{at}.{key}" if at else key)
    else:
        yield at, value


def _origin(key: str, origins: Mapping[str, str]) -> str:
    return origins.get(key, "default")


def _check(site: Site, name: str, where: str) -> None:
    """What types alone cannot say. Raises ConfigError naming the key."""
    if site.name != name:
        raise ConfigError(f'name = "{site.name}" differs from the file\'s name', where=where, hint=f'name = "{name}"')
    known = site.partitions
    if site.defaults.partition and site.defaults.partition not in known:
        hint = suggest(site.defaults.partition, known)
        raise ConfigError(f'defaults.partition = "{site.defaults.partition}" is no partition', where=where, hint=hint)
    if site.tiers and site.defaults.tier not in site.tiers:
        hint = suggest(site.defaults.tier, site.tiers)
        raise ConfigError(f'defaults.tier = "{site.defaults.tier}" is no tier', where=where, hint=hint)
    _check_units(site, where)
    if site.slurm.bin and (not site.slurm.bin.startswith("/") or ":" in site.slurm.bin):
        what = f'slurm.bin = "{site.slurm.bin}" is no folder in full'
        raise ConfigError(what, where=where, hint='bin = "/opt/slurm/bin"')
    for name in (*site.environment, *site.network.env):
        try:
            dialect.require_settable(name, by_site=True)
        except UsageError as error:
            raise ConfigError(f"environment: {error.message}", where=where, hint=error.hint) from error
    if site.connection.kind == "ssh" and (not site.connection.host or site.connection.host.startswith("-")):
        raise ConfigError(
            f'connection.host = "{site.connection.host}" is no host', where=where, hint='host = "login.example"'
        )
    first, last = site.network.ports
    if not (first >= 1024 and last <= 65535):
        raise ConfigError(f"network.ports = [{first}, {last}]: not ports", where=where, hint="from 1024 to 65535")
    if last - first < 64:
        raise ConfigError(f"network.ports = [{first}, {last}] is too small a range", where=where, hint="64 or more")
    for key, value in _flatten(msgspec.to_builtins(site), ""):
        texts = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(text, str) and not text.isprintable() for text in [key, *texts]):
            raise ConfigError(f'key "{key}" holds a control character', where=where, hint="values become script text")


def _check_remote_paths(site: Site, origins: Mapping[str, str]) -> None:
    """Raise ConfigError for a path of a site over ssh that is relative: there is no folder here that it starts from."""
    for key in ("runs", "data", "python"):
        value, origin = getattr(site.paths, key), origins.get(f"paths.{key}")
        if origin and value and not value.startswith("/"):
            raise ConfigError(
                f'paths.{key} = "{value}" is relative (expected a path in full, as the site reaches it over ssh)',
                where=origin,
                hint=f'{key} = "/shared/{{user}}/{key}"',
            )


def _check_units(site: Site, where: str) -> None:
    key = ""
    try:
        for name, text in (("quota", site.stage.quota), ("min_free", site.stage.min_free)):
            key = f"stage.{name}"
            _ = text and units.parse_size(text)
        key = "defaults.time"
        units.parse_duration(site.defaults.time)
        key = "place.bandwidth"
        if not units.parse_size(site.place.bandwidth):
            raise ConfigError("nothing would ever arrive", hint='bandwidth = "100MiB"')
        key = "recovery.exclude_for"
        units.parse_duration(site.recovery.exclude_for)
        key = "recovery.exclude_share and grace_s"
        if not 0 <= site.recovery.exclude_share <= 1 or site.recovery.grace_s < 0:
            raise ConfigError("a share is between 0 and 1, a time 0 or more", hint="exclude_share = 0.1")
        for name, partition in site.partitions.items():
            for counted in ("nodes", "gpus_per_node", "gpu_memory_gib"):
                key = f"partitions.{name}.{counted}"
                if getattr(partition, counted) < 0:
                    raise ConfigError("less than none", hint="0 is not known")
            key = f"partitions.{name}.max_time"
            dialect.time_limit_s(partition)
            key = f"partitions.{name}.speed and throughput"
            if min((partition.speed, *partition.throughput.values())) <= 0:
                raise ConfigError("0 or less: a job there would never end", hint="speed = 1.0")
    except PitError as error:
        raise ConfigError(f"{key}: {error.message}", where=where, hint=error.hint) from error
