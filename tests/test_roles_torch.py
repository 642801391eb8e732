"""Ordinary training loops of torch over four roles: what they learn is what
they learn with the batches in their own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import persia
from persia import Stream, _core, errors
from tests.remote import Servers
from tests.roles import Model, Workers, batches, open_store
from tests.test_roles import equal, feeding

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

Loop = Callable[[persia.Store, Model, Any], list[float]]


def loss_of(model: Any, batch: persia.Batch) -> torch.Tensor:
    """Of one batch."""
    return torch.nn.functional.binary_cross_entropy_with_logits(
        model(batch.dense, batch.ids), batch.label
    )


def direct(servers: Servers, loop: Loop, epochs: int) -> Any:
    """The loop with the batches in this process."""
    store = open_store(servers.text)
    model = Model(store)
    passes = [list(batches(9, seed)) for seed in range(epochs)]
    return outcome(store, model, loop(store, model, iter(passes)))


def four_roles(servers: Servers, loop: Loop, epochs: int) -> Any:
    """The loop with the batches of a loader, by two workers."""
    with contextlib.closing(Workers(servers.addresses, 2)) as workers:
        store = open_store(servers.text)
        model = Model(store)
        stream = Stream(workers.addresses, timeout=20)
        sent = [batches(9, seed) for seed in range(epochs)]
        with feeding(workers, *sent):
            seen = loop(store, model, iter([stream] * epochs))
        return outcome(store, model, seen)


def outcome(store: persia.Store, model: Model, seen: list[float]) -> Any:
    """What the loop has seen, and all that was learned."""
    store.flush()
    ids = torch.arange(-20, 20)
    rows = {name: store.rows(name, ids) for name in store.tables}
    dense = {k: v.detach().clone() for k, v in model.named_parameters()}
    store.close()
    return seen, rows | dense


def compare(loop: Loop, epochs: int = 1, exact: bool = True) -> None:
    """The same bits in both, or the same within rounding."""
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(contextlib.closing(Servers(2)))
            for _ in range(2)
        )
        want = direct(first, loop, epochs)
        got = four_roles(second, loop, epochs)
    assert len(got[0]) > 0
    if exact:
        assert got[0] == want[0]
        assert equal(got[1], want[1])
        return
    assert got[0] == pytest.approx(want[0], abs=1e-5)
    for name, value in want[1].items():
        assert torch.allclose(got[1][name], value, atol=1e-5, rtol=1e-4)


def plain(model: Any, forward: Any, passes: Iterator[Any]) -> list[float]:
    """A loop of SGD over all passes: the losses."""
    dense = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for source in passes:
        for batch in persia.DataLoader(source, model, staleness=0):
            loss = loss_of(forward, batch)
            dense.zero_grad()
            loss.backward()
            dense.step()
            losses.append(loss.item())
    return losses


def test_several_passes_and_an_evaluation_between() -> None:
    """The second pass is only read; a scheduler changes both rates."""

    def loop(store: persia.Store, model: Model, passes: Any) -> list[float]:
        dense = torch.optim.Adam(model.parameters(), 0.1)
        rates = [
            torch.optim.lr_scheduler.StepLR(dense, 1, 0.5),
            torch.optim.lr_scheduler.StepLR(store.optimizer, 1, 0.5),
        ]
        seen = []
        for epoch, source in enumerate(passes):
            reads = epoch == 1
            model.train(not reads)
            with torch.set_grad_enabled(not reads):
                for batch in persia.DataLoader(source, model, staleness=0):
                    loss = loss_of(model, batch)
                    seen.append(loss.item())
                    if reads:
                        continue
                    dense.zero_grad()
                    loss.backward()
                    dense.step()
            for rate in rates:
                rate.step()
        return seen

    compare(loop, epochs=3)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("part", ["layer", "model"])
def test_compiled(backend: str, part: str) -> None:
    """The dense part alone, or the whole model."""

    def loop(store: persia.Store, model: Model, passes: Any) -> list[float]:
        torch._dynamo.reset()
        forward: Any = model
        if part == "model":
            forward = torch.compile(model, backend=backend)
        else:
            model.layer.compile(backend=backend)
        return plain(model, forward, passes)

    compare(loop)


def test_a_forward_that_is_computed_again() -> None:
    """Activation checkpointing reads a batch twice and trains it once."""

    def loop(store: persia.Store, model: Model, passes: Any) -> list[float]:
        def forward(dense: Any, ids: Any) -> Any:
            return checkpoint(model, dense, ids, use_reentrant=False)

        return plain(model, forward, passes)

    compare(loop)


def test_mixed_precision() -> None:
    """Under autocast the layer computes in bf16."""

    def loop(store: persia.Store, model: Model, passes: Any) -> list[float]:
        def forward(dense: Any, ids: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return model(dense, ids).float()

        return plain(model, forward, passes)

    compare(loop)


def test_a_batch_in_two_forwards() -> None:
    """The gradients of both are one update: they are summed before they
    travel, in direct mode by id."""

    def loop(store: persia.Store, model: Model, passes: Any) -> list[float]:
        def forward(dense: Any, ids: Any) -> Any:
            return model(dense, ids) + model(-dense, ids)

        return plain(model, forward, passes)

    compare(loop, exact=False)


def test_a_second_backward_is_refused() -> None:
    """As without workers."""

    def loop(store: persia.Store, model: Model, passes: Any) -> list[float]:
        for batch in persia.DataLoader(next(passes), model, staleness=0):
            loss = loss_of(model, batch)
            with pytest.raises(errors.TicketError):
                loss.backward(retain_graph=True)
            loss_of(model, batch).backward()
        return [store.updates]

    compare(loop)
