"""Which runs count: anybody may write a folder as a run's, or copy one, so those whose starts accounting knows."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pitools.core.errors import PitError
from pitools.core.fs import from_os_error
from pitools.ledger.records import RunLedger
from pitools.ledger.run_ledger import MAX_JOBS, Rows, job_ids, owner, read_rows, rows_by_id, run_ledger
from pitools.run.run_folder import attempt_dirs, run_id_sort_key
from pitools.site.schema import Site
from pitools.slurm.errors import SlurmReason, SlurmRefused
from pitools.slurm.records import AccountingRow


def believed_runs(
    site: Site, run_dirs: Sequence[Path], report: Callable[[str, PitError], None]
) -> Iterator[tuple[Path, RunLedger | None, Rows | None]]:
    """Yield those of a site's runs that count, with their ledger, if it can be made, and their rows.

    Those that had no job count, and all where accounting does not tell: then rows are None. report: gets "" and the
    error of sacct, or a run's id and the error of its ledger.
    """
    rows = None
    try:
        rows = believed_rows(site, run_dirs, {})
    except PitError as error:
        report("", error)
    for run_dir in run_dirs:
        own, ledger = None if rows is None else rows.get(run_dir, []), None
        if own == [] and (job_ids(run_dir) or attempt_dirs(run_dir)):
            continue
        try:
            ledger = run_ledger(run_dir, own or (), only_rows=own is not None)
        except (PitError, OSError) as error:
            report(run_dir.name, error if isinstance(error, PitError) else from_os_error(error, run_dir))
        yield run_dir, ledger, own


def in_turn(run_dirs: Iterable[Path]) -> list[Path]:
    """Return runs by turns of their owners, of each in this order: no user keeps others' from being read."""
    by_owner: dict[str, list[Path]] = defaultdict(list)
    for run_dir in run_dirs:
        by_owner[owner(run_dir)].append(run_dir)
    return [run_dir for turn in itertools.zip_longest(*by_owner.values()) for run_dir in turn if run_dir]


def believed_rows(site: Site, run_dirs: Sequence[Path], taken: dict[str, str]) -> dict[Path, Rows] | None:
    """Return the rows of each run that belong to it, for as many runs as sacct can be asked at once.

    A start belongs to the run of its user whose id is its job's name, else (of an array of runs) to the oldest that has
    its id. taken: start → run of starts that belong to one already. None for a site without accounting.
    """
    if site.scheduler != "slurm":
        return None
    ids: dict[Path, list[str]] = {}
    left = MAX_JOBS
    for run_dir in in_turn(run_dirs):
        if (left := left - len(own := job_ids(run_dir))) < 0:
            break
        ids[run_dir] = own
    try:
        rows = read_rows(site, itertools.chain(*ids.values()))
    except SlurmRefused as error:
        if error.reason is SlurmReason.ACCOUNTING_DISABLED:
            return None
        raise
    by_id = rows_by_id(row for row in rows if row.user)
    by_run: dict[Path, Rows] = {}
    for run_dir in sorted(ids, key=lambda one: (not run_id_sort_key(one.name)[0], run_id_sort_key(one.name))):
        named = {id(row): row for job_id in ids[run_dir] for row in by_id.get(job_id, ())}
        user, run_id = owner(run_dir), run_dir.name  # a name is `<run id>`, `<run id>.<job>`, or another
        by_run[run_dir] = [
            row
            for row in named.values()
            if row.user == user
            and ((name := re.sub(r"\.\d+$", "", row.name)) == run_id or not run_id_sort_key(name)[0])
            and taken.setdefault(start_key(row), run_id) == run_id
        ]
    return by_run


def start_key(row: AccountingRow) -> str:
    """Return what tells a start of a job from all others of its site."""
    return f"{row.raw_id} {row.submit}"
