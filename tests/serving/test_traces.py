"""Traces of requests to served models."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs

import persia
from persia import _core
from persia.base import traces
from tests.collector import Collector, Span
from tests.ready import Ready
from tests.serving import models
from tests.serving.conftest import until
from tests.serving.publishing import Chain, Root
from tests.serving.test_server import INFER, ask, body_of, raw
from tests.system.processes import environment

pytest.importorskip("uvicorn", reason="persia[serve] is not installed")

OWN, CALLER = "5" * 32, "7" * 16
SAMPLED = f"00-{OWN}-{CALLER}-01"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (SAMPLED, (int(OWN, 16), int(CALLER, 16))),
        (f" {SAMPLED} ", (int(OWN, 16), int(CALLER, 16))),
        (f"00-{OWN}-{CALLER}-03", (int(OWN, 16), int(CALLER, 16))),
        (f"01-{OWN}-{CALLER}-01-more", (int(OWN, 16), int(CALLER, 16))),
        (f"00-{OWN}-{CALLER}-00", None),
    ],
)
def test_the_caller_decides(
    header: str, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rate is, but without one."""
    assert traces.request_trace(header) is None
    for rate in 1.0, 1e-12:
        monkeypatch.setattr(traces, "_running", [SimpleNamespace(rate=rate)])
        assert traces.request_trace(header) == found


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "x", SAMPLED.upper().replace("5", "A"), SAMPLED[:-1]),
        *(f"{SAMPLED}-more", f"ff{SAMPLED[2:]}", f"00-{'0' * 32}-{CALLER}-01"),
        f"00-{OWN}-{'0' * 16}-01",
    ],
)
def test_else_chance_does(
    header: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_running", [SimpleNamespace(rate=1.0)])
    found = traces.request_trace(header)
    assert found is not None and found[0] and not found[1]
    monkeypatch.setattr(traces, "_running", [SimpleNamespace(rate=0.0)])
    assert traces.request_trace(header) is None


def tree(spans: list[Span]) -> tuple[Span, Counter[str]]:
    """The request, and how many parts of each name it has; lookups are below
    what was computed."""
    (root,) = (one for one in spans if one.name == "persia.request")
    names = {one.id: one.name for one in spans}
    assert len(names) == len(spans)
    for one in spans:
        assert one.service == "persia-serving" and one.began <= one.ended
        if one is root:
            continue
        assert root.began <= one.began and one.ended <= root.ended
        lookup = one.name == "persia.lookup"
        above = "persia.compute" if lookup else "persia.request"
        assert names[one.parent] == above
    parts = Counter(one.name.removeprefix("persia.") for one in spans)
    return root, parts


def inputs_of(loaded: Any, samples: int) -> list[dict[str, Any]]:
    tensors = loaded.form.flatten(models.batch(samples), {})
    return [
        {
            "name": one.name,
            "datatype": one.datatype,
            "shape": list(x.shape),
            "data": x.flatten().tolist(),
        }
        for one, x in zip(loaded.form.inputs, tensors, strict=True)
    ]


@pytest.mark.slow
def test_a_request_is_one_tree(place: Path, tmp_path: Path) -> None:
    """Below its caller, over both protocols."""
    root = tmp_path / "served"
    Chain(Root(str(root), fs.LocalFileSystem()), 2)
    grpc = _core.GRPC[0].isdigit()
    with Collector() as collector:
        process = Ready(
            *("-m", "persia", "serve", "model", f"clicks={place / 'out'}"),
            *(str(root), "--port", "0"),
            *(("--grpc-port", "0") if grpc else ()),
            env=environment(**collector.environment()),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            said: dict[str, str] = {}
            for line in iter(process.stdout.readline, ""):
                head, _, tail = line.strip().rpartition(" ")
                said[head.split()[0]] = tail
                if head.startswith("serving"):
                    break
            address = said["serving"]
            ids = {name: secrets.token_hex(16) for name in ("http", "grpc")}
            body = body_of(raw(place, 5))
            parent = f"00-{ids['http']}-{CALLER}-01"
            status, *_ = ask(address, INFER, body, traceparent=parent)
            assert status == 200
            off = f"00-{OWN}-{CALLER}-00"
            assert ask(address, INFER, body, traceparent=off)[0] == 200
            body["inputs"].pop()
            assert ask(address, INFER, body)[0] == 400
            stats = f"/v2/models/{root.name}/stats"
            until(
                lambda: (
                    ask(address, stats)[1]["model_stats"][0]["packets"] == 2
                )
            )
            one = {"inputs": inputs_of(persia.load_model(root), 3)}
            assert ask(address, f"/v2/models/{root.name}/infer", one)[0] == 200
            if grpc:
                ask_by_grpc(said["gRPC"], place, ids["grpc"])
            process.send_signal(signal.SIGTERM)
            _, messages = process.communicate(timeout=60)
            assert process.returncode == 0, messages
        finally:
            process.kill()
            process.communicate()
        found = collector.traces()
    assert OWN not in found and len(found) == (4 if grpc else 3)
    whole = Counter(["request", "queue", "decode", "compute", "reply"])
    for name in ("http", "grpc") if grpc else ("http",):
        top, parts = tree(found.pop(ids[name]))
        lookups = parts.pop("lookup")
        assert lookups > 0
        assert parts == whole + Counter(["read"] * (name == "http"))
        assert top.parent == CALLER and not top.failed
        about = top.about
        assert about["persia.model"] == "clicks"
        assert about["persia.version"] == "v-000002"
        assert about["persia.samples"] == 5
    rest = [tree(spans)[0] for spans in found.values()]
    failed, fresh = sorted(rest, key=lambda span: not span.failed)
    assert failed.failed and not failed.parent
    assert not fresh.failed and fresh.about["persia.packets"] == 2
    assert re.fullmatch(r"v-\d{6}", fresh.about["persia.version"])


def ask_by_grpc(address: str, place: Path, trace: str) -> None:
    from tests.serving import test_grpc

    columns = raw(place, 5)
    with test_grpc.triton.InferenceServerClient(address) as client:
        client.infer(
            "clicks",
            test_grpc.inputs_of(columns),
            headers={"traceparent": f"00-{trace}-{CALLER}-01"},
        )
