"""Load the fabric of a site: from the site's file, else from its live Slurm; or from a given file."""

from __future__ import annotations

import os.path
from collections.abc import Iterable
from pathlib import Path

from pitools.core.errors import ConfigError, DataError, PitError, UsageError
from pitools.site.schema import Site
from pitools.slurm import parse_cluster
from pitools.slurm.client import Client
from pitools.slurm.records import Block, Switch
from pitools.topology.fabric_model import Fabric, expand_ordered, from_blocks, from_switches, nodes_of, torus_fabric
from pitools.topology.formats import conf, nvlink, table, yaml

_MAX_BYTES = 64 << 20


def query_fabric(slurm: Client) -> Fabric:
    """Return the fabric in `scontrol show topology`, of any plugin. Raises DataError and the client's errors."""
    return _fabric_of_records(slurm.topology())


def fabric_of_site(site: Site, slurm: Client | None) -> Fabric:
    """Return the fabric of a site: from topology.file, else the torus of topology.dims, else from Slurm.

    slurm: None for a site without Slurm; without file and dims the fabric is then flat.
    Raises what `read_fabric`, `torus_fabric` and `query_fabric` raise.
    """
    topology = site.topology
    if topology.file:
        return read_fabric(Path(topology.file))
    if topology.dims:
        return torus_fabric(topology.dims, expand_ordered(topology.nodes), f"{site.name}: topology.dims")
    return query_fabric(slurm) if slurm else Fabric(kind="flat")


def read_fabric(path: Path) -> Fabric:
    """Read a fabric from a file.

    path: topology.conf, topology.yaml (`FILE#NAME` selects the topology NAME), a CSV of hosts and switches, JSON Lines
    of `pit.nvlink-domain/1`, a measured matrix (.csv, .npz, .npy), or saved output of `scontrol show topology`.
    Raises ConfigError and DataError with file, line and switch.
    """
    path, _, name = (path, "", "") if os.path.isfile(path) else _split_name(path)  # noqa: PTH113 (it raises nothing)
    if path.suffix in (".npz", ".npy"):
        from pitools.topology.formats import matrix

        return matrix.load_matrix(path)
    text, where = _read_text(path), str(path)
    first_line = next((line for raw in text.splitlines() if (line := raw.strip()) and not line.startswith("#")), "")
    if not first_line:
        raise ConfigError("the file is empty (expected a fabric)", where=where)
    if path.suffix in (".yaml", ".yml") or first_line == "---" or first_line.startswith("- "):
        return yaml.read_yaml(text, where, name)
    if name:
        raise UsageError(f'"#{name}" selects a topology of topology.yaml only', where=where)
    if first_line.startswith("{"):
        return nvlink.read_domains(text, where)
    if " Level=" in first_line or " BlockIndex=" in first_line:
        return _read_saved_topology(text, where)
    if "=" in first_line.split()[0]:
        return conf.read_conf(text, where)
    return _read_csv(text, first_line, where)


def unknown_nodes(fabric: Fabric, names: Iterable[str]) -> list[str]:
    """Return the nodes that are not in the fabric, in the order given."""
    fabric_nodes = set(nodes_of(fabric))
    return [name for name in dict.fromkeys(names) if name not in fabric_nodes]


def _fabric_of_records(topology: Iterable[Switch | Block]) -> Fabric:
    records = list(topology)
    blocks = [part for part in records if isinstance(part, Block)]
    switches = [part for part in records if isinstance(part, Switch)]
    if not records:
        return Fabric(kind="flat")
    return from_blocks(blocks) if blocks else from_switches(switches)


def _read_saved_topology(text: str, where: str) -> Fabric:
    try:
        return _fabric_of_records(parse_cluster.parse_topology(text))
    except PitError as error:
        kind = DataError if isinstance(error, UsageError) else type(error)
        raise kind(error.message, where=f"{where}: {error.where}", hint=error.hint) from error


def _read_csv(text: str, first: str, where: str) -> Fabric:
    from pitools.topology.formats import matrix

    return matrix.read_matrix(text, where) if matrix.is_matrix(first) else table.read_table(text, where)


def _split_name(path: Path) -> tuple[Path, str, str]:
    """Split FILE#NAME into file, "#" and name."""
    file, separator, name = path.name.rpartition("#")
    return (path.with_name(file), separator, name) if file else (path, "", "")


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"larger than {_MAX_BYTES >> 20} MiB", where=str(path))
        return data.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError("no such file", where=str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("not text in UTF-8", where=str(path)) from error
    except ValueError as error:  # a name with a NUL in it
        raise ConfigError(f"cannot be read: {error}", where=repr(str(path))) from error
