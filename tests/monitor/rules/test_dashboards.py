"""Grafana's dashboards: their keys are Grafana's, their metrics ours, and each query returns data."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pitools.monitor.dashboards.grafana import dashboard, write_dashboards
from pitools.monitor.dashboards.panels import DASHBOARDS
from pitools.monitor.export.metrics import BY_NAME, METRICS
from pitools.monitor.rules.generate import rules_text
from pitools.monitor.rules.prometheus_api import query
from pitools.monitor.rules.schema import load_slos

Pit = Callable[..., subprocess.CompletedProcess[str]]
# Keys that Grafana 10's schema knows (kinds/dashboard/dashboard_kind.cue, and the panels' own), by where they stand.
KEYS = {
    "dashboard": "uid title tags schemaVersion editable graphTooltip refresh time timezone links annotations templating"
    " panels",
    "row": "id type title collapsed panels gridPos",
    "panel": "id type title description datasource links gridPos fieldConfig options targets",
    "target": "refId datasource expr legendFormat instant range",
    "variable": "name type label query refresh datasource definition sort multi includeAll allValue current",
    "link": "type title tags icon tooltip url asDropdown includeVars keepTime targetBlank",
    "defaults": "unit thresholds color custom",
}
UNITS = {"short", "percentunit", "s", "h", "Bps"}
VALUES = {
    "resource": ("gpu",),
    "state": ("allocated", "idle", "drained", "productive", "lost", "staging", "input", "running", "PENDING"),
    "origin": ("node", "source"),
}


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each panel of each dashboard but rows, with its dashboard's name."""
    for name in DASHBOARDS:
        for panel in dashboard(name, "https://docs.example.org/")["panels"]:
            if panel["type"] != "row":
                yield name, panel


def test_keys_are_those_of_grafana() -> None:
    """Of each object, with ids, places that do not overlap, thresholds in order, and units that Grafana has."""
    for name in DASHBOARDS:
        board = dashboard(name)
        assert set(board) <= set(KEYS["dashboard"].split())
        assert [set(link) for link in board["links"]] == [set(KEYS["link"].split())]
        assert {key for item in board["templating"]["list"] for key in item} <= set(KEYS["variable"].split())
        source, cluster = board["templating"]["list"]
        assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
        assert (cluster["name"], cluster["multi"], cluster["includeAll"]) == ("cluster", True, True)
        assert re.fullmatch(cluster["allValue"], "any")
        assert cluster["datasource"]["uid"] == f"${{{source['name']}}}"
        ids = [panel["id"] for panel in board["panels"]]
        assert ids == list(range(1, len(ids) + 1))
        cells: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            kind = "row" if panel["type"] == "row" else "panel"
            assert set(panel) == set(KEYS[kind].split()), panel["title"]
            at = panel["gridPos"]
            own = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
            assert not cells & own, panel["title"]
            assert at["x"] + at["w"] <= 24
            cells |= own
        places = [panel["gridPos"] for panel in board["panels"]]
        assert max(at["x"] + at["w"] for at in places if at["w"] < 24) == 24


def test_every_panel_is_whole() -> None:
    """A title, a known unit, thresholds that rise, a legend with labels, and a link from its row to the docs."""
    page = (Path(__file__).parents[3] / "docs" / "monitor.md").read_text()
    sections = {re.sub(r"[^a-z]+", "-", head.lower()) for head in re.findall(r"^## (.*)$", page, re.MULTILINE)}
    for name, panel in panels():
        defaults = panel["fieldConfig"]["defaults"]
        assert set(defaults) == set(KEYS["defaults"].split())
        assert defaults["unit"] in UNITS, panel["title"]
        steps = [step["value"] for step in defaults["thresholds"]["steps"]]
        assert steps[0] is None
        assert steps[1:] == sorted(steps[1:])
        assert [target["refId"] for target in panel["targets"]] == ["A", "B"][: len(panel["targets"])]
        assert all(set(target) == set(KEYS["target"].split()) for target in panel["targets"])
        is_now = {(target["instant"], not target["range"]) for target in panel["targets"]}
        assert is_now == {(panel["type"] != "timeseries",) * 2}
        exprs = [target["expr"] for target in panel["targets"]]
        assert all(expr.endswith("/ 3600") == (defaults["unit"] == "h") for expr in exprs)
        (link,) = panel["links"]
        address, _, section = link["url"].partition("#")
        assert (address, link["targetBlank"]) == ("https://docs.example.org/monitor/", True)
        assert section in sections, (name, panel["title"], section)
    assert {len(panel["links"]) for panel in dashboard("run")["panels"] if panel["type"] != "row"} == {0}


def test_every_query_is_of_exported_metrics_and_the_selected_clusters() -> None:
    """With labels that the metric has; each selector has the variable."""
    recorded = set(re.findall(r"record: (\S+)", rules_text(load_slos())))
    for _, panel in panels():
        for target in panel["targets"]:
            expr = target["expr"]
            assert "{C" not in expr
            names = re.findall(r"\bpit[_:][\w:]+|\bALERTS\b", expr)
            assert names, expr
            assert expr.count('cluster=~"$cluster"') == len(names), expr
            for name in names:
                metric = BY_NAME.get(name) or BY_NAME.get(re.sub(r"_(bucket|count|sum)$", "", name))
                assert metric or name in recorded or name == "ALERTS", name
                if metric:
                    legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                    selected = set(re.findall(r"(\w+)=~", expr))
                    assert legend | selected <= {*metric.labels, "cluster"}, expr


def test_every_metric_is_on_a_dashboard() -> None:
    """What is exported can be seen."""
    shown = " ".join(target["expr"] for _, panel in panels() for target in panel["targets"])
    assert [metric.name for metric in METRICS if not re.search(rf"\b{metric.name}(_bucket)?\b", shown)] == []


def healthy_series() -> dict[str, Callable[[float], float]]:
    """A series for each metric and some values of its labels, of alpha."""
    series: dict[str, Callable[[float], float]] = {}
    for metric in METRICS:
        choices = [[(label, value) for value in VALUES.get(label, ("a",))] for label in metric.labels]
        for values in itertools.product(*choices):
            labels = "".join(f',{label}="{value}"' for label, value in values)
            name = f'{metric.name}{{cluster="alpha"{labels}'
            if metric.kind != "histogram":
                series[name + "}"] = (lambda at: at * 9) if metric.kind == "counter" else (lambda at: 1.0)
                continue
            for rank, bound in enumerate([*metric.buckets, "+Inf"], 1):
                bucket = f'{metric.name}_bucket{{cluster="alpha"{labels},le="{bound}"}}'
                series[bucket] = lambda at, rank=rank: at * rank // 1000
            series[f'{metric.name}_count{{cluster="alpha"{labels}}}'] = lambda at, rank=rank: at * rank // 1000
            series[f'{metric.name}_sum{{cluster="alpha"{labels}}}'] = lambda at: at
    return series


def empty_queries(url: str, cluster: str = ".*") -> set[tuple[str, str]]:
    """The dashboards and titles of panels with a query that returns nothing. Raises for one that is refused."""
    empty = set()
    for name, panel in panels():
        for target in panel["targets"]:
            expr = target["expr"].replace("$cluster", cluster).replace("$__rate_interval", "10m")
            if not query(url, expr):
                empty.add((name, panel["title"]))
    return empty


def test_every_query_returns_data(start_prometheus: Callable[..., str]) -> None:
    """Asked of a real Prometheus that has each metric and evaluates the rules; of another cluster there is nothing."""
    rules = rules_text(load_slos())
    fast = re.sub(r"interval: \w+", "interval: 1s", rules)  # a Prometheus that has just started evaluates no day
    url = start_prometheus(healthy_series(), 2, rules=fast)
    while empty := empty_queries(url):  # until the first evaluation; the test's time-out ends it
        assert {title for _, title in empty} <= {"Error budget left", "Bad share in an hour"}
        time.sleep(0.2)
    everything = {(name, panel["title"]) for name, panel in panels()}
    assert everything - empty_queries(url, "beta") == {("fleet", "Firing alerts")}


def test_files_for_grafana(pit: Pit, tmp_path: Path) -> None:
    """One for each dashboard, in a folder that is made; a folder that cannot be made is an error."""
    done = pit("monitor", "rules", "--dashboards", "boards", "--docs", "https://docs.example.org")
    assert done.returncode == 0, done.stderr
    written = {Path(line).name for line in done.stdout.splitlines()}
    assert written == {f"pit-{name}.json" for name in ("fleet", "site", "run", "node", "data")}
    boards = [json.loads(path.read_text()) for path in (tmp_path / "boards").iterdir()]
    assert len({board["uid"] for board in boards}) == 5
    assert list(write_dashboards(tmp_path / "boards"))
    (tmp_path / "file").write_text("")
    assert pit("monitor", "rules", "--dashboards", "file/boards").returncode == 4
    assert pit("monitor", "rules", "--dashboards", "x", "--docs", "docs.example.org").returncode == 2
    assert pit("monitor", "rules", "--docs", "https://docs.example.org").returncode == 2


@pytest.mark.parametrize("name", DASHBOARDS)
def test_rows_are_few(name: str) -> None:
    """A dashboard is read at a glance: at most four rows, and fourteen panels."""
    assert len(DASHBOARDS[name]) <= 4
    assert sum(len(row.panels) for row in DASHBOARDS[name]) <= 14
