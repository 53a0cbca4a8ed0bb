"""`pit dataset tag|retire|gc|rebuild`: name, keep, remove and rebuild versions."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.completion import complete_sites
from pitools.commands.dataset_catalog import DIFF_COLUMNS, ROOT_TYPE
from pitools.commands.options import dataset_argument, format_option
from pitools.core.errors import ClusterError, UsageError, suggest
from pitools.core.output import Output

TAG_COLUMNS = ("name", "tag", "version", "number", "moved_at", "moved_by", "reason")
RETIRED_COLUMNS = ("name", "version", "retired_at", "retired_by", "reason", "grace_s")
GC_COLUMNS = ("name", "version", "state", "freed_bytes", "reason")
REBUILD_COLUMNS = ("name", "version", "rebuilt", "state", "repaired_files", "path")


@click.command()
@dataset_argument(metavar="ROOT/NAME")
@click.argument("tag", required=False)
@click.argument("version", required=False)
@click.option(
    "--expect", metavar="VERSION", help="Move the tag only if it names this version now; `none`: only if unset."
)
@click.option("--remove", is_flag=True, help="Remove the tag; its history stays.")
@click.option("--history", is_flag=True, help="Print every move, oldest first.")
@click.option("--reason", default="", help="Reason, kept in the tag's history.")
@format_option
def tag(
    dataset: str,
    tag: str | None,
    version: str | None,
    expect: str | None,
    remove: bool,
    history: bool,
    reason: str,
    form: str,
) -> None:
    """Show the tags of a dataset; with TAG and VERSION, move the tag to that version.

    VERSION may be its first 6 digits, or @OTHER for another tag's version. Exit 75: the tag was moved meanwhile.

    \b
      pit dataset tag datasets/reach                        all tags
      pit dataset tag datasets/reach prod @candidate --reason "passed on the robot"
      pit dataset tag datasets/reach prod 1f3a9c --expect 77ab02
      pit dataset tag datasets/reach prod --history
    """
    from pitools.store import tags
    from pitools.store.resolve import resolve_version, split_dataset_path

    root, name = split_dataset_path(dataset)
    if sum((bool(version), remove, history)) > 1 or (remove and not tag):
        raise UsageError("VERSION, --remove, --history: mutually exclusive", hint="see `pit dataset tag --help`")
    if (expect is not None or reason or version is not None) and not (version or remove):
        hint = "pit dataset tag ROOT/NAME TAG VERSION; see `pit dataset tag --help`"
        raise UsageError("VERSION: missing or empty (expected the version for the tag)", where=dataset, hint=hint)
    if tag and not version and tag not in (names := tags.tag_names(root, name)):
        raise UsageError(f'no tag "{tag}"', where=f"{root / name}@{tag}", hint=suggest(tag, names))
    with Output(form, TAG_COLUMNS) as out:
        if tag and (version or remove):
            before = tags.current_tag(root, name, tag)
            current = before.version if before else ""
            to = (
                resolve_version(f"{root / name}{'' if version.startswith('@') else '/'}{version}").name
                if version
                else ""
            )
            expected = current if expect is None else _expected_version(f"{root / name}", expect)
            out(tags.move_tag(root, name, tag, to, expect=expected, reason=reason))
            return
        tag_names = sorted(tags.read_tags(root, name)) if tag is None else [tag]
        if history:
            tag_names = tags.tag_names(root, name) if tag is None else tag_names
            for each_tag in tag_names:
                for move in tags.tag_history(root, name, each_tag):
                    out(move)
            return
        for each_tag in tag_names:
            if value := tags.current_tag(root, name, each_tag):
                out(value)


@click.command()
@dataset_argument("datasets", nargs=-1, required=True, metavar="DATASET...")
@click.option("--reason", default="", help="Reason, kept in the record.")
@click.option("--grace", default="0s", metavar="TIME", help="Shortest time to keep it, such as 30d (gc has its own).")
@click.option("--undo", is_flag=True, help="Undo the retirement.")
@format_option
def retire(datasets: tuple[str, ...], reason: str, grace: str, undo: bool, form: str) -> None:
    """Retire versions: `pit dataset gc` removes them after a grace, if nothing references them.

    DATASET is ROOT/NAME/VERSION, or its first 6 digits. A version with a tag is refused.
    """
    from pitools.dataset.catalog import retirement
    from pitools.store.resolve import resolve_version

    grace_s = _parse_grace(grace)
    with Output(form, RETIRED_COLUMNS) as out:
        for path in [_version_dir(dataset) if undo else resolve_version(dataset, newest=False) for dataset in datasets]:
            if undo:
                folder = path.absolute()
                retirement.undo_retirement(folder.parent.parent, folder.parent.name, folder.name)
                click.echo(f"{folder.parent.name} {folder.name}: not retired", err=True)
            else:
                out(retirement.retire_version(path, reason=reason, grace_s=grace_s))


@click.command()
@click.argument("root", type=ROOT_TYPE)
@click.option(
    "--grace", default="7d", show_default=True, metavar="TIME", help="Time to keep a version after it was retired."
)
@click.option(
    "--runs",
    multiple=True,
    type=ROOT_TYPE,
    help="Further folder of runs whose datasets stay, besides those of all users of the sites; repeatable.",
)
@click.option("--no-site-runs", is_flag=True, help="Leave out the sites' folders of runs.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, without changes.")
@click.option(
    "--site",
    "sites",
    metavar="NAME",
    multiple=True,
    shell_complete=complete_sites,
    help="A site whose runs' datasets stay; repeatable. [default: all but the examples that pitools ships]",
)
@format_option
def gc(
    root: Path,
    grace: str,
    runs: tuple[Path, ...],
    no_site_runs: bool,
    dry_run: bool,
    sites: tuple[str, ...],
    form: str,
) -> None:
    """Remove retired versions whose grace is over and that no tag, lease, run or derived version references.

    Also removes ingests abandoned for as long, and for 10 minutes at least. Prints one record for each, with the
    reason to keep it. `pit-stage` and loaders outside a run take no lease: they have --grace to finish.

    \b
      pit dataset gc datasets --dry-run
      pit dataset gc datasets --runs runs --runs /shared/other/runs
      pit dataset gc datasets --no-site-runs        no run reads these datasets
    """
    from pitools.dataset.gc.collect import collect_garbage as collect
    from pitools.dataset.gc.run_folders import run_roots
    from pitools.site.load import site_names
    from pitools.store.resolve import require_root

    grace_s = _parse_grace(grace)
    require_root(root)
    run_dirs = list(runs)
    names = () if no_site_runs else sites or site_names(shipped=False)
    for name in names:
        try:
            run_dirs += run_roots(name)
        except ClusterError as error:
            if not dry_run:
                raise
            click.echo(f"pit: without --dry-run, gc would end: {error}; {error.hint}", err=True)
    text = ", ".join(names)
    if not (run_dirs or no_site_runs or dry_run):
        problem = f"runs: no folder of runs here, of {text} (expected one: their plans keep versions)"
        raise UsageError(
            problem, where="--runs", hint="--runs FOLDER, or --no-site-runs if no run reads these datasets"
        )
    with Output(form, GC_COLUMNS) as out:
        for result in collect(root, runs=list(dict.fromkeys(run_dirs)), grace_s=grace_s, dry_run=dry_run):
            out(result)
    if not (run_dirs or no_site_runs):
        click.echo(f"pit: no folder of runs here, of {text}: `gc` needs --runs or --no-site-runs", err=True)


@click.command()
@dataset_argument()
@click.option(
    "--from", "folders", multiple=True, type=ROOT_TYPE, help="Folder with its recordings, at any depth; repeatable."
)
@click.option(
    "--publish", "to_publish", is_flag=True, help="Publish the result: repair the version, or add a differing one."
)
@format_option
def rebuild(dataset: str, folders: tuple[Path, ...], to_publish: bool, form: str) -> int:
    """Ingest a version's recordings again with the same options, and print whether the result differs.

    The result is compared with the version's manifest; `pit dataset check` compares the files with it.
    Exit 0: equal, or only the release of pitools differs. Exit 1: anything else differs. Without --publish nothing is
    kept.

    \b
      pit dataset rebuild datasets/reach@prod --from /archive/recordings
    """
    from pitools.dataset.rebuild import rebuild_version as make
    from pitools.store.resolve import resolve_version

    record, differences = make(resolve_version(dataset), folders, to_publish=to_publish)
    with Output(form, REBUILD_COLUMNS) as out:
        out(record)
    with Output(form, DIFF_COLUMNS) as out:
        for difference in differences:
            out(difference)
    return int(record.state == "differs")


def _expected_version(home: str, text: str) -> str:
    """Return the version that a tag is expected to name; it may be gone."""
    from pitools.store.resolve import resolve_version

    if text == "none":
        return ""
    if len(text) == 32:
        return text
    return resolve_version(f"{home}{'' if text.startswith('@') else '/'}{text}").name


def _version_dir(text: str) -> Path:
    """Return the folder of a version, which may be gone."""
    from pitools.store.resolve import resolve_version

    path = Path(text)
    return path if len(path.name) == 32 else resolve_version(text, newest=False)


def _parse_grace(text: str) -> int:
    """Parse a grace, seconds. A bare number is refused: elsewhere it means minutes, and a removal cannot be undone."""
    from pitools.core.units import parse_duration

    if text.isdigit() and int(text):
        raise UsageError(
            f"{text}: no unit (expected a time such as {text}d)",
            where="--grace",
            hint=f"--grace {text}d, {text}h or {text}min",
        )
    return parse_duration(text)
