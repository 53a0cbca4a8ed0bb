"""Generate a site file for a running cluster from its Slurm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pitools.core import units
from pitools.core.errors import PitError, UsageError
from pitools.slurm.client import Client, Transport
from pitools.slurm.records import Association, Config, Node, Partition, Qos
from pitools.slurm.transport import run_command

# Print the folders of Slurm's commands, one per line: "." if in the PATH, then the login shell's, then those of
# ParallelCluster, other cloud images, Bright and builds from source. A shell over ssh is not a login shell. One line,
# because csh as login shell accepts no other.
_FIND_SLURM_SCRIPT = (
    "command -v scontrol > /dev/null && echo .; "
    "said=$(\"${SHELL:-/bin/sh}\" -lc 'command -v scontrol' 2> /dev/null < /dev/null | tail -n 1); "
    'for found in "$said" /opt/slurm/bin/scontrol /opt/slurm/*/bin/scontrol /usr/local/slurm/bin/scontrol '
    "/usr/local/bin/scontrol /usr/slurm/bin/scontrol /cm/shared/apps/slurm/current/bin/scontrol; do "
    'case $found in /*) [ -x "$found" ] && echo "${found%/scontrol}" ;; esac; done; :'
)


def make_site_file(name: str, *, host: str, conf: str) -> str:
    """Return the TOML text of a site file, with ?? at values for the user to set. Raises the errors of the client."""
    if not name.replace("-", "_").isidentifier():
        raise UsageError(f'"{name}" is not a name for a site', hint="use letters, digits, - and _")
    slurm, config = _find_client(Transport(host=host, env={"SLURM_CONF": conf} if conf else {}))
    partitions = slurm.partitions()
    qos: list[Qos] = []
    own_associations: list[Association] = []
    default_accounts: Mapping[str, str] = {}
    missing = ""
    try:
        user = slurm.user()
        qos, default_accounts = slurm.qos(), slurm.default_accounts(user)
        own_associations = [row for row in slurm.associations(user) if row.user and row.cluster == config.cluster]
    except PitError as error:  # many sites have no accounting; the rest of the file is still useful
        missing = error.message
    lines = [
        *_head(name, config, sorted({row.account for row in own_associations})),
        *_connection_table(slurm.transport, conf, config),
        *_paths_table(config, slurm.home() if host else ""),
        *_tiers_table(qos, missing),
        *_defaults_table(default_accounts.get(config.cluster, ""), own_associations, qos, partitions),
        *_recovery_table(config, partitions, qos),
        *_partition_tables(partitions, slurm.nodes()),
    ]
    return "\n".join(lines) + "\n"


def _find_client(transport: Transport) -> tuple[Client, Config]:
    """Return a client whose commands work, preferably of the controller's version. Raises the errors of the client."""
    folders = dict.fromkeys(run_command(transport, ["sh", "-c", _FIND_SLURM_SCRIPT], env={}).stdout.split("\n"))
    answered: list[tuple[Client, Config]] = []
    failed: PitError | None = None
    for folder in [folder for folder in folders if folder] or ["."]:
        slurm = Client(msgspec.structs.replace(transport, bin="" if folder == "." else folder))
        try:
            answered.append((slurm, config := slurm.config()))
            if slurm.version()[:2] == config.version[:2]:
                return slurm, config
        except PitError as error:  # commands of another Slurm, or an unreachable controller: the first error is raised
            failed = failed or error
    if not answered and failed:
        raise failed
    return answered[0]


def _head(name: str, config: Config, accounts: Sequence[str]) -> list[str]:
    lines = [f"# Filled in by `pit site probe {name}`; set the values with two question marks."]
    lines += [f"name = {_quote(name)}", f"description = {_quote(f'Slurm cluster {config.cluster}')}"]
    return [*lines, f"accounts = [{', '.join(map(_quote, accounts))}]"] if accounts else lines


def _connection_table(transport: Transport, conf: str, config: Config) -> list[str]:
    lines = ["", "[connection]", 'kind = "ssh"', f"host = {_quote(transport.host)}"] if transport.host else []
    lines += ["", "[slurm]", f"cluster = {_quote(config.cluster)}"]
    lines += [f"bin = {_quote(transport.bin)}"] if transport.bin else []
    return [*lines, f"conf = {_quote(conf)}"] if conf else lines


def _paths_table(config: Config, home: str) -> list[str]:
    """Return the [paths] table. home: the user's home over ssh, "" for a local site."""
    runs = f"{home}/runs" if home else "runs"
    lines = ["", "[paths]", "# ?? storage that login and compute nodes share", f"runs = {_quote(runs)}"]
    if home:
        lines += [
            "# ?? an interpreter there that has pitools",
            f"python = {_quote(f'{home}/pitools/.venv/bin/python')}",
        ]
    lines += ["# ?? each node's own disk; {node}, {user} and {job} are filled in", 'nvme = "/tmp/pitools-{user}/nvme"']
    if "job_env" in config.values.get("AccountingStoreFlags", ""):
        lines.append("# This cluster stores the environment of every job in its database: keep secrets out of it.")
    return lines


def _tiers_table(qos: Iterable[Qos], missing: str) -> list[str]:
    if missing:
        return ["", f"# No accounting: {missing}", "[dialect]", "account = false", "qos = false"]
    tiers = [f"{_key(row.qos)} = {_quote(row.qos)}" for row in sorted(qos, key=lambda row: row.priority)]
    return ["", "# ?? from the lowest priority to the highest: name your tiers", "[tiers]", *tiers]


def _defaults_table(
    account: str, own_associations: Sequence[Association], qos: Sequence[Qos], partitions: Sequence[Partition]
) -> list[str]:
    lines = ["", "[defaults]"]
    lines += [f"partition = {_quote(part.partition)}" for part in partitions if part.is_default]
    lines += [f"account = {_quote(account)}"] if account else []
    names = {row.qos for row in qos}
    of_account = [row for row in own_associations if row.account == account] or own_associations
    tier = next((row.default_qos for row in of_account if row.default_qos in names), "")
    if names:
        lines.append(f"tier = {_quote(tier or ('normal' if 'normal' in names else min(names)))}")
    return lines


def _recovery_table(config: Config, partitions: Sequence[Partition], qos: Iterable[Qos]) -> list[str]:
    """Return the [recovery] table."""
    settings = config.values
    # A preempted job gets the grace time of its partition or QOS, if set, and KillWait in any case.
    graces = [part.grace_s for part in partitions if part.grace_s] + [row.grace_s for row in qos if row.grace_s]
    grace_s = min(graces) if graces else _seconds(settings.get("KillWait", ""), 30)
    lines = ["", "[recovery]", f"grace_s = {grace_s}"]
    lines += ['# ?? "login" where compute nodes may not call sbatch', 'submit_from = "node"']
    mode, back = settings.get("PreemptMode", "OFF").upper(), settings.get("JobRequeue", "1") == "1"
    if "REQUEUE" in mode and back:
        delay_s = _seconds(settings.get("AuthInfo", "").partition("cred_expire=")[2].partition(",")[0], 120)
        lines.append(
            f"# Slurm puts back what it preempts, after {delay_s} s (cred_expire); a fresh job starts at once."
        )
    elif not back:
        lines.append('# JobRequeue=0: Slurm puts no job back by itself, and chain = "requeue" would not work.')
    else:
        lines.append(f"# PreemptMode={mode}: Slurm puts back no job that it preempts.")
    return [*lines, 'chain = "fresh"']


def _seconds(text: str, default: int) -> int:
    number = text.split(" ")[0]
    return int(number) if number.isdecimal() else default


def _partition_tables(partitions: Iterable[Partition], nodes: Iterable[Node]) -> list[str]:
    node_list = list(nodes)
    lines: list[str] = []
    for partition in partitions:
        members = [node for node in node_list if partition.partition in node.partitions]
        lines += ["", f"[partitions.{_key(partition.partition)}]", f"nodes = {partition.nodes}"]
        if members:
            least = min(members, key=lambda node: (node.gpus, node.cpus))
            if least.gpus:
                lines += [f"gpu = {_quote(least.gpu_type)}", f"gpus_per_node = {least.gpus}"]
        if partition.max_time_s:
            lines.append(f"max_time = {_quote(units.to_slurm_time(partition.max_time_s))}")
    return lines


def _quote(text: str) -> str:
    # Basic strings of TOML have the escapes of JSON.
    return json.dumps(text)


def _key(name: str) -> str:
    return name if name.replace("-", "_").isidentifier() and name.isascii() else _quote(name)
