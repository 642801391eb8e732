"""What KServe's client gets, in tests/serving/test_stock_clients.py; runs
where kserve is installed, and imports nothing of ours.

    python kserve_client.py HTTP GRPC < TENSORS
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import (
    InferenceGRPCClient,
    InferenceRESTClient,
    InferInput,
    InferRequest,
    RESTConfig,
)


def request(tensors: list[dict[str, Any]], binary: bool) -> Any:
    inputs = []
    for one in tensors:
        values = one["data"]
        if one["datatype"] == "BYTES":
            values = np.array([str(v).encode() for v in values], object)
        tensor = InferInput(one["name"], one["shape"], one["datatype"])
        tensor.set_data_from_numpy(np.asarray(values), binary_data=binary)
        inputs.append(tensor)
    return InferRequest("clicks", inputs)


async def main(http: str, grpc: str) -> None:
    tensors = json.load(sys.stdin)
    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=1))
    stub = InferenceGRPCClient(grpc)
    at = f"http://{http}"
    assert await rest.is_server_live(at) and await rest.is_server_ready(at)
    assert await rest.is_model_ready(at, "clicks")
    assert await stub.is_server_live() and await stub.is_server_ready()
    assert await stub.is_model_ready("clicks")
    for binary in (False, True):
        asked = request(tensors, binary)
        for answer in (
            await rest.infer(at, asked, model_name="clicks"),
            await stub.infer(asked),
        ):
            (out,) = answer.outputs
            print(json.dumps(out.as_numpy().tolist()))


asyncio.run(main(*sys.argv[1:]))
