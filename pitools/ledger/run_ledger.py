"""Make a run's ledger from its folder and, if given, the accounting rows of its jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from pitools.core.errors import PitError
from pitools.ledger.records import RunLedger
from pitools.site.schema import Site
from pitools.slurm.records import AccountingRow


def run_ledger(run_dir: Path, rows: Sequence[AccountingRow] = (), *, now: datetime | None = None) -> RunLedger:
    """Return the ledger of a run. Raises DataError for a folder that is no run, OSError.

    rows: of its jobs, each start (`sacct -D`); rows of other jobs are left out. now: for running runs.
    """
    raise NotImplementedError


def job_ledger(
    rows: Sequence[AccountingRow], *, site: str = "", admin_comment: str = "", now: datetime | None = None
) -> RunLedger:
    """Return the ledger of a job of another program. rows: one or more, all of one JobIDRaw.

    admin_comment: of its last start; jobstats' record is read from it.
    """
    raise NotImplementedError


def fleet_ledgers(
    site: Site,
    since: str,
    *,
    rows: Sequence[AccountingRow] = (),
    report: Callable[[Path, PitError], None] = lambda *_: None,
    limit: int = 1000,
) -> Iterator[RunLedger]:
    """Yield the ledgers of a site's runs that ran since a time (RFC 3339), newest first; Slurm is not queried.

    report: gets the error of a run that cannot be read, which is left out. limit: of runs.
    """
    raise NotImplementedError


def read_rows(site: Site, run_dirs: Sequence[Path]) -> list[AccountingRow]:
    """Return the accounting rows of the jobs of runs, by one `sacct`; [] without Slurm. Raises ClusterError."""
    raise NotImplementedError


def describe(ledger: RunLedger) -> str:
    """Return a ledger as one line: `goodput 78 %; greatest loss: input 12 %`; "" if its goodput is unknown."""
    raise NotImplementedError
