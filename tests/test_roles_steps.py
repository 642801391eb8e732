"""Updates of several batches over four roles: accumulation, clipping,
GradScaler; one or several embedding workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import persia
from persia import Stream, _core, errors
from persia.data import Sender
from tests.remote import Servers
from tests.roles import Model, Workers, batches, open_store
from tests.test_roles import feeding, in_thread
from tests.test_roles_rows import Mixed, weighted

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

MODELS: dict[str, Any] = {
    "pooled": (Model, batches),
    "rows": (Mixed, weighted),
}


@contextlib.contextmanager
def roles(shards: int, count: int, **more: Any) -> Iterator[tuple[Any, Any]]:
    """Servers, and workers over them."""
    with (
        contextlib.closing(Servers(shards)) as servers,
        contextlib.closing(Workers(servers.addresses, count, **more)) as some,
    ):
        yield servers, some


def train(
    kind: str,
    servers: str,
    source: Any,
    every: int,
    *,
    max_norm: float | None = None,
    scaled: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """A step of both optimizers after so many batches: losses and norms, the
    rows, and the number of updates."""
    store = open_store(servers, update="step")
    model = MODELS[kind][0](store)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    seen = []
    loader = persia.DataLoader(source, model, staleness=0)
    for i, batch in enumerate(loader):
        logits = model(batch.dense, batch.ids)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, batch.label
        )
        seen.append(loss.item())
        if scaled and i == 7:
            loss = loss * float("inf")
        scaler.scale(loss / every).backward()
        if (i + 1) % every:
            continue
        if max_norm is not None:
            scaler.unscale_(dense)
            scaler.unscale_(store.optimizer)
            norm = persia.clip_grad_norm_(model, max_norm)
            seen.append(norm.item())
        scaler.step(dense)
        scaler.step(store.optimizer)
        scaler.update()
        dense.zero_grad()
    store.flush()
    ids = torch.arange(-20, 20)
    rows = {name: store.rows(name, ids) for name in store.tables}
    return seen, rows, store.updates


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize(("shards", "count"), [(1, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_step_of_several_batches(
    kind: str, shards: int, count: int, max_norm: float | None
) -> None:
    """Is one update, and that of direct mode but for the order of a sum."""
    source = MODELS[kind][1]
    with roles(shards, count) as (servers, workers):
        with feeding(workers, source(12)):
            stream = Stream(workers.addresses)
            got = train(kind, servers.text, stream, 3, max_norm=max_norm)
        assert workers.stats("trained") == 12
        assert workers.stats("bytes") == 0
        assert stream.stats()["late"] == stream.stats()["lost"] == 0
    with contextlib.closing(Servers(shards)) as direct:
        want = train(kind, direct.text, list(source(12)), 3, max_norm=max_norm)
    assert got[2] == want[2] == 4
    assert got[0] == pytest.approx(want[0], rel=1e-4, abs=1e-5)
    for name, rows in want[1].items():
        assert torch.allclose(got[1][name], rows, rtol=1e-4, atol=1e-5)


def test_the_number_of_workers_changes_no_bit() -> None:
    """Nor that of servers: parts are summed in the order of the batches."""
    found = []
    for shards, count in ((1, 1), (2, 2), (2, 3)):
        with (
            roles(shards, count) as (servers, workers),
            feeding(workers, batches(12)),
        ):
            stream = Stream(workers.addresses)
            found.append(train("pooled", servers.text, stream, 4))
    for losses, rows, updates in found[1:]:
        assert losses == found[0][0]
        assert updates == found[0][2] == 3
        assert all(torch.equal(rows[k], found[0][1][k]) for k in rows)


@pytest.mark.parametrize("count", [1, 2])
def test_a_scaler_over_several_batches(count: int) -> None:
    """A step with a gradient that is infinite changes nothing."""
    with (
        roles(2, count) as (servers, workers),
        feeding(workers, batches(12)),
    ):
        stream = Stream(workers.addresses)
        got = train(
            "pooled", servers.text, stream, 3, max_norm=0.1, scaled=True
        )
    with contextlib.closing(Servers(2)) as direct:
        want = train(
            "pooled",
            direct.text,
            list(batches(12)),
            3,
            max_norm=0.1,
            scaled=True,
        )
    assert got[2] == want[2] == 3
    assert got[0] == pytest.approx(want[0], rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_of_a_step_with_a_nan_is_applied(count: int) -> None:
    """Whichever worker has the batch."""
    with roles(2, count) as (servers, workers):
        store = open_store(servers.text, update="step")
        model = Model(store)
        with feeding(workers, batches(3)):
            loader = persia.DataLoader(Stream(workers.addresses), model)
            for i, batch in enumerate(loader):
                loss = model(batch.dense, batch.ids).sum()
                (loss * float("nan") if i == 1 else loss).backward()
            store.optimizer.step()
            with pytest.raises(errors.NonFiniteGradient):
                store.flush()
            del batch, loader
        ids = torch.arange(-20, 20)
        assert store.stats()["tables"]["t"]["rows"] == 0
        assert store.rows("t", ids).shape == (40, 8)


def test_a_worker_that_is_lost_within_a_step() -> None:
    """Its batches are applied when their loader has sent them again, or are
    trained again."""
    with roles(2, 2, lease=2.0) as (servers, workers):
        store = open_store(servers.text, update="step")
        model = Model(store)
        stream = Stream(workers.addresses, timeout=20)
        n = 0
        ended = threading.Event()

        def feed() -> None:
            with Sender(workers.addresses, timeout=20) as sender:
                for batch in batches(8):
                    sender.send(batch)
                sender.end()
                while not ended.is_set():  # it sends again what was lost
                    with contextlib.suppress(errors.DeadlineExceeded):
                        sender.flush(0.1)
                    ended.wait(0.05)

        raised = in_thread(feed)
        loader = persia.DataLoader(stream, model, staleness=4)
        for batch in loader:
            model(batch.dense, batch.ids).sum().backward()
            n += 1
            if n == 4:
                workers.restart(1)
            if n % 4 == 0:
                store.optimizer.step()
        store.optimizer.step()
        del batch, loader
        store.flush()
        ended.set()
        raised()
        assert workers.stats("trained") == 8
        assert n - stream.stats()["late"] <= 8 <= n
