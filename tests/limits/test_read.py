"""Reading a site's limits: from recorded answers, and where slurmctld hides or nobody answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from pitools.core import subprocesses
from pitools.core.errors import Unreachable
from pitools.limits import read
from pitools.limits.records import JobRequest
from pitools.slurm.transport import Transport

JOB = JobRequest(user="", account="s5x18l", partition="train", qos="s5x18qb", time_s=600)


class Site:
    """Answers each command of a batch by its first words; `failing`: the words of one that fails."""

    def __init__(self, replay: Path, failing: str = "") -> None:
        self.replay, self.failing, self.asked = replay, failing, []
        config = (replay / "config.txt").read_text()
        self.answers = {
            "id -un": "www-data\n",
            "id -Gn": "www-data staff\n",
            "scontrol show config": config.replace("= gamma", "= cloud").replace(
                "EnforcePartLimits       = NO", "EnforcePartLimits = ANY"
            ),
            "scontrol -o": (replay / "partitions_o.txt").read_text(),
            "sacctmgr -n -P show assoc": "cloud|s5x18l|www-data||s5x18qb|s5x18qb||||\ncloud|s5x18l|||||||s5x18m\n",
            "sacctmgr -n -P show qos": "s5x18qb|0||00:00:00||||\n",
            "sacctmgr -n -P show user": "cloud|s5x18l\n",
            "scontrol show assoc_mgr": (replay / "assoc_mgr.txt").read_text(),
            "squeue": "",
        }

    def __call__(self, transport: Transport, commands: Sequence[Sequence[str]]) -> list[subprocesses.Completed]:
        lines = [" ".join(command) for command in commands]
        self.asked.append(lines)
        done = []
        for command, line in zip(commands, lines, strict=True):
            (text,) = (text for words, text in self.answers.items() if line.startswith(words))
            failed = bool(self.failing) and line.startswith(self.failing)
            error = "slurm_load_assoc_mgr_info error: Access/permission denied" if failed else ""
            done.append(subprocesses.Completed(tuple(command), int(failed), "" if failed else text, error))
        return done


def test_limits_of_the_sites_user_with_slurmctlds_counts(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls; slurmctld is asked for the accounts and QOS of the job alone."""
    site = Site(repo / "tests/replay/slurm-22.05")
    monkeypatch.setattr(read, "run_queries", site)
    request, state = read.read_limits(JOB, Transport())
    assert (request.user, state.cluster, state.part_limits) == ("www-data", "cloud", "any")
    assert "limits" in state.enforced
    assert state.groups == {"www-data", "staff"}
    assert len(site.asked) == 2
    assert "scontrol show assoc_mgr accounts=s5x18l qos=s5x18qb flags=assoc,qos" in site.asked[1]
    assert next(row for row in state.usage if row.qos == "s5x18qb" and row.user == "www-data").jobs == 3


def test_a_default_account_is_looked_up(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for a job that names none."""
    site = Site(repo / "tests/replay/slurm-22.05")
    monkeypatch.setattr(read, "run_queries", site)
    request = JobRequest(user="www-data", partition="train", time_s=600)
    assert read.read_limits(request, Transport())[1].default_accounts == {"www-data": "s5x18l"}


def test_hidden_counts_are_those_of_the_queue(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PrivateData=usage slurmctld refuses; another failed command is the error of its class."""
    site = Site(repo / "tests/replay/slurm-22.05", failing="scontrol show assoc_mgr")
    monkeypatch.setattr(read, "run_queries", site)
    usage = read.read_limits(JOB, Transport())[1].usage
    assert {(row.qos, row.account, row.jobs) for row in usage} >= {("s5x18qb", "", 0), ("", "s5x18l", 0)}
    assert {row.hidden for row in usage} == {"amounts"}
    monkeypatch.setattr(read, "run_queries", Site(repo / "tests/replay/slurm-22.05", failing="squeue"))
    assert read.read_limits(JOB, Transport())[1].usage  # not needed


def test_rows_of_accounts_that_are_hidden(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user sees the own row and the QOS: the accounts' use is that of squeue; with PrivateData=jobs it is unknown."""
    site = Site(repo / "tests/replay/slurm-22.05")
    hidden = re.compile(r"^ClusterName=\S+ Account=s5x18l UserName= .*?(?=^\S)", re.MULTILINE | re.DOTALL)
    text = site.answers["scontrol show assoc_mgr"]
    site.answers["scontrol show assoc_mgr"] = hidden.sub("", text)
    assert site.answers["scontrol show assoc_mgr"] != text
    monkeypatch.setattr(read, "run_queries", site)
    rows = {(row.qos, row.account, row.user): row.hidden for row in read.read_limits(JOB, Transport())[1].usage}
    assert rows["", "s5x18l", ""] == "amounts"
    assert (rows["s5x18qb", "", ""], rows["", "s5x18l", "www-data"]) == ("", "")
    config = site.answers["scontrol show config"]
    site.answers["scontrol show config"] = re.sub("PrivateData .*", "PrivateData = jobs,usage", config)
    rows = {(row.qos, row.account, row.user): row.hidden for row in read.read_limits(JOB, Transport())[1].usage}
    assert rows["", "s5x18l", ""] == "jobs"


def test_a_cluster_without_accounting_has_no_limits(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It enforces none, and sacctmgr fails there: no error; only partitions bind."""
    site = Site(repo / "tests/replay/slurm-22.05", failing="sacctmgr")
    site.answers["scontrol show config"] = site.answers["scontrol show config"].replace(
        "= associations,limits,qos", "= none"
    )
    monkeypatch.setattr(read, "run_queries", site)
    state = read.read_limits(JOB, Transport())[1]
    assert (state.enforced, state.associations, state.usage) == ((), (), ())
    assert state.partitions


def test_a_silent_site_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the call goes on to the caller."""

    def silent(*_: object) -> list[subprocesses.Completed]:
        raise Unreachable("no answer", where="alpha")

    monkeypatch.setattr(read, "run_queries", silent)
    with pytest.raises(Unreachable):
        read.read_limits(JOB, Transport())


@pytest.mark.parametrize(
    ("text", "words"),
    [("associations,limits,qos,safe",) * 2, ("all", "associations,limits,qos,safe"), ("none", ""), ("", "")],
)
def test_words_of_accounting_storage_enforce(text: str, words: str) -> None:
    """As slurm.conf has them; `all` is every one."""
    config = read.Config(cluster="x", version=(22, 5), values={"AccountingStorageEnforce": text})
    assert ",".join(read.enforced_limits(config)) == words
