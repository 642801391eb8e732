"""The bodies of the Open Inference Protocol, against the stock client's own
code, and what is malformed."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import _core, errors
from persia.serving.protocol import arrays_of, encode
from persia.serving.protocol import decode as parse

KINDS = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}


def decode(body: bytes, header: int | None) -> Any:
    """The request, and its arrays by name: as the server reads both."""
    found = parse(body, header)
    request = _core.InferRequest("m", "", found.inputs, None)
    return found, arrays_of(request.tensors())


def array_of(kind: str, shape: list[int], seed: int) -> Any:
    rng = np.random.default_rng(seed)
    n = int(np.prod(shape))
    if kind == "BYTES":
        texts = ["é" * int(k) for k in rng.integers(0, 5, n)]
        return np.array([t.encode() for t in texts], object).reshape(shape)
    raw = rng.integers(0, 256, n * 8, np.uint8)
    if kind == "BOOL":
        return (raw[:n] > 127).reshape(shape)
    found = raw.view(np.int64)[:n].astype(KINDS[kind], copy=True)
    if kind.startswith("FP"):
        found = (raw[:n].astype(np.float64) / 7).astype(KINDS[kind])
    return found.reshape(shape)


def inputs_of(arrays: dict[str, tuple[str, Any]], binary: bool) -> list[Any]:
    client = pytest.importorskip(
        "tritonclient.http", reason="tritonclient[http] is not installed"
    )
    found = []
    for name, (kind, array) in arrays.items():
        one = client.InferInput(name, list(array.shape), kind)
        one.set_data_from_numpy(array, binary_data=binary)
        found.append(one)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*KINDS, "BYTES"]),
            st.lists(st.integers(1, 5), min_size=1, max_size=3),
            st.integers(0, 1000),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_what_the_stock_client_sends_is_read(
    tensors: list[Any], binary: bool
) -> None:
    utils = pytest.importorskip(
        "tritonclient.http._utils", reason="tritonclient is not installed"
    )
    arrays = {
        f"t{i}": (kind, array_of(kind, shape, seed))
        for i, (kind, shape, seed) in enumerate(tensors)
        if binary or kind != "FP16"  # the client sends it as bytes alone
    }
    if not arrays:
        return
    body, header = utils._get_inference_request(
        inputs=inputs_of(arrays, binary),
        request_id="7",
        outputs=None,
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout=None,
        custom_parameters=None,
    )
    found, inputs = decode(bytes(body), header)
    assert found.id == "7" and found.binary_default
    for name, (_, array) in arrays.items():
        assert inputs[name].shape == array.shape
        assert inputs[name].tolist() == array.tolist()


@pytest.mark.parametrize("binary", [False, True])
def test_what_is_answered_is_read_by_the_stock_client(binary: bool) -> None:
    client = pytest.importorskip(
        "tritonclient.http", reason="tritonclient[http] is not installed"
    )
    request, _ = decode(
        json.dumps(
            {
                "id": "x",
                "inputs": [one("a", [1], "INT64", [1])],
                "parameters": {"binary_data_output": binary},
            }
        ).encode(),
        None,
    )
    arrays = {
        name: array_of(name, [2, 3], 5) for name in KINDS if name != "FP16"
    }
    body, header = encode(request, "m", "v-1", arrays)
    assert (header is not None) == binary
    found = client.InferResult.from_response_body(body, header_length=header)
    assert found.get_response()["id"] == "x"
    for name, array in arrays.items():
        assert np.array_equal(found.as_numpy(name), array)


def test_integers_keep_all_their_bits() -> None:
    values = [2**64 - 1, 2**63, 2**53 + 1]
    body = json.dumps({"inputs": [one("a", [3], "UINT64", values)]}).encode()
    assert decode(body, None)[1]["a"].tolist() == values


def one(name: str, shape: Any, kind: str, data: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": kind, "data": data}


def sized(shape: Any, kind: str, size: Any) -> dict[str, Any]:
    return {
        "name": "a",
        "shape": shape,
        "datatype": kind,
        "parameters": {"binary_data_size": size},
    }


BAD: list[tuple[Any, type[errors.PersiaError]]] = [
    (b"", errors.ProtocolError),
    (b"[1]", errors.ProtocolError),
    (b"{" * 100000, errors.ProtocolError),
    (b"[" * 100000, errors.ProtocolError),
    ({}, errors.ProtocolError),
    ({"inputs": []}, errors.ProtocolError),
    ({"inputs": [1]}, errors.ProtocolError),
    ({"inputs": [one("", [1], "INT64", [1])]}, errors.ProtocolError),
    ({"inputs": [one("a", [1], "INT64", [1])] * 2}, errors.ProtocolError),
    ({"inputs": [one("a", [1], "INT63", [1])]}, errors.DtypeError),
    ({"inputs": [one("a", [1], "INT64", [1.5])]}, errors.DtypeError),
    ({"inputs": [one("a", [1], "INT64", [True])]}, errors.DtypeError),
    ({"inputs": [one("a", [1], "INT64", [2**63])]}, errors.DtypeError),
    ({"inputs": [one("a", [1], "UINT8", [-1])]}, errors.DtypeError),
    ({"inputs": [one("a", [1], "FP32", ["1"])]}, errors.DtypeError),
    ({"inputs": [one("a", [1], "BYTES", [1])]}, errors.DtypeError),
    ({"inputs": [one("a", [2], "INT64", [1])]}, errors.ShapeError),
    ({"inputs": [one("a", [1], "INT64", [1, 2])]}, errors.ShapeError),
    ({"inputs": [one("a", [-1], "INT64", [1])]}, errors.ShapeError),
    ({"inputs": [one("a", [], "INT64", 1)]}, errors.ShapeError),
    ({"inputs": [one("a", 1, "INT64", [1])]}, errors.ShapeError),
    ({"inputs": [one("a", [1.0], "INT64", [1])]}, errors.ShapeError),
    ({"inputs": [one("a", [1] * 9, "INT64", [1])]}, errors.ShapeError),
    ({"inputs": [one("a", [2**40, 2**40], "INT64", [])]}, errors.LimitReached),
    ({"inputs": [one("a", [2**63, 0], "INT64", [])]}, errors.LimitReached),
    (
        {
            "inputs": [
                {
                    **one("a", [1], "INT64", [1]),
                    "parameters": {"binary_data_size": 8},
                }
            ]
        },
        errors.ProtocolError,
    ),
    ({"inputs": [sized([1], "INT64", 8)]}, errors.ProtocolError),
    ({"inputs": [sized([1], "INT64", -1)]}, errors.ProtocolError),
    ({"inputs": [sized([1], "INT64", "8")]}, errors.ProtocolError),
    ({"inputs": [one("a", [1], "INT64", [1])], "id": 5}, errors.ProtocolError),
    (
        {"inputs": [one("a", [1], "INT64", [1])], "outputs": 5},
        errors.ProtocolError,
    ),
]


@pytest.mark.parametrize(("body", "error"), BAD)
def test_malformed_bodies_are_refused(body: Any, error: Any) -> None:
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    with pytest.raises(error):
        decode(body, None)


@pytest.mark.parametrize(
    ("shape", "kind", "data"),
    [
        ([1], "INT64", b"1234567"),
        ([1], "INT64", b"123456789"),
        ([1], "BYTES", b"\xff\xff\xff\xff"),
        ([2], "BYTES", b"\0\0\0\0"),
        ([1], "BYTES", b"\0\0\0\0x"),
        ([1000], "BYTES", b"\0\0\0\0"),
    ],
)
def test_bytes_that_are_no_tensor_are_refused(
    shape: Any, kind: str, data: bytes
) -> None:
    text = json.dumps({"inputs": [sized(shape, kind, len(data))]}).encode()
    with pytest.raises(errors.ShapeError):
        decode(text + data, len(text))
    for header in (-1, len(text) + len(data) + 1):
        with pytest.raises(errors.ProtocolError):
            decode(text + data, header)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(-5, 250) | st.none())
def test_any_bytes_are_decoded_or_refused(
    body: bytes, header: int | None
) -> None:
    with contextlib.suppress(errors.PersiaError):
        decode(body, header)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("inputs", "name", "shape", "datatype", "data"),
                    *("parameters", "outputs", "id", "binary_data_size"),
                ]
            ),
            inner | st.sampled_from(["INT64", "BYTES", "FP32"]),
            max_size=6,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_any_json_is_decoded_or_refused(document: Any) -> None:
    for body in (document, {"inputs": [document]}):
        with contextlib.suppress(errors.PersiaError):
            decode(json.dumps(body).encode(), None)
