"""The accounting that the clusters share: MariaDB's first data, and the accounts, users and QOS in slurmdbd."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from devcluster_parts.errors import ClusterProblem
from devcluster_parts.layout import Layout
from devcluster_parts.tools import environment, run

ACCOUNTS = ("lab", "infra")
QOS = {"low": ("10", ""), "normal": ("100", "low"), "high": ("1000", "low,normal")}
"""Name to priority and the QOS it preempts (by requeue)."""

PROMPT = "sacctmgr: "


def prepare_database(layout: Layout, *, limit_s: float) -> bool:
    """Make MariaDB's system tables, by one rename. Return False if they exist."""
    data = layout.database / "data"
    if data.is_dir():
        return False
    layout.database.mkdir(mode=0o700, exist_ok=True)
    part = layout.database / "data.part"
    if part.exists():
        shutil.rmtree(part)
    user = environment()["USER"]
    argv = ["mariadb-install-db", "--no-defaults", f"--datadir={part}", f"--user={user}", "--skip-test-db"]
    # Whoever reaches the socket as this user of the machine is this user of the database: there is no password.
    argv += ["--auth-root-authentication-method=socket", f"--auth-root-socket-user={user}"]
    # Its temporary files lie beside the data: a mariadbd removes at its start those of any other that shares /tmp.
    run(argv, root=layout.root, limit_s=limit_s, TMPDIR=str(layout.database))
    os.rename(part, data)
    return True


def ensure_accounts(layout: Layout, *, limit_s: float) -> bool:
    """Make the missing accounts, associations of the user and QOS. Return False if none was missing.

    Raises ClusterProblem with sacctmgr's output if one is still missing afterwards.
    """
    user = environment()["USER"]
    clusters = [cluster.name for cluster in layout.clusters]
    answers = _run_sacctmgr(layout, _queries(user), limit_s)
    if _is_settled(answers, clusters):
        return False
    outputs: list[str] = []
    if not _has_qos(answers):
        outputs += _run_sacctmgr(layout, _qos_changes(), limit_s)
    if missing := [cluster for cluster in clusters if not _has_accounts(answers, cluster)]:
        # In a process of its own: sacctmgr reads the names of the QOS once, and then does not know newer ones.
        outputs += _run_sacctmgr(layout, _account_changes(user, missing), limit_s)
    if not _is_settled(_run_sacctmgr(layout, _queries(user), limit_s), clusters):
        log = str(layout.logs / "slurmdbd.log")
        raise ClusterProblem(
            "slurmdbd lacks accounts or QOS after their creation:\n" + "".join(outputs), where=log, hint="see that log"
        )
    return True


def _qos_changes() -> list[str]:
    lines = []
    for name, (priority, preempts) in QOS.items():
        # Each is made after those it preempts; an empty `preempt=` is refused by 22.05 ("Preemption loop").
        options = f"priority={priority} preemptmode=requeue" + (f" preempt={preempts}" if preempts else "")
        # `add` of an existing QOS, as normal always is, reports "Nothing new added".
        lines += [f"add qos name={name} {options}", f"modify qos {name} set {options}"]
    return lines


def _account_changes(user: str, clusters: Sequence[str]) -> list[str]:
    every = f"cluster={','.join(clusters)}"
    names = ",".join(ACCOUNTS)
    allowed = f"qos={','.join(QOS)} defaultqos=normal"
    return [
        f"add cluster name={','.join(clusters)}",
        f"add account name={names} {every} description=pit organization=pit {allowed}",
        f"modify account name={names} {every} set {allowed}",
        f"add user name={user} account={names} {every} defaultaccount={ACCOUNTS[0]}",
        f"modify user name={user} {every} set defaultaccount={ACCOUNTS[0]}",
    ]


def _queries(user: str) -> list[str]:
    return [
        f"list associations user={user} format=cluster,account,defaultqos,qos",
        "list qos format=name,priority,preemptmode,preempt",
        f"list user {user} withassoc format=cluster,defaultaccount",
    ]


def _is_settled(answers: Sequence[str], clusters: Sequence[str]) -> bool:
    return _has_qos(answers) and all(_has_accounts(answers, cluster) for cluster in clusters)


def _has_qos(answers: Sequence[str]) -> bool:
    found = answers[1].split()
    return all(f"{name}|{priority}|requeue|{preempts}" in found for name, (priority, preempts) in QOS.items())


def _has_accounts(answers: Sequence[str], cluster: str) -> bool:
    associations = [line.split("|") for line in answers[0].split()]
    allowed = [tuple(fields[:3]) for fields in associations if set(fields[-1].split(",")) >= set(QOS)]
    is_default = f"{cluster}|{ACCOUNTS[0]}" in answers[2].split()
    return is_default and all((cluster, account, "normal") in allowed for account in ACCOUNTS)


def _run_sacctmgr(layout: Layout, lines: Sequence[str], limit_s: float) -> list[str]:
    """Return the answers of one sacctmgr to several lines, over one connection: each costs 0.2 s."""
    argv = ["sacctmgr", "-i", "-n", "-P"]
    conf = str(layout.clusters[0].conf)
    stdin_text = "\n".join(lines) + "\n"
    # sacctmgr echoes each line after its prompt, cut at COLUMNS; the answer follows.
    done = run(argv, root=layout.root, limit_s=limit_s, stdin=stdin_text, SLURM_CONF=conf, COLUMNS="1000")
    answers = [part.partition("\n")[2] for part in f"\n{done.out}".split(f"\n{PROMPT}")[1:]]
    if len(answers) < len(lines):
        raise ClusterProblem(
            f"answered {len(answers)} of {len(lines)} lines:\n{done.out}{done.err}", where=" ".join(argv)
        )
    return [*answers[: len(lines) - 1], answers[len(lines) - 1] + done.err]
