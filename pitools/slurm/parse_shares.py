"""Parse `sshare -a -P`: the shares of accounts and users, what they used, and the factors of fair share."""

from __future__ import annotations

from pitools.core.record import Record
from pitools.slurm.fields import parse_count, parse_error, parse_tres

_FORMAT = ("Account", "User", "RawShares", "RawUsage", "FairShare", "LevelFS", "GrpTRESMins", "GrpTRESRaw")
SHARES = ["sshare", "-a", "-P", "-o", ",".join(_FORMAT)]


class FairShare(Record, frozen=True, kw_only=True, tag="pit.fair-share/1"):
    """The share of an account, or of a user in it. parent: the account above, "" for root.

    shares: None for a user who shares what the account has. usage: weighted seconds, decayed. fair_share: the factor
    of a user's jobs, 0 to 1. level_fs: share by use among siblings, above 1 for less use than share; None if unused.
    grp_tres_mins: limits of minutes, tres_mins: what is used of them, decayed.
    """

    account: str
    user: str = ""
    parent: str = ""
    shares: int | None = None
    usage: float = 0.0
    fair_share: float | None = None
    level_fs: float | None = None
    grp_tres_mins: dict[str, str] = {}
    tres_mins: dict[str, str] = {}


def parse_shares(text: str) -> list[FairShare]:
    """Return the rows, each account before what is below it, by the header line. Raises ClusterError.

    The accounts are indented by their depth; so are users, below theirs.
    """
    header, *lines = text.rstrip("\n").split("\n")
    names = header.split("|")
    if missing := [name for name in _FORMAT[:4] if name not in names]:
        raise parse_error("sshare", f"missing column {', '.join(missing)}", header)
    above: list[str] = []  # the last account at each depth
    rows = []
    for line in lines:
        values = dict(zip(names, line.split("|"), strict=False))
        account = values["Account"].strip()
        depth = len(values["Account"]) - len(values["Account"].lstrip())
        if not values.get("User"):
            above[depth:] = [account]
        parent = above[depth - 1] if depth and depth <= len(above) else ""
        rows.append(_parse(values, account, account if values.get("User") else parent, line))
    return rows


def _parse(values: dict[str, str], account: str, parent: str, line: str) -> FairShare:
    try:
        return FairShare(
            account=account,
            user=values["User"],
            parent=parent,
            shares=None if values["RawShares"] == "parent" else parse_count(values["RawShares"]),
            usage=float(values["RawUsage"] or 0),
            fair_share=_factor(values.get("FairShare", "")),
            level_fs=_factor(values.get("LevelFS", "")),
            grp_tres_mins=parse_tres(values.get("GrpTRESMins", "")),
            tres_mins=parse_tres(values.get("GrpTRESRaw", "")),
        )
    except (KeyError, ValueError) as error:
        raise parse_error("sshare", str(error), line) from error


def _factor(text: str) -> float | None:
    return float(text) if text and text not in ("inf", "nan") else None
