"""`pit monitor export`: metrics of all sites, for Prometheus."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands import completion
from pitools.commands.options import LocalPath


@click.command()
@click.option(
    "--site",
    "names",
    envvar="PIT_SITES",
    metavar="NAME",
    multiple=True,
    shell_complete=completion.complete_sites,
    help="Export this site; repeatable; by default every site with Slurm.",
)
@click.option("--textfile", type=LocalPath(), metavar="FILE.prom", help="Make one cycle, and write the metrics there.")
@click.option("--listen", metavar="HOST:PORT", help="Serve until interrupted, such as 127.0.0.1:9341.")
@click.option("--every", default="30s", show_default=True, metavar="TIME", help="Cycle time of --listen: 5s to 60s.")
@click.option("--tls-cert", type=LocalPath(), metavar="FILE", help="Serve HTTPS with this certificate chain.")
@click.option("--tls-key", type=LocalPath(), metavar="FILE", help="The key of --tls-cert, of mode 0600.")
@click.option("--basic-auth", type=LocalPath(), metavar="FILE", help="USER:PASSWORD for clients, of mode 0600.")
@click.pass_context
def export(
    ctx: click.Context,
    names: tuple[str, ...],
    textfile: Path | None,
    listen: str | None,
    every: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    basic_auth: Path | None,
) -> None:
    """Export metrics of all sites to Prometheus: over HTTP, or as a file for node_exporter.

    A cycle makes at most two requests to a site's slurmctld, of jobs and of nodes in turn; scrapes make none. A site
    that hangs or fails has pit_collector_success 0 and no other values, and delays no other. On stderr, once: a
    collector that begins, or ceases, to fail.
    A site that another exporter of this account holds is skipped, which is said; if all are: exit 75, and no file.
    With --textfile, exit 75: a collector failed; the file was written.
    """
    import os
    import threading

    from pitools.core import units
    from pitools.core.errors import UsageError
    from pitools.monitor.export.board import Board
    from pitools.monitor.export.serve import read_password, serve, tls_context, write_textfile
    from pitools.place.clusters.snapshot import load_sites

    if (textfile is None) == (listen is None):
        raise UsageError("give either --textfile or --listen", hint="pit monitor export --listen 127.0.0.1:9341")
    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together")
    if textfile and (tls_cert or basic_auth):
        raise UsageError("--tls-cert and --basic-auth are for --listen")
    if textfile and textfile.suffix != ".prom":
        raise UsageError(f'"{textfile}" does not end in .prom: node_exporter reads no other file')
    if textfile and not textfile.parent.is_dir():
        raise UsageError("no such folder", where=str(textfile.parent), hint="the folder of node_exporter's textfiles")
    os.umask(0o022)  # node_exporter, another user, reads the file

    def report(line: str) -> None:
        click.echo(f"pit: {line}", err=True)

    sites, skipped = load_sites(names)
    for one in skipped:
        report(f"site {one.site}: {one.reason}")
    if not sites:
        raise UsageError("no site with Slurm", hint="see: pit site list")
    board = Board(sites)
    if textfile:
        if not board.run_once(lambda: write_textfile(textfile, board), report):
            ctx.exit(75)
        return
    assert listen
    host, port = _parse_address(listen)
    every_s = float(units.parse_duration(every))
    if not 5 <= every_s <= 60:
        raise UsageError(f"{every} (expected 5s to 60s)", where="--every", hint="values are exported for five minutes")
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    if basic_auth and not tls_cert and not is_loopback:
        raise UsageError("--basic-auth sends the password in clear text", hint="add --tls-cert and --tls-key")
    if not basic_auth and not is_loopback:
        report(f"note: without --basic-auth whoever reaches {host} reads the metrics")
    tls = tls_context(tls_cert, tls_key) if tls_cert and tls_key else None
    password = read_password(basic_auth) if basic_auth else b""
    port = serve(board, host, port, tls, password)
    board.run_forever(every_s, report)
    address = f"{'https' if tls else 'http'}://{listen.rpartition(':')[0]}:{port}"
    report(f"serving metrics of {len(sites)} sites on {address}")
    threading.Event().wait()


def _parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `127.0.0.1:9341` or `[::1]:9341`. Raises UsageError."""
    from pitools.core.errors import UsageError

    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f'"{text}" is not HOST:PORT', where="--listen", hint="--listen 127.0.0.1:9341")
    return host.strip("[]"), int(port)
