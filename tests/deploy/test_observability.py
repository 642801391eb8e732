"""The alert rules and dashboards of deploy/observability: they are those of
the script, know the metrics that there are, fire, and are silent."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import persia
from persia import _core, prometheus
from persia.base.health import Health
from persia.data.feeding import Loader
from persia.distributed.certs import write_certificates
from persia.distributed.security import Security
from persia.kubernetes.api import Api
from persia.kubernetes.gate import Gate
from tests.deploy.manifests import DEPLOY
from tests.system.processes import environment, wait_until
from tests.system.shards import free_port
from tests.system.test_serve import metrics, serving

sys.path.insert(0, str(DEPLOY / "observability"))
import draw
import observability

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

PAGE = DEPLOY.parent / "docs" / "howto" / "alerts.md"
PROMTOOL = shutil.which("promtool")

#: Of each alert the series with which it fires after 90 minutes, and no other
#: one.
FIRES = {
    "PersiaDown": {'up{job="persia"}': "0x120"},
    "PersiaRestarts": {
        'process_start_time_seconds{job="persia"}': "1+100x120"
    },
    "PersiaRecovers": {"persia_recovers": "1x120"},
    "PersiaMemoryHigh": {
        "persia_memory_used_bytes": "90x120",
        "persia_memory_limit_bytes": "100x120",
    },
    "PersiaMemoryFills": {
        "persia_memory_used_bytes": "0+2x120",
        "persia_memory_limit_bytes": "300x120",
    },
    "PersiaUpdatesLost": {'persia_updates_lost_total{rank="0"}': "0+1x120"},
    "PersiaLogStopped": {"persia_log_failed": "1x120"},
    # The clock of promtool begins at 0.
    "PersiaSnapshotOld": {"persia_snapshot_timestamp_seconds": "1x300"},
    "PersiaCallsSlow": {
        f'persia_call_seconds_bucket{{role="server",method="Pull",le="{le}"}}':
        # One of 50 takes longer than 5 s.
        f"0+{n}x120"
        for le, n in (("5", 49), ("10", 50), ("+Inf", 50))
    },
    "PersiaBatchesFailed": {"persia_embedding_worker_failed_total": "0+1x120"},
    "PersiaBatchesStuck": {
        "persia_embedding_worker_oldest_seconds": "901x120"
    },
    "PersiaLoadersGone": {"persia_embedding_worker_loaders_gone": "1x120"},
    "PersiaNonfinite": {'persia_table_nonfinite_total{table="t"}': "0+1x120"},
    "PersiaMalformed": {"persia_feed_malformed_total": "0+1x120"},
    "PersiaFeedLag": {'persia_feed_lag{partition="t/0"}': "0+9x120"},
    "PersiaDenied": {'persia_denied_total{reason="wrong"}': "0+2x120"},
    # promtool's time begins in 1970.
    "PersiaCertificateEnds": {
        'persia_certificate_not_after_seconds{file="s.pem"}': "1209599x120"
    },
    "PersiaRenewalFailed": {
        'persia_security_renewals_total{outcome="failed"}': "0+1x120"
    },
    "PersiaRequestsFail": {  # one of ten
        f'persia_serving_requests_total{{model="m",outcome="{outcome}"}}': n
        for outcome, n in (("ok", "0+9x120"), ("LimitReached", "0+1x120"))
    },
    "PersiaModelOld": {'persia_serving_lag_seconds{model="m"}': "901x120"},
    "PersiaConnectionsRefused": {
        "persia_connections_refused_total": "0+1x120"
    },
    "PersiaGateBlocked": {"persia_gate_blocked": "1x120"},
    "PersiaGateIdle": {"persia_gate_acts": "0x120"},
}
#: A job as it should be.
SILENT = {
    'up{job="persia"}': "1x300",
    'process_start_time_seconds{job="persia"}': "9x300",
    "persia_recovers": "0x300",
    "persia_memory_used_bytes": "50x300",
    "persia_memory_limit_bytes": "100x300",
    'persia_updates_lost_total{rank="0"}': "7x300",
    "persia_embedding_worker_lost_total": "7x300",
    "persia_feed_lost_total": "7x300",
    "persia_log_failed": "0x300",
    "persia_log_refused_total": "0x300",
    "persia_snapshot_timestamp_seconds": "60+60x300",
    **dict.fromkeys(
        (
            'persia_call_seconds_bucket{role="server",method="Pull",le="5"}',
            'persia_call_seconds_bucket{role="server",method="Pull",le="+Inf"}',
        ),
        "1+1x300",
    ),
    "persia_embedding_worker_failed_total": "7x300",
    "persia_embedding_worker_oldest_seconds": "1x300",
    "persia_embedding_worker_loaders_gone": "0x300",
    'persia_table_nonfinite_total{table="t"}': "7x300",
    "persia_feed_malformed_total": "7x300",
    'persia_feed_lag{partition="t/0"}': "9x300",
    'persia_denied_total{reason="wrong"}': "7x300",
    'persia_certificate_not_after_seconds{file="s.pem"}': "1299600x300",
    'persia_security_renewals_total{outcome="ok"}': "0+1x300",
    'persia_security_renewals_total{outcome="failed"}': "7x300",
    "persia_gate_blocked": "0x300",
    'persia_serving_requests_total{model="m",outcome="ok"}': "0+99x300",
    'persia_serving_requests_total{model="m",outcome="Closed"}': "0+1x300",
    'persia_serving_requests_total{model="",outcome="NotFound"}': "0+9x300",
    'persia_serving_lag_seconds{model="m"}': "1x300",
    "persia_gate_acts": "1x300",
    "persia_connections_refused_total": "7x300",
}
#: The same without what is off: no limit, no checkpoint.
OFF = {
    "persia_memory_used_bytes": "0+1x300",
    "persia_memory_limit_bytes": "0x300",
    "persia_snapshot_timestamp_seconds": "0x300",
}


def expressions() -> Iterator[tuple[str, str]]:
    """All of them, each with its place."""
    for alert in observability.ALERTS:
        yield alert.name, alert.expr
    for name, panels in observability.DASHBOARDS.items():
        for panel in panels:
            for expr, _ in panel.series:
                yield f"{name}: {panel.title}", expr


def test_the_files_are_those_of_the_script() -> None:
    made = observability.made()
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, (
            f"python {observability.__file__}"
        )
    here = {
        path
        for path in observability.HERE.rglob("*")
        if path.suffix in (".json", ".yaml")
        and path.name != "kustomization.yaml"
    }
    assert here == set(made)


def test_rules_and_panels_have_what_they_need() -> None:
    (group,) = yaml.safe_load(observability.rules())["groups"]
    for rule, alert in zip(group["rules"], observability.ALERTS, strict=True):
        assert rule["expr"] == alert.expr
        assert rule["annotations"]["summary"] == alert.text
        assert int(rule["for"].removesuffix("m")) >= 1  # two scrapes
    for name in observability.DASHBOARDS:
        board = json.loads(observability.dashboard(name))
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in board["panels"]:
            references = [t["refId"] for t in panel["targets"]]
            assert len(set(references)) == len(references)
            for one in (panel, *panel["targets"]):
                assert one["datasource"]["uid"] == "${datasource}"


def test_each_alert_has_a_section() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## (Persia\w+)$", text, re.MULTILINE)
    assert sections == [alert.name for alert in observability.ALERTS]
    for alert in observability.ALERTS:
        assert observability.anchor(alert.name) == alert.name.lower()
    assert (
        observability.HERE / "../../" / observability.RUNBOOKS
    ).resolve() == PAGE


@contextlib.contextmanager
def started(*words: str) -> Iterator[tuple[str, str]]:
    """Of a process that serves: the page of its metrics, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "persia", "serve", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = iter(process.stdout.readline, "")
        found = (re.match(r"metrics on (http://\S+)", s) for s in said)
        page = next(m[1] for m in found if m)
        serves = next(s for s in said if s.startswith("serving "))
        yield page, serves.split()[-1]
    finally:
        process.kill()
        process.communicate()


def names(url: str) -> set[str]:
    return {name.partition("/")[0] for name in metrics(url)}


@contextlib.contextmanager
def watching(pages: list[str], folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes them; its address."""
    targets = [urllib.parse.urlsplit(page).netloc for page in pages]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(observability.HERE / "rules.yaml")],
        "scrape_configs": [
            {"job_name": "persia", "static_configs": [{"targets": targets}]}
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def series(address: str, expr: str) -> int:
    """How many an expression has now."""
    query = urllib.parse.urlencode({"query": expr})
    try:
        with urllib.request.urlopen(
            f"http://{address}/api/v1/query?{query}"
        ) as answer:
            return len(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it starts
            return 0
        raise
    except urllib.error.URLError:
        return 0


def ask_model(address: str) -> None:
    """A request to the model m, whose inputs are ids."""
    url = f"http://{address}/v2/models/m"
    with urllib.request.urlopen(url) as answer:
        names = [one["name"] for one in json.load(answer)["inputs"]]
    ids = {"datatype": "INT64", "shape": [2], "data": [1, 2]}
    body = json.dumps({"inputs": [{"name": n, **ids} for n in names]})
    with urllib.request.urlopen(f"{url}/infer", body.encode()) as answer:
        assert answer.status == 200


@pytest.mark.slow
def test_every_metric_is_exported_and_every_panel_is_drawn(
    tmp_path: Path,
) -> None:
    """By the processes of a job that has trained and saved, and of one that
    serves. The second half needs a Prometheus."""
    pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
    limits = ("--memory-limit", "1GiB", "--checkpoints", str(tmp_path))
    options = ("--metrics-port", "0", *limits)
    page = prometheus.Page(0, "127.0.0.1", Health())
    page.add(prometheus.FeedCollector(Loader(1).counts, lambda: {"t/0": 1}))
    write_certificates(tmp_path / "keys", ["localhost"])
    security = Security.load(ca=tmp_path / "keys" / "ca.pem")
    uses = _core.Gate(security.arguments())
    assert not sum(uses.denied().values())
    page.add(Gate(Api("http://127.0.0.1:1"), "persia", "persia-ps", "me"))
    sends = f"http://127.0.0.1:{page.port}/metrics"
    with (
        contextlib.ExitStack() as stack,
        serving(*options) as server,
        started(
            *("worker", "--servers", server.address),
            *("--port", "0", "--metrics-port", "0"),
        ) as (other, _),
        persia.Store(
            persia.optim.SGD(lr=0.1), servers=server.address
        ) as store,
    ):
        bags = persia.nn.Embedding(None, 4, store=store, name="user")

        def train() -> None:
            for ids in persia.DataLoader(
                [torch.tensor([1, 2])] * 3, bags, staleness=1
            ):
                bags(ids).sum().backward()

        def works(address: str, at: str, expr: str) -> bool:
            """Whether it has series, while both jobs have work."""
            train()
            ask_model(address)
            return series(at, expr) > 0

        train()
        store.save(str(tmp_path / "root"))
        model = torch.nn.Sequential(bags, torch.nn.Linear(4, 1))
        root, example = tmp_path / "m", torch.tensor([1, 2])
        persia.export(model, root, example=example)
        serves, address = stack.enter_context(
            started(
                *("model", str(root), "--port", "0"),
                *("--metrics-port", "0"),
            )
        )
        ask_model(address)
        port = prometheus.export(store, 0)
        found = metrics(server.metrics)
        written = found["persia_snapshot_timestamp_seconds"]
        assert written > 1.7e9
        assert 0 < found["persia_snapshot_duration_seconds"] < 60
        trained = f"http://127.0.0.1:{port}/metrics"
        waited = "persia_lookahead_waited_seconds_total/0"
        assert 0 < metrics(trained)[waited] < 60
        pages = [server.metrics, other, trained, sends, serves]
        known = set().union(*map(names, pages))
        for where, expr in expressions():
            wanted = set(re.findall(r"\b(?:persia|process)_\w+", expr))
            assert wanted or "up{" in expr, where
            assert wanted <= known, (where, wanted - known)
        if shutil.which("prometheus") is None:
            pytest.skip("no prometheus: no expression was evaluated")
        with watching(pages, tmp_path) as at:
            for panels in observability.DASHBOARDS.values():
                for panel in panels:
                    for expr, _ in panel.series:
                        wait_until(lambda e=expr: works(address, at, e), 60)
            for name in "serving_requests", "lookahead_batches", "pushes":
                rate = f"rate(persia_{name}_total[1m]) > 0"
                wait_until(lambda e=rate: works(address, at, e), 60)
            assert not series(at, 'ALERTS{alertstate="firing"}')
            drawn = draw.draw_all(f"http://{at}", 60, tmp_path / "drawn")
        boards = observability.DASHBOARDS.values()
        assert len(drawn) == sum(map(len, boards)) and all(drawn.values())
        for path in drawn:
            assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool (prometheus)")
def test_alerts_fire_and_are_silent(tmp_path: Path) -> None:
    assert PROMTOOL is not None

    def case(
        series: dict[str, str], at: str, firing: str | None
    ) -> dict[str, object]:
        expected = [{"labels": f'{{alertname="{firing}"}}', "value": 1}]
        return {
            "interval": "1m",
            "input_series": [
                {"series": name, "values": values}
                for name, values in series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": "count by (alertname) "
                    '(ALERTS{alertstate="firing"})',
                    "eval_time": at,
                    "exp_samples": expected if firing else [],
                }
            ],
        }

    late = {"PersiaSnapshotOld": "240m"}
    assert list(FIRES) == [alert.name for alert in observability.ALERTS]
    cases = [
        case(series, late.get(name, "90m"), name)
        for name, series in FIRES.items()
    ]
    cases += [case(SILENT, "240m", None), case(SILENT | OFF, "240m", None)]
    rules = observability.HERE / "rules.yaml"
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(rules)], "tests": cases}))
    for words in (
        ["check", "rules", str(rules)],
        ["test", "rules", str(file)],
    ):
        done = subprocess.run(
            [PROMTOOL, *words], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool (prometheus)")
def test_every_expression_is_one(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rules = [
        {"record": f"panel:{i}", "expr": expr}
        for i, (_, expr) in enumerate(expressions())
    ]
    file = tmp_path / "rules.yaml"
    group = {"name": "all", "rules": rules}
    file.write_text(json.dumps({"groups": [group]}))
    done = subprocess.run(
        [PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
