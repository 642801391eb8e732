"""Sequences and weights over four roles: the rows travel, and the trainer
pools them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import persia
from persia import Stream, _core, errors
from persia.store.engine import engine_of
from tests.remote import Servers
from tests.roles import KEYS, Workers, batches, open_store
from tests.test_roles import equal, feeding

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)


class Mixed(torch.nn.Module):
    """Sequences, weights of the batch, learned weights and pooled features;
    tables of which some are shared."""

    def __init__(self, store: persia.Store) -> None:
        super().__init__()
        bag = persia.EmbeddingBagConfig
        self.sequences = persia.EmbeddingCollection(
            store=store,
            tables=[
                persia.EmbeddingConfig("t", 8, feature_names=["user", "item"])
            ],
        )
        # Of a table whose rows travel, and of one that workers pool.
        self.pooled = persia.EmbeddingBagCollection(
            store=store,
            tables=[
                bag("t", 8, feature_names=["shop", "user"], pooling="mean"),
                bag("p", 4, feature_names=["item", "shop"], pooling="sqrtn"),
            ],
            share=True,
        )
        self.weighted = persia.EmbeddingBagCollection(
            store=store,
            is_weighted=True,
            tables=[
                bag("w", 16, feature_names=["item"], pooling="mean"),
                bag("u", 4, feature_names=["user", "item"]),
            ],
        )
        torch.manual_seed(3)
        self.gain = torch.nn.Parameter(torch.randn(6))
        self.layer = torch.nn.Linear(4 + 16 + 24 + 24 + 24, 1)

    def learned(self, ids: persia.JaggedBatch) -> persia.JaggedBatch:
        """Weights by the place of an id in its bag."""
        _, lengths, *_ = ids["item"]
        ends = torch.cumsum(lengths, 0)
        place = torch.arange(len(ids["item"][0]), device=ends.device)
        place -= torch.repeat_interleave(ends - lengths, lengths)
        return ids.with_weights({"item": self.gain[place]})

    def forward(
        self, dense: torch.Tensor, ids: persia.JaggedBatch
    ) -> torch.Tensor:
        """Logits, [samples]."""
        sequences = self.sequences(ids)
        sums = [
            sequences[name].to_padded_dense(4).sum(1)
            for name in ("user", "item")
        ]
        parts = [
            dense,
            *sums,
            self.pooled(ids).values(),
            self.weighted(ids).values(),
            self.weighted(self.learned(ids)).values(),
        ]
        return self.layer(torch.cat(parts, 1)).squeeze(1)


def weighted(n: int, seed: int = 0) -> Iterator[persia.Batch]:
    """Batches whose ids have weights."""
    g = torch.Generator().manual_seed(seed)
    for batch in batches(n, seed):
        ids = batch.ids
        weights = torch.rand(len(ids.values()), generator=g)
        batch.ids = persia.JaggedBatch(
            KEYS, ids.values(), lengths=ids.lengths_or_none(), weights=weights
        )
        yield batch


def train(
    store: persia.Store, source: Any, compiled: bool = False
) -> tuple[list[float], dict[str, Any]]:
    """One epoch at staleness 0: the losses, and all that was learned."""
    model = Mixed(store)
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    dense = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for batch in persia.DataLoader(source, model, staleness=0):
        logits = forward(batch.dense, batch.ids)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, batch.label
        )
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.item())
    store.flush()
    ids = torch.arange(-20, 20)
    learned = {name: store.rows(name, ids) for name in store.tables}
    return losses, learned | {"gain": model.gain.detach()}


@pytest.mark.parametrize(
    ("shards", "count", "wire_dtype"),
    [(1, 1, "fp32"), (2, 2, "fp32"), (2, 1, "fp16")],
)
def test_the_same_bits_as_in_direct_mode(
    shards: int, count: int, wire_dtype: str
) -> None:
    """In fp32; in fp16 within what it resolves."""
    with contextlib.ExitStack() as stack:
        direct = stack.enter_context(contextlib.closing(Servers(shards)))
        want = train(open_store(direct.text), list(weighted(20)))
        servers = stack.enter_context(contextlib.closing(Servers(shards)))
        workers = stack.enter_context(
            contextlib.closing(Workers(servers.addresses, count))
        )
        store = open_store(servers.text, wire_dtype=wire_dtype)
        with feeding(workers, weighted(20)):
            got = train(store, Stream(workers.addresses))
        assert len(got[0]) == 20
        if wire_dtype == "fp32":
            assert got[0] == want[0]
            assert equal(got[1], want[1])
        else:
            assert got[0] == pytest.approx(want[0], abs=0.02)
        assert workers.stats("trained") == 20
        assert workers.stats("bytes") == 0


def test_what_is_known_of_ids_that_are_elsewhere() -> None:
    """Of features whose rows travel: lengths, and which ids are equal."""
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(contextlib.closing(Servers(2)))
        workers = stack.enter_context(
            contextlib.closing(Workers(servers.addresses))
        )
        model = Mixed(open_store(servers.text))
        with feeding(workers, weighted(6)):
            loader = persia.DataLoader(
                Stream(workers.addresses), model, staleness=0
            )
            for batch, mine in zip(loader, weighted(6), strict=True):
                for key in ("user", "item"):
                    numbers, lengths = batch.ids[key]
                    ids, want = mine.ids[key]
                    assert torch.equal(lengths, want)
                    assert torch.equal(
                        numbers[:, None] == numbers, ids[:, None] == ids
                    )
                other = batch.ids.to("cpu")
                assert other.ticket is batch.ids.ticket
                model(batch.dense, batch.ids).sum().backward()


def test_rows_without_gradients_do_not_change() -> None:
    """An optimizer with state would move rows by a gradient of zero."""
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(contextlib.closing(Servers(2)))
        workers = stack.enter_context(
            contextlib.closing(Workers(servers.addresses))
        )
        store = open_store(servers.text)
        first, second = (
            persia.EmbeddingCollection(
                store=store,
                tables=[persia.EmbeddingConfig("t", 4, feature_names=[name])],
                share=True,
            )
            for name in ("user", "item")
        )
        model = torch.nn.ModuleList([first, second])
        ids = persia.JaggedBatch.from_dict(
            {"user": torch.arange(8), "item": torch.arange(4, 12)}
        )
        with feeding(workers, [persia.Batch(None, ids)]):
            for batch in persia.DataLoader(Stream(workers.addresses), model):
                second(batch.ids)
                first(batch.ids).rows().square().sum().backward()
        store.flush()
        assert store.stats()["tables"]["t"]["rows"] == 8


def test_tables_travel_as_the_plan_says() -> None:
    """All features of a table alike: a client that says otherwise is
    refused."""
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(contextlib.closing(Servers(1)))
        workers = stack.enter_context(
            contextlib.closing(Workers(servers.addresses))
        )
        store = open_store(servers.text)
        Mixed(store)
        stream = Stream(workers.addresses)
        rank = stream._connect(store)
        table = engine_of(store).native(store.tables["t"])
        with pytest.raises(errors.InvalidArgument):
            rank.declare(
                [table],
                [("user", 0, 0, True, True), ("item", 0, 0, True, False)],
                False,
            )
