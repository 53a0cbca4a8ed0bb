"""`pit dataset`: ingest recordings, check and keep versions, and measure loaders."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

# Command → its module, its name there, and a line of help. Only the module of the used command is imported.
COMMANDS = {
    "ingest": ("dataset_ingest", "ingest", "Ingest recordings: robomimic and ALOHA (HDF5), LeRobot, Zarr."),
    "list": ("dataset_catalog", "list_command", "List the versions in a root, or those that match."),
    "show": ("dataset_catalog", "show", "Show arrays and episodes of a version; plot an episode."),
    "check": ("dataset_check", "check", "Find damage and bad data: files, values, frames, episodes."),
    "diff": ("dataset_catalog", "diff", "Compare two versions."),
    "tag": ("dataset_retain", "tag", "Show or move tags, the movable names of versions."),
    "retire": ("dataset_retain", "retire", "Retire versions, or undo that."),
    "gc": ("dataset_retain", "gc", "Remove retired versions that nothing references."),
    "rebuild": ("dataset_retain", "rebuild", "Rebuild a version from its recordings, and compare."),
    "plan-packing": ("dataset_packing", "plan_packing", "Show how episodes pack into rows of a fixed length."),
    "bench": ("dataset_bench", "bench", "Find what limits a loader: disk, decoding or transform."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Ingest recordings as verified Zarr datasets; check, keep and measure their versions."""
