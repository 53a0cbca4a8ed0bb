"""`pit tenancy show`: what a user may run."""

from __future__ import annotations

import click

from pitools.commands import completion
from pitools.commands.options import rows_format_option
from pitools.commands.tenancy_plan import at_site, raise_last

# Of an Allowance, all but what is long.
_LEFT_OUT = ("user", "reason", "binding", "left", "not_judged")


@click.command()
@click.argument("user", default="")
@click.option(
    "--site",
    "sites",
    envvar="PIT_SITE",
    metavar="NAME",
    multiple=True,
    shell_complete=completion.complete_sites,
    help="A site, as `pit site list` names it; repeatable. [default: all with Slurm]",
)
@click.option("--all", "with_never", is_flag=True, help="Also where no job of the user may ever run, and why.")
@rows_format_option
def show(user: str, sites: tuple[str, ...], with_never: bool, form: str) -> None:
    """Show what USER (by default you) may run now, by account, QOS and partition, and what binds a larger job.

    now and ever are GPUs of the largest job that limits allow, beside what runs and alone; CPUs where a partition has
    no GPUs. max_time_s is of a job of one GPU or CPU. hours_left is of the tightest budget, of GPUs or CPUs as resource
    says; a job may start that needs more, if Slurm does not enforce `safe`. Limits alone are asked: pit place plan says
    when a job starts.

    \b
      pit tenancy show
      pit tenancy show ann --site alpha --all
      pit tenancy show ann --format jsonl | jq 'select(.now > 8)'
    """
    from concurrent.futures import ThreadPoolExecutor

    from pitools.core.errors import PitError, UsageError
    from pitools.core.output import Output
    from pitools.site.load import load_site, site_names
    from pitools.site.schema import Site
    from pitools.tenancy.allowance import Allowance, read_allowances, usable

    def read(site: Site) -> list[Allowance] | PitError:
        try:
            return read_allowances(site, user)
        except PitError as error:
            return at_site(error, site.name)

    loaded = [load_site(name) for name in dict.fromkeys(sites or site_names(shipped=False))]
    asked = [site for site in loaded if sites or site.scheduler == "slurm"]
    if not asked:
        raise UsageError("no site with Slurm", hint="pit site list")
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(read, asked))
    errors = [answer for answer in answers if isinstance(answer, PitError)]
    rows = [row for answer in answers if not isinstance(answer, PitError) for row in answer]
    shown = rows if with_never else usable(rows)
    with Output(form, [name for name in Allowance.__struct_fields__ if name not in _LEFT_OUT]) as out:
        for row in shown:
            out(row)
    if rows and not shown:
        click.echo(f"pit: nothing may ever run: {rows[0].message}; --all shows each", err=True)
    if not rows or not all(isinstance(error, UsageError) for error in errors):
        raise_last(errors)  # a user need not be in the accounts of each site
