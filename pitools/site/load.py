"""Find and merge site files: shipped → /etc → the user's → PIT_SITE_PATH → PIT_* variables; the last one wins.

A later file of the same name may contain only the keys that it changes.
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

# Variable → the key that it overrides. Options override the request, not the site. A variable applies to every site,
# though its value may be invalid for most, so `dialect` checks it on use, not `load`.
VARIABLE_KEYS = {
    "PIT_ACCOUNT": "defaults.account",
    "PIT_PARTITION": "defaults.partition",
    "PIT_TIER": "defaults.tier",
    "PIT_RUNS": "paths.runs",
}


def bundled_dir(folder: str) -> Path:
    """Return a folder of the installed package: `site_configs`, `sbatch_templates` or `scripts`.

    In a checkout these are links to the folders of these names. Raises ConfigError if the folder is missing.
    """
    # importlib.resources takes longer to import than `pit site list` runs; packages in a zip are not supported.
    path = Path(pitools.__file__).parent / "shipped" / folder
    if not path.is_dir():
        raise ConfigError("pitools is installed without its files", where=str(path), hint="reinstall it with pip")
    return path


def search_path() -> list[Path]:
    """Return the folders of site files, lowest priority first."""
    extra = os.environ.get("PIT_SITE_PATH", "")
    return [
        bundled_dir("site_configs"),
        Path("/etc/pitools/sites"),
        user_dirs.xdg_dir("XDG_CONFIG_HOME", ".config") / "pitools" / "sites",
        *(Path(part) for part in extra.split(os.pathsep) if part),
    ]


def site_names(*, shipped: bool = True) -> list[str]:
    """Return the names of all sites. shipped: whether those are included that are only examples of pitools."""
    names = set() if shipped else {"local"}
    for folder in search_path()[0 if shipped else 1 :]:
        if folder.is_dir():
            # Editors put locks such as `.#alpha.toml` beside a file.
            names.update(path.stem for path in folder.glob("*.toml") if not path.name.startswith("."))
    return sorted(names)


def load_site(name: str, *, variables: bool = True) -> Site:
    """Return the site, merged from its files and the variables, and checked. Raises UsageError or ConfigError."""
    return _load(name, variables)[0]


def setting_origins(name: str) -> list[SiteSetting]:
    """Return every setting of the site, with the origin of its value."""
    site, origins = _load(name, variables=True)
    values = msgspec.to_builtins(site)
    return [
        SiteSetting(key=key, value=json.dumps(value, ensure_ascii=False), origin=_origin(key, origins))
        for key, value in _flatten(values, "")
    ]


def site_files(name: str) -> list[Path]:
    """Return the files of a site, lowest priority first. Raises UsageError if there is none."""
    # A name becomes a path: it must be one plain component.
    files = (
        [path for folder in search_path() if os.path.lexists(path := folder / f"{name}.toml")]
        if _is_plain(name)
        else []
    )
    if not files:
        hint = suggest(name, site_names()) or "write one: see site_configs/README.md"
        raise UsageError(f'no site "{name}"', where="--site or PIT_SITE", hint=hint)
    return files


def _is_plain(name: str) -> bool:
    return bool(name) and name == Path(name).name and name not in {".", ".."} and name.isprintable()


def _load(name: str, variables: bool) -> tuple[Site, dict[str, str]]:
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
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
        if said.node.config:
            tables["node"]["config"] = _relative_to_file(path, said.node.config)
        _merge(merged, tables, origins, str(path), "")
    where = " + ".join(str(path) for path in site_files(name))
    site = strict_toml.convert_tables(merged, Site, where)
    _check(site, name, where)
    if site.connection.kind == "ssh":
        _check_remote_paths(site, origins)
    for variable, key in VARIABLE_KEYS.items():
        if variables and (value := os.environ.get(variable)):
            section, field = key.split(".")
            _merge(merged, {section: {field: value}}, origins, f"env {variable}", "")
    return strict_toml.convert_tables(merged, Site, where), origins


def _tables(path: Path) -> dict[str, Any]:
    """Read a site file. Raises ConfigError, also if another user could have written the file."""
    if path.parent != bundled_dir("site_configs"):  # writers of that folder can change this program anyway
        trust.require_trusted(path, "site file")
    if not path.is_file():
        raise ConfigError("not a file (expected a site file)", where=str(path), hint="move it away, or write the file")
    return strict_toml.read_toml(path)


def _relative_to_file(file: Path, path: str) -> str:
    """Return a path in a file as absolute, relative to the file's folder."""
    return str((file.parent / Path(path).expanduser()).absolute())


def _merge(into: dict[str, Any], tables: Mapping[str, Any], origins: dict[str, str], origin: str, table: str) -> None:
    for key, value in tables.items():
        path = f"{table}.{key}" if table else key
        if isinstance(value, dict) and isinstance(into.get(key, {}), dict):
            _merge(into.setdefault(key, {}), value, origins, origin, path)
        else:
            into[key] = value
            origins[path] = origin


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _origin(key: str, origins: Mapping[str, str]) -> str:
    return origins.get(key, "default")


def _check(site: Site, name: str, where: str) -> None:
    """Check values beyond their types. Raises ConfigError with the key."""
    if site.name != name:
        raise ConfigError(f'name = "{site.name}" differs from the file\'s name', where=where, hint=f'name = "{name}"')
    partitions = site.partitions
    if site.defaults.partition and site.defaults.partition not in partitions:
        hint = suggest(site.defaults.partition, partitions) or f"add a table [partitions.{site.defaults.partition}]"
        problem = f'defaults.partition = "{site.defaults.partition}" is not a partition'
        raise ConfigError(problem, where=where, hint=hint)
    if site.tiers and site.defaults.tier not in site.tiers:
        hint = suggest(site.defaults.tier, site.tiers)
        raise ConfigError(f'defaults.tier = "{site.defaults.tier}" is not a tier', where=where, hint=hint)
    _check_units(site, where)
    if site.slurm.bin and (not site.slurm.bin.startswith("/") or ":" in site.slurm.bin):
        problem = f'slurm.bin = "{site.slurm.bin}" is not an absolute path'
        raise ConfigError(problem, where=where, hint='bin = "/opt/slurm/bin"')
    for table, variables in (("environment", site.environment), ("network.env", site.network.env)):
        for name in variables:
            try:
                dialect.require_settable(dialect.require_variable(name), by_site=True)
            except UsageError as error:
                raise ConfigError(f"{table}: {error.message}", where=where, hint=error.hint) from error
    for flag in site.dialect.extra:
        if not flag.startswith("-"):  # sbatch would take the line for the end of the script's options
            raise ConfigError(f'dialect.extra: "{flag}" is no sbatch flag', where=where, hint=f'"--{flag}"')
    if site.connection.kind == "ssh" and not _is_ssh_host(site.connection.host):
        hint = 'host = "login.example"; other options of ssh: in ~/.ssh/config'
        raise ConfigError(f'connection.host = "{site.connection.host}" is not a host', where=where, hint=hint)
    for key in ("runs", "data", "nvme", "python"):
        value = getattr(site.paths, key)
        if value != value.strip() or (key == "runs" and not value):
            raise ConfigError(f'paths.{key} = "{value}" is not a path', where=where, hint=f'{key} = "/shared/{key}"')
    if site.connection.kind == "local" and site.connection.host:
        problem = f'connection.host = "{site.connection.host}" with kind = "local" (expected kind = "ssh", or no host)'
        raise ConfigError(problem, where=where, hint='kind = "ssh"')
    first, last = site.network.ports
    if not (first >= 1024 and last <= 65535):
        raise ConfigError(f"network.ports = [{first}, {last}]: not ports", where=where, hint="from 1024 to 65535")
    if last - first + 1 < 64:
        raise ConfigError(f"network.ports = [{first}, {last}] is too small a range", where=where, hint="64 or more")
    for key, value in _flatten(msgspec.to_builtins(site), ""):
        texts = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(text, str) and not text.isprintable() for text in [key, *texts]):
            raise ConfigError(f'key "{key}": control character', where=where, hint="values become script text")


def _is_ssh_host(text: str) -> bool:
    from pitools.slurm.transport import Transport  # most sites need no ssh

    try:
        return bool(Transport(host=text).host)
    except ConfigError:
        return False


def _check_remote_paths(site: Site, origins: Mapping[str, str]) -> None:
    """Raise ConfigError for a relative path of a site over ssh: this machine has no folder to start from."""
    for key in ("runs", "data", "python"):
        value, origin = getattr(site.paths, key), origins.get(f"paths.{key}")
        if origin and value and not value.startswith("/"):
            raise ConfigError(
                f'paths.{key} = "{value}" is relative (expected an absolute path, for a site over ssh)',
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
            raise ConfigError("0 bytes per second", hint='bandwidth = "100MiB"')
        key = "recovery.exclude_for"
        units.parse_duration(site.recovery.exclude_for)
        key = "recovery.exclude_share and grace_s"
        if not 0 <= site.recovery.exclude_share <= 1 or site.recovery.grace_s < 0:
            raise ConfigError(
                "out of range (expected a share from 0 to 1, a time of 0 or more)", hint="exclude_share = 0.1"
            )
        for name, partition in site.partitions.items():
            for counted in ("nodes", "gpus_per_node", "gpu_memory_gib"):
                key = f"partitions.{name}.{counted}"
                if getattr(partition, counted) < 0:
                    raise ConfigError("negative", hint="0 means unknown")
            key = f"partitions.{name}.max_time"
            dialect.time_limit_s(partition)
            key = f"partitions.{name}.speed and throughput"
            if min((partition.speed, *partition.throughput.values())) <= 0:
                raise ConfigError("not positive: a job would never end", hint="speed = 1.0")
    except PitError as error:
        raise ConfigError(f"{key}: {error.message}", where=where, hint=error.hint) from error
