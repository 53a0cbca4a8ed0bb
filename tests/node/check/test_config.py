"""The file of checks: strict, with the nearest known name, and without rules that contradict each other."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterable
from itertools import combinations_with_replacement
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.core.errors import ConfigError
from pitools.node.check import config
from pitools.node.check.config import NodeConfig, checks_for, load_config, load_shipped, names_of
from pitools.node.check.evaluate import evaluate
from pitools.node.check.problems import check_problem, contradiction
from pitools.node.check.rule import Check
from pitools.node.check.values import matches
from pitools.node.types import FactTable, NodeFacts, Row


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def one_check(tests: str) -> str:
    return f'[[check]]\nname = "site-one"\ntable = "mounts"\n{tests}\n'


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ('spol = "/x"', "spool"),
        ("[control]\nmax_share_lief = 0.5", "max_share_leaf"),
        (one_check('key = "used_share"\nmaxx = 1'), "max"),
        (one_check('key = "usd_share"\nmax = 1'), "used_share"),
        (one_check("min_count = 1\nwhere = {targt = '/'}"), "target"),
        (one_check("max_count = 1\ngroup_by = ['devise']"), "device"),
        (one_check('key = "used_share"\nmax = 1\naction = "drian"'), "drain"),
        (one_check('key = "used_share"\nmax = 1\ntypes = ["gpus"]') + '[types.gpu]\nnodes = "n[1-4]"', "gpu"),
        ('[[check]]\nname = "a"\ntable = "mount"\nmin_count = 1', "mounts"),
        ('disable = ["slurmd-run"]', "slurmd-runs"),
        ('[[check]]\nname = "a"\ntable = "kernel_log"\nmax_count = 0\nwhere = {kind = "XIDs"}', "xid"),
        ('[[check]]\nname = "a"\ntable = "rdma_ports"\nkey = "state"\nequals = "active"', "ACTIVE"),
        (one_check('key = "used_share"\none_of = [1]'), "any_of"),
        (one_check('key = "used_share"\nmax = 1\naction = "watch"'), "report"),
        (one_check('key = "kind"\ntable = "files"\nequals = "folder"\nwhere.path = "/x"'), "directory"),
        (one_check("min_count = 1").replace("site-one", "my check"), "my-check"),
        ("[control]\nstable_for = 600", "600s"),
        (one_check('key = "size_bytes"\nmin = "2GiB"'), "2147483648 bytes"),
        (one_check('min_count = 1\ntypes = ["gpu"]'), "n[001-064]"),
    ],
)
def test_unknown_names_the_nearest(tmp_path: Path, text: str, nearest: str) -> None:
    """An unknown key, table, level, type or check is an error that names the most similar one, or its new name."""
    text = text.replace('table = "mounts"\n', "") if 'table = "files"' in text else text
    path = write(tmp_path / "node.toml", text)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert re.search(rf'[" ]{re.escape(nearest)}("|$)', f"{raised.value.message} {raised.value.hint}")
    assert raised.value.where == str(path)


@pytest.mark.parametrize(
    "tests",
    [
        "",
        'key = "used_share"',
        "max = 1",
        'key = "used_share"\nmin = 2\nmax = 1',
        'key = "used_share"\nmin = 2\nequals = 1',
        'key = "used_share"\nmin = 2\nequals = "a"',
        'key = "type"\nequals = "ext4"\nany_of = ["nfs", "xfs"]',
        'key = "type"\nequals = "ext4"\npattern = "nfs.*"',
        'key = "is_read_only"\nequals = true\nany_of = [1, 2]',
        'key = "used_share"\nany_of = [3, 4]\nmax = 2',
        'key = "type"\npattern = "("',
        'key = "type"\npattern = "x"\nwhere = {type = "re:["}',
        'key = "type"\nall_equal = false',
        'key = "used_share"\nmax_increase = -1',
        'key = "used_share"\nmax_rate = "10/week"',
        'key = "used_share"\nmax_rate = "0/h"',
        "count = 1\nmin_count = 1",
        "min_count = 3\nmax_count = 2",
        "min_count = 0",
        "max_count = -1",
        "max_count = 1\nwhere = {type = []}",
        'max_count = 1\nwhere = {path = "re:.*"}\ntable = "files"',
        "max_count = 1\nmax_age = '1h'",
        "max_count = 1\nmerge_within = '1h'",
        'key = "type"\npattern = "x"\ngroup_by = ["device"]',
        "max_count = 1\nname = 'Bad Name'",
        'max_count = 1\nname = "a\\n"',
        "max_count = 1\nmax_groups = -1",
        # A value of another type than the key's, or that no row has.
        "max_count = 1\nwhere = {type = 4}",
        "max_count = 1\nwhere = {inodes = '79'}",
        "max_count = 1\nwhere = {inodes = '7*'}",
        "max_count = 1\nwhere = {is_read_only = 'true'}",
        'key = "options"\nequals = 644',
        'key = "options"\nequals = true',
        'key = "type"\nmax = 3',
        'key = "inodes"\nmax = nan',
        'key = "used_share"\nmax = 95',
        'key = "mode"\ntable = "files"\nwhere = {path = "/x"}\nequals = "644"',
        'key = "type"\nmax_rate = "3/h"',
        'key = "is_read_only"\nmax = 3',
        'key = "is_read_only"\npattern = "true"',
        'key = "is_read_only"\nany_of = [true, 1]',
        'key = "text"\ntable = "files"\nwhere = {path = "/x"}\npattern = "ERROR"',
        'key = "output"\ntable = "commands"\nwhere = {command = "x", output = "ERROR"}\nequals = "x"',
        'key = "kind"\ntable = "sensors"\npattern = "temp.*c"',
        'key = "used_share"\nequals = 95',
        "max_count = 0\nwhere = {used_share = [0.5, 95]}",
        "table = 'system'\ncount = 2",
        "table = 'slurm'\nmin_count = 2",
        "table = 'slurm'\nmax_count = 0",
        *(
            f'table = "{key.partition(".")[0]}"\nmax_count = 0\nwhere = {{"{key.partition(".")[2]}" = "{value}"}}'
            for key, value in {
                "block_devices.state": "LIVE",
                "cpus.governor": "Performance",
                "endpoints.endpoint": "tcp://login1",
                "files.path": "/scratch*",
                "gpus.pci": "0000:B5:00.0",
                "kernel_log.state": "Down",
                "pci_devices.kind": "0300",
                "pci_devices.pci": "b5:00.0",
                "pci_devices.vendor": "10de",
                "processes.name": "systemd-networkd",
                "raid_arrays.level": "RAID1",
                "rdma_ports.physical_state": "LINKUP",
                "services.service": "sssd*",
                "slurm.node_state": "drained",
            }.items()
        ),
        'table = "files"\nmin_count = 1\nwhere = {path = "scratch"}',
        'table = "endpoints"\nmin_count = 1\nwhere = {endpoint = "http://login1:80"}',
        'table = "slurm"\nkey = "node_state"\nequals = "IDLE"',
        # A mild level with an action that drains.
        'key = "used_share"\nmax = 1\nlevel = "warning"',
        'key = "used_share"\nmax = 1\nlevel = "warning"\naction = "drain-after-job"',
    ],
)
def test_rules_that_cannot_be_made_or_hold(tmp_path: Path, tests: str) -> None:
    """A check that tests nothing, cannot be made, or that no value passes is an error of the file."""
    text = one_check(tests)
    for key, line in (("name", 'name = "site-one"\n'), ("table", 'table = "mounts"\n')):
        text = text.replace(line, "") if f"{key} = " in tests else text
    with pytest.raises(ConfigError):
        load_config(write(tmp_path / "node.toml", text))


@pytest.mark.parametrize(("line", "key"), [("max = '1'", "max"), ("where = {type = {}}", "where")])
def test_wrong_types_of_toml_name_the_check(tmp_path: Path, line: str, key: str) -> None:
    """A number in quotes, or a table for a value, is of that check: people do not count from 0."""
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path / "node.toml", one_check(f'key = "used_share"\n{line}')))
    assert raised.value.key.startswith(f"check[0].{key}")
    assert '"site-one"' in raised.value.message
    for text in ("check = [3]", "[[check]]\nmax = 1", '[[check]]\nname = "site-one"\nmax = 1'):
        with pytest.raises(ConfigError) as raised:
            load_config(write(tmp_path / "node.toml", text))
        assert ('"site-one"' in raised.value.message) is ("site-one" in text)


@pytest.mark.parametrize(
    "tests", ["max_age = '0s'", "max_age = 'soon'", "merge_within = '5s'\nkey = 'kind'\npattern = 'x'"]
)
def test_durations_of_events(tmp_path: Path, tests: str) -> None:
    """A duration of nothing, or that is none, is refused, and a burst of rows that are not counted."""
    text = f'[[check]]\nname = "a"\ntable = "kernel_log"\n{tests}\n' + ("" if "key" in tests else "max_count = 1\n")
    with pytest.raises(ConfigError):
        load_config(write(tmp_path / "node.toml", text))


def two(first: str, second: str) -> str:
    """Return a file of two checks of the same rows."""
    rows = 'table = "gpus"\nwhere = {vendor = "nvidia"}'
    checks = (f'[[check]]\nname = "{name}"\n{rows}\n{tests}' for name, tests in (("one", first), ("two", second)))
    return "\n".join(('[types.a]\nnodes = "a[1-8]"', '[types.b]\nnodes = "b1"', *checks))


@pytest.mark.parametrize(
    ("first", "second", "contradict"),
    [
        ("count = 8", "count = 4", True),
        ("count = 8", "min_count = 9", True),
        ("max_count = 3", "min_count = 4", True),
        ("count = 8", "count = 4\ntypes = ['a']", True),
        ("count = 8\ntypes = ['a', 'b']", "count = 4\ntypes = ['a']", True),
        ("key = 'driver'\nequals = '550'", "key = 'driver'\nequals = '570'", True),
        ("key = 'driver'\nequals = '550'", "key = 'driver'\npattern = '57.*'", True),
        ("key = 'power_w'\nmin = 90", "key = 'power_w'\nmax = 80", True),
        ("key = 'power_w'\nany_of = [1, 2]", "key = 'power_w'\nmin = 3", True),
        ("key = 'power_w'\nmin = 90", "key = 'power_w'\npattern = '5.*'", False),  # 500 passes both
        ("count = 8\ntypes = ['b']", "count = 4\ntypes = ['a']", False),
        ("count = 8", "max_count = 9", False),
        ("key = 'power_w'\nmin = 90", "key = 'power_limit_w'\nmax = 80", False),
        ("key = 'power_w'\nmax = 90", "key = 'power_w'\nmax = 80", False),
        ("key = 'driver'\nequals = '550'", "key = 'driver'\npattern = '55.*'", False),
        ("count = 8", "max_count = 4\ngroup_by = ['model']", False),
    ],
)
def test_rules_that_contradict_each_other(tmp_path: Path, first: str, second: str, contradict: bool) -> None:
    """Two checks of the same rows and nodes that cannot both pass are an error that names both."""
    path = write(tmp_path / "node.toml", two(first, second))
    if not contradict:
        assert {check.name for check in load_config(path).check} >= {"one", "two"}
        return
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert '"one"' in raised.value.message
    assert '"two"' in raised.value.message


@pytest.mark.parametrize(("few", "many", "contradict"), [("24h", "1h", True), ("1h", "1h", True), ("1h", "24h", False)])
def test_events_of_a_window_are_of_a_longer_one_too(few: str, many: str, contradict: bool) -> None:
    """At most three events of a time and at least four of a longer one: there may be more in the rest of it."""
    most = Check(name="most", table="kernel_log", max_age=few, max_count=3)
    least = Check(name="least", table="kernel_log", max_age=many, min_count=4)
    assert bool(contradiction([most, least])) is contradict


WHERES = st.sampled_from(
    [{}, {"type": "nfs"}, {"type": ("nfs", "xfs")}, {"type": "nfs", "device": "a"}, {"device": "a"}]
)
TESTS_OF_VALUES = {
    "min": st.integers(0, 3),
    "max": st.integers(0, 3),
    "equals": st.integers(0, 3),
    "any_of": st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple),
}
TESTS_OF_ROWS = {"count": st.integers(0, 2), "min_count": st.integers(1, 2), "max_count": st.integers(0, 2)}
RULES: st.SearchStrategy[Check] = st.one_of(
    st.fixed_dictionaries({"key": st.just("inodes"), "where": WHERES}, optional=TESTS_OF_VALUES),
    st.fixed_dictionaries({"where": WHERES}, optional=TESTS_OF_ROWS),
).map(lambda fields: msgspec.convert({"name": "c", "table": "mounts", **fields}, Check))


def passes(rules: tuple[Check, ...], rows: Iterable[Row]) -> bool:
    facts = FactTable(table="mounts", source="", read_at="", cost_s=0, rows=tuple(rows))
    node = NodeFacts(node="n", boot_id="", gathered_at="", tables={"mounts": facts})
    return all(finding.state == "passed" for finding in evaluate(rules, node))


@given(RULES, RULES)
def test_two_rules_contradict_each_other_if_no_rows_pass_both(one: Check, other: Check) -> None:
    """Found by trial of all small sets of rows; for tests of values, if one rule means no rows but the other's."""
    if check_problem(one) or check_problem(other):
        return
    rows: list[Row] = [{"type": kind, "device": device} for kind in ("nfs", "xfs", "ext4") for device in ("a", "b")]
    first, second = ([row for row in rows if matches(row, rule.where)] for rule in (one, other))
    meant = min(first, second, key=len)
    expected = False
    if one.key == other.key == "inodes" and all(row in first and row in second for row in meant):
        expected = not any(passes((one, other), [{**row, "inodes": n}]) for row in meant for n in range(4))
    elif not one.key and not other.key:
        trials = (chosen for size in range(5) for chosen in combinations_with_replacement(rows, size))
        expected = not any(passes((one, other), chosen) for chosen in trials)
    assert bool(contradiction([one, other])) == expected


def test_a_site_replaces_and_disables_shipped_checks(tmp_path: Path) -> None:
    """A check of the same name replaces a shipped one; another is left out by its name; the rest stays."""
    base = {check.name: check for check in load_shipped().check}
    text = """
disable = ["clocksource"]
[[check]]
name = "slurmd-runs"
table = "slurm"
key = "slurmd_is_running"
equals = true
action = "drain"
"""
    own = {check.name: check for check in load_config(write(tmp_path / "node.toml", text)).check}
    assert set(base) - set(own) == {"clocksource"}
    assert own["slurmd-runs"].action == "drain" != base["slurmd-runs"].action


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        ('state = "/var/lib/x # y"', True),
        ("  state='/x' # \"y\"\n[nhc]", True),
        ('disable = [\n  "clocksource",\n]\nstate = "/x"', True),
        ("[nhc]", True),
        ('"state" = "/x"', False),
        ('state = """/x"""', False),
        ('state = "/\\u0078"', False),
        ('python = """\nstate = "/y"\n"""', False),
        ('python = """\nx"""\nstate = "/y"', False),
    ],
)
def test_what_the_script_cannot_read_is_refused(tmp_path: Path, repo: Path, text: str, is_read: bool) -> None:
    """pit-healthcheck finds `state` and `python` with sed: else a prolog would look into another folder."""
    path = write(tmp_path / "node.toml", text)
    if not is_read:
        with pytest.raises(ConfigError, match="pit-healthcheck"):
            load_config(path)
        return
    script = (repo / "scripts" / "pit-healthcheck").read_text()
    function = script[script.index("setting() {") : script.index("warn() {")]
    argv = ["sh", "-c", f"config=$1\n{function}\nsetting state", "sh", str(path)]
    read = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    assert load_config(path).state == (read or NodeConfig().state)


@pytest.mark.parametrize("name", ["clock", "clocksource"])
def test_a_shipped_check_is_disabled_by_any_name_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A release that renames it stops no node's checks."""
    base = load_shipped()
    fields = {"name": "clock", "old_names": ("clocksource",)}
    renamed = tuple(msgspec.structs.replace(one, **fields) if one.name == "clocksource" else one for one in base.check)
    monkeypatch.setattr(config, "load_shipped", lambda: msgspec.structs.replace(base, check=renamed))
    left = {one.name for one in load_config(write(tmp_path / "node.toml", f'disable = ["{name}"]')).check}
    assert {one.name for one in renamed} - left == {"clock"}


def test_types_choose_nodes(tmp_path: Path) -> None:
    """A check with types is for the nodes of these; targets are what its checks name to be read."""
    text = """
[types.gpu]
nodes = "g[01-02]"
[types.cpu]
nodes = "c1"
[[check]]
name = "scratch"
table = "files"
where = {path = ["/scratch", "/work"]}
key = "exists"
equals = true
types = ["gpu"]
"""
    config = load_config(write(tmp_path / "node.toml", text))
    assert [check.name for check in checks_for(config, "g02") if check.name == "scratch"]
    assert not [check for node in ("g3", "c1") for check in checks_for(config, node) if check.name == "scratch"]
    assert names_of(checks_for(config, "g01"))["files"] >= {"/scratch", "/work"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["key", "min", "max", "equals", "any_of", "pattern", "where", "max_age", "count", "group_by"]),
        st.sampled_from(
            ['"type"', "1", "-1", "true", "[]", "['type', 2]", "{type = 'x'}", '"re:("', "1979-05-27", "nan"]
        ),
    )
)
def test_no_file_crashes(tmp_path: Path, keys: dict[str, str]) -> None:
    """Whatever values a check has, its file loads or is an error of the file."""
    text = one_check("\n".join(f"{key} = {value}" for key, value in keys.items()))
    with contextlib.suppress(ConfigError):
        assert load_config(write(tmp_path / "node.toml", text)).check[-1].name == "site-one"


def test_rows_are_chosen_by_values_patterns_and_lists() -> None:
    """A row matches if each key has its value, fits its pattern, or one of its list; unknown in doubt."""
    assert matches({"a": "nvme0n1"}, {"a": "nvme*"}) is True
    assert matches({"a": "sda"}, {"a": ("nvme*", "sd?")}) is True
    assert matches({"a": 1}, {"a": True}) is False
    assert matches({"type": None}, {"type": "x"}, "mounts") is None
    assert matches({"type": None, "device": "y"}, {"type": "x", "device": "z"}, "mounts") is False
    assert matches({"code": None}, {"code": 79}, "kernel_log") is False
