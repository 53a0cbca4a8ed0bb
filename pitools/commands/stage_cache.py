"""`pit stage list | pin | unpin | evict | check`: what stands at a staging root, what stays, and whether it is good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import format_option
from pitools.commands.stage_options import place, readers_option, to_option
from pitools.core import units
from pitools.core.errors import NoSpace, UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.stage.cache.evict import Eviction
    from pitools.stage.verify import Finding

_LIST_COLUMNS = ("dataset", "version", "state", "bytes", "last_used", "leased", "locked", "pinned", "source")
_EVICT_COLUMNS = ("version", "state", "bytes", "reason", "path")


@click.command("list")
@click.argument("root", type=place)
@format_option
def list_(root: Path, form: str) -> None:
    """The dataset versions at ROOT: whole, damaged and unfinished ones, their last use, and what keeps them."""
    from pitools.stage.cache.inventory import staged

    with Output(form, _LIST_COLUMNS) as out:
        for record in staged(root):
            out(record)


@click.command()
@click.argument("versions", metavar="VERSION...", nargs=-1, required=True)
@to_option(required=True)
@format_option
def pin(versions: tuple[str, ...], root: Path, form: str) -> None:
    """Keep sets from being evicted. VERSION is one, the beginning of one, or a dataset's name."""
    _pin(versions, root, form, pinned=True)


@click.command()
@click.argument("versions", metavar="VERSION...", nargs=-1, required=True)
@to_option(required=True)
@format_option
def unpin(versions: tuple[str, ...], root: Path, form: str) -> None:
    """Let sets be evicted again. VERSION is one, the beginning of one, or a dataset's name."""
    _pin(versions, root, form, pinned=False)


@click.command()
@click.argument("versions", metavar="[VERSION...]", nargs=-1)
@to_option(required=True)
@click.option("--need", metavar="SIZE", help="Evict, the least recently used first, until so much is free.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@click.option("--force", is_flag=True, help="Also named sets whose source is unknown or gone.")
@format_option
def evict(versions: tuple[str, ...], root: Path, need: str | None, dry_run: bool, force: bool, form: str) -> int:
    """Remove sets that nobody leases, stages or has pinned: the named ones, or as many as make room.

    VERSION is one, the beginning of one, or a dataset's name. Exit 1 when a named one stays.
    """
    from pitools.stage.cache import evict as evicting
    from pitools.stage.cache import inventory

    if bool(versions) == bool(need):
        raise UsageError("either versions, or --need SIZE", hint="pit-stage evict --to ROOT --need 200GiB")
    size = units.size(need) if need else 0
    if dry_run:
        inventory.require_root(root)
    else:
        _require_root(root)
    with Output(form, _EVICT_COLUMNS) as out:
        if need:
            return _make_room(root, size, out, dry_run=dry_run)
        stay: set[evicting.KeptReason] = set()
        for version in inventory.find(root, versions):
            for record in evicting.evict_version(root, version, force=force, dry_run=dry_run):
                out(record)
                stay |= {record.reason} if record.reason else set()
    reasons, elsewhere = evicting.KeptReason, "--force, if it is elsewhere"
    hints = {reasons.PINNED: "pit-stage unpin", reasons.UNKNOWN_SOURCE: elsewhere, reasons.SOURCE_GONE: elsewhere}
    for reason, what_next in hints.items():
        if reason in stay:
            click.echo(f"pit-stage evict: {evicting.KEPT_TEXT[reason]}: {what_next}", err=True)
    return 1 if stay else 0


@click.command()
@click.argument("path", type=place)
@click.option("--repair", "mend", is_flag=True, help="Stage damaged sets again, from where they came from.")
@readers_option
@format_option
def check(path: Path, mend: bool, readers: int | None, form: str) -> int:
    """Read everything and compare it with the manifest: one record per finding, then a summary. Exit 1 on findings.

    PATH is a staging ROOT, a dataset, or one version of it. With --repair, of a ROOT or one of its sets: a record per
    damaged set, and exit 1 when one is not repaired. A set of which nobody knows where it came from is moved to
    ROOT/.quarantine.
    """
    from pitools.core.forked_pool import default_readers
    from pitools.stage.verify import Check, Finding
    from pitools.stage.verify import check as judge

    root = _root_to_repair(path) if mend else path
    summary: Check | None = None
    damaged: dict[str, list[Finding]] = {}
    with Output(form) as out:
        for record in judge(path, readers=readers or default_readers()):
            if isinstance(record, Finding):
                out(record)
                damaged.setdefault(record.version, []).append(record)
            else:
                summary = record
    assert summary is not None
    repaired = _repair(root, damaged, readers or 0, form) if mend else False
    with Output(form) as out:  # its own table: other columns
        out(summary)
    return 1 if summary.findings and not repaired else 0


def _root_to_repair(path: Path) -> Path:
    from pitools.stage import repair

    root = repair.root_of(path)
    _require_root(root)
    return root


def _repair(root: Path, damaged: dict[str, list[Finding]], readers: int, form: str) -> bool:
    from pitools.stage import repair

    done = True
    with Output(form) as out:
        for version, findings in damaged.items():
            record = repair.repair(root, version, findings, readers=readers)
            out(record)
            done = done and record.state == "repaired"
    return done


def _pin(versions: tuple[str, ...], root: Path, form: str, *, pinned: bool) -> None:
    from pitools.stage.cache import inventory, records

    _require_root(root)
    with Output(form, _LIST_COLUMNS) as out:
        for version in inventory.find(root, versions):
            records.pin(root, version, pinned=pinned)
            out(inventory.describe(root, version))


def _make_room(root: Path, size: int, out: Callable[[Eviction], None], *, dry_run: bool) -> int:
    from pitools.stage.cache import disk_quota
    from pitools.stage.cache import evict as evicting

    done = disk_quota.make_room(
        root, lambda _: disk_quota.Lack(0, size - disk_quota.available_bytes(root)), dry_run=dry_run
    )
    for item, n_bytes in done.gone:
        out(evicting.eviction(item, n_bytes, None, dry_run=dry_run))
    if not done.missing:
        return 0
    what = f"{units.size_text(size)} needed, {units.size_text(disk_quota.available_bytes(root))} free"
    if not dry_run:
        raise NoSpace(what, where=str(root), hint=disk_quota.why(done.stay))
    click.echo(f"pit-stage evict: {what}, and nothing would go: {disk_quota.why(done.stay)}", err=True)
    return 1


def _require_root(root: Path) -> None:
    from pitools.stage.cache import inventory, layout

    inventory.require_root(root)
    layout.prepare(root)
    layout.sweep(root)
