"""`pit dataset`: recordings in, versions that can be trusted, and what a loader makes of them."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

# Module, what it calls the command, and a line of help: none is imported but the one that is used.
COMMANDS = {
    "ingest": ("dataset_ingest", "ingest", "Recordings to one version: HDF5, LeRobot, Zarr, JPEG rows."),
    "list": ("dataset_catalog", "list_versions", "The versions in a root, searched by what they hold."),
    "show": ("dataset_catalog", "show", "Arrays and episodes of a version; a picture of an episode."),
    "check": ("dataset_check", "check", "Find damage and bad data: files, values, frames, episodes."),
    "diff": ("dataset_catalog", "diff", "What differs between two versions."),
    "tag": ("dataset_retain", "tag", "Names that move from version to version."),
    "retire": ("dataset_retain", "retire", "Mark versions as no longer wanted, or take that back."),
    "gc": ("dataset_retain", "gc", "Remove retired versions that nothing names."),
    "rebuild": ("dataset_retain", "rebuild", "Make a version again from its recordings, and compare."),
    "plan-packing": ("dataset_packing", "plan_packing", "How episodes fit into rows of a fixed length."),
    "bench": ("dataset_bench", "bench", "What bounds a loader: the disk, decoding, or the device."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Recordings in, verified Zarr datasets out; which versions are kept, and how fast they are read."""
