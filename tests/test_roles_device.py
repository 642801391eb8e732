"""Four roles whose trainer computes on a device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import persia
from persia import Stream, _core
from persia.store.device import Way
from tests.places import Place, place
from tests.remote import Servers
from tests.roles import Model, Workers, batches, open_store
from tests.test_roles import feeding
from tests.test_roles_rows import Mixed, weighted

__all__ = ["place"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)


def losses_of(
    model: Any, source: Any, staleness: int, device: torch.device
) -> torch.Tensor:
    """Of one epoch of SGD."""
    dense = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for batch in persia.DataLoader(source, model, staleness=staleness):
        batch = batch.to(device)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch.dense, batch.ids), batch.label
        )
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def rows_of(store: persia.Store) -> torch.Tensor:
    store.flush()
    ids = torch.arange(-20, 20)
    return torch.cat([store.rows(name, ids) for name in store.tables], 1)


@pytest.mark.parametrize("kind", [Model, Mixed])
def test_a_device_learns_what_the_cpu_learns(
    place: Place, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pooled values, sequences and weights that are learned."""
    made = batches if kind is Model else weighted
    sent = []
    pull = Way.pull

    def spy(self: Way, *args: Any) -> Any:
        sent.append(self.link)
        return pull(self, *args)

    monkeypatch.setattr(Way, "pull", spy)
    with contextlib.ExitStack() as stack:
        here, there = (
            stack.enter_context(contextlib.closing(Servers(2)))
            for _ in range(2)
        )
        store = open_store(here.text)
        cpu = torch.device("cpu")
        want = losses_of(kind(store), list(made(12)), 0, cpu), rows_of(store)
        assert not sent
        workers = stack.enter_context(
            contextlib.closing(Workers(there.addresses, 2))
        )
        store = open_store(there.text)
        model = place.put(kind(store))
        with feeding(workers, made(12)):
            stream = Stream(workers.addresses, timeout=20)
            got = losses_of(model, stream, 0, place.device), rows_of(store)
    assert len(got[0]) == 12
    assert set(sent) == {place.link}
    for a, b in zip(got, want, strict=True):
        place.compare(a, b)


def test_workers_pool_also_where_a_device_would(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer has no ids to pool by, however often they repeat."""

    def pooled(*_: Any) -> Any:
        raise AssertionError("pooled on the device")

    monkeypatch.setattr("persia.nn.on_device.pooled", pooled)
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(contextlib.closing(Servers(1)))
        workers = stack.enter_context(
            contextlib.closing(Workers(servers.addresses))
        )
        store = open_store(servers.text)
        model = place.put(Model(store))
        with feeding(workers, batches(8, samples=400)):
            stream = Stream(workers.addresses, timeout=20)
            losses = losses_of(model, stream, 4, place.device)
        assert len(losses) == 8 and losses.isfinite().all()
        assert store.updates == 8
        with pytest.raises(AssertionError, match="on the device"):
            losses_of(model, batches(1, samples=400), 4, place.device)
