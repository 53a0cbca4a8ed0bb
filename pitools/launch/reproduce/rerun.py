"""Repeat a run from its copy of the code and the same dataset versions, and list every difference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pitools.core import hostlist, trust
from pitools.core.errors import ConfigError, DataError, PitError
from pitools.core.record import Record
from pitools.launch import plan as planning
from pitools.launch import request as requests
from pitools.launch.plan import Plan
from pitools.launch.provenance import code_copy, provenance
from pitools.launch.reproduce import facts
from pitools.launch.reproduce.facts import Difference
from pitools.launch.submission import exactly_once, submit
from pitools.launch.tickets import remote
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.store import manifest

# Differences in these parts need no confirmation.
HARMLESS_PARTS = ("nodes", "variables")


class RerunResult(Record, frozen=True, kw_only=True, tag="pit.rerun-result/1"):
    """A repetition that was started. run_id: the original run. new_run_id, site, run_dir: the new run."""

    run_id: str
    new_run_id: str
    site: str
    run_dir: str


def plan_rerun(
    run_dir: Path, site: Site, *, same_nodes: bool = False, values: Mapping[str, str] = {}
) -> tuple[Plan, list[Difference]]:
    """Return the plan that repeats a run on `site`, and its differences from the original run.

    same_nodes: request exactly the original nodes; Slurm waits until they are free. values: text by key or parameter of
    the request, in place of its own, see `request.set_values`. Raises ConfigError if another user could have changed
    the run, DataError if its code or data has changed or is missing, and the errors of planning.
    """
    run_folder.require_own_run(run_dir, group_above=site.paths.runs_access == "group")
    old_plan = planning.load_plan(run_dir)
    request = provenance.request_with_own_code(run_dir, old_plan)
    for data in old_plan.data:
        _check_dataset(data)
    request = msgspec.structs.replace(request, data={data.name: data.source for data in old_plan.data})
    ranks = facts.rank_nodes(run_dir)
    if same_nodes:
        if not ranks:
            raise DataError("no attempt of this run had nodes", where=str(run_dir), hint="leave out --same-nodes")
        request = msgspec.structs.replace(request, nodelist=hostlist.fold(ranks), topology="none", exclude="")
    text = old_plan.request_text
    if values:
        tables = requests.set_values(msgspec.to_builtins(request), values, str(run_dir))
        request = requests.request_of_tables(tables, run_dir / "request.toml")
        text = f"# Repeated with: {' '.join(f'{key}={value}' for key, value in values.items())}\n{text}"
    new_plan = planning.make_plan(request, site, str(run_dir), request_text=text)
    old_facts = {
        key: value for key, value in facts.facts_of_run(run_dir).items() if key[0] not in ("machine", "outcome")
    }
    after = facts.facts_now(new_plan, site, run_dir)
    try:
        provenance.require_no_copy(run_dir, old_plan)
    except PitError:  # unless proven otherwise, the run may be a copy of another user's
        after |= _untrusted_links(run_dir)
    if ranks:
        is_same = same_nodes or site.scheduler == "none"
        after["nodes", "by rank"] = old_facts["nodes", "by rank"] if is_same else "chosen by Slurm"
    return new_plan, facts.compare_facts(old_facts, after)


def start_rerun(plan: Plan, site: Site) -> str:
    """Start the planned run and return its folder on the site. Raises the errors of a submission."""
    if remote.is_remote(plan, site):
        name = run_folder.new_run_id(plan.name)
        exactly_once.require_cluster(site, client(site))
        remote.submit_ticket(plan, site, name=name)
        return remote.ticket_dir(site, name)
    return str(submit.submit_run(plan, site))


def _untrusted_links(run_dir: Path) -> facts.Facts:
    """Return the links in a run's code to files outside that another user can change. The copy has only the links."""
    links = {}
    for link in code_copy.read_listing(run_dir).linked:
        try:
            trust.require_trusted(Path(link.link), "it")
        except ConfigError as error:
            links["code", link.path] = f"→ {link.link}: {error.message}"
    return links


def _check_dataset(data: planning.StagedDataset) -> None:
    try:
        _, raw = manifest.load_manifest(Path(data.source))
    except PitError as error:
        hint = "restore it, or find the version with: pit dataset list"
        raise DataError(f'dataset "{data.name}" is missing: {error.message}', where=data.source, hint=hint) from error
    if manifest.version_of(raw) != data.version:
        message = f'dataset "{data.name}": version {manifest.version_of(raw)} (expected {data.version})'
        raise DataError(message, where=data.source, hint=f"restore version {data.version}")
