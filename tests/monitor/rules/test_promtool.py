"""Every alert fires on its fault, with real promtool, and a healthy hour is silent."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pitools.monitor.rules.alerts import ALERTS
from pitools.monitor.rules.generate import rules_text
from pitools.monitor.rules.schema import load_slos

STEP_S = {True: 300, False: 60}  # between samples: of cases of more than three hours, and of the others
# Series of a cluster that is well, by the minute: jobs start in the hour, nine of ten hours are productive.
HEALTHY = {
    'pit_collector_success{cluster="alpha",collector="jobs"}': "1x{n}",
    'pit_collector_success{cluster="alpha",collector="nodes"}': "1x{n}",
    'pit_collector_success{cluster="alpha",collector="runs"}': "1x{n}",
    'pit_collector_success{cluster="alpha",collector="topology"}': "1x{n}",
    'pit_exporter_cycle_timestamp_seconds{cluster="alpha"}': "0+60x{n}",
    'pit_nodes{cluster="alpha",state="allocated"}': "95x{n}",
    'pit_nodes{cluster="alpha",state="drained"}': "5x{n}",
    'pit_drained_gpu_seconds_total{cluster="alpha",cause="gpu"}': "0+60x{n}",
    'pit_held_idle_gpus{cluster="alpha"}': "1x{n}",
    'pit_queue_age_seconds{cluster="alpha",tier="high"}': "30000x{n}",
    'pit_queue_wait_seconds_bucket{cluster="alpha",tier="high",le="14400.0"}': "0+99x{n}",
    'pit_queue_wait_seconds_count{cluster="alpha",tier="high"}': "0+100x{n}",
    'pit_run_resource_seconds_total{cluster="alpha",resource="gpu",state="productive"}': "0+9000x{n}",
    'pit_run_resource_seconds_total{cluster="alpha",resource="gpu",state="lost"}': "0+1000x{n}",
    'pit_run_resource_seconds_total{cluster="alpha",resource="gpu",state="unaccounted"}': "0+90000x{n}",
    'pit_recoveries_total{cluster="alpha",cause="node"}': "7x{n}",
    'pit_recovery_seconds_bucket{cluster="alpha",le="600.0"}': "0+10x{n}",
    'pit_recovery_seconds_count{cluster="alpha"}': "0+10x{n}",
    'pit_stage_bytes_total{cluster="alpha",origin="node"}': "0+8e9x{n}",
    'pit_stage_bytes_total{cluster="alpha",origin="source"}': "0+2e9x{n}",
    'pit_stage_seconds_bucket{cluster="alpha",le="600.0"}': "0+99x{n}",
    'pit_stage_seconds_count{cluster="alpha"}': "0+100x{n}",
}
GOODPUT = 'pit_run_resource_seconds_total{cluster="alpha",resource="gpu",state="%s"}'
# name: alerts that fire, minutes, series that differ ("" for absent).
FAULTS: dict[str, tuple[set[str], int, dict[str, str]]] = {
    "a healthy hour": (set(), 60, {}),
    "Slurm is away": (
        {"PitSiteUnreachable:page"},
        14,
        {f'pit_collector_success{{cluster="alpha",collector="{name}"}}': "0x{n}" for name in ("jobs", "nodes")},
    ),
    "Slurm is away, and the exporter starts anew": (
        {"PitSiteUnreachable:page"},
        14,
        {
            f'pit_collector_success{{cluster="alpha",collector="{name}"}}': "0x10 stale stale 0x{n}"
            for name in ("jobs", "nodes")
        },
    ),
    "Slurm is away, and there are no runs": (
        {"PitSiteUnreachable:page"},
        40,
        {
            f'pit_collector_success{{cluster="alpha",collector="{name}"}}': "1x10 0x{n}" if name != "runs" else ""
            for name in ("jobs", "nodes", "topology", "runs")
        },
    ),
    "a moment without Slurm": (
        set(),
        20,
        {
            f'pit_collector_success{{cluster="alpha",collector="{name}"}}': "1x10 0x2 1x{n}"
            for name in ("jobs", "nodes")
        },
    ),
    "one collector": (
        {"PitCollectorFailing:ticket"},
        20,
        {'pit_collector_success{cluster="alpha",collector="runs"}': "0x{n}"},
    ),
    "the exporter is dead": (
        {"PitExporterStale:page"},
        40,
        dict.fromkeys(HEALTHY, "") | {'pit_exporter_cycle_timestamp_seconds{cluster="alpha"}': "0+60x20"},
    ),
    "the exporter is dead for days": (
        {"PitExporterStale:page"},
        49 * 60,
        dict.fromkeys(HEALTHY, "") | {'pit_exporter_cycle_timestamp_seconds{cluster="alpha"}': "0+60x20"},
    ),
    "an old textfile": (
        {"PitExporterStale:page"},
        40,
        {'pit_exporter_cycle_timestamp_seconds{cluster="alpha"}': "0+60x20 1200x{n}"},
    ),
    "an old textfile of a collector that failed": (
        {"PitExporterStale:page", "PitCollectorFailing:ticket"},
        40,
        {
            'pit_exporter_cycle_timestamp_seconds{cluster="alpha"}': "0+60x20 1200x{n}",
            'pit_collector_success{cluster="alpha",collector="topology"}': "0x{n}",
        },
    ),
    "drained nodes": (
        {"PitNodesDrained:ticket"},
        20,
        {'pit_nodes{cluster="alpha",state="drained"}': "20x{n}"},
    ),
    "drained GPUs for hours": (
        {"PitDrainedGpuHours:ticket"},
        120,
        {'pit_drained_gpu_seconds_total{cluster="alpha",cause="gpu"}': "0+7200x{n}"},
    ),
    "idle GPUs": ({"PitHeldIdleGpus:ticket"}, 40, {'pit_held_idle_gpus{cluster="alpha"}': "64x{n}"}),
    "a stuck queue": (
        {"PitQueueStuck:page"},
        9 * 60,
        {
            'pit_collector_success{cluster="alpha",collector="jobs"}': "1x300 0x20 1x{n}",
            'pit_queue_wait_seconds_bucket{cluster="alpha",tier="high",le="14400.0"}': "99x{n}",
            'pit_queue_wait_seconds_count{cluster="alpha",tier="high"}': "100x{n}",
        },
    ),
    "a queue of which hours are not known": (
        set(),
        9 * 60,
        {
            'pit_collector_success{cluster="alpha",collector="jobs"}': "1x60 0x300 1x{n}",
            'pit_queue_age_seconds{cluster="alpha",tier="low"}': "30000x{n}",
        },
    ),
    "a queue in which no job ever started": (
        {"PitQueueStuck:page"},
        9 * 60,
        {'pit_queue_age_seconds{cluster="alpha",tier="low"}': "30000x{n}"},
    ),
    "a queue whose first job has started": (
        set(),
        9 * 60,
        {
            'pit_queue_wait_seconds_bucket{cluster="alpha",tier="high",le="14400.0"}': "0x300 1x{n}",
            'pit_queue_wait_seconds_count{cluster="alpha",tier="high"}': "0x300 1x{n}",
        },
    ),
    "a tier whose series begins with its first start": (
        set(),
        9 * 60,
        {
            'pit_queue_wait_seconds_bucket{cluster="alpha",tier="high",le="14400.0"}': "_x60 1x{n}",
            'pit_queue_wait_seconds_count{cluster="alpha",tier="high"}': "_x60 1x{n}",
        },
    ),
    "a new exporter and an old job": (set(), 60, {'pit_queue_age_seconds{cluster="alpha",tier="low"}': "30000x{n}"}),
    "a cold cache": (
        {"PitStageCacheCold:ticket"},
        90,
        {
            'pit_stage_bytes_total{cluster="alpha",origin="node"}': "0+1e8x{n}",
            'pit_stage_bytes_total{cluster="alpha",origin="source"}': "0+5e10x{n}",
        },
    ),
    "a cold cache of a quiet night": (set(), 90, {'pit_stage_bytes_total{cluster="alpha",origin="node"}': "0x{n}"}),
    "recoveries": ({"PitRecoveries:ticket"}, 60, {'pit_recoveries_total{cluster="alpha",cause="node"}': "7+1x{n}"}),
    "hours without a productive one": (
        {"PitSloBurn:page", "PitSloBurn:ticket"},
        25 * 60,
        {GOODPUT % "productive": "5x{n}"},
    ),
    "the start of one run of a quiet site": (
        set(),
        30,
        {GOODPUT % "productive": "0x{n}", GOODPUT % "lost": "0+480x20 9600x{n}"},
    ),
    "half of the hours, for a day": ({"PitSloBurn:ticket"}, 25 * 60, {GOODPUT % "lost": "0+9000x{n}"}),
    "a fifth of the hours, for three days": ({"PitSloBurn:ticket"}, 73 * 60, {GOODPUT % "lost": "0+2500x{n}"}),
    "a fifth of the hours, and over": (set(), 73 * 60, {GOODPUT % "lost": "0+2500x3600 9000000x{n}"}),
    "hours without evidence": (set(), 25 * 60, {GOODPUT % "unaccounted": "0+9000000x{n}"}),
    "late jobs": (
        {"PitSloBurn:page", "PitSloBurn:ticket"},
        7 * 60,
        {'pit_queue_wait_seconds_bucket{cluster="alpha",tier="high",le="14400.0"}': "0+20x{n}"},
    ),
    "two exporters of one site, each below the limits": (
        set(),
        60,
        {
            name.replace("}", f"{instance}}}"): values
            for instance in ("", ',instance="y"')
            for name, values in {
                'pit_drained_gpu_seconds_total{cluster="alpha",cause="gpu"}': "0+7200x{n}",
                'pit_held_idle_gpus{cluster="alpha"}': "5x{n}",
                'pit_recoveries_total{cluster="alpha",cause="node"}': "7+0.05x{n}",
                'pit_queue_wait_seconds_bucket{cluster="alpha",tier="high",le="14400.0"}': "0x{n}",
                'pit_queue_wait_seconds_count{cluster="alpha",tier="high"}': "0+0.1x{n}",
            }.items()
        },
    ),
    "a stuck queue, and a second exporter": (
        {"PitQueueStuck:page"},
        9 * 60,
        {
            'pit_queue_wait_seconds_bucket{cluster="alpha",tier="high",le="14400.0"}': "99x{n}",
            'pit_queue_wait_seconds_count{cluster="alpha",tier="high"}': "100x{n}",
            'pit_queue_wait_seconds_count{cluster="alpha",tier="high",instance="y"}': "_x60 40x{n}",
        },
    ),
    "late jobs, but few": (
        set(),
        7 * 60,
        {
            'pit_queue_wait_seconds_bucket{cluster="alpha",tier="high",le="14400.0"}': "0x{n}",
            'pit_queue_wait_seconds_count{cluster="alpha",tier="high"}': "0+0.01x{n}",
        },
    ),
    "slow staging": (
        {"PitSloBurn:page", "PitSloBurn:ticket"},
        90,
        {'pit_stage_seconds_bucket{cluster="alpha",le="600.0"}': "0+10x{n}"},
    ),
    "slow recoveries": (
        {"PitSloBurn:page", "PitSloBurn:ticket"},
        90,
        {'pit_recovery_seconds_bucket{cluster="alpha",le="600.0"}': "0x{n}"},
    ),
}


def per_step(values: str, step_s: int, n: int) -> str:
    """Return promtool's values for steps of another length: `0+60x{n}` grows by 300 in five minutes."""
    scale = step_s // 60

    def one(match: re.Match[str]) -> str:
        growth = f"+{float(match[2]) * scale:g}" if match[2] else ""
        count = n if match[3] == "{n}" else int(match[3])
        return f"{match[1]}{growth}x{count // scale}"

    return re.sub(r"([\d.e]+)(?:\+([\d.e]+))?x(\{n\}|\d+)", one, values)


def make_test(name: str, firing: set[str], minutes: int, series: dict[str, str]) -> dict[str, Any]:
    """Return a test of promtool: of the whole set of firing alerts at the end."""
    step_s = STEP_S[minutes > 180]
    values = {key: per_step(text, step_s, minutes) for key, text in (HEALTHY | series).items() if text}
    expected = [
        {"labels": f'{{alertname="{alert}", cluster="alpha", severity="{severity}"}}', "value": 1}
        for alert, severity in (one.split(":") for one in sorted(firing))
    ]
    expr = 'max by (cluster, alertname, severity) (ALERTS{alertstate="firing"})'
    return {
        "name": name,
        "interval": f"{step_s}s",
        "input_series": [{"series": key, "values": text} for key, text in values.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": f"{minutes}m", "exp_samples": expected}],
    }


def test_every_alert_has_a_fault() -> None:
    """No alert of the table, and no severity of an SLO, is without a case below."""
    firing = {one for alerts, _, _ in FAULTS.values() for one in alerts}
    assert {one.split(":")[0] for one in firing} == {*ALERTS, "PitSloBurn"}


@pytest.mark.parametrize("is_long", [False, True], ids=["hours", "days"])
def test_alerts_fire_on_their_faults_alone(is_long: bool, tmp_path: Path) -> None:
    """promtool plays each fault's series to the shipped rules: the firing alerts are those of the fault, no other."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    rules = rules_text(load_slos())
    (tmp_path / "rules.yml").write_text(rules)
    order = [group["name"] for group in yaml.safe_load(rules)["groups"]]  # promtool's is random
    tests = [make_test(name, *case) for name, case in FAULTS.items() if (case[1] > 180) == is_long]
    file = {"rule_files": ["rules.yml"], "group_eval_order": order, "evaluation_interval": "1h" if is_long else "2m"}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({**file, "tests": tests}))
    argv = [promtool, "test", "rules", "test.yml"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
