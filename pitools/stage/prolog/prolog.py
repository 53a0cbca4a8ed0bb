"""Check the staging disk and lease the user's sets before a job; end the leases after it. Run by `scripts/pit-prolog`.

Runs as root, copies nothing and calls no Slurm command. A prolog that fails drains its node, so only a fault of the
node's own disk fails it (EXIT_DISK_FAULT); all else is a warning. The leases bridge the time from the job's start to
its first step: a step that stages (`pit-stage run`, `pit launch`) then holds a lease of its own on what it uses, beside
the one held here, which the job's end, or `max_lease`, ends. The job itself may evict what only its prolog leases.
"""

from __future__ import annotations

import errno
import math
import os
import pwd
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pitools.core import strict_toml, trust, units
from pitools.core.errors import ConfigError, PitError, UsageError, suggest
from pitools.stage.prolog import lease_holder
from pitools.stage.prolog.lease_holder import NodeJob

EXIT_DISK_FAULT = 100
"""Exit code of a fault of the node. Not 1, with which Python ends when it cannot start."""

CONFIG_PATH = Path("/etc/pitools/prolog.toml")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*\$?")
# Errors of a broken or lost disk. A full disk, or one without unnamed files, is not broken.
_BROKEN_ERRNOS = {errno.EIO, errno.EROFS, errno.EUCLEAN, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN}
_MISSING_ERRNOS = {errno.ENOENT, errno.ENOTDIR}


class StagingRoot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A staging root, with {user}, {node}, {job}. disk: its mount point; default: the folder above the placeholders."""

    path: str
    disk: str = ""


class PrologConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`/etc/pitools/prolog.toml`. max_lease: leases end then, even of a running job. idle_time: leases end so long
    after the last step. timeout_s, python: read by `scripts/pit-prolog`. state: folder of the lease holders' files.
    """

    roots: tuple[StagingRoot, ...] = ()
    max_lease: str = "7d"
    idle_time: str = "10m"
    timeout_s: int = 5
    python: str = ""
    state: str = "/run/pitools"


class JobRoot(NamedTuple):
    """A root of this job's user, and the disk it is on. mounted: the disk must be a mount point."""

    root: Path
    disk: Path
    mounted: bool


def main() -> int:
    """Return the exit code, EXIT_DISK_FAULT or 0. Messages go to stderr."""
    try:
        return run_prolog(os.environ)
    except PitError as error:
        _log(f"{error}; {error.hint}" if error.hint else str(error))
    return 0


def run_prolog(environment: Mapping[str, str]) -> int:
    """Run as prolog or epilog, by Slurm's variables. Raises PitError for errors that are no fault of the node."""
    context = environment.get("SLURM_SCRIPT_CONTEXT", "")
    if context not in ("prolog_slurmd", "epilog_slurmd"):
        message = f'SLURM_SCRIPT_CONTEXT is "{context}"'
        raise ConfigError(message, hint="this is for Prolog= and Epilog= of slurm.conf, which run on the node")
    config = load_config(environment)
    job = _slurmd_job(environment)
    if context == "epilog_slurmd":
        lease_holder.stop_holder(Path(config.state), job)
        return 0
    job_roots = [job_root(root, job) for root in config.roots]
    findings = [
        problem for disk in dict.fromkeys((p.disk, p.mounted) for p in job_roots) if (problem := disk_problem(*disk))
    ]
    if findings:
        _log("; ".join(findings))
        return EXIT_DISK_FAULT
    max_lease_s, idle_s = (_duration_s(config, key, environment) for key in ("max_lease", "idle_time"))
    roots = [place.root for place in job_roots]
    for warning in lease_holder.start_holder(Path(config.state), job, roots, max_lease_s=max_lease_s, idle_s=idle_s):
        _log(warning)
    return 0


def _config_path(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("PIT_PROLOG_CONFIG") or CONFIG_PATH)


def _duration_s(config: PrologConfig, key: str, environment: Mapping[str, str]) -> int:
    try:
        return units.parse_duration(getattr(config, key))
    except UsageError as error:
        where = str(_config_path(environment))
        raise ConfigError(f"{key}: {error.message}", where=where, hint=error.hint) from error


def load_config(environment: Mapping[str, str]) -> PrologConfig:
    """Load the configuration: PIT_PROLOG_ROOTS (separated by `:`) overrides the file. Raises ConfigError."""
    path = _config_path(environment)
    roots = environment.get("PIT_PROLOG_ROOTS", "")
    tables: dict[str, Any] = {}
    if path.exists() or not roots:
        if path.exists():
            trust.require_trusted(path, "prolog configuration")
        tables = strict_toml.read_toml(path)
    if roots:
        tables["roots"] = [{"path": root} for root in roots.split(":") if root]
    config = strict_toml.convert_tables(tables, PrologConfig, str(path))
    if not config.roots:
        raise ConfigError("no staging root is named", where=str(path), hint='[[roots]] path = "/nvme/{user}/pit"')
    return config


def job_root(root: StagingRoot, job: NodeJob) -> JobRoot:
    """Return the root with its placeholders filled in, and its disk. Raises ConfigError."""
    values = {"user": job.user, "node": job.node, "job": str(job.id)}

    def fill(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ConfigError(
                f'"{match.group(0)}" cannot be filled in', where=root.path, hint=suggest(match[1], values)
            )
        return values[match.group(1)]

    path = Path(re.sub(r"\{(\w+)\}", fill, root.path))
    if not path.is_absolute() or ".." in path.parts:
        raise ConfigError("a root is an absolute path without ..", where=root.path)
    # The folder above the first placeholder is the administrator's and must exist; the rest, or a root without
    # placeholders, is created by the first stager.
    parent = Path(root.path.partition("{")[0] + "x").parent if "{" in root.path else path.parent
    if root.disk and not Path(root.disk).is_absolute():
        raise ConfigError(f'disk = "{root.disk}" is no absolute path', where=root.path, hint='disk = "/nvme"')
    return JobRoot(path, Path(root.disk) if root.disk else parent, mounted=bool(root.disk))


def disk_problem(disk: Path, mounted: bool) -> str:
    """Return the fault of a disk, or "". The folder is the administrator's: no user can cause a fault."""
    try:
        if not stat.S_ISDIR(disk.stat().st_mode):
            return f"{disk} is not a folder"
        if mounted and not os.path.ismount(disk):
            return f"{disk} is not mounted"
        if os.statvfs(disk).f_flag & os.ST_RDONLY:
            return f"{disk} is read-only"
        _write_test_block(disk)
    except OSError as error:
        if error.errno in _MISSING_ERRNOS:
            return f"{disk} is missing"
        if error.errno in _BROKEN_ERRNOS:
            return f"{disk} is broken: {error.strerror}"
        _log(f"{disk}: {error.strerror}")
    return ""


def _write_test_block(disk: Path) -> None:
    # Unsynced: a file system that lost its device refuses this too, and a busy disk may take seconds to sync.
    try:
        descriptor = os.open(disk, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EACCES, errno.EPERM):
            return
        raise
    try:
        os.write(descriptor, bytes(4096))
    finally:
        os.close(descriptor)


def _slurmd_job(environment: Mapping[str, str]) -> NodeJob:
    """Return the job of slurmd's variables. Raises ConfigError if one is missing or wrong."""
    try:
        number, uid = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_JOB_UID"])
        user, gid = environment.get("SLURM_JOB_USER", ""), environment.get("SLURM_JOB_GID", "")
        if not user or not gid:  # not set by older Slurms
            account = pwd.getpwuid(uid)
            user, gid = user or account.pw_name, gid or str(account.pw_gid)
        job = NodeJob(
            id=number,
            uid=uid,
            gid=int(gid),
            user=user,
            node=environment["SLURMD_NODENAME"],
            cluster=environment.get("SLURM_CLUSTER_NAME") or "cluster",
            time_limit_at=_time_limit_at(environment.get("SLURM_JOB_END_TIME", "")),
        )
    except KeyError as error:
        raise ConfigError(f"unknown: {error.args[0]}", hint="nothing is leased") from error
    except ValueError as error:
        raise ConfigError(f"not a number among Slurm's variables: {error}", hint="nothing is leased") from error
    # They become parts of paths.
    for name in (job.user, job.node, job.cluster):
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of a user, node or cluster", hint="nothing is leased")
    return job


def _time_limit_at(text: str) -> float:
    """Return the job's time limit of newer Slurms; infinity if it has none or it is unknown."""
    return float(text) if text.isdecimal() and int(text) else math.inf


def _log(text: str) -> None:
    print(text if text.isprintable() else ascii(text), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
