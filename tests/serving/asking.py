"""A server of models, asked over HTTP and gRPC."""

from __future__ import annotations

import http.client
import json
from typing import Any

import numpy as np
import pytest

from persia.serving.process import Serving
from tests.serving import models

triton = pytest.importorskip(
    "tritonclient.grpc", reason="tritonclient[grpc] is not installed"
)
grpc = pytest.importorskip("grpc", reason="grpcio is not installed")

Tensors = list[dict[str, Any]]
CONTENTS = {
    "BOOL": "bool",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint"),
    "INT64": "int64",
    "UINT64": "uint64",
    "FP64": "fp64",
    "BYTES": "bytes",
}


def message_of(model: str, tensors: Tensors) -> Any:
    """The same tensors as a message of gRPC, typed."""
    found = triton.service_pb2.ModelInferRequest(model_name=model)
    for one in tensors:
        tensor = found.inputs.add(name=one["name"], datatype=one["datatype"])
        tensor.shape.extend(one["shape"])
        values = np.asarray(one["data"], object).reshape(-1).tolist()
        field = CONTENTS.get(one["datatype"], "fp32")
        if any(isinstance(v, str) for v in values):
            field, values = "bytes", [str(v).encode() for v in values]
        getattr(tensor.contents, f"{field}_contents").extend(values)
    return found


class Both:
    """A server, asked over both protocols.

    Args:
        one: that is asked.
        goods: tensors by model.
    """

    def __init__(self, one: Serving, goods: dict[str, Tensors]) -> None:
        self.goods = goods
        host, _, port = one.address.rpartition(":")
        self.http_address = host, int(port)
        self.http = http.client.HTTPConnection(host, int(port), timeout=120)
        assert one.grpc_address is not None
        self.grpc_address = one.grpc_address
        self.channel = grpc.insecure_channel(one.grpc_address)
        stub = triton.service_pb2_grpc.GRPCInferenceServiceStub
        self.stub = stub(self.channel)
        self.want = {name: self.answers(name) for name in goods}

    def close(self) -> None:
        self.channel.close()
        self.http.close()

    def over_http(
        self, model: str, body: bytes, header: int | None = None
    ) -> tuple[str, Any]:
        """The name of the error, or "", and the answer."""
        headers = {"content-type": "application/json"}
        if header is not None:
            headers["Inference-Header-Content-Length"] = str(header)
        self.http.request("POST", f"/v2/models/{model}/infer", body, headers)
        answer = self.http.getresponse()
        text = json.loads(answer.read())
        if answer.status == 200:
            return "", text
        assert isinstance(text["error"], str)
        name = answer.headers["persia-error"]
        assert name != "InternalError", text
        return name, text

    def over_grpc(self, message: Any) -> tuple[str, Any]:
        """The same; of a message, or its bytes."""
        call: Any = self.stub.ModelInfer
        if isinstance(message, bytes):
            call = self.channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                response_deserializer=(
                    triton.service_pb2.ModelInferResponse.FromString
                ),
            )
        answer = call.future(message, timeout=120)
        error = answer.exception()
        if error is None:
            return "", answer.result()
        name = dict(error.trailing_metadata())["persia-error"]
        assert name != "InternalError", error
        return name, error

    def answers(self, model: str) -> list[np.ndarray[Any, Any]]:
        """Of the good request, over both."""
        good = self.goods[model]
        name, text = self.over_http(
            model, json.dumps({"inputs": good}).encode()
        )
        assert not name, text
        found = [
            np.asarray(one["data"], np.float32) for one in text["outputs"]
        ]
        name, answer = self.over_grpc(message_of(model, good))
        assert not name, answer
        found += [
            np.frombuffer(one, np.float32)
            for one in answer.raw_output_contents
        ]
        return found

    def check(self, model: str) -> None:
        """A good request gets what it got at first."""
        pairs = zip(self.answers(model), self.want[model], strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def several() -> Tensors:
    """Lists of ids, two or three samples."""
    lists: Tensors = [tensor("dense", "FP32", [2, 3], [0.5] * 6)]
    for key in models.KEYS:
        lists.append(tensor(key, "INT64", [3], [1, 2, 3]))
        lists.append(tensor(f"{key}.lengths", "INT64", [2], [1, 2]))
    return lists


def tensor(name: str, kind: str, shape: Any, data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": shape, "data": data}
