"""``persia serve model`` over HTTP: stock clients get what the model gives;
versions, limits, bad requests, the end."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import persia
from persia import _core, errors
from persia.distributed import tokens
from persia.serving.batcher import Batcher
from persia.serving.config import ModelConfig
from persia.serving.folder import versions_of
from persia.serving.measures import Measures
from persia.serving.process import Serving, serving
from persia.serving.repository import Model, Repository
from persia.serving.web import listen
from tests.ready import python
from tests.serving import models
from tests.serving.conftest import call, lines_of, until

pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
pytestmark = pytest.mark.slow


def ask(
    address: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any, Any]:
    """Status, JSON and headers of an answer."""
    data = (
        body if isinstance(body, bytes | None) else json.dumps(body).encode()
    )
    request = urllib.request.Request(
        f"http://{address}{path}",
        data,
        {k.replace("_", "-"): v for k, v in headers.items()},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


def probe(address: str, path: str) -> bool:
    """What a probe finds."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    finally:
        connection.close()
    assert status in (200, 503)
    return status == 200


@pytest.fixture(scope="module")
def ids_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that takes ids, and its export."""
    torch.manual_seed(2)
    model = models.CLICKS["mmoe"](models.bags())
    models.train(model, lambda: models.batch(16))
    root = tmp_path_factory.mktemp("ids") / "own"
    persia.export(model, root, example=models.batch(3))
    return model.eval(), root


@pytest.fixture(scope="module")
def server(place: Path, ids_model: Any) -> Iterator[Serving]:
    config = ModelConfig(port=0, threads=2, request_samples=500, poll=0)
    paths = (f"clicks={place / 'out'}", str(ids_model[1]))
    with serving(config, paths) as one:
        yield one


def raw(place: Path, n: int) -> dict[str, list[Any]]:
    frame = pd.read_csv(place / "clicks.csv", keep_default_na=False)[:n]
    return {
        name: frame[name].tolist() for name in ("user", "item", "age", "tags")
    }


KINDS = {"user": "BYTES", "item": "INT64", "age": "FP64", "tags": "BYTES"}


def body_of(columns: dict[str, list[Any]], **more: Any) -> dict[str, Any]:
    return {
        "inputs": [
            {
                "name": name,
                "shape": [len(values)],
                "datatype": KINDS[name],
                "data": values,
            }
            for name, values in columns.items()
        ],
        **more,
    }


INFER = "/v2/models/clicks/infer"


def test_json_and_the_stock_client_get_what_the_model_gives(
    server: Serving, place: Path
) -> None:
    client = pytest.importorskip(
        "tritonclient.http", reason="tritonclient[http] is not installed"
    )
    columns = raw(place, 20)
    want = persia.load_model(place / "out").predict(columns).numpy()
    status, answer, _ = ask(server.address, INFER, body_of(columns, id="é"))
    assert status == 200 and answer["id"] == "é"
    assert answer["model_version"] == "v-000002"
    (out,) = answer["outputs"]
    assert out["name"] == "score" and out["shape"] == [20]
    assert np.allclose(out["data"], want, atol=1e-6)
    with client.InferenceServerClient(server.address) as stock:
        assert stock.is_server_live() and stock.is_server_ready()
        assert stock.is_model_ready("clicks")
        about = stock.get_model_metadata("clicks", "v-000001")
        assert about["versions"] == ["v-000001", "v-000002"]
        assert (
            "binary_tensor_data" in stock.get_server_metadata()["extensions"]
        )
        kinds = {one["name"]: one["datatype"] for one in about["inputs"]}
        assert kinds["user"] == "BYTES" and kinds["age"] == "FP32"
        for binary in (True, False):
            inputs = []
            for name, values in columns.items():
                kind = KINDS[name]
                array = np.array(
                    [str(v).encode() for v in values]
                    if kind == "BYTES"
                    else values,
                    object if kind == "BYTES" else None,
                )
                one = client.InferInput(name, [20], kind)
                one.set_data_from_numpy(array, binary_data=binary)
                inputs.append(one)
            found = stock.infer("clicks", inputs, request_id="9")
            assert np.allclose(found.as_numpy("score"), want, atol=1e-6)


def test_ids_and_tasks(server: Serving, ids_model: Any) -> None:
    model, _ = ids_model
    dense, ids = models.batch(7)
    inputs = [
        {
            "name": "dense",
            "shape": [7, models.DENSE],
            "datatype": "FP32",
            "data": dense.tolist(),
        }
    ]
    for key in ids:
        values, lengths = ids[key]
        inputs += [
            {
                "name": key,
                "shape": [len(values)],
                "datatype": "UINT64",  # ids are 64 bits
                "data": [v % 2**64 for v in values.tolist()],
            },
            {
                "name": f"{key}.lengths",
                "shape": [7],
                "datatype": "INT64",
                "data": lengths.tolist(),
            },
        ]
    status, answer, _ = ask(
        server.address, "/v2/models/own/infer", {"inputs": inputs}
    )
    assert status == 200, answer
    with torch.no_grad():
        want = model(dense, ids)
    found = np.array(answer["outputs"][0]["data"]).reshape(want.shape)
    assert np.allclose(found, want.numpy(), atol=1e-5)


def test_one_user_beside_n_candidates(server: Serving, place: Path) -> None:
    columns = raw(place, 9)
    user = {"user": columns["user"][:1], "tags": columns["tags"][3:4]}
    every = columns | {k: v * 9 for k, v in user.items()}
    _, want, _ = ask(server.address, INFER, body_of(every))
    status, answer, _ = ask(server.address, INFER, body_of(columns | user))
    assert status == 200
    assert answer["outputs"] == want["outputs"]
    lists = body_of(columns | {"tags": ["t1", "t2", "t1"]})
    lists["inputs"].append(
        {
            "name": "tags.lengths",
            "shape": [9],
            "datatype": "INT32",
            "data": [0, 1, 0, 0, 2, 0, 0, 0, 0],
        }
    )
    texts = columns | {"tags": ["", "t1", "", "", "t2|t1", "", "", "", ""]}
    _, want, _ = ask(server.address, INFER, body_of(texts))
    status, answer, _ = ask(server.address, INFER, lists)
    assert status == 200, answer
    assert answer["outputs"] == want["outputs"]


def without(name: str, place: Path) -> Any:
    columns = raw(place, 2)
    del columns[name]
    return body_of(columns)


def changed(place: Path, **inputs: Any) -> Any:
    body = body_of(raw(place, 2))
    for one in body["inputs"]:
        one.update(inputs.get(one["name"], {}))
    return body


def test_bad_requests_are_named_errors(server: Serving, place: Path) -> None:
    good = body_of(raw(place, 2))
    many = {k: v * 300 for k, v in raw(place, 2).items()}
    cases: list[tuple[str, Any, int, str]] = [
        (INFER, without("age", place), 400, "MissingFeature"),
        (INFER, changed(place, age={"name": "size"}), 400, "InvalidArgument"),
        (INFER, changed(place, age={"datatype": "FP31"}), 400, "DtypeError"),
        (INFER, changed(place, age={"shape": [3]}), 400, "ShapeError"),
        (
            INFER,
            changed(place, age={"shape": [3], "data": [1, 2, 3]}),
            400,
            "ShapeError",
        ),
        (INFER, changed(place, item={"datatype": "FP32"}), 400, ""),
        (INFER, body_of(many), 429, "LimitReached"),
        (INFER, b"{", 400, "ProtocolError"),
        (INFER, good | {"outputs": [{"name": "x"}]}, 400, "InvalidArgument"),
        (
            INFER,
            good | {"parameters": {"timeout": "x"}},
            400,
            "InvalidArgument",
        ),
        (
            INFER,
            good | {"parameters": {"timeout": 0}},
            504,
            "DeadlineExceeded",
        ),
        ("/v2/models/none/infer", good, 404, "NotFound"),
        ("/v2/models/clicks/versions/v-000009/infer", good, 404, "NotFound"),
        ("/v2/models/clicks/versions/..%2Fv/infer", good, 404, ""),
    ]
    for path, body, status, name in cases:
        got, answer, headers = ask(server.address, path, body)
        if got == 200:  # an integer that is written as a float
            assert not name
            continue
        assert got == status, (path, answer)
        assert isinstance(answer["error"], str)
        if name:
            assert headers["persia-error"] == name
    got, answer, _ = ask(
        server.address, INFER, good, Inference_Header_Content_Length="99999"
    )
    assert got == 400
    assert ask(server.address, INFER, good)[0] == 200


def test_versions_roll_back_and_return(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "out", tmp_path / "m")
    config = ModelConfig(port=0, threads=1, poll=0.05)
    body = body_of(raw(place, 3))
    with serving(config, (str(tmp_path / "m"),)) as one:
        at = one.address

        def version(path: str = "") -> str:
            status, answer, _ = ask(at, f"/v2/models/m{path}/infer", body)
            assert status == 200, answer
            return str(answer["model_version"])

        load = "/v2/repository/models/m/load"
        assert version() == "v-000002"
        assert version("/versions/v-000001") == "v-000001"
        old = {"parameters": {"version": "v-000001"}}
        assert ask(at, load, old)[0] == 200
        assert version() == "v-000001"
        _, index, _ = ask(at, "/v2/repository/index", {})
        assert [e["state"] for e in index] == ["READY", "AVAILABLE"]
        assert ask(at, load, {"parameters": {"version": "v-9"}})[0] == 404
        assert version() == "v-000001"  # the one before answers on
        assert ask(at, load, {})[0] == 200
        assert version() == "v-000002"
        # It follows what the root says.
        versions_of(tmp_path / "m").use("v-000001")
        changed = threading.Event()
        while version() != "v-000001":
            changed.wait(0.02)
        assert ask(at, "/v2/repository/models/m/unload", {})[0] == 200
        assert ask(at, "/v2/health/ready")[0] == 503
        assert ask(at, "/v2/health/live")[0] == 200
        assert ask(at, "/v2/models/m/infer", body)[0] == 503
        assert ask(at, load, {})[0] == 200
        assert ask(at, "/v2/health/ready")[0] == 200


def test_a_model_waits_for_its_first_version(
    place: Path, tmp_path: Path
) -> None:
    root = tmp_path / "m"
    (root / "deltas").mkdir(parents=True)  # a publisher begins
    (root / ".tmp-1").mkdir()
    command = [python(), "-m", "persia", "serve", "model", str(root)]
    command += ["--port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    command += ["--poll", "0.05"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            lines = lines_of(process)
            at = lines[-1].split()[-1]
            page = next(x for x in lines if "/metrics" in x).split()[-1]
            page = page.removeprefix("http://").removesuffix("/metrics")

            def is_ready() -> set[bool]:
                found = {
                    ask(at, path)[0] == 200
                    for path in ("/v2/health/ready", "/v2/models/m/ready")
                }
                return found | {probe(page, "/health/ready")}

            assert is_ready() == {False}
            assert ask(at, "/v2/health/live")[0] == 200
            assert probe(page, "/health/live")
            assert probe(page, "/health/startup")
            body = body_of(raw(place, 3))
            status, _, headers = ask(at, "/v2/models/m/infer", body)
            assert status == 503 and headers["persia-error"] == "Unavailable"
            assert ask(at, "/v2/repository/index", {})[1] == []
            shutil.copytree(place / "out", root, dirs_exist_ok=True)
            until(lambda: is_ready() == {True})
            assert ask(at, "/v2/models/m/infer", body)[0] == 200
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=60)
            assert process.returncode == 0, rest
        finally:
            process.kill()


def test_health_over_grpc_follows_the_models(
    place: Path, tmp_path: Path
) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    root = tmp_path / "m"
    root.mkdir()
    config = ModelConfig(port=0, grpc_port=0, threads=1, poll=0.05)
    with serving(config, (str(root),)) as one:
        assert one.grpc_address is not None
        with grpc.insecure_channel(one.grpc_address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")

            def is_ready() -> bool:
                return bool(check(b"", timeout=60) == b"\x08\x01")

            assert not is_ready()
            shutil.copytree(place / "out", root, dirs_exist_ok=True)
            until(is_ready)
            path = "/v2/repository/models/m/"
            assert ask(one.address, f"{path}unload", {})[0] == 200
            assert not is_ready()
            assert ask(one.address, f"{path}load", {})[0] == 200
            assert is_ready()


@pytest.mark.parametrize("other", ["LATEST", "manifest", "clicks.csv"])
def test_a_folder_of_something_else_is_refused(
    other: str, tmp_path: Path
) -> None:
    """So that a wrong path does not wait for ever."""
    paths = {"m": str(tmp_path)}
    (tmp_path / other).touch()
    with pytest.raises(errors.StorageError):
        Repository(paths, 2, 1.0)
    (tmp_path / other).unlink()
    with pytest.raises(errors.StorageError):  # no one would look again
        Repository(paths, 2, 0)
    with pytest.raises(errors.StorageError):
        Repository({"m": str(tmp_path / "none")}, 2, 1.0)


def test_the_end_waits_for_a_version_that_is_being_loaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread within torch at the interpreter's end aborts the process."""
    shutil.copytree(place / "out", tmp_path / "m")
    loads, goes_on = threading.Event(), threading.Event()

    def follow(model: Model) -> None:
        loads.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(Model, "follow", follow)
    one = Repository({"m": str(tmp_path / "m")}, 1, 0.01)
    assert loads.wait(60)
    ended = threading.Event()
    closes = threading.Thread(target=lambda: (one.close(), ended.set()))
    closes.start()
    assert not ended.wait(0.2)
    goes_on.set()
    assert ended.wait(60)
    closes.join()


def test_a_damaged_version_leaves_the_one_before(
    place: Path, tmp_path: Path
) -> None:
    root = tmp_path / "m"
    shutil.copytree(place / "out", root)
    versions_of(root).use("v-000001")
    config = ModelConfig(port=0, threads=1, poll=0)
    with serving(config, (str(root),)) as one:
        path = root / "v-000002" / "dense.pt2"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        versions_of(root).use("v-000002")
        load = "/v2/repository/models/m/load"
        status, answer, headers = ask(one.address, load, {})
        assert status == 500 and headers["persia-error"] == "CorruptFile"
        body = body_of(raw(place, 3))
        _, answer, _ = ask(one.address, "/v2/models/m/infer", body)
        assert answer["model_version"] == "v-000001"


def test_damage_is_found_while_it_answers(place: Path, tmp_path: Path) -> None:
    """Rows are mapped without being read. Once they are, the version before
    answers, and the damaged one does not again."""
    shutil.copytree(place / "out", tmp_path / "m")
    path = tmp_path / "m" / "v-000002" / "rows-0000.safetensors"
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    config = ModelConfig(port=0, threads=1, poll=0.1)
    body = body_of(raw(place, 1))

    def version(at: str) -> str:
        _, answer, _ = ask(at, "/v2/models/m/infer", body)
        return str(answer["model_version"])

    with serving(config, (str(tmp_path / "m"),)) as one:
        until(lambda: version(one.address) == "v-000001")
        load = "/v2/repository/models/m/load"
        for asked in {}, {"parameters": {"version": "v-000002"}}:
            status, _, headers = ask(one.address, load, asked)
            assert (status, headers["persia-error"]) == (500, "CorruptFile")
        time.sleep(0.3)
        assert version(one.address) == "v-000001"
        call("export", place / "ck", tmp_path / "m")
        until(lambda: version(one.address) == "v-000003")


def test_a_version_that_is_removed_is_not_compared(
    place: Path, tmp_path: Path
) -> None:
    """A training removes old versions beside the comparison."""
    root = tmp_path / "m"
    shutil.copytree(place / "out", root)
    first, second = Model("m", str(root), 2), Model("m", str(root), 2)
    for model in (first, second):
        model.load()
    (root / "v-000002" / "rows-0000.safetensors").unlink()
    with pytest.raises(errors.StorageError):
        first.check_files()
    shutil.rmtree(root / "v-000002")
    second.check_files()
    assert second.current.version == "v-000002"


def test_a_token_is_asked_for(place: Path) -> None:
    config = ModelConfig(port=0, threads=1, token="secret", poll=0)
    with serving(config, (f"clicks={place / 'out'}",)) as one:
        body = body_of(raw(place, 1))
        for given in ({}, {"authorization": "Bearer wrong"}):
            status, _, headers = ask(one.address, INFER, body, **given)
            assert status == 401
            assert headers["persia-error"] == "AccessDenied"
            assert headers["www-authenticate"] == "Bearer"
        good = {"authorization": "Bearer secret"}
        assert ask(one.address, INFER, body, **good)[0] == 200
        assert ask(one.address, "/v2/health/ready")[0] == 200
    with pytest.raises(errors.InvalidArgument):
        ModelConfig(host="0.0.0.0").security()


def test_a_token_for_something_else_is_denied(
    place: Path, tmp_path: Path
) -> None:
    """With another status than one that is not known."""
    file = tmp_path / "tokens"
    reads, asks = (tokens.add(file, r, [r]) for r in ("read", "serve"))
    config = ModelConfig(port=0, threads=1, tokens_file=file, poll=0)
    load = "/v2/repository/models/clicks/load"
    with serving(config, (f"clicks={place / 'out'}",)) as one:
        body = body_of(raw(place, 1))
        for path, token, want in (
            (INFER, "x" * 64, 401),
            (INFER, reads, 403),
            (INFER, asks, 200),
            (load, asks, 403),
        ):
            shown = {"authorization": f"Bearer {token}"}
            sent = body if path == INFER else {}
            status, _, headers = ask(one.address, path, sent, **shown)
            assert status == want
            if want != 200:
                assert headers["persia-error"] == "AccessDenied"
                assert ("www-authenticate" in headers) == (want == 401)


def test_slow_and_half_bodies_end(place: Path) -> None:
    config = ModelConfig(
        port=0, threads=1, timeout=0.3, body_limit="10KiB", poll=0
    )
    with serving(config, (f"clicks={place / 'out'}",)) as one:
        host, port = one.address.split(":")
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: "
        for body, status in ((b"{", b" 504 "), (b"x" * 11000, b" 429 ")):
            with socket.create_connection((host, int(port)), 60) as raw_one:
                raw_one.sendall(f"{head}20000\r\n\r\n".encode() + body)
                answer = raw_one.recv(1000)
                assert status in answer
                closes = b"connection: close" in answer.lower()
                assert closes == (status == b" 504 ")
        with socket.create_connection((host, int(port)), 60) as raw_one:
            raw_one.sendall(f"{head}20000\r\n\r\n".encode() + b"{")
        for _ in range(3):  # it answers others on
            status_of_live, _, _ = ask(one.address, "/v2/health/live")
            assert status_of_live == 200


def request_of(
    model: Any, tensors: Any, answer: Future[Any]
) -> _core.InferRequest:
    inputs = [
        (one.name, one.datatype, list(x.shape), x.numpy())
        for one, x in zip(model.form.inputs, tensors, strict=True)
    ]

    def give(found: Any) -> None:
        if isinstance(found, errors.PersiaError):
            answer.set_exception(found)
        else:
            answer.set_result(found[1])

    give.outputs = None  # type: ignore[attr-defined]
    return _core.InferRequest("m", "", inputs, give)


@pytest.mark.parametrize("several", [False, True])
def test_requests_that_wait_are_computed_together(
    several: bool, tmp_path: Path
) -> None:
    """Whatever the batches are, each request has its own answer."""
    torch.manual_seed(2)
    made = models.CLICKS["mmoe"](models.bags())
    models.train(made, lambda: models.batch(16, several))
    persia.export(made, tmp_path, example=models.batch(3, several))
    model = persia.load_model(tmp_path)
    assert (model.plan is None) == several and model.joins
    measures = Measures(["m"])
    calls = [models.batch(n % 5 + 1, several) for n in range(40)]
    inputs = [model.form.flatten(call, {}) for call in calls]
    want = [model.scores(model.run(tensors)) for tensors in inputs]
    begun, go = threading.Event(), threading.Event()
    first = model.run

    def slow(tensors: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return first(tensors)

    model.run = slow  # type: ignore[method-assign]
    room = 300
    batcher = Batcher(
        lambda name, version: model,
        measures,
        threads=1,
        batch=32,
        queue=room,
        limit=1000,
        timeout=60.0,
    )

    def submit(tensors: Any, timeout: float) -> Future[Any]:
        answer: Future[Any] = Future()
        batcher.queue.put(request_of(model, tensors, answer), timeout)
        return answer

    answers = [submit(inputs[0], 60)]
    assert begun.wait(60)
    late = submit(inputs[1], 0)
    answers += [submit(t, 60) for t in inputs[2:30]]
    refused = 0
    for tensors in inputs * 10:
        try:
            submit(tensors, 60)
        except errors.LimitReached:
            refused += 1
    assert refused and batcher.queue.waiting <= room
    go.set()
    batcher.close()
    with pytest.raises(errors.DeadlineExceeded):
        late.result(60)
    for answer, expected in zip(answers, [want[0], *want[2:30]], strict=True):
        for name, got in answer.result(60).items():
            assert np.allclose(got, expected[name].numpy(), atol=1e-6)
    (family,) = (
        f
        for f in measures.collect()
        if f.name == "persia_serving_batch_samples"
    )
    count = next(s.value for s in family.samples if s.name.endswith("_count"))
    assert count < 30 - 5  # of more requests
    with pytest.raises(errors.Closed):
        submit(inputs[0], 60)


@pytest.mark.parametrize("kind", [models.Ranks, models.Centred])
def test_requests_of_a_model_that_mixes_samples_are_computed_alone(
    kind: Any, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    made = persia.convert(kind(), store=models.store())
    persia.export(made, tmp_path, example=torch.zeros(2).long())
    models.train(made, lambda: (torch.randint(0, 50, (16,)),))
    persia.export(made, tmp_path, example=torch.zeros(2).long())
    for name in "v-000001", "v-000002":
        model = persia.load_model(tmp_path, name)
        inputs = [[torch.randint(0, 50, (n % 5 + 1,))] for n in range(40)]
        want = [model.run(tensors)[0].numpy() for tensors in inputs]
        assert not model.joins
        batcher = Batcher(
            lambda name, version, found=model: found,
            Measures(["m"]),
            threads=1,
            batch=32,
            queue=300,
            limit=1000,
            timeout=60.0,
        )
        answers: list[Future[Any]] = [Future() for _ in inputs]
        for tensors, answer in zip(inputs, answers, strict=True):
            batcher.queue.put(request_of(model, tensors, answer), 60)
        batcher.close()
        for answer, expected in zip(answers, want, strict=True):
            assert np.allclose(answer.result(60)["output"], expected)


def test_a_request_that_fails_fails_alone(
    ids_model: Any, tmp_path: Path
) -> None:
    """One that the model refuses is beside others that it answers."""
    model = persia.load_model(ids_model[1])
    measures = Measures(["m"])
    begun, go = threading.Event(), threading.Event()
    first = model.run

    def slow(tensors: Any) -> Any:
        begun.set()
        assert go.wait(60)
        if any((x == 1234).any() for x in tensors):
            raise RuntimeError("1234")
        return first(tensors)

    model.run = slow  # type: ignore[method-assign]
    batcher = Batcher(
        lambda name, version: model,
        measures,
        threads=1,
        batch=1000,
        queue=1000,
        limit=1000,
        timeout=60.0,
    )
    answers: list[Future[Any]] = []
    for i in range(4):
        tensors = model.form.flatten(models.batch(3), {})
        if i == 2:
            tensors[0] = torch.full_like(tensors[0], 1234)
        answers.append(Future())
        batcher.queue.put(request_of(model, tensors, answers[-1]), 60)
        assert begun.wait(60)
    go.set()
    batcher.close()
    for i, answer in enumerate(answers):
        if i == 2:
            with pytest.raises(errors.InternalError):
                answer.result(60)
        else:
            answer.result(60)


def test_many_clients_at_once(server: Serving, place: Path) -> None:
    columns = raw(place, 64)
    want = persia.load_model(place / "out").predict(columns).tolist()

    def one(i: int) -> None:
        some = slice(i % 50, i % 50 + i % 7 + 1)
        part = {k: v[some] for k, v in columns.items()}
        status, answer, _ = ask(server.address, INFER, body_of(part))
        assert status == 200
        assert np.allclose(answer["outputs"][0]["data"], want[some], atol=1e-6)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(80)))


def test_the_process_drains_and_counts(place: Path) -> None:
    command = [python(), "-m", "persia", "serve", "model"]
    command += [f"clicks={place / 'out'}", "--port", "0"]
    command += ["--metrics-port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            lines = lines_of(process)
            assert lines[-1].startswith("serving 1 model on "), lines
            at = lines[-1].split()[-1]
            metrics = next(one for one in lines if "/metrics" in one)
            body = body_of(raw(place, 3))
            assert ask(at, INFER, body)[0] == 200
            assert ask(at, INFER, {"inputs": []})[0] == 400
            url = metrics.split()[-1]
            with urllib.request.urlopen(url, timeout=60) as page:
                text = page.read().decode()
            found = {
                tuple(sorted(s.labels.items())): s.value
                for family in text_string_to_metric_families(text)
                for s in family.samples
                if s.name == "persia_serving_requests_total"
            }
            assert set(found.values()) == {1.0} and len(found) == 2
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=60)
            assert process.returncode == 0, rest
            assert "all requests were answered" in rest
        finally:
            process.kill()


def test_answers_are_sent_at_once() -> None:
    """asyncio sets TCP_NODELAY where the listening socket names TCP; without
    it the second write of an answer waits for the client's kernel."""
    found = []

    class Look(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            one = transport.get_extra_info("socket")
            level, option = socket.IPPROTO_TCP, socket.TCP_NODELAY
            found.append(one.getsockopt(level, option))
            transport.close()

    async def run() -> None:
        with listen("127.0.0.1", 0) as one:
            server = await asyncio.get_running_loop().create_server(
                Look, sock=one
            )
            async with server:
                reader, writer = await asyncio.open_connection(
                    *one.getsockname()
                )
                await reader.read()
                writer.close()

    asyncio.run(run())
    assert found[0]
