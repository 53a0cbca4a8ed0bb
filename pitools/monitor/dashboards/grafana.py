"""Grafana's JSON of the dashboards, for its import or its provisioning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pitools.core.errors import UsageError
from pitools.core.fs import from_os_error, write_atomic
from pitools.monitor.dashboards.panels import DASHBOARDS, Panel, Row, Steps

Json = dict[str, Any]
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA = 39  # of Grafana 10.4; newer ones migrate it
_HEIGHT = 8
_COLUMNS = 24
_QUANTILES = (0.5, 0.95)
_OTHERS = {
    "type": "dashboards",
    "title": "pit",
    "tags": ["pit"],
    "icon": "external link",
    "tooltip": "",
    "url": "",
    "asDropdown": True,
    "includeVars": True,
    "keepTime": True,
    "targetBlank": False,
}


def write_dashboards(folder: Path, docs: str = "") -> Iterator[Path]:
    """Write each dashboard into a folder, created if missing; yield its path. docs: address of the pages, or "".

    Raises UsageError for an address that is none, PitError.
    """
    if docs and not docs.startswith(("http://", "https://")):
        raise UsageError(f'"{docs}" (expected an address of HTTP)', where="--docs", hint="https://docs.example.org")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in DASHBOARDS:
            path = folder / f"pit-{name}.json"
            write_atomic(path, json.dumps(dashboard(name, docs), indent=1) + "\n")
            yield path
    except OSError as error:
        raise from_os_error(error, folder) from error


def dashboard(name: str, docs: str = "") -> Json:
    """Return a dashboard. docs: address of the pages that its panels link to, or ""."""
    return {
        "uid": f"pit-{name}",
        "title": f"pit: {name}",
        "tags": ["pit"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "timezone": "browser",
        "links": [_OTHERS],
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": _panels(DASHBOARDS[name], docs),
    }


def _variables() -> list[Json]:
    query = "label_values(pit_collector_success, cluster)"
    return [
        {"name": "datasource", "type": "datasource", "label": "Prometheus", "query": "prometheus", "refresh": 1},
        {
            "name": "cluster",
            "type": "query",
            "label": "Cluster",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": "cluster"},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _panels(rows: tuple[Row, ...], docs: str) -> list[Json]:
    """Return the panels of rows, each row from left to right, with ids in this order."""
    panels: list[Json] = []
    y = 0
    for row in rows:
        panels.append(
            {"type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": _at(0, y, 24, 1)}
        )
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + _HEIGHT
            panels.append(_panel(panel, row, docs) | {"gridPos": _at(x, y, panel.width, _HEIGHT)})
            x += panel.width
        y += _HEIGHT
    return [{"id": number, **panel} for number, panel in enumerate(panels, 1)]


def _at(x: int, y: int, width: int, height: int) -> Json:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, row: Row, docs: str) -> Json:
    url = f"{docs.rstrip('/')}/monitor/#{row.section}"
    custom = {"fillOpacity": 30 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    is_now = panel.kind != "timeseries"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "links": [{"title": f"About: {row.title}", "url": url, "targetBlank": True}] if docs else [],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "thresholds": _thresholds(panel.steps),
                "color": {"mode": "thresholds" if is_now else "palette-classic"},
                "custom": {} if is_now else custom | {"thresholdsStyle": {"mode": "dashed" if panel.steps else "off"}},
            },
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}}
        if is_now
        else {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            | {"instant": is_now, "range": not is_now}
            for number, (expr, legend) in enumerate(queries(panel))
        ],
    }


def queries(panel: Panel) -> list[tuple[str, str]]:
    """Return the expressions and legends of a panel, with the matcher of the selected clusters."""
    expr = panel.expr.replace("{C", '{cluster=~"$cluster"')
    if "(Q, " not in expr:
        return [(expr, panel.legend)]
    return [(expr.replace("(Q, ", f"({share}, "), f"{panel.legend} p{share * 100:.0f}") for share in _QUANTILES]


def _thresholds(steps: Steps) -> Json:
    return {
        "mode": "absolute",
        "steps": [{"value": value, "color": color} for value, color in steps or ((None, "blue"),)],
    }
