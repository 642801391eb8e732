"""What stock clients can ask beyond inference, over HTTP and gRPC: it is done,
or refused by name. An option that is ignored would give another answer than
the client believes."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import persia
from persia import _core
from persia.serving.config import ModelConfig
from persia.serving.process import Serving, serving
from tests.serving.test_server import KINDS, body_of, raw

pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
pytest.importorskip("tritonclient", reason="tritonclient is not installed")
to_dict = pytest.importorskip("google.protobuf.json_format").MessageToDict
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_core.GRPC == "none", reason="built without gRPC"),
]


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Serving]:
    config = ModelConfig(port=0, grpc_port=0, threads=1, poll=0)
    with serving(config, (f"clicks={place / 'out'}",)) as one:
        yield one


@pytest.fixture(params=["http", "grpc"])
def kind(request: pytest.FixtureRequest) -> Any:
    """The module of tritonclient."""
    return pytest.importorskip(f"tritonclient.{request.param}")


@pytest.fixture
def client(kind: Any, server: Serving) -> Iterator[Any]:
    is_http = kind.__name__.endswith("http")
    at = server.address if is_http else server.grpc_address
    with kind.InferenceServerClient(at) as one:
        yield one


def inputs_of(kind: Any, place: Path, samples: int = 3) -> list[Any]:
    found = []
    for name, values in raw(place, samples).items():
        one = kind.InferInput(name, [samples], KINDS[name])
        texts = [str(v).encode() for v in values]
        array = np.array(texts, object) if KINDS[name] == "BYTES" else values
        one.set_data_from_numpy(np.asarray(array))
        found.append(one)
    return found


INVALID = "400", "INVALID_ARGUMENT"


def refused(call: Callable[[], Any]) -> str:
    """The status that a call ends with."""
    utils = pytest.importorskip("tritonclient.utils")
    with pytest.raises(utils.InferenceServerException) as found:
        call()
    return str(found.value.status()).removeprefix("StatusCode.")


def test_shared_memory_and_classes_are_refused(
    kind: Any, client: Any, place: Path
) -> None:
    good = inputs_of(kind, place)
    want = client.infer("clicks", good).as_numpy("score")
    register = client.register_system_shared_memory
    assert refused(lambda: register("region", "/region", 64)) in (
        *("404", "UNIMPLEMENTED"),
    )
    lent = inputs_of(kind, place)
    lent[0].set_shared_memory("region", 64)
    memory = kind.InferRequestedOutput("score")
    memory.set_shared_memory("region", 64)
    classes = kind.InferRequestedOutput("score", class_count=3)
    for inputs, outputs in (
        (lent, None),
        (good, [memory]),
        (good, [classes]),
    ):
        call = functools.partial(client.infer, outputs=outputs)
        assert refused(functools.partial(call, "clicks", inputs)) in INVALID
    found = client.infer("clicks", good).as_numpy("score")
    assert np.array_equal(found, want)


def document(answer: Any) -> dict[str, Any]:
    """As HTTP answers it; gRPC writes large numbers as texts."""
    found: dict[str, Any] = answer
    if not isinstance(answer, dict):
        found = to_dict(answer, preserving_proto_field_name=True)
    return found


def test_programs_that_measure_learn_inputs_and_times(
    kind: Any, client: Any, place: Path
) -> None:
    """Triton's perf_analyzer asks for both."""
    config = document(client.get_model_config("clicks"))
    config = config.get("config", config)
    about = document(client.get_model_metadata("clicks"))
    for ours, theirs in ("input", "inputs"), ("output", "outputs"):
        want = [
            (
                one["name"],
                "TYPE_" + one["datatype"].replace("BYTES", "STRING"),
                [int(n) for n in one["shape"]],
            )
            for one in about[theirs]
        ]
        assert want == [
            (one["name"], one["data_type"], [int(n) for n in one["dims"]])
            for one in config[ours]
        ]

    def statistics() -> dict[str, tuple[int, int]]:
        answer = client.get_inference_statistics("clicks")
        (one,) = document(answer)["model_stats"]
        assert one["version"] == "v-000002"
        found = {
            name: (int(of.get("count", 0)), int(of.get("ns", 0)))
            for name, of in one["inference_stats"].items()
        }
        assert found["success"][0] == int(one.get("inference_count", 0))
        batches = int(one.get("execution_count", 0))
        assert batches <= found["success"][0] + found["fail"][0]
        return found

    before = statistics()
    for _ in range(3):
        client.infer("clicks", inputs_of(kind, place))
    assert (
        refused(lambda: client.infer("clicks", inputs_of(kind, place)[:-1]))
        in INVALID
    )
    ask = functools.partial(client.infer, "clicks", inputs_of(kind, place))
    wrong = [kind.InferRequestedOutput("none")]
    assert refused(functools.partial(ask, outputs=wrong)) in INVALID
    after = statistics()
    assert after["success"][0] == before["success"][0] + 3
    assert after["fail"][0] == before["fail"][0] + 2
    for name in after:
        pairs = zip(after[name], before[name], strict=True)
        count, ns = (x - y for x, y in pairs)
        assert count >= (1 if name == "fail" else 3), name
        assert ns > 0
    total = sum(after[k][1] for k in ("queue", "compute_input"))
    assert total <= after["success"][1]
    none = functools.partial(client.get_inference_statistics, "none")
    assert refused(none) in ("404", "NOT_FOUND")


def test_a_timeout_is_the_same_over_both(
    kind: Any, client: Any, place: Path
) -> None:
    good = inputs_of(kind, place)
    infer = functools.partial(client.infer, "clicks", good)
    late = "504", "DEADLINE_EXCEEDED"
    assert refused(functools.partial(infer, timeout=0)) in late
    infer(timeout=60_000_000, priority=1)


def test_compressed_requests_are_refused(
    kind: Any, client: Any, place: Path
) -> None:
    option = "request_compression_algorithm"
    if kind.__name__.endswith("grpc"):
        option = "compression_algorithm"
    infer = functools.partial(client.infer, "clicks", inputs_of(kind, place))
    zipped = functools.partial(infer, **{option: "gzip"})
    assert refused(zipped) in ("400", "UNIMPLEMENTED")
    infer()


def test_the_repository_answers(
    kind: Any, place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "out", tmp_path / "m")
    config = ModelConfig(port=0, grpc_port=0, threads=1, poll=0)
    is_http = kind.__name__.endswith("http")
    with serving(config, (str(tmp_path / "m"),)) as one:
        at = one.address if is_http else one.grpc_address
        with kind.InferenceServerClient(at) as client:
            text = json.dumps({"max_batch_size": 8})
            for more in (
                {"config": text},
                {"config": text, "files": {"file:1/model.pt": b"x"}},
            ):
                load = functools.partial(client.load_model, "m", **more)
                assert refused(load) in INVALID
            client.load_model("m")
            client.unload_model("m")
            assert not client.is_model_ready("m")
            client.load_model("m")
            assert client.is_model_ready("m")
            index = client.get_model_repository_index()
            names = index if is_http else index.models
            assert len(names) == 2


def test_the_index_of_what_is_ready(server: Serving) -> None:
    """No client of Python can ask for it; the protocol has it."""
    http = pytest.importorskip("tritonclient.http")
    triton = pytest.importorskip("tritonclient.grpc")
    grpc = pytest.importorskip("grpc")
    with http.InferenceServerClient(server.address) as one:
        answer = one._post(
            "v2/repository/index", '{"ready": true}', None, None
        )
        (entry,) = json.loads(answer.read())
    assert (entry["version"], entry["state"]) == ("v-000002", "READY")
    stub = triton.service_pb2_grpc.GRPCInferenceServiceStub
    asked = triton.service_pb2.RepositoryIndexRequest(ready=True)
    with grpc.insecure_channel(server.grpc_address) as channel:
        (entry,) = stub(channel).RepositoryIndex(asked).models
    assert (entry.version, entry.state) == ("v-000002", "READY")


def test_statistics_and_configuration(server: Serving, place: Path) -> None:
    http = pytest.importorskip("tritonclient.http")
    with http.InferenceServerClient(server.address) as client:
        client.infer("clicks", inputs_of(http, place))
        (found,) = client.get_inference_statistics("clicks")["model_stats"]
        assert found["version"] == "v-000002" and found["ids"] > 0
        about = client.get_model_config("clicks")
        kinds = {one["name"]: one["data_type"] for one in about["input"]}
        assert kinds["user"] == "TYPE_STRING" and kinds["age"] == "TYPE_FP32"


def test_curl_gets_scores_and_errors(server: Serving, place: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    columns = raw(place, 2)
    inputs = [
        {"name": n, "shape": [2], "datatype": KINDS[n], "data": values}
        for n, values in columns.items()
    ]
    want = persia.load_model(place / "out").predict(columns).tolist()
    for body, status in ((json.dumps({"inputs": inputs}), 200), ("{", 400)):
        done = subprocess.run(
            [
                *("curl", "-sS", "-w", "\n%{http_code}", "-d", "@-"),
                f"http://{server.address}/v2/models/clicks/infer",
            ],
            input=body,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        text, code = done.stdout.rsplit("\n", 1)
        answer = json.loads(text)
        assert int(code) == status
        if status == 200:
            found = answer["outputs"][0]["data"]
            assert np.allclose(found, want, atol=1e-6)
        else:
            assert isinstance(answer["error"], str)


@pytest.mark.long
def test_kserves_client_gets_scores(server: Serving, place: Path) -> None:
    """It needs other versions than we do: an environment of its own."""
    python = os.environ.get("PERSIA_TEST_KSERVE", "")
    if not python:
        pytest.skip("set PERSIA_TEST_KSERVE to a Python that has kserve")
    columns = raw(place, 3)
    want = persia.load_model(place / "out").predict(columns).tolist()
    script = str(Path(__file__).with_name("kserve_client.py"))
    done = subprocess.run(
        [python, script, server.address, str(server.grpc_address)],
        input=json.dumps(body_of(columns)["inputs"]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 4
    assert all(np.allclose(found, want, atol=1e-6) for found in answers)
