"""Finding, merging and checking site files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError, UsageError
from pitools.site import dialect, load

SHIPPED = ["aws-p5-efa", "gb200-nvl72", "gcp-a3-tpu", "h100-ib", "local"]


def test_every_shipped_site_loads() -> None:
    """The sites we ship are found and valid, and none names a slurm.conf of this machine."""
    assert {path.stem for path in load.bundled_dir("site_configs").glob("*.toml")} == set(SHIPPED)
    sites = [load.load_site(name) for name in SHIPPED]
    assert [site.name for site in sites] == SHIPPED
    assert not [site.name for site in sites if site.slurm.conf]


def test_a_later_layer_changes_only_its_keys(
    write_site: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of one key overrides that key, a variable overrides the file, and each origin is told."""
    own_part = write_site("alpha", '[defaults]\npartition = "dev"\n')
    monkeypatch.setenv("PIT_ACCOUNT", "infra")
    site = load.load_site("alpha")
    assert (site.defaults.partition, site.defaults.account, site.tiers["high"]) == ("dev", "infra", "high")
    origin = {setting.key: setting.origin for setting in load.setting_origins("alpha")}
    assert origin["defaults.partition"] == str(own_part)
    assert origin["defaults.account"] == "env PIT_ACCOUNT"
    assert origin["slurm.conf"].endswith("pitools/sites/alpha.toml")
    assert origin["network.host_suffix"] == "default"


def test_an_editors_lock_is_no_site(write_site: Callable[[str, str], Path]) -> None:
    """A hidden file beside a site file, as Emacs makes it, is left alone."""
    path = write_site("x", 'name = "x"\n')
    path.with_name(".#x.toml").symlink_to("ada@host.1")
    assert [name for name in load.site_names() if "x" in name.split("-")[0]] == ["x"]


def test_an_unknown_site_names_the_nearest() -> None:
    """A misspelt site is a usage error."""
    with pytest.raises(UsageError) as caught:
        load.load_site("alhpa")
    assert caught.value.hint == 'did you mean "alpha"?'
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["../alpha", "a/b", "", ".", "..", "/etc/passwd", "a\n"])
def test_a_name_cannot_leave_its_folder(name: str) -> None:
    """A site's name is one path component."""
    with pytest.raises(UsageError):
        load.load_site(name)


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("[partitions.a]\ngpu_per_node = 8\n", 'unknown key "partitions.a.gpu_per_node"', "gpus_per_node"),
        ('[defaults]\npartition = "trian"\n[partitions.train]\n', "defaults.partition", "train"),
        ('[defaults]\ntier = "hihg"\n[tiers]\nhigh = "h"\n', "defaults.tier", "high"),
        ('name = "y"\n', "differs from the file's name", 'name = "x"'),
        ('[connection]\nkind = "ssh"\nhost = "-oProxyCommand=id"\n', "connection.host", ""),
        ('[connection]\nkind = "ssh"\nhost = "login.x -J bastion"\n', "connection.host", "~/.ssh/config"),
        ('[network.env]\nMY_PASSWORD = "x"\n', "network.env: MY_PASSWORD", "export"),
        ('[dialect]\nextra = ["comment=x"]\n', "dialect.extra", '"--comment=x"'),
        ('[paths]\nruns = ""\n', "paths.runs", "/shared/runs"),
        ('[paths]\nnvme = " "\n', "paths.nvme", "nvme ="),
        ('[defaults]\npartition = "train"\n', "defaults.partition", "[partitions.train]"),
        ('[connection]\nhost = "login.far"\n', "connection.host", 'kind = "ssh"'),
        ('[connection]\nkind = "shh"\n', "connection.kind", ""),
        ("[network]\nports = [2000, 2001]\n", "too small a range", ""),
        ("[network]\nports = [60000, 65536]\n", "network.ports", "65535"),
        ("[network]\nports = [1000, 2000]\n", "network.ports", "1024"),
        ('[environment]\nA = "x\\ny"\n', "control character", ""),
        ('[environment]\nPIT_RUN_DIR = "/etc"\n', "PIT_RUN_DIR", "omit"),
        ('[network.env]\nPIT_PYTHON = "x"\n', "PIT_PYTHON", "omit"),
        ('[slurm]\nbin = "slurm/bin"\n', "slurm.bin", "/opt/slurm/bin"),
        ('[defaults]\ntime = "2 hours"\n', 'defaults.time: "2 hours" is not a duration', "2h"),
        ("[partitions.a]\nnodes = -1\n", "partitions.a.nodes", "0 means unknown"),
        ('[partitions.a]\nmax_time = "UNLIMITTED"\n', "partitions.a.max_time", "2h"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(
    write_site: Callable[[str, str], Path], text: str, what: str, hint: str
) -> None:
    """Exit code 3, the file, the key and what it should be."""
    path = write_site("x", text if "name" in text.split("\n")[0] else f'name = "x"\n{text}')
    with pytest.raises(ConfigError) as caught:
        load.load_site("x")
    assert what in caught.value.message
    assert hint in caught.value.hint
    assert str(path) in caught.value.where
    assert caught.value.exit_code == 3


def test_the_smallest_range_of_ports(write_site: Callable[[str, str], Path]) -> None:
    """64 ports are accepted, 63 refused."""
    write_site("x", 'name = "x"\n[network]\nports = [2000, 2063]\n')
    assert load.load_site("x").network.ports == (2000, 2063)
    write_site("x", 'name = "x"\n[network]\nports = [2000, 2062]\n')
    with pytest.raises(ConfigError):
        load.load_site("x")


def test_the_reference_names_every_key(repo: Path) -> None:
    """site_configs/README.md has each key of a site file."""
    text = (repo / "site_configs" / "README.md").read_text()
    settings = [setting.key.split(".") for setting in load.setting_origins("local")]
    assert not [key for *_, key in settings if f"`{key}`" not in text]
    tables = {table for table, *keys in settings if keys}
    assert not [table for table in tables if f"`[{table}]`" not in text and f"`[{table}." not in text]


def test_something_depends_on_every_key(repo: Path) -> None:
    """Each key of a site file is read somewhere."""
    sources = (repo / "pitools").rglob("*.py")
    attributes = {name for path in sources for name in re.findall(r"\.(\w+)", path.read_text())}
    assert {setting.key.split(".")[-1] for setting in load.setting_origins("local")} - attributes == set()


@pytest.mark.parametrize(
    ("said", "limit"), [("", None), ("UNLIMITED", None), ("infinite", None), ("1-00:00:00", 86400)]
)
def test_slurm_s_own_words_are_no_limit(write_site: Callable[[str, str], Path], said: str, limit: int | None) -> None:
    """max_time takes what scontrol prints."""
    write_site("x", f'name = "x"\n[partitions.a]\nmax_time = "{said}"\n')
    assert dialect.time_limit_s(load.load_site("x").partitions["a"]) == limit


def test_a_template_lies_beside_the_file_that_names_it(
    write_site: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path does not start where the command happens to be typed."""
    path = write_site(
        "x",
        'name = "x"\n[templates]\nmine = "mine.j2"\nhome = "~/home.j2"\nfar = "/far.j2"\n[node]\nconfig = "n.toml"\n',
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load.load_site("x").templates == {
        "mine": str(path.with_name("mine.j2")),
        "home": str(tmp_path / "home.j2"),
        "far": "/far.j2",
    }
    assert load.load_site("x").node.config == str(path.with_name("n.toml"))


@pytest.mark.parametrize("folder", [False, True])
def test_a_site_that_others_can_write_is_refused(write_site: Callable[[str, str], Path], folder: bool) -> None:
    """A file of mode 0666, or one in a folder that is open to everybody, decides nothing."""
    path = write_site("x", 'name = "x"\n')
    position = path.parent if folder else path
    position.chmod(0o777)
    with pytest.raises(ConfigError) as caught:
        load.load_site("x")
    assert caught.value.where == str(position)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_site_that_is_no_file_is_said(write_site: Callable[[str, str], Path], make: Callable[[Path], None]) -> None:
    """A folder, a FIFO and a dangling link of the site's name: exit 3 and the path, not another site's name."""
    path = write_site("x", "")
    path.unlink()
    make(path)
    with pytest.raises(ConfigError) as caught:
        load.load_site("x")
    assert caught.value.where == str(path)


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "9" * 5000, "{a=" * 5000 + "1" + "}" * 5000])
def test_what_python_cannot_read_is_a_wrong_file(write_site: Callable[[str, str], Path], value: str) -> None:
    """Nesting and digits without end are exit 3 with the file's name, not a traceback."""
    path = write_site("x", f"a = {value}")
    with pytest.raises(ConfigError) as caught:
        load.load_site("x")
    assert caught.value.where == str(path)


@pytest.mark.parametrize("key", ["runs", "data", "python"])
def test_a_site_over_ssh_has_no_relative_paths(write_site: Callable[[str, str], Path], key: str) -> None:
    """Nothing there tells where such a path starts: the file and the key are named, and none is needed for psbatch."""
    ssh = 'name = "x"\n[connection]\nkind = "ssh"\nhost = "login.far"\n'
    path = write_site("x", f'{ssh}[paths]\n{key} = "here"\n')
    with pytest.raises(ConfigError) as caught:
        load.load_site("x")
    assert (f"paths.{key}" in caught.value.message, caught.value.where) == (True, str(path))
    write_site("x", f'{ssh}[paths]\n{key} = "/home/{{user}}/here"\n')
    assert getattr(load.load_site("x").paths, key) == "/home/{user}/here"
    write_site("x", ssh)
    assert load.load_site("x").paths.runs == "runs"
    write_site("x", f'name = "x"\n[paths]\n{key} = "here"\n')
    assert getattr(load.load_site("x").paths, key) == "here"
