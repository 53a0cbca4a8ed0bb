from __future__ import annotations

import getpass
import os
import re
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ConfigError, DataError, PitError
from pitools.stage.cache.space import RootLimits
from pitools.stage.prolog import prolog
from pitools.stage.sync import policy
from pitools.stage.sync.policy import Rule, load_policy
from pitools.stage.sync.versions import SourceVersion, fit_cap, newest_versions

RULE = '[[rules]]\nfrom = "/shared/data"\nto = "/nvme/pit"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "stage.toml"
    path.write_text(text)
    return path


def rule(source: Path, **more: object) -> Rule:
    fields = {
        "name": "r",
        "source": source,
        "pattern": "*",
        "newest": 1,
        "cap_bytes": None,
        "root": Path("/nvme"),
        "disk": None,
        "limits": RootLimits(),
        "shared": False,
        "applies": True,
    }
    return Rule(**{**fields, **more})


def put(source: Path, name: str, version: str, modified_s: float) -> Path:
    folder = source / name / version
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    os.utime(folder / "manifest.json", (modified_s, modified_s))
    return folder


def test_every_key_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sizes become bytes, placeholders this node and user, and a rule without a name is called after its pattern."""
    monkeypatch.setenv("SLURMD_NODENAME", "n03")
    actual = load_policy(
        write(
            tmp_path,
            '[[rules]]\nfrom = "/d"\npattern = "pick*"\nnewest = 3\ncap = "1GiB"\nto = "/nvme/{node}/{user}"\n'
            'disk = "/nvme"\n'
            'nodes = "n[01-04]"\nquota = "2TB"\nmin_free = "10MiB"\nshared = true\n'
            '[[rules]]\nname = "b"\nfrom = "/d"\nto = "/x"\nnodes = "n07"\n',
        )
    )
    first, second = actual.rules
    assert first == Rule(
        name="pick*",
        source=Path("/d"),
        pattern="pick*",
        newest=3,
        cap_bytes=1 << 30,
        shared=True,
        applies=True,
        root=Path(f"/nvme/n03/{getpass.getuser()}"),
        disk=Path("/nvme"),
        limits=RootLimits(quota_bytes=2 * 10**12, min_free_bytes=10 << 20),
    )
    assert (second.name, second.newest, second.cap_bytes, second.limits, second.applies) == (
        "b",
        1,
        None,
        RootLimits(),
        False,
    )
    assert (actual.node, actual.id[:6]) == ("n03", "stage-")


def test_a_rule_counts_by_the_short_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Cron knows no Slurm: the host's name, with or without its domain, is in the list."""
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "n03.example.org")
    path = write(tmp_path, RULE + 'nodes = "n[01-03]"\n[[rules]]\nname="b"\nfrom="/d"\nto="/x"\nnodes="n04"\n')
    assert [each.applies for each in load_policy(path).rules] == [True, False]


def test_policies_of_one_name_are_told_apart(tmp_path: Path):
    """The id has the path in it, so that two files do not take each other's sets for their own."""
    (tmp_path / "a").mkdir()
    assert load_policy(write(tmp_path, RULE)).id != load_policy(write(tmp_path / "a", RULE)).id
    assert load_policy(tmp_path / "a" / ".." / "stage.toml").path.name == "stage.toml"


@pytest.mark.parametrize(
    ("text", "line", "key", "hint"),
    [
        (RULE + "newst = 2\n", 4, "newst", 'did you mean "newest"?'),
        (RULE + RULE + "\n# more\nnewst = 2\n", 9, "newst", "newest"),
        (RULE + 'newest = "2"\n', 4, "newest", ""),
        (RULE + "newest = 0\n", 4, "newest", ""),
        (RULE + 'cap = "5 apples"\n', 4, "cap", "200GiB"),
        (RULE + 'min_free = "-1"\n', 4, "min_free", ""),
        (RULE + 'nodes = "n[1-"\n', 4, "nodes", ""),
        ('[[rules]]\nfrom = "data"\nto = "/x"\n', 2, "from", "cron has no working folder"),
        ('[[rules]]\nfrom = "/data"\nto = "x"\n', 3, "to", "cron has no working folder"),
        ('[[rules]]\nfrom = "/data"\nto = "/x/{job}"\n', 3, "to", "{node} and {user}"),
        ('[[rules]]\nfrom = "/data"\nto = "/x/{usr}"\n', 3, "to", 'did you mean "user"?'),
        ('[[rules]]\nfrom = "s3://bucket/../data"\nto = "/x"\n', 2, "from", "s3://BUCKET"),
        ('[[rules]]\nfrom = "s3://me:pw@bucket/data"\nto = "/x"\n', 2, "from", "environment"),
        ('[[rules]]\nfrom = "https://bucket/data"\nto = "/x"\n', 2, "from", "AWS_ENDPOINT_URL"),
        ('\n\n[[rules]]\nfrom = "/data"\n', 3, "", ""),
        (RULE + RULE, 4, "name", "name ="),
        (RULE + RULE + 'name = "b"\nquota = "1GiB"\n', 4, "", "all rules of a root"),
        (RULE + RULE + 'name = "b"\nshared = true\n', 4, "", "all rules of a root"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, line: int, key: str, hint: str):
    """Exit code 3, the file, the line and the key, and what was perhaps meant."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert caught.value.key == key
    assert caught.value.where.startswith(f"{path}:{line}, rule ")
    assert hint in caught.value.hint


@pytest.mark.parametrize("text", ["", "rules = []", "rule = 1", RULE + "[metrics]\nfile = 'x'\n", "rules = 1", "[["])
def test_what_is_no_policy_is_refused(tmp_path: Path, text: str):
    """A file without rules, or with more than rules, keeps nothing, and says so."""
    with pytest.raises(ConfigError) as caught:
        load_policy(write(tmp_path, text))
    assert str(tmp_path / "stage.toml") in caught.value.where
    if text in ("", "rules = []"):
        assert load_policy(Path(caught.value.hint.rpartition(" ")[2])).rules, "the example that it names is one"


def test_rules_on_one_line_are_refused_by_number(tmp_path: Path):
    """TOML has other ways to write a list of tables: there the rule's number must do."""
    path = write(tmp_path, 'rules = [{from = "/d", to = "/x"}, {from = "/d", too = "/x"}]\n')
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert caught.value.where == f"{path}, rule 2"


def test_the_newest_are_those_written_last(tmp_path: Path):
    """By the manifest's time, then by name; of each dataset that matches so many; the newest of all comes first."""
    put(tmp_path, "pick", "a", 100)
    put(tmp_path, "pick", "b", 300)
    put(tmp_path, "pick", "c", 200)
    put(tmp_path, "pick2", "d", 250)
    put(tmp_path, "pick2", "e", 250)
    put(tmp_path, "place", "f", 999)
    (tmp_path / "pick" / "latest").symlink_to("b")
    (tmp_path / "pick" / ".tmp").mkdir()
    (tmp_path / "pick3").mkdir()
    (tmp_path / ".pick").mkdir()
    (tmp_path / "pick.txt").write_text("")
    actual = newest_versions(rule(tmp_path, pattern="pick*", newest=2), pytest.fail)
    assert [each.name for each in actual] == ["b", "e", "d", "c"]
    assert [each.dataset for each in actual] == ["pick", "pick2", "pick2", "pick"]
    put(tmp_path, ".trash", "g", 1000)
    assert [each.name for each in newest_versions(rule(tmp_path), pytest.fail)] == ["f", "b", "e"]


def test_newest_by_the_recorded_time(tmp_path: Path):
    """A version that records when it was published is ordered by that, not by the times of its files."""
    for version, published, modified_s in (("a", "2026-01-02", 100), ("b", "2026-01-01", 4e9)):
        record = f'{{"schema":"pit.publication/1","published_at":"{published}T00:00:00Z"}}'
        (put(tmp_path, "pick", version, modified_s) / "published.json").write_text(record)
    assert [each.name for each in newest_versions(rule(tmp_path), pytest.fail)] == ["a"]


@pytest.mark.parametrize(
    ("where", "said"), [("gone", "no such folder"), ("empty", "no dataset matches"), ("file", "no such folder")]
)
def test_an_empty_source_is_not_believed(tmp_path: Path, where: str, said: str):
    """What is not mounted looks like an empty folder: keeping nothing is never what a rule means."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        newest_versions(rule(tmp_path / where), pytest.fail)
    assert said in caught.value.message
    assert "mounted" in caught.value.hint


def test_a_pattern_that_matches_nothing_names_the_nearest(tmp_path: Path):
    """A typing mistake in a pattern is found by the names that are there."""
    put(tmp_path, "place", "a", 1)
    with pytest.raises(ConfigError) as caught:
        newest_versions(rule(tmp_path, pattern="plase"), pytest.fail)
    assert caught.value.hint == 'did you mean "place"?'


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.integers(0, 300))
def test_a_cap_cuts_the_oldest(sizes: list[int], cap: int):
    """What is kept is the longest run of the newest that fits; where not even one does the rule is wrong."""
    chosen = [SourceVersion("d", Path(f"/d/{number}"), -number) for number in range(len(sizes))]
    capped = rule(Path("/d"), cap_bytes=cap)

    def size(version: SourceVersion) -> int:
        return sizes[int(version.name)]

    if sizes[0] > cap:
        with pytest.raises(ConfigError, match="over the cap"):
            fit_cap(capped, chosen, size, pytest.fail)
        return
    retained = fit_cap(capped, chosen, size, pytest.fail)
    assert retained == chosen[: len(retained)]
    assert sum(sizes[: len(retained)]) <= cap
    assert len(retained) == len(sizes) or sum(sizes[: len(retained) + 1]) > cap


def test_a_version_without_a_size_is_told_and_left_out():
    """A damaged manifest costs its own version, not the others."""
    chosen = [SourceVersion("d", Path(f"/d/{name}"), 0) for name in "abc"]
    reported: list[PitError] = []

    def size(version: SourceVersion) -> int:
        if version.name == "b":
            raise DataError("not a manifest")
        return 1

    assert fit_cap(rule(Path("/d"), cap_bytes=2), chosen, size, reported.append) == [chosen[0], chosen[2]]
    assert [error.message for error in reported] == ["not a manifest"]


def test_without_a_cap_nothing_is_opened():
    """Sizes cost a look at each manifest; a rule that needs none asks for none."""
    chosen = [SourceVersion("d", Path("/d/a"), 0)]
    assert fit_cap(rule(Path("/d")), chosen, pytest.fail, pytest.fail) == chosen


def test_the_docstring_is_a_policy(tmp_path: Path):
    """The keys that the module tells are the keys there are."""
    text = (policy.__doc__ or "").partition("\n\n")[2]
    (actual,) = load_policy(write(tmp_path, text)).rules
    assert (actual.name, actual.newest, actual.cap_bytes) == ("pick", 2, 500 << 30)


def test_the_page_names_every_key(repo: Path) -> None:
    """Of a policy, and of the prolog's configuration: an operator has no other list."""
    page = (repo / "docs" / "operators.md").read_text()
    keys = {key for row in re.findall(r"^\| (`[^|]*)\|", page, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    kinds = (policy.RuleTable, prolog.PrologConfig, prolog.StagingRoot)
    fields = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    assert fields - {"roots"} <= keys
