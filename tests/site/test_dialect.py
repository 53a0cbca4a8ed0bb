"""Flags, names and defaults in a site's own spelling."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable

import pytest

from pitools.core.errors import ConfigError, UsageError
from pitools.site import dialect, load, template
from pitools.site.schema import Site


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "token",
        "GIT_PASSWORD_FILE",
        "OPENAI_KEY",
        "WANDB_KEY",
        "GH_PAT",
        "MY_PASS",
        "PASS",
        "PGPASSWORD",
        "MYSQL_PWD",
        "OPENAI_APIKEY",
        "NPM_AUTH",
        "SSH_KEYS",
        "GPG_PASSPHRASE",
    ],
)
def test_secrets_are_refused(name: str) -> None:
    """A secret's word anywhere in the name."""
    with pytest.raises(UsageError, match="looks like a secret"):
        dialect.require_variable(name)


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "SECRETARY",
        "KEY",
        "NCCL_NET",
        "NCCL_IB_PKEY",
        "PASSES",
        "PATIENCE",
        "XAUTHORITY",
        "BYPASS",
    ],
)
def test_names_that_only_hold_a_secret_s_word_are_not(name: str) -> None:
    """Variables that people do set pass."""
    assert dialect.require_variable(name) == name


@pytest.mark.parametrize(
    ("name", "of_request", "of_site"),
    [
        ("PIT_ATTEMPT_DIR", False, False),
        ("PIT_PYTHON", False, False),
        ("PIT_CHECKPOINT_NVME", False, False),
        ("PATH", False, True),
        ("LD_PRELOAD", False, True),
        ("LD_LIBRARY_PATH", False, True),
        ("SLURM_CONF", False, True),
        ("BASH_ENV", False, True),
        ("PYTHONPATH", True, True),
        ("MY_PATH", True, True),
        ("PATHS", True, True),
        ("SLURM_JOB_ID", False, False),
        ("SLURM_JOB_NODELIST", False, False),
        ("UID", False, False),
        ("SLURM_CPU_BIND", True, True),
        ("SLURM_MPI_TYPE", True, True),
    ],
)
def test_what_decides_what_runs_is_not_a_request_s(name: str, of_request: bool, of_site: bool) -> None:
    """Our own variables are nobody's to set; those that load programs and libraries are the site's."""
    for is_allowed, of in ((of_request, False), (of_site, True)):
        if is_allowed:
            assert dialect.require_settable(name, by_site=of) == name
            continue
        with pytest.raises(UsageError):
            dialect.require_settable(name, by_site=of)


def test_segments_are_not_dropped() -> None:
    """A site without --segment refuses the job that asks for it; one with it gets the flag."""
    job = dialect.JobSpec(name="x", segment=16)
    assert "--segment=16" in dialect.sbatch_flags(load.load_site("gb200-nvl72"), job)
    with pytest.raises(ConfigError, match='"alpha" has no --segment'):
        dialect.sbatch_flags(load.load_site("alpha"), job)


@pytest.mark.parametrize(
    ("variable", "use"),
    [
        ("PIT_PARTITION", lambda site: dialect.require_partition(site, site.defaults.partition, "file")),
        ("PIT_TIER", lambda site: dialect.qos_for_tier(site, site.defaults.tier, "file")),
        ("PIT_ACCOUNT", lambda site: dialect.require_account(site, site.defaults.account, "file")),
    ],
)
def test_a_variable_is_judged_where_it_is_used(
    variable: str, use: Callable[[Site], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site loads; using the value is an error that names the variable."""
    monkeypatch.setenv(variable, "elsewhere")
    site = load.load_site("alpha")
    with pytest.raises(ConfigError, match='"elsewhere"') as caught:
        use(site)
    assert caught.value.where == f"env {variable}"


def test_a_wrong_name_that_no_variable_says_is_the_asker_s() -> None:
    """Without a variable, the error is where the caller says."""
    with pytest.raises(ConfigError) as caught:
        dialect.require_account(load.load_site("alpha"), "labb", "request.toml")
    assert (caught.value.where, caught.value.hint) == ("request.toml", 'did you mean "lab"?')
    # The account is not emitted there, so none is wrong.
    assert dialect.require_account(load.load_site("gcp-a3-tpu"), "lab", "request.toml") == "lab"


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a container the number of a user may have no name; a path without {user} does not ask."""

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert template.expand_placeholders("/a/{user}/{node}", node="n1") == f"/a/{os.getuid()}/n1"
    monkeypatch.setattr(os, "getuid", nobody)
    assert template.expand_placeholders("/a/{node}", node="n1") == "/a/n1"


def test_no_partition_at_all_is_said_as_that(write_site: Callable[[str, str], object]) -> None:
    """A site without a default and a request without a partition: exit code 3, and where to say one."""
    write_site("bare", 'name = "bare"\n[partitions.train]\n')
    with pytest.raises(ConfigError) as caught:
        dialect.require_partition(load.load_site("bare"), "", "r.toml")
    assert "no partition is given" in caught.value.message
    assert ["[defaults]" in caught.value.hint, "train" in caught.value.hint] == [True, True]
