"""``persia serve model`` over gRPC: stock clients get what HTTP gives them;
messages, limits, bad requests, the end."""

from __future__ import annotations

import contextlib
import functools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia import _core, errors
from persia.distributed import certs
from persia.serving import calls
from persia.serving.config import ModelConfig
from persia.serving.measures import Measures
from persia.serving.process import Serving, serving
from persia.serving.protocol import arrays_of, output_of
from tests.serving import models
from tests.serving.test_protocol import KINDS as TYPES
from tests.serving.test_protocol import array_of
from tests.serving.test_server import KINDS, raw

pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
triton = pytest.importorskip(
    "tritonclient.grpc", reason="tritonclient[grpc] is not installed"
)
grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_core.GRPC == "none", reason="built without gRPC"),
]
SERVICE = "inference.GRPCInferenceService"


def inputs_of(columns: dict[str, list[Any]]) -> list[Any]:
    found = []
    for name, values in columns.items():
        kind = KINDS[name]
        texts = [str(v).encode() for v in values]
        array = np.array(texts, object) if kind == "BYTES" else values
        one = triton.InferInput(name, [len(values)], kind)
        one.set_data_from_numpy(np.asarray(array))
        found.append(one)
    return found


def dense_input(name: str, kind: str, array: Any) -> Any:
    one = triton.InferInput(name, list(array.shape), kind)
    one.set_data_from_numpy(array)
    return one


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that takes one id of each feature, and its export."""
    torch.manual_seed(3)
    model = models.CLICKS["dlrm"](models.bags())
    models.train(model, lambda: models.batch(16, several=False))
    root = tmp_path_factory.mktemp("single") / "own"
    persia.export(model, root, example=models.batch(3, several=False))
    return model.eval(), root


@pytest.fixture(scope="module")
def server(place: Path, single: Any) -> Iterator[Serving]:
    config = ModelConfig(
        port=0, grpc_port=0, threads=2, request_samples=500, poll=0
    )
    paths = (f"clicks={place / 'out'}", str(single[1]))
    with serving(config, paths) as one:
        yield one


@pytest.fixture
def client(server: Serving) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc_address) as one:
        yield one


def code_of(call: Any) -> str:
    """The status that a call ends with."""
    with pytest.raises(triton.InferenceServerException) as found:
        call()
    return str(found.value.status()).removeprefix("StatusCode.")


def test_the_stock_client_gets_what_the_model_gives(
    client: Any, place: Path
) -> None:
    columns = raw(place, 20)
    want = persia.load_model(place / "out").predict(columns).numpy()
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("clicks")
    assert client.is_model_ready("clicks", "v-000001")
    assert not client.is_model_ready("clicks", "v-000009")
    assert client.get_server_metadata().name == "persia"
    about = client.get_model_metadata("clicks", "v-000001")
    assert list(about.versions) == ["v-000001", "v-000002"]
    kinds = {one.name: one.datatype for one in about.inputs}
    assert kinds["user"] == "BYTES" and kinds["age"] == "FP32"
    assert list(about.outputs[0].shape) == [-1]
    found = client.infer("clicks", inputs_of(columns), request_id="é")
    assert found.get_response().id == "é"
    assert found.get_response().model_version == "v-000002"
    assert np.allclose(found.as_numpy("score"), want, atol=1e-6)
    outputs = [triton.InferRequestedOutput("score")]
    found = client.infer(
        "clicks", inputs_of(columns), "v-000001", outputs=outputs
    )
    assert found.get_response().model_version == "v-000001"


def test_a_user_beside_candidates_and_many_at_once(
    client: Any, single: Any
) -> None:
    """Whatever the batches are, each request has its own answer."""
    model, _ = single
    wants, answers, ended = [], {}, threading.Semaphore(0)
    for i in range(60):
        n = i % 7 + 1
        dense, ids = models.batch(n, several=False)
        parts = {key: ids[key][0] for key in ids}
        parts["a"] = parts["a"][:1]
        every = [
            x.expand(n).contiguous() if len(x) < n else x
            for x in parts.values()
        ]
        whole = persia.JaggedBatch(list(parts), torch.cat(every))
        with torch.no_grad():
            wants.append(model(dense, whole).sigmoid().numpy())
        inputs = [dense_input("dense", "FP32", dense.numpy())]
        for key, x in parts.items():
            kind = ["INT64", "UINT64", "INT32"][i % 3]
            array = x.numpy().astype(kind.lower())
            inputs.append(dense_input(key, kind, array))

        def done(result: Any, error: Any, i: int = i) -> None:
            answers[i] = result if error is None else error
            ended.release()

        client.async_infer("own", inputs, done)
    for _ in wants:
        assert ended.acquire(timeout=60)
    for i, want in enumerate(wants):
        (name,) = [one.name for one in answers[i].get_response().outputs]
        found = answers[i].as_numpy(name)
        assert np.allclose(found, want.reshape(found.shape), atol=1e-5) or (
            np.allclose(1 / (1 + np.exp(-found)), want, atol=1e-5)
        )


def test_bad_requests_are_named_errors(
    client: Any, server: Serving, place: Path
) -> None:
    good = inputs_of(raw(place, 2))
    many = {k: v * 300 for k, v in raw(place, 2).items()}
    typed = triton.service_pb2.ModelInferRequest(model_name="clicks")
    tensor = typed.inputs.add(name="age", datatype="FP32", shape=[2])
    tensor.contents.fp32_contents.extend([1.0])
    stub = triton.service_pb2_grpc.GRPCInferenceServiceStub
    none = [triton.InferRequestedOutput("none")]
    for call, code in (
        (lambda: client.infer("none", good), "NOT_FOUND"),
        (lambda: client.infer("clicks", good, "v-000009"), "NOT_FOUND"),
        (lambda: client.infer("clicks", good[:-1]), "INVALID_ARGUMENT"),
        (
            lambda: client.infer("clicks", good, outputs=none),
            "INVALID_ARGUMENT",
        ),
        (
            lambda: client.infer("clicks", inputs_of(many)),
            "RESOURCE_EXHAUSTED",
        ),
        (lambda: client.get_model_metadata("none"), "NOT_FOUND"),
        (lambda: client.load_model("none"), "NOT_FOUND"),
        (lambda: client.get_trace_settings("clicks"), "UNIMPLEMENTED"),
    ):
        assert code_of(call) == code
    with grpc.insecure_channel(server.grpc_address) as to:
        with pytest.raises(grpc.RpcError) as found:
            stub(to).ModelInfer(typed)
        assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = dict(found.value.trailing_metadata())["persia-error"]
        assert error == "ShapeError"
        for method in ("ModelInfer", "ModelMetadata", "RepositoryModelLoad"):
            send = to.unary_unary(f"/{SERVICE}/{method}")
            with pytest.raises(grpc.RpcError) as found:
                send(b"\x0a\xff", timeout=60)
            assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.infer("clicks", good).as_numpy("score").shape == (2,)


def test_versions_roll_back(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "out", tmp_path / "m")
    config = ModelConfig(port=0, grpc_port=0, threads=1, poll=0)
    inputs = inputs_of(raw(place, 3))
    with (
        serving(config, (str(tmp_path / "m"),)) as one,
        triton.InferenceServerClient(one.grpc_address) as client,
    ):
        index = client.get_model_repository_index().models
        assert [e.state for e in index] == ["AVAILABLE", "READY"]
        request = triton.service_pb2.RepositoryModelLoadRequest(model_name="m")
        request.parameters["version"].string_param = "v-000001"
        client._client_stub.RepositoryModelLoad(request)
        found = client.infer("m", inputs).get_response()
        assert found.model_version == "v-000001"
        client.unload_model("m")
        assert client.is_server_live() and not client.is_server_ready()
        infer = functools.partial(client.infer, "m", inputs)
        assert code_of(infer) == "UNAVAILABLE"
        client.load_model("m")
        found = client.infer("m", inputs).get_response()
        assert found.model_version == "v-000002"


def test_a_token_is_asked_for(place: Path) -> None:
    config = ModelConfig(
        port=0, grpc_port=0, threads=1, token="secret", poll=0
    )
    inputs = inputs_of(raw(place, 1))
    with (
        serving(config, (f"clicks={place / 'out'}",)) as one,
        triton.InferenceServerClient(one.grpc_address) as client,
    ):
        infer = functools.partial(client.infer, "clicks", inputs)
        assert code_of(infer) == "UNAUTHENTICATED"
        wrong = {"authorization": "Bearer wrong"}
        call = functools.partial(infer, headers=wrong)
        assert code_of(call) == "UNAUTHENTICATED"
        good = {"authorization": "Bearer secret"}
        client.infer("clicks", inputs, headers=good)


def test_tls_and_a_token(place: Path, tmp_path: Path) -> None:
    """A stock client with the authority's certificate gets an answer; one
    without, or without the token, gets none."""
    certs.write_certificates(tmp_path, ["localhost"])
    config = ModelConfig(
        port=0,
        grpc_port=0,
        threads=1,
        token="secret",
        tls_cert=tmp_path / "server.pem",
        tls_key=tmp_path / "server-key.pem",
        poll=0,
    )
    inputs = inputs_of(raw(place, 2))
    good = {"authorization": "Bearer secret"}
    with serving(config, (f"clicks={place / 'out'}",)) as one:
        assert one.grpc_address is not None
        at = one.grpc_address.replace("127.0.0.1", "localhost")
        ca = str(tmp_path / "ca.pem")
        with triton.InferenceServerClient(
            at, ssl=True, root_certificates=ca
        ) as client:
            found = client.infer("clicks", inputs, headers=good)
            assert found.as_numpy("score").shape == (2,)
            infer = functools.partial(client.infer, "clicks", inputs)
            assert code_of(infer) == "UNAUTHENTICATED"
        with triton.InferenceServerClient(at) as plain:
            infer = functools.partial(plain.infer, "clicks", inputs)
            assert code_of(infer) == "UNAVAILABLE"
        certs.write_certificates(tmp_path / "other", ["localhost"])
        ca = str(tmp_path / "other" / "ca.pem")
        with triton.InferenceServerClient(
            at, ssl=True, root_certificates=ca
        ) as foreign:
            call = functools.partial(
                foreign.infer, "clicks", inputs, headers=good
            )
            assert code_of(call) == "UNAVAILABLE"


def test_the_end_answers_what_is_in_hand(single: Any) -> None:
    """Requests that a thread computes are answered; new ones are refused."""
    config = ModelConfig(port=0, grpc_port=0, threads=1, poll=0)
    begun, go = threading.Event(), threading.Event()
    answers: list[Any] = []
    dense, ids = models.batch(2, several=False)
    inputs = [dense_input("dense", "FP32", dense.numpy())]
    inputs += [dense_input(k, "INT64", ids[k][0].numpy()) for k in ids]
    one = Serving(config, (str(single[1]),))
    one.start()
    model = one.repository.find("own", "")
    run = model.run

    def slow(tensors: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return run(tensors)

    model.run = slow  # type: ignore[method-assign]
    with triton.InferenceServerClient(one.grpc_address) as client:
        done = threading.Event()

        def note(result: Any, error: Any) -> None:
            answers.append(error or result)
            done.set()

        client.async_infer("own", inputs, note)
        assert begun.wait(60)
        closes = threading.Thread(target=one.close)
        closes.start()
        go.set()
        assert done.wait(60)
        closes.join(60)
    assert answers[0].get_response().model_name == "own"


@contextlib.contextmanager
def listening() -> Iterator[tuple[Any, str]]:
    queue = _core.InferQueue(1 << 20, 60.0)
    port = queue.listen(
        address="127.0.0.1:0",
        threads=1,
        calls=16,
        connections=16,
        message_limit=1 << 20,
        shared=False,
        security={},
    )
    try:
        yield queue, f"127.0.0.1:{port}"
    finally:
        queue.stop(1.0)
        queue.close()


@pytest.fixture(scope="module")
def bare() -> Iterator[tuple[Any, str]]:
    with listening() as found:
        yield found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*TYPES, "BYTES"]),
            st.lists(st.integers(1, 5), min_size=1, max_size=3),
            st.integers(0, 1000),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_tensors_arrive_as_they_were_sent(
    bare: tuple[Any, str], tensors: list[Any], typed: bool
) -> None:
    queue, address = bare
    arrays = {
        f"t{i}": (kind, array_of(kind, shape, seed))
        for i, (kind, shape, seed) in enumerate(tensors)
        if not typed or kind != "FP16"  # which has no typed form
    }
    if not arrays:
        return
    request = triton.service_pb2.ModelInferRequest(model_name="m", id="7")
    for name, (kind, array) in arrays.items():
        one = dense_input(name, kind, array)
        tensor = request.inputs.add()
        tensor.CopyFrom(one._get_tensor())
        if not typed:
            request.raw_input_contents.append(one._get_content())
            continue
        field = {"BYTES": "bytes", "BOOL": "bool"}.get(kind)
        field = field or {
            **dict.fromkeys(("INT8", "INT16", "INT32"), "int"),
            **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint"),
        }.get(kind, kind.lower())
        values = getattr(tensor.contents, f"{field}_contents")
        values.extend(array.reshape(-1).tolist())
    stub = triton.service_pb2_grpc.GRPCInferenceServiceStub
    with grpc.insecure_channel(address) as channel:
        answer = stub(channel).ModelInfer.future(request, timeout=60)
        (found,) = queue.take(1)
        assert found.model == "m" and found.outputs is None
        got = arrays_of(found.tensors())
        for name, (_, array) in arrays.items():
            assert got[name].shape == array.shape
            assert got[name].tolist() == array.tolist()
        back = [output_of(n, x) for n, x in got.items() if x.dtype != object]
        found.reply("v-1", back)
        result = triton.InferResult(answer.result(60))
        for name, *_, array in back:
            assert np.array_equal(result.as_numpy(name), array)


def test_a_deadline_that_has_passed_is_an_error(bare: Any) -> None:
    queue, address = bare
    request = triton.service_pb2.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="a", datatype="INT64", shape=[1])
    tensor.contents.int64_contents.append(1)
    stub = triton.service_pb2_grpc.GRPCInferenceServiceStub
    with grpc.insecure_channel(address) as channel:
        answer = stub(channel).ModelInfer.future(request, timeout=0.2)
        (found,) = queue.take(1)
        with pytest.raises(grpc.RpcError) as error:
            answer.result(60)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        found.fail("DeadlineExceeded", "late")
        with pytest.raises(errors.Closed):
            found.fail("DeadlineExceeded", "twice")


def test_a_request_that_is_dropped_is_answered(bare: Any) -> None:
    queue, address = bare
    request = triton.service_pb2.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="a", datatype="INT64", shape=[1])
    tensor.contents.int64_contents.append(1)
    stub = triton.service_pb2_grpc.GRPCInferenceServiceStub
    with grpc.insecure_channel(address) as channel:
        answer = stub(channel).ModelInfer.future(request, timeout=60)
        queue.take(1)
        with pytest.raises(grpc.RpcError) as error:
            answer.result(60)
        assert error.value.code() is grpc.StatusCode.INTERNAL


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_message_is_read_or_refused(message: bytes) -> None:
    with contextlib.suppress(errors.ProtocolError):
        fields = calls.read(message)
        for number in fields:
            calls.text_of(fields, number)


def test_messages_are_those_of_the_stock_client() -> None:
    pb = triton.service_pb2
    want = pb.ModelMetadataResponse(name="é", versions=["a", "b"])
    want.platform = "p"
    want.inputs.add(name="x", datatype="FP32", shape=[-1, 300])
    about = {
        "name": "é",
        "versions": ["a", "b"],
        "platform": "p",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 300]}],
        "outputs": [],
    }
    found = pb.ModelMetadataResponse.FromString(calls._metadata(about))
    assert found == want
    with pytest.raises(errors.ProtocolError):
        calls.read(b"\x0b")


def test_what_is_refused_on_arrival_is_counted(bare: Any) -> None:
    queue, address = bare
    measures = Measures()
    measures.watch_refused(lambda: queue.refused)
    before = queue.refused.get("ProtocolError", 0)
    with grpc.insecure_channel(address) as channel:
        send = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        with pytest.raises(grpc.RpcError):
            send(b"\xff", timeout=60)
    assert queue.refused["ProtocolError"] == before + 1
    (family,) = (
        f for f in measures.collect() if f.name == "persia_serving_refused"
    )
    found = {s.labels["outcome"]: s.value for s in family.samples}
    assert found["ProtocolError"] == before + 1
