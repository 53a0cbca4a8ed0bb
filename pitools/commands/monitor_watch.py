"""`pit monitor watch`: all sites, queues, runs and alerts on one screen."""

from __future__ import annotations

import click

from pitools.commands import completion


@click.command()
@click.option(
    "--site",
    "sites",
    metavar="NAME",
    multiple=True,
    shell_complete=completion.complete_sites,
    help="A site to show; repeatable. [default: all of `pit site list`]",
)
@click.option("--prometheus", "url", envvar="PIT_PROMETHEUS", default="", metavar="URL", help="Also what fires there.")
def watch(sites: tuple[str, ...], url: str) -> None:
    """Show all sites, their queues and runs, goodput and alerts on one screen, until q is pressed.

    Keys: / filters the runs, s sorts, r reverses; l shows the logs of the selected run, w why its attempts ended;
    c cancels it, after a question; tab moves to the next table. A site that does not answer becomes grey, with the age
    of what is shown of it. Of a site the newest 1000 runs are shown.
    """
    import os
    import sys

    from pitools.core.errors import UsageError
    from pitools.monitor.live.app import WatchApp
    from pitools.monitor.live.site_feeds import make_feeds
    from pitools.monitor.rules.prometheus_api import check_url

    prometheus = check_url(url) if url else ""
    feeds = make_feeds(sites)
    # stderr too: the screen is drawn there.
    is_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if not is_terminal or os.environ.get("TERM", "dumb") == "dumb":
        hint = "as records: pit launch list --all-sites, pit place list, pit monitor goodput"
        problem = "stdin, stdout and stderr: not a terminal that can draw (expected one, whose TERM is not dumb)"
        raise UsageError(problem, where="pit monitor watch", hint=hint)
    WatchApp(feeds, prometheus).run()
