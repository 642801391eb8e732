"""Requests that are none: over HTTP and gRPC each is an error with the same
name, and after it a good one gets the same bits as before."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import fs

import persia
from persia import _core
from persia.serving.config import ModelConfig
from persia.serving.process import serving
from tests.serving import models
from tests.serving.asking import (
    Both,
    Tensors,
    message_of,
    several,
    tensor,
    triton,
)
from tests.serving.test_bucket import copy as upload
from tests.serving.test_server import body_of, raw

pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_core.GRPC == "none", reason="built without gRPC"),
]

#: Candidates of a request, and what is more than that.
LIMIT, MANY = 1000, 10**6


@pytest.fixture(scope="module")
def exports(
    place: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Tensors]]:
    """Models that take columns, one id a feature, and lists of ids: their
    roots, and a good request of each."""
    torch.manual_seed(3)
    root = tmp_path_factory.mktemp("bad")
    for name, lists in (("one", False), ("lists", True)):
        model = models.CLICKS["dlrm"](models.bags())
        models.train(model, lambda lists=lists: models.batch(16, lists))
        example = models.batch(3, lists)
        persia.export(model, root / name / "out", example=example)
    one = [tensor("dense", "FP32", [2, 3], [0.5] * 6)]
    one += [tensor(key, "INT64", [2], [1, 2]) for key in models.KEYS]
    columns: Tensors = body_of(raw(place, 2))["inputs"]
    return {
        "columns": (place / "out", columns),
        "one": (root / "one" / "out", one),
        "lists": (root / "lists" / "out", several()),
    }


@pytest.fixture(params=["folder", "bucket"])
def both(
    request: pytest.FixtureRequest,
    exports: dict[str, tuple[Path, Tensors]],
    tmp_path: Path,
) -> Iterator[Both]:
    roots = {name: str(root) for name, (root, _) in exports.items()}
    if request.param == "bucket":
        files: fs.FileSystem = request.getfixturevalue("bucket")
        uri: Callable[[str], str] = request.getfixturevalue("uri")
        for name, (root, _) in exports.items():
            upload(root.parent, files, name)
            roots[name] = uri(name)
    config = ModelConfig(
        port=0,
        grpc_port=0,
        threads=1,
        poll=0,
        request_samples=LIMIT,
        timeout=120,
        cache=tmp_path / "cache",
    )
    paths = tuple(f"{name}={root}" for name, root in roots.items())
    goods = {name: good for name, (_, good) in exports.items()}
    with serving(config, paths) as one:
        found = Both(one, goods)
        yield found
        found.close()


def named(tensors: Tensors, end: str) -> dict[str, Any]:
    """The last tensor whose name ends so."""
    return [one for one in tensors if one["name"].endswith(end)][-1]


def of_last(**more: Any) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors[-1].update(more)


#: What is wrong, by the errors that it may be: each is done to a good request
#: of each model.
WRONG: list[tuple[Callable[[Tensors], Any], set[str]]] = [
    (
        lambda t: t.append(tensor("x", "INT64", [2], [1, 2])),
        {"InvalidArgument"},
    ),
    (of_last(name="x"), {"InvalidArgument", "MissingFeature"}),
    (lambda t: t.pop(0), {"MissingFeature"}),
    (lambda t: t.append(t[0]), {"ProtocolError"}),
    (lambda t: t.clear(), {"ProtocolError"}),
    (of_last(datatype="FP31", data=[1.0, 2.0]), {"DtypeError"}),
    (of_last(datatype=""), {"ProtocolError", "DtypeError"}),
    (of_last(name=""), {"ProtocolError"}),
    (of_last(name="x" * 300), {"ProtocolError"}),
    (of_last(shape=[5]), {"ShapeError"}),
    (of_last(shape=[]), {"ShapeError"}),
    (of_last(shape=[-1]), {"ShapeError"}),
    (of_last(shape=[1] * 9), {"ShapeError"}),
    (of_last(shape=[2**40, 2**40]), {"LimitReached"}),
    (of_last(shape=[2**62, 4]), {"LimitReached"}),
    (of_last(shape=[2**63 - 1]), {"LimitReached"}),
    (of_last(shape=[0], data=[]), {"ShapeError", "OffsetsError"}),
    (
        of_last(shape=[2, 2], datatype="INT64", data=[1] * 4),
        {"ShapeError", "DtypeError"},
    ),
    (
        of_last(shape=[3], datatype="INT64", data=[1] * 3),
        {"ShapeError", "DtypeError", "OffsetsError"},
    ),
]


def one_of_many(tensors: Tensors) -> None:
    """One candidate is malformed beside 299 that are not: a training would
    leave it out."""
    for each in tensors:
        each.update(shape=[300], data=each["data"][:1] * 300)
    ages = named(tensors, "age")
    ages.update(datatype="BYTES", data=["1"] * 150 + ["a"] + ["1"] * 149)


#: The same, of one model.
WRONG_OF: list[tuple[str, Callable[[Tensors], Any], set[str]]] = [
    ("one", of_last(datatype="FP32", data=[1.0, 2.0]), {"DtypeError"}),
    ("one", of_last(datatype="BYTES", data=["1", "2"]), {"DtypeError"}),
    ("one", of_last(datatype="BOOL", data=[True, False]), {"DtypeError"}),
    (
        "one",
        lambda t: t[0].update(shape=[2, 2], data=[1.0] * 4),
        {"ShapeError"},
    ),
    ("one", lambda t: t[0].update(datatype="FP64"), {"DtypeError"}),
    ("lists", of_last(data=[1, 1]), {"OffsetsError"}),
    ("lists", of_last(data=[-1, 4]), {"OffsetsError"}),
    ("lists", of_last(data=[2**62, 2**62]), {"OffsetsError"}),
    ("lists", of_last(datatype="FP32", data=[1.0, 2.0]), {"DtypeError"}),
    (
        "columns",
        lambda t: t.append(tensor("tags.lengths", "INT32", [2], [3, 3])),
        {"OffsetsError"},
    ),
    (
        "columns",
        lambda t: t.append(tensor("tags.lengths", "INT32", [2], [-1, 3])),
        {"OffsetsError"},
    ),
    (
        "columns",
        lambda t: named(t, "age").update(datatype="BYTES", data=["a", "b"]),
        {"MalformedData"},
    ),
    ("columns", one_of_many, {"MalformedData"}),
]


def test_each_error_has_a_name_and_leaves_the_answers(both: Both) -> None:
    every = [(m, wrong, names) for wrong, names in WRONG for m in both.goods]
    others = []
    for model, wrong, names in [*every, *WRONG_OF]:
        tensors = copy.deepcopy(both.goods[model])
        wrong(tensors)
        body = json.dumps({"inputs": tensors}).encode()
        over_http, _ = both.over_http(model, body)
        over_grpc, _ = both.over_grpc(message_of(model, tensors))
        if over_http != over_grpc or over_http not in names:
            others.append((model, tensors, over_http, over_grpc, names))
        both.check(model)
    assert not others


def many(model: str, good: Tensors) -> Tensors:
    """A request of a million candidates."""
    found = copy.deepcopy(good)
    for one in found:
        each = len(one["data"]) // one["shape"][0]
        one["shape"][0] = MANY
        one["data"] = one["data"][:each] * MANY
    return found


def test_a_million_candidates_are_too_many(both: Both) -> None:
    """As bytes: the messages have the sizes that they say."""
    kinds = {"INT64": np.int64, "FP32": np.float32}
    tensors = many("one", both.goods["one"])
    message = triton.service_pb2.ModelInferRequest(model_name="one")
    parts, entries = [], []
    for one in tensors:
        part = np.array(one["data"], kinds[one["datatype"]]).tobytes()
        parts.append(part)
        message.inputs.add(
            **{k: one[k] for k in ("name", "datatype", "shape")}
        )
        message.raw_input_contents.append(part)
        entries.append(
            {k: v for k, v in one.items() if k != "data"}
            | {"parameters": {"binary_data_size": len(part)}}
        )
    text = json.dumps({"inputs": entries}).encode()
    body = b"".join([text, *parts])
    assert both.over_http("one", body, len(text))[0] == "LimitReached"
    assert both.over_grpc(message)[0] == "LimitReached"
    both.check("one")


def test_bytes_beside_values_are_refused(both: Both) -> None:
    """Each protocol has its own way to say both."""
    good = both.goods["one"]
    mixed = copy.deepcopy(good)
    mixed[-1]["parameters"] = {"binary_data_size": 16}
    text = json.dumps({"inputs": mixed}).encode()
    name, _ = both.over_http("one", text + bytes(16), len(text))
    assert name == "ProtocolError"
    message = message_of("one", good)
    message.raw_input_contents.append(bytes(16))
    assert both.over_grpc(message)[0] == "ProtocolError"
    message.raw_input_contents.extend([bytes(16)] * (len(good) - 1))
    assert both.over_grpc(message)[0] == "ProtocolError"
    # Texts of 4 GiB, by their length.
    columns = copy.deepcopy(both.goods["columns"])
    long = b"\xff\xff\xff\xff" * 2
    named(columns, "user").pop("data")
    named(columns, "user")["parameters"] = {"binary_data_size": len(long)}
    text = json.dumps({"inputs": columns}).encode()
    name, _ = both.over_http("columns", text + long, len(text))
    assert name == "ShapeError"
    both.check("one")
    both.check("columns")


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    head = len(data).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + data


def test_half_bodies_end_with_their_connection(both: Both) -> None:
    good = json.dumps({"inputs": both.goods["one"]}).encode()
    head = "POST /v2/models/one/infer HTTP/1.1\r\nHost: x\r\nContent-Length: "
    for _ in range(3):
        with socket.create_connection(both.http_address, 60) as to:
            to.sendall(f"{head}{len(good)}\r\n\r\n".encode() + good[:-9])
    message = message_of("one", both.goods["one"]).SerializeToString()
    host, _, port = both.grpc_address.rpartition(":")
    fields = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
            (b":authority", b"x"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
    )
    half = b"\0" + struct.pack(">I", len(message)) + message[:-9]
    for _ in range(3):
        with socket.create_connection((host, int(port)), 60) as to:
            to.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            to.sendall(frame(4, 0, 0, b"") + frame(1, 4, 1, fields))
            to.sendall(frame(0, 0, 1, half))
            assert to.recv(100)
        both.check("one")


def test_half_heads_end(
    exports: dict[str, tuple[Path, Tensors]],
) -> None:
    """A connection without a whole head is closed, the first request of it or
    a later one; one whose request is answered is not."""
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
    config = ModelConfig(port=0, threads=1, poll=0, timeout=0.2)
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(
            serving(config, (f"one={exports['one'][0]}",))
        )
        host, _, port = one.address.rpartition(":")
        for sent in (b"", live[:9], live, live + b"\r\n" + live):
            to = stack.enter_context(
                socket.create_connection((host, int(port)), 60)
            )
            to.sendall(sent)
            found = b""
            while got := to.recv(1000):
                found += got
            assert found.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n")


def altered(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, put in or left out."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(found))
        new = bytes(
            rng.choice([rng.randrange(256), *b'0123456789-{}[]":,.e'])
            for _ in range(rng.randrange(3))
        )
        found[at : at + rng.randrange(3)] = new
    return bytes(found)


@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 20))],
)
@pytest.mark.parametrize("both", ["folder"], indirect=True)
def test_any_bytes_are_answered_or_refused(both: Both, seed: int) -> None:
    rng = random.Random(seed)
    for i in range(300):
        model = rng.choice(sorted(both.goods))
        tensors = both.goods[model]
        body = json.dumps({"inputs": tensors}).encode()
        both.over_http(model, altered(body, rng))
        message = message_of(model, tensors).SerializeToString()
        both.over_grpc(altered(message, rng))
        if i % 20 == 19:
            both.check(model)
