"""`pit dataset tag|retire|gc|rebuild`: which versions are kept, under what names, and how to get one back."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.dataset_catalog import DIFF, ROOT
from pitools.commands.options import format_option, site_option
from pitools.core.errors import ToolMissing, UsageError, nearest
from pitools.core.output import Output

TAGS = ("name", "tag", "version", "number", "at", "by", "why")
RETIRED = ("name", "version", "when", "by", "why", "grace_s")
COLLECTED = ("name", "version", "state", "freed_bytes", "why")
REBUILT = ("name", "version", "rebuilt", "state", "repaired_files", "path")


@click.command()
@click.argument("dataset", metavar="ROOT/NAME")
@click.argument("tag", required=False)
@click.argument("version", required=False)
@click.option(
    "--expect", metavar="VERSION", help="Move it only if it names this one now; `none`: only if there is none."
)
@click.option("--remove", is_flag=True, help="Let it name nothing.")
@click.option("--history", is_flag=True, help="Every move, oldest first.")
@click.option("--why", default="", help="Kept in its history.")
@format_option
def tag(
    dataset: str,
    tag: str | None,
    version: str | None,
    expect: str | None,
    remove: bool,
    history: bool,
    why: str,
    form: str,
) -> None:
    """The tags of a dataset; with TAG and VERSION, let the tag name that version.

    VERSION may be its first 6 digits, or @OTHER for what another tag names. Exit 75: somebody else moved it meanwhile.

    \b
      pit dataset tag datasets/reach                        what all tags name
      pit dataset tag datasets/reach prod @candidate --why "passed on the robot"
      pit dataset tag datasets/reach prod 1f3a9c --expect 77ab02
      pit dataset tag datasets/reach prod --history
    """
    from pitools.store import tags
    from pitools.store.resolve import resolve, split

    root, name = split(dataset)
    if sum((bool(version), remove, history)) > 1 or (remove and not tag):
        raise UsageError("one thing at a time: VERSION, --remove or --history", hint="see `pit dataset tag --help`")
    if tag and not version and tag not in (names := tags.names(root, name)):
        raise UsageError(f'no tag "{tag}"', where=f"{root / name}@{tag}", hint=nearest(tag, names))
    with Output(form, TAGS) as out:
        if tag and (version or remove):
            before = tags.current(root, name, tag)
            held = before.version if before else ""
            to = resolve(f"{root / name}{'' if version.startswith('@') else '/'}{version}").name if version else ""
            expected = held if expect is None else _version(f"{root / name}", expect)
            out(tags.move(root, name, tag, to, expect=expected, why=why))
            return
        known = sorted(tags.read(root, name)) if tag is None else [tag]
        if history:
            known = tags.names(root, name) if tag is None else known
            for one in known:
                for move in tags.history(root, name, one):
                    out(move)
            return
        for one in known:
            if value := tags.current(root, name, one):
                out(value)


@click.command()
@click.argument("datasets", nargs=-1, required=True, metavar="DATASET...")
@click.option("--why", default="", help="Kept with it.")
@click.option("--grace", default="0s", metavar="TIME", help="Keep it so long at least, such as 30d (gc has its own).")
@click.option("--undo", is_flag=True, help="Take it back.")
@format_option
def retire(datasets: tuple[str, ...], why: str, grace: str, undo: bool, form: str) -> None:
    """Mark versions as no longer wanted: `pit dataset gc` removes them after a grace, if nothing names them.

    DATASET is ROOT/NAME/VERSION, or its first 6 digits. A version that a tag names is refused.
    """
    from pitools.dataset.catalog import retirement
    from pitools.store.resolve import resolve

    grace_s = _grace(grace)
    with Output(form, RETIRED) as out:
        for path in [_known(dataset) if undo else resolve(dataset, newest=False) for dataset in datasets]:
            if undo:
                whole = path.absolute()
                retirement.undo(whole.parent.parent, whole.parent.name, whole.name)
                click.echo(f"{whole.parent.name} {whole.name}: not retired", err=True)
            else:
                out(retirement.retire(path, why=why, grace_s=grace_s))


@click.command()
@click.argument("root", type=ROOT)
@click.option("--grace", default="7d", show_default=True, metavar="TIME", help="How long a version stays once retired.")
@click.option(
    "--runs", multiple=True, type=ROOT, help="Runs whose datasets stay; repeatable. Default: of all users of the site."
)
@click.option("--dry-run", is_flag=True, help="Change nothing, and say what would be.")
@site_option
@format_option
def gc(root: Path, grace: str, runs: tuple[Path, ...], dry_run: bool, site_name: str, form: str) -> None:
    """Remove versions that were retired, whose grace is over, and that no tag, lease, run or younger version names.

    Also ingests that nobody went on with for as long. One record for each, and why it stays. What reads a
    version for itself (`pit-stage`, a loader that is in no run) takes no lease on it: --grace is the time it has.

    \b
      pit dataset gc datasets --dry-run
      pit dataset gc datasets --runs runs --runs /shared/other/runs
    """
    from pitools.dataset.gc.collect import gc as collect
    from pitools.dataset.gc.run_folders import of_site
    from pitools.store.resolve import check_root

    grace_s = _grace(grace)
    check_root(root)
    asked = runs or of_site(site_name)
    gone = 0
    with Output(form, COLLECTED) as out:
        for found in collect(root, runs=asked, grace_s=grace_s, dry_run=dry_run):
            out(found)
            gone += found.state != "kept" and bool(found.version)
    if gone and not asked:
        click.echo(f"pit: site {site_name} has no folder of runs here, so no run keeps a version: --runs", err=True)


@click.command()
@click.argument("dataset")
@click.option("--from", "folders", multiple=True, type=ROOT, help="Where its recordings are, at any depth; repeatable.")
@click.option("--publish", "to_publish", is_flag=True, help="Keep the result: repair the version, or add what differs.")
@format_option
def rebuild(dataset: str, folders: tuple[Path, ...], to_publish: bool, form: str) -> int:
    """Ingest a version's recordings once more, as they were, and show that the result is the same, or what differs.

    It is compared with what the version's manifest says; whether its files are still that says `pit dataset check`.
    Exit 0: it is the same, or only our own release differs in what its manifest says. Exit 1: something else differs.
    Without --publish nothing is kept.

    \b
      pit dataset rebuild datasets/reach@prod --from /archive/recordings
    """
    from pitools.store.resolve import resolve

    try:
        from pitools.dataset.rebuild import rebuild as make
    except ImportError as error:
        raise ToolMissing(f"{error.name} is not installed", hint="pip install 'pitools-hpc[data]'") from error

    record, differences = make(resolve(dataset), folders, to_publish=to_publish)
    with Output(form, REBUILT) as out:
        out(record)
    with Output(form, DIFF) as out:
        for found in differences:
            out(found)
    return int(record.state == "differs")


def _version(home: str, text: str) -> str:
    """The version that a tag is expected to name, which need not be there any more."""
    from pitools.store.resolve import resolve

    if text == "none":
        return ""
    if len(text) == 32:
        return text
    return resolve(f"{home}{'' if text.startswith('@') else '/'}{text}").name


def _known(text: str) -> Path:
    """The folder of a version that may be gone."""
    from pitools.store.resolve import resolve

    path = Path(text)
    return path if len(path.name) == 32 else resolve(text, newest=False)


def _grace(text: str) -> int:
    """Seconds. A number alone, which elsewhere is minutes, may well be meant as days, and what is gone is gone."""
    from pitools.core.units import seconds

    if text.isdigit() and int(text):
        raise UsageError(f'"{text}" of what?', where="--grace", hint=f"--grace {text}d, {text}h or {text}min")
    return seconds(text)
