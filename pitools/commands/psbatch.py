"""`psbatch`: sbatch with the defaults of a site."""

from __future__ import annotations

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    add_help_option=False,
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(args: tuple[str, ...]) -> int:
    """Run sbatch with a site's defaults added: [--site NAME] [--dry-run] SBATCH-OPTIONS… SCRIPT [ARGS…].

    Settings of the command line, the script and SBATCH_* override the defaults. Other arguments are passed unchanged.
    --dry-run prints the command.
    """
    from pitools.site import psbatch
    from pitools.site.load import load_site

    if not args or args[0] in ("-h", "--help"):
        click.echo(command.get_help(click.get_current_context()))
        return 0
    site_name, dry_run, rest = psbatch.parse_own_options(args)
    # Scripts need not be UTF-8.
    with open(0, encoding="utf-8", errors="surrogateescape", closefd=False) as stdin:
        call = psbatch.prepare_call(load_site(site_name), rest, None if stdin.isatty() else stdin)
    if dry_run:
        click.echo(call.command_text)
        return 0
    return psbatch.execute_call(call)
