"""One user beside n candidates: what is the user's is looked up once, and the
scores are those of a request that repeats it for each candidate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import persia
from persia import _core
from persia.serving.config import ModelConfig
from persia.serving.process import serving
from tests.serving import models
from tests.serving.asking import Both, Tensors, message_of, tensor
from tests.serving.test_server import ask

pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_core.GRPC == "none", reason="built without gRPC"),
]
N, PADS = 20, 6
ALONE = N + 2  # candidates, the user, and the vector of padding


class Mixed(nn.Module):
    """Bags of a table that two features share, with weights, sequences, and
    padded ids."""

    def __init__(self) -> None:
        super().__init__()
        own = models.store()
        bag, row = persia.EmbeddingBagConfig, persia.EmbeddingConfig
        self.bags = persia.EmbeddingBagCollection(
            store=own,
            tables=[
                bag("items", 8, ["item", "history"], pooling="mean"),
                bag("users", 4, ["user"]),
                bag("likes", 4, ["likes"], pooling="sqrtn"),
            ],
        )
        self.weighted = persia.EmbeddingBagCollection(
            store=own,
            tables=[bag("tags", 4, ["tags"], pooling="mean")],
            is_weighted=True,
        )
        self.rows = persia.EmbeddingCollection(
            store=own, tables=[row("pages", 4, ["pages"])]
        )
        self.padded = persia.nn.Embedding(
            40, 4, padding_idx=0, name="words", store=own
        )
        self.last = nn.Linear(8 + 8 + 4 + 4 + 4 + 4 + 4, 1)

    def forward(self, ids: Any, tags: Any, words: Tensor) -> Tensor:
        parts = [
            self.bags(ids).values(),
            self.weighted(tags).values(),
            self.rows(ids)["pages"].to_padded_dense(9).sum(1),
            self.padded(words).sum(1),
        ]
        out: Tensor = self.last(torch.cat(parts, 1))
        return out.squeeze(1)


def arguments(user: dict[str, list[int]], items: list[int]) -> Any:
    """Of a call that repeats the user for each candidate."""
    n = len(items)
    ids: dict[str, Any] = {
        "item": torch.tensor(items),
        "user": torch.tensor(user["user"] * n),
    }
    for key in ("history", "likes", "pages"):
        lengths = torch.tensor([len(user[key])] * n)
        ids[key] = torch.tensor(user[key] * n, dtype=torch.int64), lengths
    tags = user["tags"]
    return (
        persia.JaggedBatch.from_dict(ids),
        persia.JaggedBatch(
            ["tags"],
            torch.tensor(tags * n, dtype=torch.int64),
            lengths=torch.tensor([len(tags)] * n),
            weights=torch.tensor(weights_of(tags) * n),
        ),
        torch.tensor([user["words"]] * n),
    )


def weights_of(tags: list[int]) -> list[float]:
    return [0.5 + i for i in range(len(tags))]


def tensors(user: dict[str, list[int]], items: list[int], n: int) -> Tensors:
    """A request that has its user n times."""
    found = [
        tensor("item", "INT64", [len(items)], items),
        tensor("item.lengths", "INT64", [len(items)], [1] * len(items)),
    ]
    for key in ("user", "history", "likes", "pages", "tags"):
        values = user[key]
        size = len(values)
        found.append(tensor(key, "INT64", [n * size], values * n))
        found.append(tensor(f"{key}.lengths", "INT64", [n], [size] * n))
    weights = weights_of(user["tags"]) * n
    found.append(tensor("tags.weights", "FP32", [len(weights)], weights))
    words = [user["words"]] * n
    found.append(tensor("words", "INT64", [n, PADS], words))
    return found


def user_of(sizes: dict[str, int]) -> dict[str, list[int]]:
    """One with so many different ids of each feature."""
    found = {key: torch.randperm(30)[:n].tolist() for key, n in sizes.items()}
    words = (torch.randperm(39)[: sizes["words"]] + 1).tolist()
    found["words"] = words + [0] * (PADS - len(words))
    return found | {"user": [int(torch.randint(30, ()))]}


SIZES = [
    {"history": 8, "likes": 5, "pages": 7, "tags": 4, "words": 3},
    {"history": 0, "likes": 1, "pages": 0, "tags": 0, "words": 0},
    {"history": 1, "likes": 0, "pages": 1, "tags": 1, "words": PADS},
]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, and its export."""
    torch.manual_seed(4)
    model = Mixed()

    def make() -> Any:
        return arguments(user_of(SIZES[0]), torch.randperm(30)[:9].tolist())

    models.train(model, make)
    root = tmp_path_factory.mktemp("mixed") / "mixed"
    persia.export(model, root, example=make())
    return model.eval(), root


@pytest.fixture(scope="module")
def both(mixed: Any, place: Path) -> Iterator[Both]:
    config = ModelConfig(port=0, grpc_port=0, threads=1, poll=0)
    paths = (str(mixed[1]), f"clicks={place / 'out'}")
    with serving(config, paths) as one:
        asked = Both(one, {})
        yield asked
        asked.close()


def looked_up(both: Both, model: str) -> int:
    """Ids so far."""
    host, port = both.http_address
    _, found, _ = ask(f"{host}:{port}", f"/v2/models/{model}/stats")
    ids: int = found["model_stats"][0]["ids"]
    return ids


def scores(both: Both, model: str, some: Tensors, over: str) -> Any:
    if over == "http":
        name, answer = both.over_http(
            model, json.dumps({"inputs": some}).encode()
        )
        assert not name, answer
        return np.array(answer["outputs"][0]["data"], np.float32)
    name, answer = both.over_grpc(message_of(model, some))
    assert not name, answer
    return np.frombuffer(answer.raw_output_contents[0], np.float32)


@pytest.mark.parametrize("over", ["http", "grpc"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_user_is_looked_up_once(
    both: Both, mixed: Any, over: str, sizes: dict[str, int]
) -> None:
    model, _ = mixed
    user, items = user_of(sizes), torch.randperm(30)[:N].tolist()
    begin = looked_up(both, "mixed")
    found = scores(both, "mixed", tensors(user, items, 1), over)
    once = looked_up(both, "mixed")
    assert once - begin == ALONE + sum(sizes.values())
    repeated = scores(both, "mixed", tensors(user, items, N), over)
    assert looked_up(both, "mixed") - once == once - begin
    assert np.array_equal(found, repeated)
    with torch.no_grad():
        want = model(*arguments(user, items)).numpy()
    assert np.allclose(found, want, atol=1e-6)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_call_that_repeats_its_user_looks_it_up_once(
    mixed: Any, sizes: dict[str, int]
) -> None:
    model, root = mixed
    loaded = persia.load_model(root)
    user, items = user_of(sizes), torch.randperm(30)[:N].tolist()
    call = arguments(user, items)
    with torch.no_grad():
        assert torch.allclose(loaded(*call), model(*call), atol=1e-6)
    assert loaded.unknown()[0] == ALONE + sum(sizes.values())


@pytest.mark.parametrize("over", ["http", "grpc"])
def test_a_history_of_texts_is_looked_up_once(both: Both, over: str) -> None:
    items = list(range(N))
    for tags in (["t1", "t7", "t2", "t3"], [], ["t1", "none", "t1"]):

        def request(n: int, tags: list[str] = tags) -> Tensors:
            many = n * len(tags)
            lengths = [len(tags)] * n
            return [
                tensor("user", "BYTES", [n], ["u5"] * n),
                tensor("item", "INT64", [N], items),
                tensor("age", "FP32", [n], [30.0] * n),
                tensor("tags", "BYTES", [many], tags * n),
                tensor("tags.lengths", "INT32", [n], lengths),
            ]

        begin = looked_up(both, "clicks")
        found = scores(both, "clicks", request(1), over)
        assert looked_up(both, "clicks") - begin == N + 1 + len(tags)
        repeated = scores(both, "clicks", request(N), over)
        assert np.array_equal(found, repeated)
