"""Record a run's code, environment and site in its folder, before its submission, and verify them later.

code/ code.json     a copy of the workdir, which the ranks execute: see code_copy.py
provenance.json     pit.provenance/1
site.json           the resolved site, without values of variables that are probably secrets
environment.txt     the packages: see environment.py
dirty.patch         uncommitted changes: see git_state.py

The same folder has the plan, with the versions of the datasets, the script and the request; each attempt's `hostfile`
has the order of the nodes.
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
from pitools.launch.plan import Plan, site_of_plan
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
    """The origin of a run.

    pitools: its version. workdir: the folder that the code was copied from, "" without a copy. files, bytes, code:
    number, size and digest of the copy. site, template: digests of site.json and of the script's templates. variables:
    of the submitting process, those that affect a computation or that the command uses. other_variables: names of the
    others. parent: the run that this one repeats or continues, "" for none. warnings: code missing from the copy.
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
    other_variables: tuple[str, ...] = ()
    parent: str = ""
    warnings: tuple[str, ...] = ()


def read_provenance(run_dir: Path) -> Provenance | None:
    """Return a run's provenance; None if not recorded. Raises DataError."""
    return run_folder.read_record(run_dir / PROVENANCE_FILE, Provenance)


def capture(plan: Plan, site: Site, building: Path, run_dir: Path) -> Plan:
    """Record the origin of a run in the folder `building`, which is later renamed to `run_dir`.

    Returns the plan with the copy of the code as its workdir. If the workdir is another run's `code/`, only the files
    that were copied for that run are copied. Raises ConfigError for code that cannot be copied, DataError for another
    run's code that has changed, NoSpace and ClusterError.
    """
    workdir = Path(plan.request.workdir)
    parent = provenance_of_code(workdir)
    listing, git = _record_code(plan, workdir, parent, building)
    captured, text = environment.capture_environment(plan.python, site_of_plan(plan, site), plan.request.env)
    variables, other_variables = environment.select_variables(command=plan.request.command, env=plan.request.env)
    site_json = site_text(site)
    record = Provenance(
        t=timestamps.now_rfc3339(),
        run=run_dir.name,
        pitools=pitools.__version__,
        python=plan.python,
        workdir=(parent.workdir if parent else str(workdir.resolve())) if listing else "",
        files=sum(file.kind == "file" for file in listing.files) if listing else 0,
        bytes=listing.bytes if listing else 0,
        code=listing.digest if listing else "",
        git=git,
        environment=captured,
        site=digest.digest_bytes(site_json),
        template=template_digest(site),
        variables=variables,
        other_variables=other_variables,
        parent=parent.run if parent else "",
        warnings=tuple(_warnings(plan, workdir, listing, captured)),
    )
    write_atomic(building / SITE_FILE, site_json + b"\n", durable=False)
    if text:
        write_atomic(building / environment.ENVIRONMENT_FILE, text, durable=False)
    write_atomic(building / PROVENANCE_FILE, msgspec.json.format(msgspec.json.encode(record), indent=1), durable=False)
    for warning in record.warnings:
        print(f"pit: {warning}", file=sys.stderr)
    if listing is None:
        return plan
    request = msgspec.structs.replace(plan.request, workdir=str(run_dir / code_copy.CODE_DIR))
    return msgspec.structs.replace(plan, request=request)


def provenance_of_code(workdir: Path) -> Provenance | None:
    """Return the provenance of the run of which this folder is the `code/`; None for any other folder."""
    if workdir.name != code_copy.CODE_DIR or not (workdir.parent / code_copy.LISTING_FILE).is_file():
        return None
    return read_provenance(workdir.parent)


def site_text(site: Site) -> bytes:
    """Return a site as canonical JSON, without the values of variables that are probably secrets."""
    network = msgspec.structs.replace(site.network, env=_masked(site.network.env))
    masked = msgspec.structs.replace(site, environment=_masked(site.environment), network=network)
    return msgspec.json.encode(masked, order="sorted")


def template_digest(site: Site) -> str:
    """Return the digest of the templates of a run's script; "" for a site without scripts."""
    if site.scheduler == "none":
        return ""
    paths = [Path(template.find_template(site, "train").path), *sorted(bundled_dir("sbatch_templates").glob("_*"))]
    return digest.digest_bytes(b"\0".join(path.read_bytes() for path in paths))


def _masked(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: _MASKED_VALUE if environment.is_secret_variable(name) else value for name, value in variables.items()}


def _record_code(
    plan: Plan, workdir: Path, parent: Provenance | None, building: Path
) -> tuple[code_copy.CodeListing | None, GitState]:
    """Copy the code, and return its listing and git state; no listing for snapshot = false, or an absent workdir."""
    runs = Path(plan.runs_dir).resolve()
    try:
        if parent:
            listing = code_copy.restore_code(workdir.parent, building / code_copy.CODE_DIR)
            if (workdir.parent / PATCH_FILE).is_file() and parent.git.patch:
                write_atomic(
                    building / PATCH_FILE, (workdir.parent / PATCH_FILE).read_bytes(), mode=0o600, durable=False
                )
            git = parent.git
        else:
            git = git_state.read_git_state(workdir, building / PATCH_FILE, without={runs})
            if not plan.request.snapshot or not workdir.is_dir():
                return None, git
            excluded_dirs = {runs, building.resolve()}
            listing = code_copy.copy_workdir(
                workdir,
                building / code_copy.CODE_DIR,
                ignored=git_state.ignored_paths(workdir),
                tracked=git_state.tracked_files(workdir),
                excluded_dirs=excluded_dirs,
            )
    except OSError as error:
        raise from_os_error(error, building) from error
    write_atomic(building / code_copy.LISTING_FILE, msgspec.json.encode(listing), durable=False)
    return listing, git


def _warnings(plan: Plan, workdir: Path, listing: code_copy.CodeListing | None, captured: Environment) -> Iterator[str]:
    if listing is None:
        reason = "snapshot = false" if not plan.request.snapshot else f"{workdir} does not exist on this machine"
        yield f"no copy of the code, the run uses the files in {workdir} at its start: {reason}"
        return
    if left_out := _exclusion_warning(listing):
        yield left_out
    if listing.skipped:
        more = f" and {len(listing.skipped) - 1} more" if len(listing.skipped) > 1 else ""
        yield f"not in the run's copy of the code, as no regular file, or for its name: {listing.skipped[0]}{more}"
    root = workdir.resolve()
    for link in listing.linked:
        target = Path(link.link)
        is_outside = not target.is_relative_to(root)
        if target.suffix == ".so" or (is_outside and (target.suffix == ".py" or (target / "__init__.py").is_file())):
            yield f"{link.path} links to {target}: not copied, the run uses that file at its start"
    entry = plan.request.entry.partition(":")[0].partition(".")[0]
    for package in captured.editable:
        # A package inside the workdir is in the copy, to which imports are redirected. pitools itself is exempt.
        is_outside = not Path(package.path).is_relative_to(root) and package.name != "pitools-hpc"
        if is_outside and entry and any((Path(package.path) / part / entry).exists() for part in (".", "src")):
            yield f'"{package.name}" is installed editable: {package.path} is not copied'
    for key, value in _plan_texts(plan):
        if f"{root}/" in f"{value}/":
            yield f"{key} names {root}: the run uses that folder, not its copy"


def _exclusion_warning(listing: code_copy.CodeListing) -> str:
    """Return a line on the files that were excluded from the copy; "" for none."""
    parts = []
    if listing.secrets:
        parts.append(f"{_first_names(listing.secrets)} (secrets)")
    for why, paths in (("readable by you alone", listing.private), ("ignored", listing.ignored)):
        # Modules first: a program needs them most.
        if names := sorted(paths, key=lambda name: (not name.endswith((".py", ".so")), name)):
            parts.append(f"{_first_names(names)} ({why}; a line `!{names[0]}` in .pitignore copies it)")
    return f"left out of the run's copy of the code: {'; '.join(parts)}" if parts else ""


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _plan_texts(plan: Plan) -> Iterator[tuple[str, str]]:
    request = plan.request
    yield "command", request.command
    yield from ((f"env.{name}", value) for name, value in request.env.items() if not name.endswith("PATH"))
    yield from ((f"args.{name}", value) for name, value in _flatten_texts(request.args))


def _flatten_texts(args: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in args.items():
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", text) for key, text in _flatten_texts(value))


def require_no_copy(run_dir: Path, plan: Plan) -> None:
    """Raise ConfigError for a copy of a run's folder: its plan and script name the original, which others may change.

    The original's path is read from the folder's own plan and records. Raises ConfigError also for an original that
    does not exist on this machine, or whose path contains another user's link; ClusterError or Unreachable if
    unreadable.
    """
    record = read_provenance(run_dir)
    home = Path(plan.runs_dir) / (record.run if record else run_dir.name)
    if (run_dir / code_copy.CODE_DIR).is_dir():
        home = Path(plan.request.workdir).parent
    try:
        is_home = run_dir.samefile(home)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            problem, hint = f"the run's own folder is missing (expected {home})", "use a machine that has this folder"
            raise ConfigError(problem, where=str(run_dir), hint=hint) from error
        kind = ClusterError if isinstance(error, PermissionError) else Unreachable
        raise kind(f"cannot read the run's own folder: {error.strerror}", where=str(home)) from error
    if not is_home:
        problem = f"copy of a run's folder (expected the original, {home})"
        raise ConfigError(problem, where=str(run_dir), hint=f"for a new run: pit launch reproduce {run_dir}")
    trust.require_trusted(home, "the run's own folder", group_above=True)


def request_with_own_code(run_dir: Path, plan: Plan) -> Request:
    """Return a run's request with this folder's verified code as its workdir, also for a copied run folder.

    Raises DataError for changed code.
    """
    verify_provenance(run_dir)
    return msgspec.structs.replace(plan.request, workdir=str(run_dir.absolute() / code_copy.CODE_DIR))


def verify_provenance(run_dir: Path) -> Provenance:
    """Verify a run's copy of its code, and return its provenance. Raises DataError for changed or missing records."""
    record = read_provenance(run_dir)
    if record is None:
        raise DataError("provenance.json is missing", where=str(run_dir), hint="launch the run from its workdir")
    if not record.code:
        raise DataError("the run has no copy of its code", where=str(run_dir), hint="launch it from its workdir")
    if code_copy.read_listing(run_dir).digest != record.code:
        raise DataError("code.json has changed", where=str(run_dir), hint="restore the file")
    if changed := code_copy.changed_paths(run_dir):
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise DataError(f"code/{changed[0]}{more}: changed", where=str(run_dir), hint="restore the files")
    return record
