"""`pit node check|show`: what this node, or the controller's records of another, say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands import completion
from pitools.commands.options import LocalPath, rows_format_option, site_option

if TYPE_CHECKING:
    from pitools.node.check.config import NodeConfig

FINDING_COLUMNS = ("check", "state", "level", "action", "subject", "message", "hint")
INCIDENT_COLUMNS = ("incident", "check", "action", "phase", "opened_at", "over_at", "outcome", "message")
SUSPICION_COLUMNS = ("source", "user", "weight", "at", "message")
HISTORY_COLUMNS = ("node", "incidents", "median_between_s", "median_repair_s", "checked_at")
config_option = click.option(
    "--config",
    "config_path",
    type=LocalPath(),
    metavar="FILE",
    shell_complete=completion.complete_files,
    help="File of checks and limits, if not the site's or /etc/pitools/node.toml.",
)


def load_node_config(config_path: Path | None, site_name: str) -> NodeConfig:
    """Load the file that --config names, else the site's, else /etc/pitools/node.toml. Raises PitError."""
    from pitools.node.check.config import load_config

    if config_path is None:
        from pitools.site.load import load_site  # milliseconds, which the check of each five minutes need not pay

        config = load_site(site_name).node.config
        config_path = Path(config) if config else None
    return load_config(config_path)


@click.command()
@config_option
@site_option
@click.option("--report", is_flag=True, help="Write the report for the controller, into the spool.")
@click.option("--all", "with_passed", is_flag=True, help="Each check, also those that passed.")
@click.option("--node", "name", metavar="NAME", default="", help="This node's name in Slurm, if not the host's.")
@rows_format_option
@click.pass_context
def check(
    ctx: click.Context,
    config_path: Path | None,
    site_name: str,
    report: bool,
    with_passed: bool,
    name: str,
    form: str,
) -> None:
    """Check this node: a line for each finding that failed, then one for each table of which something is unknown.

    Exit 1: a critical check failed.
    """
    from pitools.core.errors import ConfigError
    from pitools.core.output import Output
    from pitools.node.check import this_node

    config = load_node_config(config_path, site_name)
    if report:
        os.umask(0o022)  # all users read reports and benches, to choose nodes
    checked = this_node.check_node(config, this_node.node_name(name))
    with Output(form, FINDING_COLUMNS) as out:
        for finding in checked.findings if with_passed else this_node.summary(checked):
            out(finding)
    if problem := this_node.nhc_problem(config, checked.facts.node):
        click.echo(f"pit: {problem}", err=True)
    if report:
        this_node.require_known(checked.facts)
        from pitools.node.report import write_report
        from pitools.node.spool import require_usable

        write_report(config, checked)
        try:
            require_usable(Path(config.spool))
        except ConfigError as error:
            click.echo(f"pit: no controller uses this report: {error}", err=True)
    if checked.has_failed:
        ctx.exit(1)


@click.command()
@click.argument("node", default="", shell_complete=completion.complete_nodes)
@config_option
@site_option
@click.option(
    "--facts",
    "table",
    metavar="TABLE",
    default="",
    shell_complete=completion.complete_tables,
    help="The rows of a table of facts about this node.",
)
@click.option("--tables", is_flag=True, help="The keys of all tables of facts, with what they mean.")
@click.option("--coverage", is_flag=True, help="Lines of nhc.conf and checks of gcm, NHC, Azure, with what does them.")
@click.option("--node", "name", metavar="NAME", default="", help="With --coverage: a node, if not this one.")
@rows_format_option
def show(
    node: str, config_path: Path | None, site_name: str, table: str, tables: bool, coverage: bool, name: str, form: str
) -> None:
    """Show the tables of facts about this node; or of NODE: its history, incidents, last report, and who suspects it.

    Of its incidents: median_between_s from the start of one to that of the next (the MTBI, as a median),
    median_repair_s from the start to the return.
    """
    from pitools.core.errors import UsageError, suggest
    from pitools.node.tables import TABLES

    if sum([bool(node), bool(table), tables, coverage]) > 1:
        raise UsageError("NODE, --facts, --tables and --coverage exclude each other", where="pit node show")
    if name and not coverage:
        raise UsageError("--node is for --coverage", where="pit node show", hint=f"its reports: pit node show {name}")
    if table and table not in TABLES:
        raise UsageError(f'no table "{table}"', where="--facts", hint=suggest(table, TABLES))
    if tables:
        _print_keys(form)
    elif coverage:
        _print_coverage(config_path, site_name, name, form)
    elif node:
        _print_history(node, config_path, site_name, form)
    else:
        _print_facts(config_path, site_name, table, form)


def _print_keys(form: str) -> None:
    from pitools.core.output import Output
    from pitools.node.tables import TABLES
    from pitools.node.types import KeyRow

    with Output(form) as out:
        for name, table in TABLES.items():
            for key, one in table.keys.items():
                out(KeyRow(table=name, key=key, type=one.type, meaning=one.meaning))


def _print_coverage(config_path: Path | None, site_name: str, name: str, form: str) -> None:
    """Print what is made of each line of the site's nhc.conf, if it names one, then the checks of other tools."""
    from pitools.core.output import Output
    from pitools.node.check import this_node
    from pitools.node.check.coverage import coverage
    from pitools.node.check.nhc.lines import line_rows

    file = load_node_config(config_path, site_name).nhc.file
    with Output(form) as out:
        for row in (*(line_rows(Path(file), this_node.node_name(name)) if file else ()), *coverage()):
            out(row)


def _print_facts(config_path: Path | None, site_name: str, table: str, form: str) -> None:
    from pitools.core.errors import ClusterError
    from pitools.core.output import Output
    from pitools.node.check import this_node
    from pitools.node.tables import TABLES
    from pitools.node.types import FactRow, TableRow

    config, node = load_node_config(config_path, site_name), this_node.node_name()
    facts = this_node.read_all(config, node, [table] if table else ())
    if not table:
        with Output(form) as out:
            for name, read in facts.tables.items():
                rows = None if read.unknown and not read.rows else len(read.rows)
                out(
                    TableRow(
                        node=node, table=name, rows=rows, cost_s=read.cost_s, source=read.source, unknown=read.unknown
                    )
                )
        return
    found = facts.tables.get(table)
    if found is None or (found.unknown and not found.rows):
        raise ClusterError(f"{table}: {found.unknown if found else 'nothing reads this table'}", where=node)
    with Output(form, tuple(f"values.{key}" for key in TABLES[table].keys)) as out:
        for row in found.rows:
            out(FactRow(node=node, table=table, values=row))


def _print_history(node: str, config_path: Path | None, site_name: str, form: str) -> None:
    from pitools.commands.node_drain import load_controller
    from pitools.core.output import Output
    from pitools.node.control.history import node_history
    from pitools.node.site_suspicion import read_suspicions

    controller = load_controller(config_path, site_name)
    incidents = [one for one in controller.incidents().values() if one.node == node]
    report = controller.report(node)
    if not incidents and report is None:
        controller.require_node(node)
    with Output(form, HISTORY_COLUMNS) as out:
        out(node_history(node, incidents, report))
    with Output(form, INCIDENT_COLUMNS) as out:
        for incident in incidents:
            out(incident)
    with Output(form, FINDING_COLUMNS) as out:
        for finding in report.findings if report else ():
            out(finding)
    suspicion = read_suspicions(controller.config, {node}).get(node)
    with Output(form, SUSPICION_COLUMNS) as out:
        for reason in suspicion.other_reasons if suspicion else ():
            out(reason)
