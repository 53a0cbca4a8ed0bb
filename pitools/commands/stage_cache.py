"""`pit stage list | pin | unpin | evict | check`: list, keep, remove and verify the versions at a staging root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import format_option
from pitools.commands.stage_options import ROOT_TYPE, limit_options, readers_option, report_eviction, to_option
from pitools.core import units
from pitools.core.errors import NoSpace, UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.stage.cache.evict import Eviction
    from pitools.stage.cache.space import RootLimits
    from pitools.stage.verify import FileFinding

_LIST_COLUMNS = ("dataset", "version", "state", "bytes", "last_used", "leased", "locked", "pinned", "source")
_EVICT_COLUMNS = ("version", "state", "bytes", "reason", "path")


@click.command("list")
@click.argument("root", type=ROOT_TYPE)
@format_option
def list_command(root: Path, form: str) -> None:
    """List the dataset versions at ROOT: complete, damaged and unfinished ones, their last use, leases and pins."""
    from pitools.stage.cache.inventory import list_sets

    with Output(form, _LIST_COLUMNS) as out:
        for record in list_sets(root):
            out(record)


@click.command()
@click.argument("versions", metavar="VERSION...", nargs=-1, required=True)
@to_option(required=True)
@format_option
def pin(versions: tuple[str, ...], root: Path, form: str) -> None:
    """Protect sets from eviction. VERSION is a version, its first 6 digits, or a dataset's name."""
    _pin(versions, root, form, pinned=True)


@click.command()
@click.argument("versions", metavar="VERSION...", nargs=-1, required=True)
@to_option(required=True)
@format_option
def unpin(versions: tuple[str, ...], root: Path, form: str) -> None:
    """Allow the eviction of sets again. VERSION is a version, its first 6 digits, or a dataset's name."""
    _pin(versions, root, form, pinned=False)


@click.command()
@click.argument("versions", metavar="[VERSION...]", nargs=-1)
@to_option(required=True)
@click.option("--need", metavar="SIZE", help="Evict until this much is free, the least recently used first.")
@click.option("--quarantined", is_flag=True, help="Remove the damaged sets that `check --repair` moved aside.")
@click.option("--dry-run", is_flag=True, help="Only show the sets that would be removed.")
@click.option(
    "--force", is_flag=True, help="Also named sets with an unknown or missing source, and copies of other nodes."
)
@format_option
def evict(
    versions: tuple[str, ...],
    root: Path,
    need: str | None,
    quarantined: bool,
    dry_run: bool,
    force: bool,
    form: str,
) -> int:
    """Remove sets that are not leased, pinned or being staged: the named ones, or as many as --need requires.

    VERSION is a version, its first 6 digits, or a dataset's name. Exit 1 if a named set stays.
    """
    from pitools.stage.cache import evict as evicting
    from pitools.stage.cache import inventory

    if bool(versions) + bool(need) + quarantined != 1:
        message = "either versions, or --need SIZE, or --quarantined"
        raise UsageError(message, hint="pit-stage evict --to ROOT --need 200GiB")
    if force and not versions:
        raise UsageError("--force is for named versions alone", where="--force", hint="pit-stage evict VERSION --force")
    size = units.parse_size(need) if need else 0
    if dry_run:
        inventory.require_root(root)
    else:
        _prepare_root(root)
    with Output(form, _EVICT_COLUMNS) as out:
        if need:
            return _make_room(root, size, out, dry_run=dry_run)
        if quarantined:
            for record in evicting.evict_quarantined(root, dry_run=dry_run):
                out(record)
            return 0
        kept_reasons: set[evicting.KeptReason] = set()
        for version in inventory.find_versions(root, versions, partial=True):
            for record in evicting.evict_version(root, version, force=force, dry_run=dry_run):
                out(record)
                kept_reasons |= {record.reason} if record.reason else set()
    reasons, force_hint = evicting.KeptReason, "--force, if it is elsewhere"
    hints = {reasons.PINNED: "pit-stage unpin", reasons.UNKNOWN_SOURCE: force_hint, reasons.SOURCE_GONE: force_hint}
    hints[reasons.OTHER_NODE] = "--force, if it does not"
    for reason, hint in hints.items():
        if reason in kept_reasons:
            click.echo(f"pit-stage evict: {evicting.KEPT_TEXT[reason]}: {hint}", err=True)
    return 1 if kept_reasons else 0


@click.command()
@click.argument("path", type=ROOT_TYPE)
@click.option("--repair", "repair_sets", is_flag=True, help="Stage damaged sets again from their source.")
@readers_option
@limit_options
@format_option
def check(
    path: Path, repair_sets: bool, readers: int | None, quota: int | None, min_free: int | None, form: str
) -> int:
    """Compare every byte with the manifests: one record per finding, then a summary. Exit 1 on findings.

    PATH is a staging ROOT, a dataset, or one version of it. With --repair (a ROOT or one of its sets): also a record
    per damaged set, and exit 1 if one is not repaired. A set with an unknown source is moved to ROOT/.quarantine.
    """
    from pitools.core.forked_pool import default_readers
    from pitools.stage.cache.layout import staged_identity, staged_path
    from pitools.stage.cache.space import RootLimits
    from pitools.stage.verify import CheckTotals, FileFinding, check_versions

    root = _root_to_repair(path) if repair_sets else path
    summary: CheckTotals | None = None
    damaged: dict[str, list[FileFinding]] = {}
    identities: dict[str, tuple[int, int] | None] = {}
    with Output(form, ends_with_reader=not repair_sets) as out:
        for record in check_versions(path, readers=readers or default_readers()):
            if isinstance(record, FileFinding):
                out(record)
                damaged.setdefault(record.version, []).append(record)
                identities.setdefault(record.version, staged_identity(staged_path(root, record.version)))
            else:
                summary = record
    assert summary is not None
    limits = RootLimits(quota_bytes=quota, min_free_bytes=min_free or 0)
    repaired = _repair(root, damaged, identities, readers or 0, limits, form) if repair_sets else False
    with Output(form) as out:  # its own table: other columns
        out(summary)
    return 1 if summary.findings and not repaired else 0


def _root_to_repair(path: Path) -> Path:
    from pitools.stage import repair

    root = repair.root_of(path)
    _prepare_root(root)
    return root


def _repair(
    root: Path,
    damaged: dict[str, list[FileFinding]],
    identities: dict[str, tuple[int, int] | None],
    readers: int,
    limits: RootLimits,
    form: str,
) -> bool:
    from pitools.stage import repair

    all_repaired = True
    with Output(form) as out:
        for version, findings in damaged.items():
            record = repair.repair_set(
                root,
                version,
                findings,
                identity=identities[version],
                readers=readers,
                limits=limits,
                on_evicted=report_eviction,
            )
            out(record)
            all_repaired = all_repaired and record.state == "repaired"
    return all_repaired


def _pin(versions: tuple[str, ...], root: Path, form: str, *, pinned: bool) -> None:
    from pitools.stage.cache import inventory, records

    _prepare_root(root)
    with Output(form, _LIST_COLUMNS) as out:
        for version in inventory.find_versions(root, versions, partial=False):
            records.set_pinned(root, version, pinned=pinned)
            out(inventory.describe_set(root, version))


def _make_room(root: Path, needed: int, out: Callable[[Eviction], None], *, dry_run: bool) -> int:
    from pitools.stage.cache import evict as evicting
    from pitools.stage.cache import space

    result = space.make_room(root, lambda _: space.Shortfall(0, needed - space.available_bytes(root)), dry_run=dry_run)
    for item, n_bytes in result.evicted:
        out(evicting.make_record(item, n_bytes, None, dry_run=dry_run))
    if not result.missing_bytes:
        return 0
    message = f"{units.format_size(needed)} needed, {units.format_size(space.available_bytes(root))} free"
    if not dry_run:
        raise NoSpace(message, where=str(root), hint=space.no_space_hint(result.kept_reasons))
    click.echo(
        f"pit-stage evict: {message}; nothing would be evicted: {space.no_space_hint(result.kept_reasons)}", err=True
    )
    return 1


def _prepare_root(root: Path) -> None:
    from pitools.stage.cache import inventory, layout

    inventory.require_root(root)
    layout.create_root(root)
    layout.purge_trash(root)
