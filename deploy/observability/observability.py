"""Makes the alert rules and the dashboards of this folder of the lists below.

    python deploy/observability/observability.py

All processes of Persia are scraped as the job "persia". Dashboards are for
Grafana; it asks for the Prometheus that they read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: The page with a section for each alert.
RUNBOOKS = "docs/howto/alerts.md"

# ---- alerts ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Alert:
    """A rule.

    Attributes:
        name: also its section of the page.
        expr: of Prometheus; each series that it has fires.
        wait: how long it must have them.
        text: for the operator.
        page: someone must act now.
    """

    name: str
    expr: str
    wait: str
    text: str
    page: bool = False


ALERTS = (
    Alert(
        "PersiaDown",
        'up{job="persia"} == 0',
        "2m",
        "{{ $labels.instance }} does not answer.",
        page=True,
    ),
    Alert(
        "PersiaRestarts",
        'changes(process_start_time_seconds{job="persia"}[30m]) > 3',
        "1m",
        "{{ $labels.instance }} was started again {{ $value }} times in 30 "
        "minutes.",
        page=True,
    ),
    Alert(
        "PersiaRecovers",
        "persia_recovers == 1",
        "15m",
        "{{ $labels.instance }} reads its log, and clients wait.",
        page=True,
    ),
    Alert(
        "PersiaMemoryHigh",
        "persia_memory_used_bytes / (persia_memory_limit_bytes > 0) > 0.85",
        "5m",
        "{{ $labels.instance }} has used {{ $value | humanizePercentage }} of "
        "its memory limit.",
    ),
    Alert(
        "PersiaMemoryFills",
        "predict_linear(persia_memory_used_bytes[30m], 7200) "
        "> (persia_memory_limit_bytes > 0)",
        "15m",
        "{{ $labels.instance }} reaches its memory limit within two hours.",
        page=True,
    ),
    Alert(
        "PersiaUpdatesLost",
        "increase(persia_updates_lost_total[10m]) > 0 "
        "or increase(persia_embedding_worker_lost_total[10m]) > 0 "
        "or increase(persia_feed_lost_total[10m]) > 0",
        "1m",
        "{{ $labels.instance }} knows of {{ $value }} updates that a server "
        "has lost.",
        page=True,
    ),
    Alert(
        "PersiaLogStopped",
        "persia_log_failed > 0 or increase(persia_log_refused_total[10m]) > 0",
        "1m",
        "The log of {{ $labels.instance }} takes no records.",
        page=True,
    ),
    Alert(
        "PersiaSnapshotOld",
        "time() - (persia_snapshot_timestamp_seconds > 0) > 10800",
        "5m",
        "{{ $labels.instance }} wrote its rows "
        "{{ $value | humanizeDuration }} ago.",
    ),
    Alert(
        "PersiaCallsSlow",
        "histogram_quantile(0.99, sum by (instance, method, le) "
        '(rate(persia_call_seconds_bucket{role="server",'
        'method=~"Pull|Push"}[10m]))) > 5',
        "15m",
        "One {{ $labels.method }} in a hundred takes {{ $value }} s at "
        "{{ $labels.instance }}.",
    ),
    Alert(
        "PersiaBatchesFailed",
        "increase(persia_embedding_worker_failed_total[10m]) > 0",
        "1m",
        "{{ $labels.instance }} ended {{ $value }} batches without an update.",
    ),
    Alert(
        "PersiaBatchesStuck",
        "persia_embedding_worker_oldest_seconds > 900",
        "5m",
        "A batch is at {{ $labels.instance }} for "
        "{{ $value | humanizeDuration }}.",
    ),
    Alert(
        "PersiaLoadersGone",
        "persia_embedding_worker_loaders_gone > 0",
        "5m",
        "{{ $labels.instance }} hears nothing of {{ $value }} data loaders.",
    ),
    Alert(
        "PersiaNonfinite",
        "increase(persia_table_nonfinite_total[10m]) > 0",
        "1m",
        "Table {{ $labels.table }}: {{ $value }} row gradients were NaN or "
        "infinite.",
    ),
    Alert(
        "PersiaMalformed",
        "increase(persia_feed_malformed_total[10m]) > 0",
        "1m",
        "{{ $labels.instance }} left out {{ $value }} messages of Kafka.",
    ),
    Alert(
        "PersiaFeedLag",
        "deriv(persia_feed_lag[30m]) > 0",
        "30m",
        "The lag of {{ $labels.partition }} grows.",
    ),
    Alert(
        "PersiaDenied",
        "sum by (instance, reason) (increase(persia_denied_total[10m])) > 10",
        "1m",
        "{{ $labels.instance }} denied {{ $value }} calls "
        "({{ $labels.reason }}).",
    ),
    Alert(
        "PersiaCertificateEnds",
        "persia_certificate_not_after_seconds - time() < 14 * 86400",
        "5m",
        "{{ $labels.file }} of {{ $labels.instance }} ends in "
        "{{ $value | humanizeDuration }}.",
    ),
    Alert(
        "PersiaRenewalFailed",
        'increase(persia_security_renewals_total{outcome="failed"}[1h]) > 0',
        "5m",
        "{{ $labels.instance }} found certificates or tokens that it cannot "
        "use, and keeps those from before.",
    ),
    Alert(
        "PersiaRequestsFail",
        "sum by (instance, model) (rate(persia_serving_requests_total"
        '{outcome!="ok",model!=""}[10m])) > 0.05 * sum by (instance, model) '
        '(rate(persia_serving_requests_total{model!=""}[10m]))',
        "5m",
        "{{ $labels.instance }} answers more than one request in twenty to "
        "{{ $labels.model }} with an error.",
        page=True,
    ),
    Alert(
        "PersiaModelOld",
        "persia_serving_lag_seconds > 900",
        "10m",
        "{{ $labels.model }} at {{ $labels.instance }} is "
        "{{ $value | humanizeDuration }} behind its training.",
    ),
    Alert(
        "PersiaConnectionsRefused",
        "increase(persia_connections_refused_total[10m]) > 0",
        "1m",
        "{{ $labels.instance }} closed {{ $value }} connections for their "
        "limit.",
    ),
    Alert(
        "PersiaGateBlocked",
        "persia_gate_blocked == 1",
        "15m",
        "The servers cannot be changed: see the message of the ScaleGate.",
    ),
    Alert(
        "PersiaGateIdle",
        "max by (job) (persia_gate_acts) == 0",
        "10m",
        "No gate acts: the number of servers follows no load.",
    ),
)


def anchor(name: str) -> str:
    """Of the section of an alert."""
    return name.lower()


def rules(runbooks: str = RUNBOOKS) -> str:
    """The file of rules, YAML."""
    out = [
        "# Made by observability.py.",
        "groups:",
        "  - name: persia",
        "    rules:",
    ]
    for alert in ALERTS:
        severity = "page" if alert.page else "ticket"
        out += [
            f"      - alert: {alert.name}",
            "        expr: >-",
            *textwrap.wrap(
                alert.expr,
                width=78,
                initial_indent=" " * 10,
                subsequent_indent=" " * 10,
                break_long_words=False,
                break_on_hyphens=False,
            ),
            f"        for: {alert.wait}",
            f"        labels: {{severity: {severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(alert.text)}",
            f"          runbook_url: {runbooks}#{anchor(alert.name)}",
        ]
    return "\n".join(out) + "\n"


# ---- dashboards ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Panel:
    """A chart of one or more expressions, each with the legend of its series.

    Attributes:
        unit: as Grafana names it: short, s, bytes, Bps, ops, percentunit.
    """

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}[5m]))"


def _quantile(q: float, metric: str, by: str) -> str:
    return f"histogram_quantile({q}, {_rate(metric, f'{by}, le')})"


_CALLS = 'persia_call_seconds_bucket{{role="{}"}}'
_SERVER, _WORKER = _CALLS.format("server"), _CALLS.format("embedding-worker")


def _busy(metric: str) -> Panel:
    """Processors of the processes that have a metric."""
    return Panel(
        "Processors in use",
        "short",
        (
            (
                'rate(process_cpu_seconds_total{job="persia"}[5m]) '
                f"and on (instance) {metric}",
                "{{instance}}",
            ),
        ),
    )


SERVERS = (
    Panel(
        "Memory",
        "bytes",
        (
            ("persia_memory_used_bytes", "{{instance}}"),
            ("persia_memory_limit_bytes > 0", "{{instance}} limit"),
        ),
    ),
    Panel(
        "Rows",
        "short",
        (("sum by (table) (persia_table_rows)", "{{table}}"),),
    ),
    Panel(
        "Calls per second",
        "ops",
        (
            (
                _rate(
                    'persia_call_seconds_count{role="server"}',
                    "instance, method",
                ),
                "{{instance}} {{method}}",
            ),
        ),
    ),
    Panel(
        "Seconds of a call: median",
        "s",
        ((_quantile(0.5, _SERVER, "method"), "{{method}}"),),
    ),
    Panel(
        "Seconds of a call: 99 %",
        "s",
        ((_quantile(0.99, _SERVER, "method"), "{{method}}"),),
    ),
    Panel(
        "Bytes per second",
        "Bps",
        (
            (
                _rate(
                    'persia_call_bytes_total{role="server"}',
                    "instance, direction",
                ),
                "{{instance}} {{direction}}",
            ),
        ),
    ),
    Panel(
        "Updates per second",
        "ops",
        (("rate(persia_updates_total[5m])", "{{instance}}"),),
    ),
    Panel(
        "Waiting, failed and repeated",
        "short",
        (
            ("persia_parked", "{{instance}} waits"),
            ("rate(persia_failed_total[5m])", "{{instance}} failed/s"),
            ("rate(persia_duplicates_total[5m])", "{{instance}} repeated/s"),
        ),
    ),
    Panel(
        "Ids looked up, and without a row, per second",
        "ops",
        (
            (_rate("persia_table_pulled_total", "table"), "{{table}}"),
            (
                _rate("persia_table_missed_total", "table"),
                "{{table}} without a row",
            ),
        ),
    ),
    Panel(
        "Rows made and evicted per second",
        "ops",
        (
            (_rate("persia_table_created_total", "table"), "{{table}} made"),
            (
                _rate("persia_table_evicted_total", "table"),
                "{{table}} evicted",
            ),
        ),
    ),
    Panel(
        "Age of the rows on disk",
        "s",
        (
            (
                "time() - (persia_snapshot_timestamp_seconds > 0)",
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        "Seconds of writing them",
        "s",
        (("persia_snapshot_duration_seconds", "{{instance}}"),),
    ),
    Panel("Log", "bytes", (("persia_log_bytes", "{{instance}}"),)),
    Panel("Connections", "short", (("persia_connections", "{{instance}}"),)),
    Panel(
        "Calls denied per second",
        "ops",
        (
            (
                "sum by (instance, reason) (rate(persia_denied_total[5m]))",
                "{{instance}} {{reason}}",
            ),
        ),
    ),
    _busy("persia_uptime_seconds"),
    Panel(
        "Versions",
        "short",
        (("sum by (version) (persia_build_info)", "{{version}}"),),
    ),
)

WORKERS = (
    Panel(
        "Samples sent per second",
        "ops",
        (("rate(persia_feed_samples_total[5m])", "{{instance}}"),),
    ),
    Panel(
        "Batches trained per second",
        "ops",
        (
            (
                "rate(persia_embedding_worker_trained_total[5m])",
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        "Batches at embedding workers",
        "short",
        (
            (
                "sum by (state) (persia_embedding_worker_batches)",
                "{{state}}",
            ),
        ),
    ),
    Panel(
        "Bytes of batches",
        "bytes",
        (
            ("persia_embedding_worker_bytes", "{{instance}}"),
            ("persia_embedding_worker_bytes_limit", "{{instance}} limit"),
        ),
    ),
    Panel(
        "Share of the time in which trainers or loaders wait for the other",
        "percentunit",
        (
            (
                "rate(persia_embedding_worker_starved_seconds_total[5m])",
                "{{instance}} trainers",
            ),
            (
                "rate(persia_embedding_worker_blocked_seconds_total[5m])",
                "{{instance}} loaders",
            ),
        ),
    ),
    Panel(
        "Share of the time in which a loader sends",
        "percentunit",
        (("rate(persia_feed_sending_seconds_total[5m])", "{{instance}}"),),
    ),
    Panel(
        "Seconds of a call at embedding workers: 99 %",
        "s",
        ((_quantile(0.99, _WORKER, "method"), "{{method}}"),),
    ),
    Panel(
        "Age of the oldest batch",
        "s",
        (("persia_embedding_worker_oldest_seconds", "{{instance}}"),),
    ),
    Panel(
        "Ranks and data loaders",
        "short",
        (
            ("persia_embedding_worker_ranks", "{{instance}} ranks"),
            ("persia_embedding_worker_streams", "{{instance}} loaders"),
            ("persia_embedding_worker_loaders_gone", "{{instance}} gone"),
        ),
    ),
    Panel(
        "Messages of Kafka to send",
        "short",
        (("persia_feed_lag", "{{partition}}"),),
    ),
    Panel(
        "Lost, failed and offered again",
        "short",
        (
            ("persia_feed_lost_total", "updates lost, {{instance}}"),
            (
                "persia_embedding_worker_failed_total",
                "batches failed, {{instance}}",
            ),
            (
                "persia_embedding_worker_again_total",
                "offered again, {{instance}}",
            ),
            ("persia_feed_malformed_total", "malformed, {{instance}}"),
        ),
    ),
    _busy("persia_embedding_worker_bytes"),
)

TRAINERS = (
    Panel(
        "Batches per second",
        "ops",
        (("rate(persia_lookahead_batches_total[5m])", "rank {{rank}}"),),
    ),
    Panel(
        "Share of the time in which a rank waits for rows",
        "percentunit",
        (
            (
                "rate(persia_lookahead_waited_seconds_total[5m])",
                "rank {{rank}}",
            ),
        ),
    ),
    Panel(
        "Staleness: mean",
        "short",
        (
            (
                "rate(persia_staleness_sum[5m]) "
                "/ rate(persia_staleness_count[5m])",
                "rank {{rank}}",
            ),
        ),
    ),
    Panel(
        "Staleness: 99 %",
        "short",
        (
            (
                _quantile(0.99, "persia_staleness_bucket", "rank"),
                "rank {{rank}}",
            ),
        ),
    ),
    Panel(
        "Forwards that were not looked up ahead, per second",
        "ops",
        (
            (
                "rate(persia_lookahead_not_prefetched_total[5m])",
                "rank {{rank}}",
            ),
        ),
    ),
    Panel(
        "Updates lost",
        "short",
        (("persia_updates_lost_total", "rank {{rank}}"),),
    ),
    Panel(
        "Memory",
        "bytes",
        (
            (
                'process_resident_memory_bytes{job="persia"} '
                "and on (instance) persia_lookahead_batches_total",
                "{{instance}}",
            ),
        ),
    ),
    _busy("persia_lookahead_batches_total"),
)

_PHASES = "persia_serving_seconds_bucket"
SERVING = (
    Panel(
        "Requests per second",
        "ops",
        (
            (
                _rate("persia_serving_requests_total", "model, outcome"),
                "{{model}} {{outcome}}",
            ),
        ),
    ),
    Panel(
        "Share of requests that failed",
        "percentunit",
        (
            (
                "1 - "
                + _rate('persia_serving_requests_total{outcome="ok"}', "model")
                + " / "
                + _rate("persia_serving_requests_total", "model"),
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Seconds of a phase: median",
        "s",
        ((_quantile(0.5, _PHASES, "phase"), "{{phase}}"),),
    ),
    Panel(
        "Seconds of a phase: 99 %",
        "s",
        ((_quantile(0.99, _PHASES, "phase"), "{{phase}}"),),
    ),
    Panel(
        "Samples computed per second, and together",
        "short",
        (
            (
                "rate(persia_serving_batch_samples_sum[5m])",
                "{{instance}} per second",
            ),
            (
                "rate(persia_serving_batch_samples_sum[5m]) "
                "/ rate(persia_serving_batch_samples_count[5m])",
                "{{instance}} together",
            ),
        ),
    ),
    Panel(
        "Samples that wait",
        "short",
        (("persia_serving_queue_samples", "{{instance}}"),),
    ),
    Panel(
        "Age of the model: seconds behind its training",
        "s",
        (("persia_serving_lag_seconds", "{{instance}} {{model}}"),),
    ),
    Panel(
        "Packets applied to the version in use",
        "short",
        (("persia_serving_packets", "{{instance}} {{model}}"),),
    ),
    Panel(
        "Requests denied per second",
        "ops",
        (
            (
                "sum by (instance, reason) (rate(persia_denied_total[5m]) "
                "and on (instance) persia_serving_queue_samples)",
                "{{instance}} {{reason}}",
            ),
        ),
    ),
    _busy("persia_serving_queue_samples"),
)

SCALING = (
    Panel(
        "Load: 1 is the right size",
        "short",
        (("avg by (role) (persia_load)", "{{role}}"),),
    ),
    Panel(
        "Processes",
        "short",
        (("count by (role) (persia_load)", "{{role}}"),),
    ),
    Panel(
        "Load of each process",
        "short",
        (("persia_load", "{{instance}} {{role}}"),),
    ),
    Panel(
        "Shards of a server",
        "short",
        (("count by (instance) (persia_shard)", "{{instance}}"),),
    ),
    Panel(
        "Rows of the fullest shard by the mean",
        "short",
        (
            (
                "max by (namespace) (persia_shard_rows) "
                "/ avg by (namespace) (persia_shard_rows)",
                "{{namespace}}",
            ),
        ),
    ),
    Panel(
        "Growth of the rows, bytes a second",
        "Bps",
        (("persia_memory_growth_bytes", "{{instance}}"),),
    ),
    Panel(
        "Shards that are to move",
        "short",
        (("persia_gate_shards_left", "{{instance}}"),),
    ),
    Panel(
        "The gate: 1 acts, or is blocked",
        "short",
        (
            ("persia_gate_acts", "{{instance}} acts"),
            ("persia_gate_blocked", "{{instance}} is blocked"),
        ),
    ),
)

#: The folder of dashboards has one of each.
DASHBOARDS = {
    "servers": SERVERS,
    "workers": WORKERS,
    "trainers": TRAINERS,
    "serving": SERVING,
    "scaling": SCALING,
}


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _source(),
        "gridPos": {
            "x": number % 2 * 12,
            "y": number // 2 * 8,
            "w": 12,
            "h": 8,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _source(),
                "expr": expr,
                "legendFormat": legend,
            }
            for i, (expr, legend) in enumerate(panel.series)
        ],
    }


def dashboard(name: str) -> str:
    """One of :data:`DASHBOARDS`, JSON."""
    made = {
        "uid": f"persia-{name}",
        "title": f"Persia: {name}",
        "tags": ["persia"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": [_panel(i, p) for i, p in enumerate(DASHBOARDS[name])],
    }
    return json.dumps(made, indent=1) + "\n"


def made(runbooks: str = RUNBOOKS) -> dict[Path, str]:
    """All files and their texts."""
    found = {HERE / "rules.yaml": rules(runbooks)}
    for name in DASHBOARDS:
        found[HERE / "dashboards" / f"{name}.json"] = dashboard(name)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runbooks", default=RUNBOOKS, help="address of the page of alerts"
    )
    for path, text in made(parser.parse_args().runbooks).items():
        path.write_text(text, encoding="utf-8")
