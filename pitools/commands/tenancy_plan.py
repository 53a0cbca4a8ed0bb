"""`pit tenancy import|plan`: read accounting, and compare it with a policy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.completion import complete_files
from pitools.commands.options import LocalPath, rows_format_option, sites_option

if TYPE_CHECKING:
    from pitools.core.errors import PitError
    from pitools.tenancy.policy import Policy
    from pitools.tenancy.read import SiteAccounting
    from pitools.tenancy.removals import Kept

CHANGE_COLUMNS = ("site", "change", "command")
policy_argument = click.argument("policy", type=LocalPath(dir_okay=False), shell_complete=complete_files)
policy_sites_option = sites_option("A site of the policy; repeatable; by default each of its [sites], if it has any.")


def load_policies(path: Path, sites: Iterable[str]) -> dict[str, Policy]:
    """Return the policy of each site: those named by --site, else those of the policy, else the default."""
    from pitools.tenancy.policy import load_policies as load

    source = click.get_current_context().get_parameter_source("sites")
    is_named = source is not click.core.ParameterSource.DEFAULT
    return load(path, tuple(sites) if is_named else (), next(iter(sites)))


def read_accounting(names: Iterable[str]) -> tuple[dict[str, SiteAccounting], list[PitError]]:
    """Return the accounting of the sites that answered, and the errors of the others."""
    from pitools.core.errors import PitError
    from pitools.site.load import load_site
    from pitools.tenancy.read import read_sites

    answers = read_sites([load_site(name) for name in dict.fromkeys(names)])
    errors = [at_site(answer, name) for name, answer in answers.items() if isinstance(answer, PitError)]
    return {name: answer for name, answer in answers.items() if not isinstance(answer, PitError)}, errors


def at_site(error: PitError, name: str) -> PitError:
    """Return the error with the name of its site."""
    if not error.where.startswith(f"site {name}"):
        error.where = f"site {name}: {error.where}" if error.where else f"site {name}"
    return error


def raise_last(errors: list[PitError]) -> None:
    """Print all errors but the last on stderr, and raise the last."""
    for error in errors[:-1]:
        click.echo(f"pit: {error}" + (f"; {error.hint}" if error.hint else ""), err=True)
    if errors:
        raise errors[-1]


def print_kept(accounting: SiteAccounting, kept: Kept) -> None:
    """Print on stderr who loses the last team, whose usage is lost, what others have too, and what stays for now."""
    from pitools.tenancy.refusals import users_without_team
    from pitools.tenancy.site_plan import shared_changes
    from pitools.tenancy.words import forgotten_usage, name_of, partition_gaps

    now, then = accounting.state.objects, kept.state.objects
    users = users_without_team(accounting.state, kept.state)
    texts = [f"in no team any more: {', '.join(users)}"] if users else []
    texts += forgotten_usage(now, then)
    for key, text in partition_gaps(kept.state):
        if any(now.get(each) != then.get(each) for each in (key, (*key[:3], ""))):
            texts.append(f"{name_of(key)}: {text}")
    for text in (*texts, *shared_changes(accounting.state, kept.state), *kept.for_clusters, *kept.for_jobs):
        click.echo(f"pit: site {accounting.site.name}: {text}", err=True)


@click.command("import")
@sites_option("A site to read; repeatable.")
def import_command(sites: tuple[str, ...]) -> None:
    """Print the policy (TOML) that sites have now; `plan` of it shows no change.

    Of several sites: what all have alike, and in [sites] what differs.
    """
    from pitools.tenancy.desired import policy_tables
    from pitools.tenancy.policy_text import policy_text, site_tables

    accounting, errors = read_accounting(sites)
    raise_last(errors)
    tables = site_tables({name: policy_tables(each.state) for name, each in accounting.items()})
    click.echo(policy_text(tables), nl=False)


@click.command()
@policy_argument
@policy_sites_option
@rows_format_option
def plan(policy: Path, sites: tuple[str, ...], form: str) -> None:
    """Show what `run` would change to make accounting what POLICY says; nothing is changed.

    Each record is one call of sacctmgr, in the order of the calls.
    Exit 75: a site did not answer; the others are shown.
    """
    from pitools.core.output import Output
    from pitools.tenancy.site_plan import find_lock_outs, plan_rows, planned_states, policy_states, require_agreement

    wanted = policy_states(load_policies(policy, sites), str(policy))
    accounting, errors = read_accounting(wanted)
    require_agreement(accounting, wanted, str(policy))
    planned = planned_states(accounting, wanted, str(policy))
    with Output(form, CHANGE_COLUMNS) as out:
        for each, kept in planned:
            print_kept(each, kept)
            for row in plan_rows(each.site.name, each.state, kept.state):
                out(row)
    for each, kept in planned:
        name = each.site.name
        for text in find_lock_outs(each, kept.state):
            click.echo(f"pit: site {name}: {text}; pit tenancy run refuses this without --lock-out {name}", err=True)
    raise_last(errors)
