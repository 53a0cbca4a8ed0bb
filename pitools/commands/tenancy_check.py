"""`pit tenancy check`: judge sites by their policy."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import rows_format_option
from pitools.commands.tenancy_plan import (
    at_site,
    load_policies,
    policy_argument,
    policy_sites_option,
    raise_last,
    read_accounting,
)

COLUMNS = ("site", "kind", "object", "message", "hint")


@click.command()
@policy_argument
@policy_sites_option
@rows_format_option
@click.pass_context
def check(ctx: click.Context, policy: Path, sites: tuple[str, ...], form: str) -> None:
    """Find what differs from POLICY, with who changed it, and what keeps its limits from having an effect.

    Drift is shown as `policy → site`, with who changed it last, if accounting tells. Ineffective is a setting of Slurm,
    or a right, that sets aside what the policy uses. Notes are no fault. For cron.

    Exit 1: something differs or is ineffective; 75: a site did not answer.
    """
    from pitools.core.errors import PitError
    from pitools.core.output import Output
    from pitools.tenancy.check import check_site
    from pitools.tenancy.refusals import require_possible
    from pitools.tenancy.site_plan import policy_states, require_agreement

    policies = load_policies(policy, sites)
    accounting, errors = read_accounting(policies)
    wanted = policy_states(policies, str(policy))
    require_agreement(accounting, wanted, str(policy))
    is_bad = False
    with Output(form, COLUMNS) as out:
        for name, each in accounting.items():
            try:
                then = wanted[name](each.state)
                require_possible(each.state, then, f"{policy} at site {name}")
                found = check_site(each, policies[name], then)
            except PitError as error:  # the other sites are judged
                errors.append(at_site(error, name))
                continue
            for finding in found:
                out(finding)
                is_bad = is_bad or finding.kind != "note"
    raise_last(errors)
    if is_bad:
        ctx.exit(1)
