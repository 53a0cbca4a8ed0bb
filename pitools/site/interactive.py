"""Make the command line of an interactive command at a site: on this machine, or over ssh with a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pitools.site.schema import Site
from pitools.slurm import transport
from pitools.slurm.client import Transport


class InteractiveCall(NamedTuple):
    """A program to become. env: its whole environment."""

    argv: list[str]
    env: dict[str, str]

    def execute(self) -> None:
        """Become the program. Raises OSError if it cannot be started."""
        os.execvpe(self.argv[0], self.argv, self.env)


def interactive_call(
    site: Site, argv: Sequence[str], *, env: Mapping[str, str] = {}, terminal: bool = True
) -> InteractiveCall:
    """Return the call of a command with the site's Slurm: its SLURM_CONF, and its commands first on the PATH.

    env: further variables. terminal: whether the command gets one over ssh. Raises ConfigError for a slurm.conf or
    commands that are missing or that others can change.
    """
    connection = Transport(
        host=site.connection.host if site.connection.kind == "ssh" else "",
        env={"SLURM_CONF": site.slurm.conf} if site.slurm.conf else {},
        bin=site.slurm.bin,
        timeout_s=site.connection.timeout_s,
    )
    if not connection.host:
        variables = {} if site.scheduler == "none" else transport.slurm_conf_env(connection)
        return InteractiveCall(list(argv), {**os.environ, **variables, **transport.path_env(connection), **env})
    options = ["-t"] if terminal else []
    return InteractiveCall(transport.ssh_argv(connection, argv, env, options=options), dict(os.environ))
