"""A run, once more: from its own copy of the code and the same versions of its data, with every difference told."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pitools.core import hostlist, trust
from pitools.core.errors import ConfigError, DataError, PitError
from pitools.core.record import Record
from pitools.launch import plan as planning
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

# What a repetition may well differ in, without anybody being asked.
HARMLESS_PARTS = ("nodes", "variables")


class RerunResult(Record, frozen=True, kw_only=True, tag="pit.rerun-result/1"):
    """A run that was started once more. run_id: the first; new_run_id: the new one."""

    run_id: str
    new_run_id: str
    site: str
    run_dir: str


def plan_rerun(run_dir: Path, site: Site, *, same_nodes: bool = False) -> tuple[Plan, list[Difference]]:
    """The plan that runs it again on a site, and everything in which that is not what it was.

    same_nodes: on just the nodes that it had, which Slurm then waits for. Raises ConfigError for a run that others
    could have changed, DataError where its code or its data
    is no longer what it was, or was not kept; what planning raises.
    """
    run_folder.require_own_run(run_dir, group_above=site.paths.runs_access == "group")
    was = planning.load_plan(run_dir)
    request = provenance.request_with_own_code(run_dir, was)
    for data in was.data:
        _check_dataset(data)
    request = msgspec.structs.replace(request, data={data.name: data.source for data in was.data})
    ranks = facts.rank_nodes(run_dir)
    if same_nodes:
        if not ranks:
            raise DataError("it never had nodes", where=str(run_dir), hint="leave out --same-nodes")
        request = msgspec.structs.replace(request, nodelist=hostlist.fold(ranks), topology="none", exclude="")
    made = planning.make_plan(request, site, str(run_dir), request_text=was.request_text)
    before = {key: value for key, value in facts.facts_of_run(run_dir).items() if key[0] not in ("machine", "outcome")}
    after = facts.facts_now(made, site, run_dir)
    try:
        provenance.require_no_copy(run_dir, was)
    except PitError:  # what is not known to be none counts as a copy
        after |= _others_links(run_dir)
    if ranks:
        kept = same_nodes or site.scheduler == "none"
        after["nodes", "by rank"] = before["nodes", "by rank"] if kept else "as they come"
    return made, facts.compare_facts(before, after)


def start_rerun(plan: Plan, site: Site) -> str:
    """Start the run that was planned; its folder, as the site sees it. Raises what starting a run raises."""
    if remote.is_remote(plan, site):
        name = run_folder.new_run_id(plan.name)
        exactly_once.require_cluster(site, client(site))
        remote.submit_ticket(plan, site, name=name)
        return remote.ticket_dir(site, name)
    return str(submit.submit_run(plan, site))


def _others_links(run_dir: Path) -> facts.Facts:
    """The links of a run's code to what stayed outside of it and others can change: nobody copied that."""
    found = {}
    for one in code_copy.read_listing(run_dir).linked:
        try:
            trust.require_trusted(Path(one.link), "it")
        except ConfigError as error:
            found["code", one.path] = f"→ {one.link}: {error.message}"
    return found


def _check_dataset(data: planning.StagedDataset) -> None:
    try:
        _, raw = manifest.load_manifest(Path(data.source))
    except PitError as error:
        hint = "bring it back, or look for the version with: pit dataset list"
        raise DataError(f'dataset "{data.name}" is gone: {error.message}', where=data.source, hint=hint) from error
    if manifest.version_of(raw) != data.version:
        what = f'dataset "{data.name}" is version {manifest.version_of(raw)} now, and was {data.version}'
        raise DataError(what, where=data.source, hint="bring back the version that the run had")
