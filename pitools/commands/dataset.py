"""`pit dataset`: recordings in, versions that can be trusted, and what a loader makes of them."""

from __future__ import annotations

import click

from pitools.commands.dataset_catalog import list_versions, show
from pitools.commands.dataset_ingest import ingest


@click.group()
def group() -> None:
    """Recordings in, verified Zarr datasets out."""


for command in (ingest, list_versions, show):
    group.add_command(command)
