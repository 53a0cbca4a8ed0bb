"""The file of SLOs and alerts, the limits of burn rates, and what promtool finds of the generated rules."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pitools.commands import monitor
from pitools.core import strict_toml
from pitools.core.errors import ConfigError
from pitools.monitor.export.metrics import BY_NAME
from pitools.monitor.rules.alerts import ALERTS
from pitools.monitor.rules.burn import PAIRS, burn_factor, used_pairs
from pitools.monitor.rules.generate import left_out, rules_text
from pitools.monitor.rules.measures import MEASURES
from pitools.monitor.rules.schema import SHIPPED, load_slos

Pit = Callable[..., subprocess.CompletedProcess[str]]
DAY_S = 86400
SLO = '[[slo]]\nname = "q"\nmeasure = "queue-wait"\nwithin = "4h"\nobjective = 0.99\n'


@pytest.mark.parametrize(
    ("days", "factors"),
    [(30, [14.4, 6, 3, 1]), (28, [13.44, 5.6, 2.8, 1]), (7, [3.36, 1.4, 1, 1]), (90, [43.2, 18, 9, 3])],
)
def test_factors_are_of_the_period(days: int, factors: list[float]) -> None:
    """Those of 30 days are the workbook's; no alert fires for a burn that keeps the objective."""
    assert [round(burn_factor(pair, days * DAY_S), 9) for pair in PAIRS] == factors


@given(days=st.integers(7, 90), budget=st.floats(0.0001, 0.9999))
def test_an_alert_says_that_its_share_of_the_budget_is_spent(days: int, budget: float) -> None:
    """Bad at the limit for the long window spends at least the pair's share, and the limit can be reached."""
    period = days * DAY_S
    pairs = used_pairs(period, budget)
    assert bool(pairs) == (budget * max(1, days / 30) < 1)
    for pair, limit in pairs:
        assert budget * 0.999 <= limit < 1
        assert limit * pair.long_s / (budget * period) >= pair.spent * 0.999


def test_the_shipped_file_has_every_measure_and_all_of_every_alert() -> None:
    """It works unchanged, and is where the defaults are that a file does not give."""
    tables = strict_toml.read_toml(SHIPPED)
    assert {slo["measure"] for slo in tables["slo"]} == set(MEASURES)
    assert list(tables["alerts"]) == list(ALERTS)
    for name, setting in tables["alerts"].items():
        assert set(setting) >= {"for", "severity"} | ({"limit"} if "LIMIT" in ALERTS[name].expr else set()), name


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[slos]]\n", ("slos", '"slo"')),
        (SLO + "objectiv = 0.9\n", ("slo[0].objectiv", '"objective"')),
        (SLO.replace("queue-wait", "queue-wiat"), ("measure", '"queue-wait"')),
        (SLO.replace("0.99", "1.0"), ("slo.objective", "0.9")),
        (SLO.replace("0.99", "0.9999999999"), ("slo.objective", "0.9999999999 (expected")),
        (SLO.replace('"4h"', '"3h"'), ("slo.within", "4h")),
        (SLO.replace('within = "4h"\n', ""), ("slo.within", "4h")),
        (SLO.replace("0.99", "0.2") + 'period = "60d"\n', ("slo.objective", "burn")),
        (SLO + 'period = "1d"\n', ("slo.period", "7d")),
        (SLO + 'for = "soon"\n', ("slo.for", "5m")),
        (SLO + "min_events = -1\n", ("slo.min_events", "0 or more")),
        (SLO.replace('"q"', '"a b"'), ("slo.name", "letters")),
        (SLO + SLO, ("slo.name", "rename")),
        (SLO.replace("queue-wait", "staging").replace("4h", "10m") + 'tier = "high"\n', ("slo.tier", "leave")),
        (SLO.replace("queue-wait", "goodput"), ("slo.within", "leave")),
        ("[alerts.PitNodesDraind]\n", ("alerts.PitNodesDraind", '"PitNodesDrained"')),
        ("[alerts.PitNodesDrained]\nlimt = 1\n", ("limt", '"limit"')),
        ("[alerts.PitNodesDrained]\nlimit = -1\n", ("alerts.PitNodesDrained.limit", "0 to 1")),
        ("[alerts.PitNodesDrained]\nlimit = nan\n", ("alerts.PitNodesDrained.limit", "0 to 1")),
        ("[alerts.PitNodesDrained]\nlimit = 10\n", ("alerts.PitNodesDrained.limit", "0 to 1")),
        ("[alerts.PitQueueStuck]\nlimit = 1e16\n", ("alerts.PitQueueStuck.limit", "0 to 1e+09")),
        ("[alerts.PitSiteUnreachable]\nlimit = 2\n", ("alerts.PitSiteUnreachable.limit", "leave")),
        ("alerts = 1\n", ("alerts", "object")),
        ("[alerts]\nPitNodesDrained = 1\n", ("alerts.PitNodesDrained", "object")),
        ('[alerts.PitNodesDrained]\nfor = "soon"\n', ("alerts.PitNodesDrained.for", "5m")),
    ],
)
def test_a_wrong_file_is_refused(text: str, parts: tuple[str, str], pit: Pit, tmp_path: Path) -> None:
    """With the key, and the nearest name or what is expected: exit 3 of the command."""
    path = tmp_path / "slos.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_slos(path)
    error = caught.value
    assert error.exit_code == 3
    assert parts[0] in error.key
    assert parts[1] in f"{error} {error.hint}"


def test_the_commands_refuse_a_misspelt_key(pit: Pit, tmp_path: Path) -> None:
    """Exit 3 with the nearest name, and no rules on stdout."""
    (tmp_path / "slos.toml").write_text(SLO + "objectiv = 0.9\n")
    for verb in ("rules", "check"):
        done = pit("monitor", verb, "slos.toml")
        assert (done.returncode, done.stdout) == (3, "")
        assert 'did you mean "objective"' in done.stderr


def test_a_tier_that_no_site_has_is_said(pit: Pit, tmp_path: Path) -> None:
    """Also by a check in which no job had it; the tiers of the shipped examples are none, a wrong site file neither."""
    slos, sites = tmp_path / "slos.toml", tmp_path / "sites"
    sites.mkdir()
    (sites / "wrong.toml").write_text("nmae = 1\n")
    slos.write_text(SLO + 'tier = "hihg"\n')
    text = (tmp_path / "home" / ".config" / "pitools" / "sites" / "alpha.toml").read_text()
    assert "[tiers]" in text
    for verb in ("rules", "check"):
        done = pit("monitor", verb, "slos.toml", PIT_SITE_PATH=str(sites))
        assert (done.returncode, done.stderr.count('no site has a tier "hihg"; did you mean "high"?')) == (0, 1), verb
        other = pit("monitor", verb, "slos.toml", PIT_SITE_PATH=str(sites), XDG_CONFIG_HOME=str(tmp_path))
        assert "hihg" not in other.stderr
    slos.write_text(SLO + 'tier = "high"\n')
    assert "tier" not in pit("monitor", "rules", "slos.toml").stderr


def test_every_metric_of_a_rule_is_exported() -> None:
    """With the labels that the rules select and group by, and at each site: no endpoint of Slurm replaces it."""
    text = rules_text(load_slos())
    exprs = [rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert len(exprs) > 40
    for name in set(re.findall(r"\bpit_\w+", " ".join(exprs))):
        base = BY_NAME.get(name) or BY_NAME[re.sub(r"_(bucket|count|sum)$", "", name)]
        assert (base.kind == "histogram") == (base.name != name), name
        for selector in re.findall(rf"{name}{{([^}}]*)}}", " ".join(exprs)):
            assert set(re.findall(r"(\w+)[=!]", selector)) <= {*base.labels, "cluster", "le"}, selector
    for alert in ALERTS.values():
        used = [BY_NAME[re.sub(r"_(bucket|count|sum)$", "", name)] for name in re.findall(r"\bpit_\w+", alert.expr)]
        by = {label for text in re.findall(r"by \(([^)]*)\)", alert.expr) for label in text.split(", ")}
        assert by <= {"cluster", *(label for metric in used for label in metric.labels)}


def test_every_runbook_is_a_command_of_ours() -> None:
    """Its words and options exist, and it names the cluster; an alert's text uses only labels that it has."""
    from pitools import cli

    rules = [rule for group in yaml.safe_load(rules_text(load_slos()))["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]
    assert {rule["alert"] for rule in alerts} == {*ALERTS, "PitSloBurn"}
    assert monitor.COMMANDS
    for rule in alerts:
        words = shlex.split(rule["annotations"]["runbook"].replace("{{ $labels.cluster }}", "alpha"))
        assert words[0] == "pit"
        assert "alpha" in words
        with cli.group.make_context("pit", words[1:], resilient_parsing=False) as context:
            command, rest = context.command, [*context._protected_args, *context.args]
            while hasattr(command, "resolve_command"):
                name, command, rest = command.resolve_command(context, rest)
                assert command is not None, words
            command.make_context(name, rest)  # raises for an option that it has not


def test_what_can_never_alert_is_left_out_and_said(pit: Pit, tmp_path: Path) -> None:
    """An objective of 0.85 has no factor 14.4: all hours bad burn 6.7 times too fast."""
    lines = left_out(load_slos())
    assert any('"goodput"' in line and "10m and 1h" in line for line in lines)
    assert not any("staging" in line for line in lines)
    done = pit("monitor", "rules")
    assert (done.returncode, done.stderr.count("pit: slo")) == (0, len(lines))
    assert 'ratio_rate1h{slo="goodput"} >' not in done.stdout


def test_an_alert_is_switched_off_and_its_limit_changed(tmp_path: Path) -> None:
    """A file without SLOs is one of alerts alone; what it does not name keeps its default."""
    path = tmp_path / "a.toml"
    path.write_text(
        '[alerts.PitRecoveries]\non = false\n[alerts.PitNodesDrained]\nlimit = 0.5\nfor = "0s"\nseverity = "page"\n'
        "[alerts.PitQueueStuck]\nlimit = 60\n"
    )
    (group,) = yaml.safe_load(rules_text(load_slos(path)))["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    assert set(rules) == set(ALERTS) - {"PitRecoveries"}
    assert rules["PitNodesDrained"]["expr"].endswith("> 0.5")
    assert rules["PitNodesDrained"]["labels"] == {"severity": "page"}
    assert "for" not in rules["PitNodesDrained"]
    stuck = rules["PitQueueStuck"]
    assert ("> 60" in stuck["expr"], stuck["for"], stuck["labels"]) == (True, "5m", {"severity": "page"})
    assert rules["PitHeldIdleGpus"]["for"] == "30m"


def test_the_example_is_a_file_that_works(pit: Pit, tmp_path: Path) -> None:
    """Printed, saved and read again it makes the same rules."""
    (tmp_path / "slos.toml").write_text(pit("monitor", "rules", "--example").stdout)
    assert pit("monitor", "rules", "slos.toml").stdout == pit("monitor", "rules").stdout
    assert pit("monitor", "rules", "slos.toml", "--example").returncode == 2


@pytest.fixture
def promtool() -> str:
    """The path of promtool; skips without it."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    return path


NAMES = SLO + SLO.replace('"q"', '"q-days"') + "[alerts.PitQueueStuck]\nlimit = 1e9\n"


@pytest.mark.parametrize("text", ["", SLO, NAMES, SLO + "tier = 'a\"b\\\\c'\nperiod = '7d'\nfor = '2m'\n"])
def test_promtool_finds_nothing(promtool: str, text: str, tmp_path: Path) -> None:
    """Neither an error nor a duplicate, of the shipped file and of others."""
    slos = tmp_path / "slos.toml"
    slos.write_text(text)
    rules = tmp_path / "rules.yml"
    rules.write_text(rules_text(load_slos(slos if text else None)))
    done = subprocess.run(
        [promtool, "check", "rules", "--lint-fatal", rules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
