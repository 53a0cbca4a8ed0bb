"""What a run was made from: recorded in its folder before it is submitted, and the code that it runs along with it.

code/ code.json     the workdir as it was, which is what runs: see code_copy.py
provenance.json     pit.provenance/1
site.json           the site as it was resolved, less what its variables may hold of secrets
environment.txt     the packages: see environment.py
dirty.patch         what git had not committed: see git_state.py

The plan, the script and the request stand beside these; a dataset's version is in the plan, the order of the nodes in
each attempt's `hostfile`.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import pitools
from pitools.core import timestamps, trust
from pitools.core.errors import ClusterError, ConfigError, DataError, Unreachable
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.record import Record
from pitools.launch.plan import Plan
from pitools.launch.provenance import code_copy, environment, git_state
from pitools.launch.provenance.environment import Environment
from pitools.launch.provenance.git_state import GitState
from pitools.launch.request import Request
from pitools.run import run_folder
from pitools.site import template
from pitools.site.load import bundled_dir
from pitools.site.schema import Site
from pitools.store import digest

PROVENANCE_FILE, SITE_FILE, PATCH_FILE = "provenance.json", "site.json", "dirty.patch"
_MASKED_VALUE = "(not kept)"


class Provenance(Record, frozen=True, kw_only=True, tag="pit.provenance/1"):
    """What a run was made from.

    pitools: its version. workdir: where the code was copied from, "" where it was not. files, bytes, code: how many,
    how much, and digest of the copy. site, template: digests of site.json and of what the script is rendered from.
    variables: of whoever submitted, those that say how a program computes or that the command names; others: names
    of all others. parent: the run that this one repeats or goes on from, "" for none. warnings: what the copy of
    the code does not hold.
    """

    t: str
    run: str
    pitools: str
    python: str
    workdir: str = ""
    files: int = 0
    bytes: int = 0
    code: str = ""
    git: GitState = GitState()
    environment: Environment = Environment()
    site: str = ""
    template: str = ""
    variables: dict[str, str] = {}
    others: tuple[str, ...] = ()
    parent: str = ""
    warnings: tuple[str, ...] = ()


def read_provenance(run_dir: Path) -> Provenance | None:
    """A run's provenance; None where there is none. Raises DataError."""
    return run_folder.read_record(run_dir / PROVENANCE_FILE, Provenance)


def capture(plan: Plan, site: Site, building: Path, run_dir: Path) -> Plan:
    """Record in the folder `building`, which is to become `run_dir`, what the run is made from.

    Returns the plan that is to be run: its workdir is the copy of the code. Where that workdir is another run's copy
    already, what that run was made with is what is copied. Raises ConfigError for code that cannot be copied,
    DataError for another run's that was changed since, NoSpace and ClusterError.
    """
    workdir = Path(plan.request.workdir)
    parent = provenance_of_code(workdir)
    held, found = _record_code(plan, workdir, parent, building)
    lock, text = environment.capture_environment(plan.python, site, plan.request.env)
    told, others = environment.select_variables(command=plan.request.command, env=plan.request.env)
    site_json = site_text(site)
    record = Provenance(
        t=timestamps.now_rfc3339(),
        run=run_dir.name,
        pitools=pitools.__version__,
        python=plan.python,
        workdir=(parent.workdir if parent else str(workdir.resolve())) if held else "",
        files=sum(one.kind == "file" for one in held.files) if held else 0,
        bytes=held.bytes if held else 0,
        code=held.digest if held else "",
        git=found,
        environment=lock,
        site=digest.digest_bytes(site_json),
        template=template_digest(site),
        variables=told,
        others=others,
        parent=parent.run if parent else "",
        warnings=tuple(_warnings(plan, workdir, held, lock)),
    )
    write_atomic(building / SITE_FILE, site_json + b"\n", durable=False)
    if text:
        write_atomic(building / environment.ENVIRONMENT_FILE, text, durable=False)
    write_atomic(building / PROVENANCE_FILE, msgspec.json.format(msgspec.json.encode(record), indent=1), durable=False)
    for warning in record.warnings:
        print(f"pit: {warning}", file=sys.stderr)
    if held is None:
        return plan
    request = msgspec.structs.replace(plan.request, workdir=str(run_dir / code_copy.CODE_DIR))
    return msgspec.structs.replace(plan, request=request)


def provenance_of_code(workdir: Path) -> Provenance | None:
    """The provenance of the run whose copy of its code this folder is; None for any other folder."""
    if workdir.name != code_copy.CODE_DIR or not (workdir.parent / code_copy.LISTING_FILE).is_file():
        return None
    return read_provenance(workdir.parent)


def site_text(site: Site) -> bytes:
    """A site as canonical JSON: the same for the same site, and without what looks like a secret."""
    network = msgspec.structs.replace(site.network, env=_masked(site.network.env))
    kept = msgspec.structs.replace(site, environment=_masked(site.environment), network=network)
    return msgspec.json.encode(kept, order="sorted")


def template_digest(site: Site) -> str:
    """The digest of what a run's script is rendered from; "" for a site without scripts."""
    if site.scheduler == "none":
        return ""
    paths = [Path(template.find_template(site, "train").path), *sorted(bundled_dir("sbatch_templates").glob("_*"))]
    return digest.digest_bytes(b"\0".join(path.read_bytes() for path in paths))


def _masked(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: _MASKED_VALUE if environment.is_secret(name) else value for name, value in variables.items()}


def _record_code(
    plan: Plan, workdir: Path, parent: Provenance | None, building: Path
) -> tuple[code_copy.CodeListing | None, GitState]:
    """Copy the code, and ask git about it; None where there is to be no copy, or the folder is not to be seen here."""
    runs = Path(plan.runs).resolve()
    try:
        if parent:
            held = code_copy.restore_code(workdir.parent, building / code_copy.CODE_DIR)
            if (workdir.parent / PATCH_FILE).is_file() and parent.git.patch:
                write_atomic(
                    building / PATCH_FILE, (workdir.parent / PATCH_FILE).read_bytes(), mode=0o600, durable=False
                )
            found = parent.git
        else:
            found = git_state.read_git_state(workdir, building / PATCH_FILE, without={runs})
            if not plan.request.snapshot or not workdir.is_dir():
                return None, found
            without = {runs, building.resolve()}
            held = code_copy.copy_workdir(
                workdir, building / code_copy.CODE_DIR, ignored=git_state.ignored_paths(workdir), excluded_dirs=without
            )
    except OSError as error:
        raise from_os_error(error, building) from error
    write_atomic(building / code_copy.LISTING_FILE, msgspec.json.encode(held), durable=False)
    return held, found


def _warnings(plan: Plan, workdir: Path, held: code_copy.CodeListing | None, lock: Environment) -> Iterator[str]:
    if held is None:
        why = "snapshot = false" if not plan.request.snapshot else f"{workdir} is not to be seen from here"
        yield f"the run uses {workdir} as it will be then, and not a copy of it: {why}"
        return
    if left_out := _left_out(held):
        yield left_out
    if held.skipped:
        more = f" and {len(held.skipped) - 1} more" if len(held.skipped) > 1 else ""
        yield f"no part of the run's code, being no files or having no names: {held.skipped[0]}{more}"
    root = workdir.resolve()
    for one in held.linked:
        target = Path(one.link)
        if not target.is_relative_to(root) and (target.suffix == ".py" or (target / "__init__.py").is_file()):
            yield f"{one.path} leads to {target}, which is no part of the run's code: it counts as it will be then"
    entry = plan.request.entry.partition(":")[0].partition(".")[0]
    for package in lock.editable:
        # One inside the workdir is in the copy, and led there. Our own code starts the ranks, and is none of theirs.
        outside = not Path(package.path).is_relative_to(root) and package.name != "pitools-hpc"
        if outside and entry and any((Path(package.path) / part / entry).exists() for part in (".", "src")):
            yield f'"{package.name}" is installed editable: {package.path} is no part of the run\'s code'
    for key, value in _plan_texts(plan):
        if f"{root}/" in f"{value}/":
            yield f"{key} names {root}: what is there is not the run's copy of it"


def _left_out(held: code_copy.CodeListing) -> str:
    """What the exclusions left out of the copy, in a line; "" for nothing."""
    parts = []
    if held.secrets:
        parts.append(f"{_first_names(held.secrets)} (secrets)")
    if held.ignored:
        # What could be imported is what is missed first.
        names = sorted(held.ignored, key=lambda name: (not name.endswith((".py", ".so")), name))
        parts.append(f"{_first_names(names)} (ignored; a line `!{names[0]}` in .pitignore copies it)")
    return f"left out of the run's copy of the code: {'; '.join(parts)}" if parts else ""


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _plan_texts(plan: Plan) -> Iterator[tuple[str, str]]:
    request = plan.request
    yield "command", request.command
    yield from ((f"env.{name}", value) for name, value in request.env.items() if not name.endswith("PATH"))
    yield from ((f"args.{name}", value) for name, value in _flat(request.args))


def _flat(args: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in args.items():
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", text) for key, text in _flat(value))


def require_no_copy(run_dir: Path, plan: Plan) -> None:
    """Refuse to go on with a copy of a run's folder: its plan and its script lead to that one, which others may change.

    The original's path is read from the folder's own plan and records. Raises ConfigError, also where the original does
    not exist here, or its path goes through another user's link, which may point elsewhere later; ClusterError or
    Unreachable where it cannot be read.
    """
    record = read_provenance(run_dir)
    home = Path(plan.runs) / (record.run if record else run_dir.name)
    if (run_dir / code_copy.CODE_DIR).is_dir():
        home = Path(plan.request.workdir).parent
    try:
        is_home = run_dir.samefile(home)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            what, hint = f"the run's own folder is not here (expected {home})", "continue it where that can be seen"
            raise ConfigError(what, where=str(run_dir), hint=hint) from error
        kind = ClusterError if isinstance(error, PermissionError) else Unreachable
        raise kind(f"the run's own folder cannot be read: {error.strerror}", where=str(home)) from error
    if not is_home:
        what = "the folder is a copy of a run's, whose plan and script lead to that one"
        raise ConfigError(what, where=str(run_dir), hint=f"run it anew: pit launch reproduce {run_dir}")
    trust.require_trusted(home, "the run's own folder", group_above=True)


def in_own_code(run_dir: Path, plan: Plan) -> Request:
    """A run's request, with the verified code of this very folder: its plan names that of the run it was copied from.

    Raises DataError where the code is not what it was.
    """
    verify_provenance(run_dir)
    return msgspec.structs.replace(plan.request, workdir=str(run_dir.absolute() / code_copy.CODE_DIR))


def verify_provenance(run_dir: Path) -> Provenance:
    """A run's provenance, its copy of the code verified. Raises DataError where either is not what it was."""
    record = read_provenance(run_dir)
    if record is None:
        hint = "it was made by a version that kept none"
        raise DataError("the run does not say what it was made from", where=str(run_dir), hint=hint)
    if not record.code:
        raise DataError("the run kept no copy of its code", where=str(run_dir), hint="launch it from its workdir")
    if code_copy.read_listing(run_dir).digest != record.code:
        raise DataError("code.json is not what was written there", where=str(run_dir))
    if wrong := code_copy.changed_paths(run_dir):
        what = f"code/{wrong[0]} is not what was put there" + (f", nor are {len(wrong) - 1} more" * (len(wrong) > 1))
        raise DataError(what, where=str(run_dir), hint="put back what was there")
    return record
