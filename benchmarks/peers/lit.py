"""The model of `benchmarks.serve` for LitServe, whose workers import it."""

# Annotations are read by LitServe: none may be a string.
from typing import Any

import litserve
from starlette.requests import Request

from benchmarks.peers.serving import Whole


class Api(litserve.LitAPI):
    """Answers the JSON of a request with scores."""

    def __init__(self, folder: str, vocabulary: int) -> None:
        super().__init__()
        self._place = folder, vocabulary

    def setup(self, device: Any) -> None:
        self._model = Whole(*self._place)

    def decode_request(self, request: Request) -> Any:
        return request

    def predict(self, x: Any) -> Any:
        return self._model(x)

    def encode_response(self, output: Any) -> Any:
        return {"scores": output}
