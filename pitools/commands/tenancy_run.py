"""`pit tenancy run|history`: change accounting, undo it, and list what was changed."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.completion import complete_files, complete_sites
from pitools.commands.options import rows_format_option
from pitools.commands.tenancy_plan import (
    load_policies,
    policy_sites_option,
    print_kept,
    raise_last,
    read_accounting,
)

if TYPE_CHECKING:
    from pitools.tenancy.site_plan import DesiredState

DONE_COLUMNS = ("at", "user", "run", "site", "change", "state")


@click.command()
@click.argument("policy", required=False, default="", shell_complete=complete_files)
@policy_sites_option
@click.option(
    "--undo",
    metavar="RUN",
    default="",
    help="Instead of a policy: restore what this run changed, at each site or those of --site; but no used hours.",
)
@click.option(
    "--lock-out",
    "lock_outs",
    metavar="SITE",
    multiple=True,
    shell_complete=complete_sites,
    help="Run even if users, all administrators or partitions of this site are then locked out.",
)
@rows_format_option
def run(policy: str, sites: tuple[str, ...], undo: str, lock_outs: tuple[str, ...], form: str) -> None:
    """Make accounting what POLICY (TOML) says; a record for each change.

    Safe to repeat: after a kill, or while a database is away, the same command goes on from what accounting and your
    journal have.
    Needs an administrator of Slurm's accounting, or for limits of a team's members alone its lead (coordinator).
    It ends where somebody else changes what it is about to change.
    Members and tiers of unfinished jobs are not removed yet: exit 75, all else is done.
    Exit 3: the policy is wrong, or would lock users out. Sites before the named one may be changed; the named one and
    those after it are not.
    Exit 75: a site did not answer, or your other run is at work.
    """
    from pitools.core.errors import TryLater, UsageError
    from pitools.core.output import Output
    from pitools.core.trust import require_trusted
    from pitools.tenancy.apply import journal_path, lock_journal, read_entries
    from pitools.tenancy.read import read_site
    from pitools.tenancy.site_plan import (
        next_state,
        planned_states,
        policy_states,
        require_agreement,
        require_no_lock_out,
        run_changes,
    )

    if bool(policy) == bool(undo):
        raise UsageError("no policy" if not undo else "a policy and --undo", hint="pit tenancy run POLICY | --undo RUN")
    if policy:
        require_trusted(Path(policy), "policy", group_above=True)
    where, run_id, changed, waiting = policy or f"run {undo}", secrets.token_hex(4), 0, 0
    with Output(form, DONE_COLUMNS) as out, lock_journal():
        read_entries(journal_path())  # before the first change: each must be one that can be undone
        policies = load_policies(Path(policy), sites) if policy else {}
        wanted = policy_states(policies, policy) if policy else _undone_states(undo, sites)
        accounting, errors = read_accounting(wanted)
        raise_last(errors)
        if policy:
            require_agreement(accounting, wanted, policy)
        if unknown := [name for name in lock_outs if name not in accounting]:
            raise UsageError(f"--lock-out {unknown[0]}: no site of this run (expected {', '.join(accounting)})")
        planned = planned_states(accounting, wanted, where)
        for each, kept in planned:
            require_no_lock_out(each, kept.state, lock_outs, is_undo=bool(undo))
        for i, (each, kept) in enumerate(planned):
            if i:  # sites may share a database: what the first changed is read again, and judged again
                each = read_site(each.site)
                kept = next_state(each, wanted[each.site.name], where, [later for later, _ in planned[i + 1 :]])
                require_no_lock_out(each, kept.state, lock_outs, is_undo=bool(undo))
            print_kept(each, kept)
            for row in run_changes(each, kept.state, run_id, undo, kept.postponed):
                out(row)
                changed += 1
            waiting += len(kept.for_jobs)
    if undo and not changed:
        click.echo(f"pit: run {undo}: nothing left to restore", err=True)
    if waiting:
        hint = "run the same command again once they have ended; max_submit = 0 keeps further ones away until then"
        raise TryLater(f"removals that wait for unfinished jobs: {waiting}; all else is done", hint=hint)


def _undone_states(run: str, sites: tuple[str, ...]) -> dict[str, DesiredState]:
    from functools import partial

    from pitools.core.errors import UsageError
    from pitools.tenancy.apply import journal_path
    from pitools.tenancy.undo import sites_of_run, undone_state

    changed = sites_of_run(journal_path(), run)
    source = click.get_current_context().get_parameter_source("sites")
    named = sites if source is click.core.ParameterSource.COMMANDLINE else changed
    if unknown := [name for name in named if name not in changed]:
        raise UsageError(f"--site {unknown[0]}: run {run} did not change it (expected {', '.join(changed)})")
    states = {name: partial(undone_state, journal=journal_path(), run=run, site=name) for name in changed}
    return {name: state for name, state in states.items() if name in named}


@click.command()
@click.option(
    "--site", "sites", metavar="NAME", multiple=True, shell_complete=complete_sites, help="Of this site alone."
)
@rows_format_option
def history(sites: tuple[str, ...], form: str) -> None:
    """List the changes that this user's runs made, the oldest first: who, when, from, to.

    State `refused`: Slurm did not accept the call; `unknown`: the run was ended during the call.
    """
    from pitools.core.output import Output
    from pitools.site.load import load_site
    from pitools.tenancy import site_plan

    rows = site_plan.history(sites)
    for name in {*sites} - {row.site for row in rows}:  # none yet, or misspelt
        load_site(name)
    with Output(form, DONE_COLUMNS) as out:
        for row in rows:
            out(row)
