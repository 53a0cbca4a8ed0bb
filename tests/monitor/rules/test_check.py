"""`pit monitor check`: judged by a real Prometheus, or by the records of runs; and its notices."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from pitools.core.errors import NoSpace, Unreachable
from pitools.ledger import believed
from pitools.monitor.rules import prometheus_api
from pitools.monitor.rules.from_records import record_shares
from pitools.monitor.rules.judge import Share, SloState, judge_slos, prometheus_shares
from pitools.monitor.rules.notify import notify, state_path
from pitools.monitor.rules.schema import SHIPPED, load_slos
from pitools.run import run_folder
from pitools.site.schema import Hook
from pitools.slurm.records import AccountingRow
from tests.monitor.fleet import Runs

Pit = Callable[..., subprocess.CompletedProcess[str]]
SECONDS = 'pit_run_resource_seconds_total{cluster="%s",resource="gpu",state="%s"}'
SLOS = """
[[slo]]
name = "goodput"
measure = "goodput"
objective = 0.85
min_events = 0

[[slo]]
name = "waits"
measure = "queue-wait"
within = "1h"
objective = 0.9
"""


def states(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, object]]:
    return {(row["slo"], row["cluster"]): row for row in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def prometheus(start_prometheus: Callable[..., str]) -> str:
    """Four days in which alpha loses a quarter of its hours and half of its jobs wait too long, and beta is well."""
    series: dict[str, Callable[[float], float]] = {
        f'pit_collector_success{{cluster="{name}",collector="runs"}}': lambda _: 1
        for name in ("alpha", "beta", "quiet")
    }
    for cluster, lost in (("alpha", 0.25), ("beta", 0.05)):
        series |= {
            SECONDS % (cluster, "productive"): lambda at, lost=lost: at * (1 - lost),
            SECONDS % (cluster, "lost"): lambda at, lost=lost: at * lost,
            SECONDS % (cluster, "unaccounted"): lambda at: at * 5,
        }
    wait = 'pit_queue_wait_seconds_%s{cluster="alpha",tier="high"%s}'
    series[wait % ("bucket", ',le="3600.0"')] = lambda at: at / 1200
    series[wait % ("count", "")] = lambda at: at / 600
    return start_prometheus(series, 4)


def test_prometheus_is_asked_for_each_budget(prometheus: str, pit: Pit, tmp_path: Path) -> None:
    """Burn rates and budgets are those of the history, and exit 1 is for the one that burns."""
    (tmp_path / "slos.toml").write_text(SLOS)
    done = pit("monitor", "check", "slos.toml", PIT_PROMETHEUS=prometheus + "/")
    assert done.returncode == 1, done.stderr
    rows = states(done)
    assert set(rows) == {("goodput", "alpha"), ("goodput", "beta"), ("waits", "alpha")}
    lost = rows["goodput", "alpha"]
    assert (lost["burning"], lost["resource"], lost["schema"]) == ("ticket", "gpu", "pit.slo/1")
    assert lost["bad"] == pytest.approx(0.25, abs=0.01)
    assert lost["burn_1d"] == pytest.approx(0.25 / 0.15, abs=0.1)
    assert lost["budget_left"] == pytest.approx(1 - 0.25 / 0.15, abs=0.1)
    assert "25.0% of the accounted hours" in str(lost["reason"])
    assert str(lost["hint"]).startswith("pit launch list --site alpha")
    assert rows["goodput", "beta"]["burning"] == ""
    assert rows["goodput", "beta"]["budget_left"] == pytest.approx(2 / 3, abs=0.1)
    assert rows["waits", "alpha"]["burning"] == "ticket"
    assert rows["waits", "alpha"]["tier"] == "high"
    one = pit("monitor", "check", "slos.toml", "--prometheus", prometheus, "--site", "beta")
    assert (one.returncode, set(states(one))) == (0, {("goodput", "beta")})


def test_a_dead_exporter_ends_no_notice(
    start_prometheus: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours without samples are unknown: no hook gets `over`; series that stand still do no longer burn."""
    gone = 4 * 86400 - 7 * 3600  # past the short window of each pair
    series: dict[str, Callable[[float], float | None]] = {}
    for state in ("productive", "lost"):
        series[SECONDS % ("alpha", state)] = lambda at: at if at < gone else None
        series[SECONDS % ("beta", state)] = lambda at: min(at, gone)
    file = tmp_path / "slos.toml"
    file.write_text(SLOS)
    slos = load_slos(file)
    shares = prometheus_shares(start_prometheus(series, 4), ())
    states = {state.cluster: state for state in judge_slos(slos, shares)}
    assert {name: (state.burning, state.is_known) for name, state in states.items()} == {
        "alpha": ("", False),
        "beta": ("", True),
    }
    out = tmp_path / "out"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    hook = Hook(on=("slo",), command=(sys.executable, "-c", COLLECT, str(out)))
    burning = [msgspec.structs.replace(state, burning="ticket", is_known=True) for state in states.values()]
    for judged in (burning, states.values()):
        assert notify(slos, file, judged, lambda _: [hook]) == []
    notices = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["site"], one["severity"]) for one in notices] == [
        *[(state.cluster, "ticket") for state in burning],
        ("beta", "over"),
    ]


def test_no_events_are_said(prometheus: str, pit: Pit, tmp_path: Path) -> None:
    """An empty answer, also of one site of several, is no failure, and no silent success."""
    (tmp_path / "slos.toml").write_text(SLOS)
    for quiet in ("local", "quiet"):  # a site of this machine, and one that Prometheus alone knows
        sites = ("--site", "beta", "--site", quiet)
        done = pit("monitor", "check", "slos.toml", "--prometheus", prometheus, *sites)
        assert (done.returncode, set(states(done))) == (0, {("goodput", "beta")}), done.stderr
        assert (done.stderr.count("no SLO of"), f"no SLO of {quiet} had an event" in done.stderr) == (1, True)


def test_an_unknown_cluster_is_refused(prometheus: str, pit: Pit, tmp_path: Path) -> None:
    """A misspelt --site in a crontab is exit 2 as elsewhere, not a silence for ever; its neighbour is not judged."""
    (tmp_path / "slos.toml").write_text(SLOS)
    done = pit("monitor", "check", "slos.toml", "--prometheus", prometheus, "--site", "beta", "--site", "locla")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert 'no site "locla"' in done.stderr
    assert '"local"' in done.stderr


STEPS = """
import os, time
from pathlib import Path
from pitools.run.steps import StepLog
log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"], "steps"), 0)
for step in range(8):
    time.sleep(0.1)
    log.write(step=step, loss=1.0, wall_s=0.1, input_s=0.05, compute_s=0.05, comm_s=0.0, rank_samples=1)
"""


def test_the_records_of_runs_are_judged_without_prometheus(pit: Pit, tmp_path: Path) -> None:
    """A run of this machine whose steps wait for input burns, by what its ledger says; a damaged run is said."""
    (tmp_path / "train.py").write_text(STEPS)
    (tmp_path / "t.toml").write_text('name = "t"\ncommand = "python train.py"\nsnapshot = false\n')
    (tmp_path / "slos.toml").write_text(SLOS + "min_events = 1\n")
    runs = tmp_path / "runs"
    run = json.loads(pit("launch", "run", "t.toml", "--wait", PIT_RUNS=str(runs)).stdout)["run_id"]
    (runs / "t-20261127-000000-000000").mkdir()
    (runs / "t-20261127-000000-000000" / "plan.json").write_text("{")
    done = pit("monitor", "check", "slos.toml", PIT_RUNS=str(runs))
    assert (done.returncode, "t-20261127-000000-000000" in done.stderr) == (1, True), done.stderr
    ledger = json.loads(pit("monitor", "goodput", run, PIT_RUNS=str(runs)).stdout)
    seconds = ledger["seconds"]
    lost = states(done)["goodput", "local"]
    accounted = sum(seconds.values()) - seconds["unaccounted"]
    assert lost["bad"] == pytest.approx(1 - seconds["productive"] / accounted, abs=1e-6)
    assert (lost["resource"], lost["burning"] != "") == ("node", True)
    waits = states(done)["waits", "local"]
    assert (waits["tier"], waits["bad"], waits["burning"], waits["budget_left"]) == ("normal", 0.0, "", 1.0)
    empty = pit("monitor", "check", "slos.toml", PIT_RUNS=str(tmp_path / "none"))
    assert (empty.returncode, empty.stdout, "no SLO" in empty.stderr) == (0, "", True)


@pytest.mark.parametrize(
    ("long", "short", "events", "burning"),
    [(0.7, 0.7, 10, "page"), (0.7, 0.6, 10, ""), (0.6, 0.7, 10, ""), (0.7, 0.7, 9.9, ""), (0.7, None, 10, "")],
)
def test_both_windows_and_enough_events_burn(
    long: float, short: float | None, events: float, burning: str, tmp_path: Path
) -> None:
    """Above 60 %, the limit of 30m and 6h at an objective of 0.9, and at least ten events in the 6h."""
    (tmp_path / "slos.toml").write_text(SLOS[SLOS.rindex("[[slo]]") :] + 'period = "30d"\n')
    windows = {21600: Share(long, events), 1800: None if short is None else Share(short, 1)}
    answers = {window: {("alpha", "high"): share} for window, share in windows.items()}
    (state,) = judge_slos(load_slos(tmp_path / "slos.toml"), lambda _, window_s: answers.get(window_s, {}))
    assert state.burning == burning


def test_what_took_as_long_as_the_limit_is_good(make_site: Callable[..., Runs], tmp_path: Path) -> None:
    """Of the records of two runs, one waited nothing, which is in the bucket of 10s; the other one an hour."""
    runs = make_site("east")
    for wait_s in (0, 3600):
        job = run_folder.JobRef(site="east", submitted=runs.at(600 + wait_s), job_id="7")
        run_folder.write_record(runs.add(state="COMPLETED") / "job.json", job)
    for within, bad in (("10s", 0.5), ("30m", 0.5), ("1h", 0.0)):
        (tmp_path / "slos.toml").write_text(SLOS.replace('"1h"', f'"{within}"'))
        slos, lines = load_slos(tmp_path / "slos.toml"), list[str]()
        states = judge_slos(slos, record_shares(["east"], slos.slo[1].period_s, lines.append))
        assert (lines, [state.bad for state in states if state.slo == "waits"]) == ([], [bad]), within


def test_a_copy_is_no_run(make_site: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where accounting knows the job, its start counts for the run of its name alone; a link never counts."""
    runs = make_site("east", scheduler="slurm")
    run_dir = runs.add(state="COMPLETED", job_id="7")
    shutil.copytree(run_dir, run_dir.with_name(f"{run_dir.name[:-1]}f"))
    (runs.root / f"{run_dir.name[:-1]}e").symlink_to(run_dir)
    row = AccountingRow(
        job_id="7", raw_id="7", state="COMPLETED", nodes=1, name=run_dir.name, user=run_dir.owner(),
        submit=runs.at(600), start=runs.at(600), end=runs.at(300), elapsed_s=300,
    )  # fmt: skip
    waits = next(slo for slo in load_slos().slo if slo.measure == "queue-wait")
    for answer, count in (([row], 1), ([], None), (None, 2)):

        def read_rows(*_: object, answer: list[AccountingRow] | None = answer) -> list[AccountingRow]:
            if answer is None:
                raise Unreachable("no answer")
            return answer

        monkeypatch.setattr(believed, "read_rows", read_rows)
        lines = list[str]()
        shares = record_shares(["east"], waits.period_s, lines.append)(waits, 86400).values()
        assert ([one.events for one in shares if one], len(lines)) == ([count] if count else [], answer is None)


def test_a_plan_that_is_none_takes_no_other_run_away(make_site: Callable[..., Runs]) -> None:
    """A run whose plan has what a ledger needs, and no more: it is said, and the others are judged."""
    runs = make_site("east")
    _, damaged = (runs.add(state="COMPLETED") for _ in range(2))
    (damaged / "plan.json").write_text('{"schema": "pit.plan/1", "name": "t", "site": "east", "job": {}}')
    slos, lines = load_slos(), list[str]()
    waits = next(slo for slo in slos.slo if slo.measure == "queue-wait")
    share = record_shares(["east"], waits.period_s, lines.append)(waits, 86400)
    assert [line.partition(": ")[0] for line in lines] == [damaged.name]
    assert [one.events for one in share.values() if one] == [1]


def test_a_prometheus_that_is_away_is_exit_75(pit: Pit, tmp_path: Path) -> None:
    """Nobody listens, there is no such host, and one that accepts and is silent: its address, and what to type."""
    for address in ("127.0.0.1:1", "nowhere.invalid:9090"):
        done = pit("monitor", "check", "--prometheus", f"http://{address}")
        assert (done.returncode, done.stdout) == (75, ""), done.stderr
        assert f"curl -sS http://{address}/-/ready" in done.stderr
    for wrong in ("localhost:9090", "http://me:secret@127.0.0.1:1"):
        refused = pit("monitor", "check", "--prometheus", wrong)
        assert (refused.returncode, "secret" in refused.stderr) == (2, False)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable, match="timed out"):
        prometheus_api.query(f"http://127.0.0.1:{silent.getsockname()[1]}", "1", timeout_s=0.2)


def test_an_answer_that_drips_ends_at_the_deadline() -> None:
    """Each byte comes in time, the whole answer never: one time-out for all, not one for each read."""
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            while not ended.wait(0.05):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        try:
            with pytest.raises(Unreachable) as caught:
                prometheus_api.query(f"http://127.0.0.1:{server.getsockname()[1]}", "1", timeout_s=0.3)
        finally:
            ended.set()
            thread.join()
    assert "pit monitor check" in caught.value.hint


ANSWERS = {
    "503": (503, "Service Unavailable"),
    "html": (200, "<html>a proxy</html>"),
    "scalar": (200, '{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}'),
    "null": (200, '{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"x"]}]}}'),
    "refused": (422, '{"status":"error","errorType":"execution","error":"too many samples"}'),
    "nan": (200, '{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"NaN"]}]}}'),
}


@pytest.fixture
def fake() -> Iterator[Callable[[str], str]]:
    """A server that answers each query with one of ANSWERS, or, for "burning", as if all were bad from a file on."""
    servers = []

    def start(name: str, bad: Path | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                status, body = ANSWERS.get(name, (200, ""))
                if bad is not None:
                    row = {"metric": {"cluster": "alpha", "resource": "gpu"}, "value": [1, bad.read_text()]}
                    body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": [row]}})
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "code"), [("503", 75), ("html", 5), ("scalar", 5), ("null", 5), ("refused", 4), ("nan", 0)]
)
def test_other_answers(answer: str, code: int, fake: Callable[[str], str], pit: Pit, tmp_path: Path) -> None:
    """A server that starts, one that is no Prometheus, a refusal, and ratios of nothing."""
    (tmp_path / "slos.toml").write_text(SLOS)
    done = pit("monitor", "check", "slos.toml", "--prometheus", fake(answer))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert ("too many samples" in done.stderr) == (answer == "refused")


COLLECT = 'import sys; open(sys.argv[1], "a").write(sys.stdin.read()); sys.exit(sys.argv[2:] == ["fail"])'


def test_hooks_get_each_change_once(fake: Callable[..., str], pit: Pit, tmp_path: Path) -> None:
    """When it begins to burn, gets worse and is over; a hook that fails is started again, and holds up no other."""
    bad, out, failing = tmp_path / "bad", tmp_path / "out", tmp_path / "failing"
    url = fake("burning", bad)
    (tmp_path / "slos.toml").write_text(SLOS[: SLOS.index("[[slo]]", 2)])
    hooks = [
        {"on": '["slo"]', "command": json.dumps([sys.executable, "-c", COLLECT, str(failing), "fail"])},
        {"on": '["slo", "verdict"]', "command": json.dumps([sys.executable, "-c", COLLECT, str(out)])},
        {"on": '["verdict"]', "command": json.dumps([sys.executable, "-c", COLLECT, str(out)])},
    ]
    text = "".join(f"[[hooks]]\non = {one['on']}\ncommand = {one['command']}\n" for one in hooks)
    (tmp_path / "home" / ".config" / "pitools" / "hooks.toml").write_text(text)
    for value, code in (("0.01", 0), ("0.5", 1), ("0.5", 1), ("0.99", 1), ("0.01", 0), ("0.01", 0)):
        bad.write_text(value)
        done = pit(
            "monitor", "check", "slos.toml", "--prometheus", url, "--notify", XDG_STATE_HOME=str(tmp_path / "state")
        )
        assert done.returncode == code, done.stderr
    notices = [json.loads(line) for line in out.read_text().splitlines()]
    assert [notice["severity"] for notice in notices] == ["ticket", "page", "over"]
    assert (
        notices[0].items() >= {"schema": "pit.slo-notice/1", "event": "slo", "site": "alpha", "slo": "goodput"}.items()
    )
    assert "50.0% of the accounted hours" in notices[0]["reason"]
    assert [json.loads(line)["severity"] for line in failing.read_text().splitlines()] == ["ticket", "ticket", "page"]
    state = tmp_path / "state" / "pitools" / "slo_notices.json"
    assert (json.loads(state.read_text())["sent"], state.stat().st_mode & 0o777) == ([], 0o600)


def test_an_slo_that_is_taken_out_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next check of its file alone: if it comes back while it burns, hooks hear of it again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    out, files = tmp_path / "out", [tmp_path / "a.toml", tmp_path / "x" / ".." / "b.toml"]
    (tmp_path / "x").mkdir()
    hook = Hook(on=("slo",), command=(sys.executable, "-c", COLLECT, str(out)))
    burns = SloState(cluster="alpha", slo="goodput", burning="page", objective=0.9, period="30d")
    for text, total in ((SLOS, 2), (SLOS, 2), ("", 2), (SLOS, 3)):  # the second file keeps it
        files[0].write_text(text)
        files[1].write_text(SLOS)
        for file in files:
            slos = load_slos(file)
            assert notify(slos, file, [burns] * bool(slos.slo), lambda _: [hook]) == []
        assert len(out.read_text().splitlines()) == total
    slos = load_slos(files[0])
    assert notify(slos, files[1].resolve(), [burns], lambda _: [hook]) == []  # by another path, the same file
    assert len(out.read_text().splitlines()) == total
    files[1].rename(tmp_path / "c.toml")
    notify(slos, files[0], [burns], lambda _: [hook])
    assert {Path(key[0]) for key, _ in json.loads(state_path().read_text())["sent"]} == {files[0]}


def test_hooks_are_started_though_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that is full or read-only: each time, which is said."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    state_path().with_suffix(".lock").mkdir(mode=0o700, parents=True)

    def fail(*_: object, **__: object) -> None:
        raise NoSpace("no space left")

    monkeypatch.setattr("pitools.monitor.rules.notify.write_atomic", fail)
    hook = Hook(on=("slo",), command=(sys.executable, "-c", COLLECT, str(tmp_path / "out")))
    burns = SloState(cluster="alpha", slo="goodput", burning="page", objective=0.9, period="30d")
    for count in (1, 2):
        (error,) = notify(load_slos(), SHIPPED, [burns], lambda _: [hook])
        assert "may be started again: no space left" in error
        assert len((tmp_path / "out").read_text().splitlines()) == count
