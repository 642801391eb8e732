"""What the ranks of a job do in tests/system/test_ranks.py.

    python ranks.py FOLDER SCENARIO[=ADDRESSES] ...

Each scenario gets a store of its own, on servers or on the ranks, and returns
what the test compares: FOLDER/SCENARIO.RANK.pt.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import persia
from persia import Batch, JaggedBatch, _core
from persia.distributed import hosting as hosts
from persia.store.engine import engine_of

IDS = 60
STEPS = 8
SEVEN = torch.tensor([7])


def batch(number: int, samples: int = 16) -> Batch:
    """Batch `number` of the job, the same in every process."""
    g = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (2 * samples,), generator=g)
    ids = torch.randint(0, IDS, (int(lengths.sum()),), generator=g)
    label = torch.rand(samples, generator=g)
    return Batch(None, JaggedBatch(["a", "b"], ids, lengths=lengths), label)


class Model(nn.Module):
    def __init__(self, store: persia.Store) -> None:
        super().__init__()
        self.bags = persia.EmbeddingBagCollection(
            store=store,
            tables=[
                persia.EmbeddingBagConfig(
                    "x", embedding_dim=8, feature_names=["a"], pooling="mean"
                ),
                persia.EmbeddingBagConfig(
                    "y", embedding_dim=16, feature_names=["b"]
                ),
            ],
        )
        torch.manual_seed(0)
        self.linear = nn.Linear(24, 1)

    def forward(self, ids: Any) -> Tensor:
        out: Tensor = self.linear(self.bags(ids).values())
        return out[:, 0]


def loss_of(out: Tensor, one: Batch) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(out, one.label)


def everything(store: persia.Store, model: Model) -> dict[str, Any]:
    ids = torch.arange(IDS)
    return {
        "x": store.rows_and_state("x", ids),
        "y": store.rows_and_state("y", ids),
        "weight": model.linear.weight.detach().clone(),
    }


class Counter:
    """As in test_updates.py: row 7 counts updates."""

    def __init__(self, store: persia.Store, table: str = "t") -> None:
        self.store = store
        self.model = persia.EmbeddingBagCollection(
            store=store,
            tables=[
                persia.EmbeddingBagConfig(
                    table, embedding_dim=4, feature_names=["f"], init=0.0
                )
            ],
        )

    def loader(self, n: int, staleness: int = 0) -> Any:
        def source() -> Iterator[Batch]:
            for _ in range(n):
                yield Batch(None, JaggedBatch(["f"], torch.tensor([7])))

        return persia.DataLoader(source(), self.model, staleness)

    def forward(self, one: Batch) -> tuple[int, Tensor]:
        out = self.model(one.ids).values()
        return int(out[0, 0]), -out.sum()

    @property
    def value(self) -> int:
        return int(self.store.rows("t", [7])[0, 0])


# ---- scenarios -------------------------------------------------------------

Open = Callable[..., persia.Store]


def train(open_store: Open, rank: int, world: int) -> Any:
    """Synchronous, under DDP, with evaluation in the middle."""
    store = open_store(persia.optim.Adam(lr=0.05))
    model = Model(store)
    net = nn.parallel.DistributedDataParallel(model)
    dense = torch.optim.SGD(model.linear.parameters(), 0.1)
    for epoch in range(2):
        own = [batch(100 * epoch + world * i + rank) for i in range(STEPS)]
        for i, one in enumerate(persia.DataLoader(own, model, 0)):
            dense.zero_grad()
            loss_of(net(one.ids), one).backward()
            dense.step()
            if i == 2 and rank == 0:
                with torch.no_grad():
                    for other in persia.DataLoader([batch(5)], model, 0):
                        model(other.ids)
    dist.barrier()
    return everything(store, model)


def accumulate(open_store: Open, rank: int, world: int) -> Any:
    """update="step": two backwards a step; the last step is smaller."""
    store = open_store(persia.optim.Adagrad(lr=0.1), update="step")
    model = Model(store)
    own = [batch(world * i + rank) for i in range(5)]
    for i, one in enumerate(persia.DataLoader(own, model, 0)):
        loss_of(model(one.ids), one).backward()
        if i % 2 or i == 4:
            store.optimizer.step()
    dist.barrier()
    return everything(store, model) | {"updates": store.updates}


def plain(open_store: Open, rank: int, world: int) -> Any:
    """train() without a loader; rank 1 comes late."""
    store = open_store(persia.optim.Adam(lr=0.05))
    model = Model(store)
    net = nn.parallel.DistributedDataParallel(model)
    dense = torch.optim.SGD(model.linear.parameters(), 0.1)
    for epoch in range(2):
        for i in range(STEPS):
            one = batch(100 * epoch + world * i + rank)
            time.sleep(0.3 * rank * (i == 0))
            dense.zero_grad()
            loss_of(net(one.ids), one).backward()
            dense.step()
            if i == 2 and rank == 0:
                with torch.no_grad():
                    model(batch(5).ids)
    store.flush()
    dist.barrier()
    return everything(store, model)


def unknown(open_store: Open, rank: int, world: int) -> Any:
    """train() with a loader of other ids than those of the forwards."""
    store = open_store(persia.optim.Adam(lr=0.05))
    model = Model(store)
    net = nn.parallel.DistributedDataParallel(model)
    dense = torch.optim.SGD(model.linear.parameters(), 0.1)
    for epoch in range(2):
        own = [batch(100 * epoch + world * i + rank) for i in range(STEPS)]
        others = [batch(1000 + i) for i in range(STEPS)]
        for one, _ in zip(own, persia.DataLoader(others, model, 0)):
            dense.zero_grad()
            loss_of(net(one.ids), one).backward()
            dense.step()
    dist.barrier()
    return everything(store, model) | {"updates": store.updates}


def summed(open_store: Open, rank: int, world: int) -> Any:
    """accumulate() without a loader; rank 1 comes late."""
    store = open_store(persia.optim.Adagrad(lr=0.1), update="step")
    model = Model(store)
    time.sleep(0.3 * rank)
    for i in range(5):
        one = batch(world * i + rank)
        loss_of(model(one.ids), one).backward()
        if i % 2 or i == 4:
            store.optimizer.step()
    store.flush()
    dist.barrier()
    return everything(store, model)


def mixed(open_store: Open, rank: int, world: int) -> Any:
    """Loops without a loader between others; then rank 0 closes."""
    c = Counter(open_store(persia.optim.SGD(lr=1.0), grad_division=False))
    seen = []

    def loop(batches: Any) -> None:
        for one in batches:
            value, loss = c.forward(one)
            seen.append(value)
            loss.backward()

    def plain_loop(n: int) -> None:
        loop([Batch(None, JaggedBatch(["f"], SEVEN))] * n)

    time.sleep(0.3 * rank)
    plain_loop(3)
    loop(c.loader(4, 3))
    dist.barrier()
    del seen[3:]  # of the loop with a bound
    plain_loop(2)
    loop(c.loader(2))
    plain_loop(1)
    if rank == 0:
        c.store.close()
    else:
        plain_loop(2)
        seen.append(c.value)
        c.store.close()
    return seen


def turns(open_store: Open, rank: int, world: int) -> Any:
    """Two stores at the same servers, whose updates alternate."""
    pair = [
        Counter(
            open_store(persia.optim.SGD(lr=1.0), grad_division=False), table
        )
        for table in ("t", "u")
    ]
    seen = []
    time.sleep(0.3 * rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for c in pair * 3:
            value, loss = c.forward(Batch(None, JaggedBatch(["f"], SEVEN)))
            seen.append(value)
            loss.backward()
    for c in pair:
        c.store.flush()
    return {"seen": seen, "said": [w.category.__name__ for w in said]}


def uneven(open_store: Open, rank: int, world: int) -> Any:
    """Rank 0 has fewer batches; then both have as many."""
    c = Counter(open_store(persia.optim.SGD(lr=1.0), grad_division=False))
    seen = []
    for n in (3 + 4 * rank, 2):
        for one in c.loader(n):
            value, loss = c.forward(one)
            seen.append(value)
            loss.backward()
    dist.barrier()
    return {"seen": seen, "value": c.value, "updates": c.store.updates}


def gaps(open_store: Open, rank: int, world: int) -> Any:
    """Rank 1 leaves out gradients in every way there is."""
    c = Counter(open_store(persia.optim.SGD(lr=1.0), grad_division=False))
    seen = []
    for t, one in enumerate(c.loader(8)):
        if rank == 1 and t == 1:
            seen.append(-1)
            continue  # not even a forward
        if rank == 1 and t == 2:
            with torch.no_grad():
                seen.append(c.forward(one)[0])
            continue
        value, loss = c.forward(one)
        seen.append(value)
        if rank == 1 and t == 3:
            one.skip()
        elif rank == 1 and t == 4:
            continue  # a bad loss
        elif rank == 1 and t == 5:
            try:
                (loss * float("nan")).backward()
                c.store.flush()
            except persia.errors.NonFiniteGradient:
                seen[-1] += 1000
        else:
            loss.backward()
    dist.barrier()
    return {"seen": seen, "value": c.value, "updates": c.store.updates}


def leaving(open_store: Open, rank: int, world: int) -> Any:
    """A break at the same place, then another pass."""
    c = Counter(open_store(persia.optim.SGD(lr=1.0), grad_division=False))
    seen = []
    for stop in (3, 100):
        for t, one in enumerate(c.loader(6)):
            value, loss = c.forward(one)
            seen.append(value)
            loss.backward()
            if t == stop:
                break
    dist.barrier()
    return {"seen": seen, "value": c.value}


def ended(open_store: Open, rank: int, world: int) -> Any:
    """Rank 0 leaves its loop at its last batch; then another pass. The end of
    its batches was seen by the look-ahead, if there is one."""
    c = Counter(open_store(persia.optim.SGD(lr=1.0), grad_division=False))
    gc.disable()  # leaves cycles as they are
    for staleness in (0, 3):
        for n in (4 + 4 * rank, 6):
            for t, one in enumerate(c.loader(n, staleness)):
                c.forward(one)[1].backward()
                if t == 3 and rank == 0:
                    break
            c.store.flush()
            dist.barrier()
    gc.enable()
    return {"value": c.value}


def closing(open_store: Open, rank: int, world: int) -> Any:
    """A store is closed in the middle of a pass that goes on elsewhere."""
    c = Counter(open_store(persia.optim.SGD(lr=1.0), grad_division=False))
    loop = iter(c.loader(9))
    for _ in range(2 + 3 * rank):
        c.forward(next(loop))[1].backward()
    c.store.close()
    again = Counter(open_store(persia.optim.SGD(lr=1.0), grad_division=False))
    dist.barrier()  # the other rank's updates are through
    before = again.value
    dist.barrier()
    for one in again.loader(3):
        again.forward(one)[1].backward()
    dist.barrier()
    del loop
    return {"closed": c.store.closed, "more": again.value - before}


_held: list[Any] = []  # until the process ends


def held(open_store: Open, rank: int, world: int) -> Any:
    """A pass that is still open when the process ends."""
    c = Counter(open_store(persia.optim.SGD(lr=1.0), grad_division=False))
    _held.append(iter(c.loader(9)))
    for _ in range(3):
        c.forward(next(_held[-1]))[1].backward()
    return {}


def hybrid(open_store: Open, rank: int, world: int) -> Any:
    """No step waits for the other rank; nothing is lost."""
    c = Counter(open_store(persia.optim.SGD(lr=1.0), grad_division=False))
    own = []
    for t, one in enumerate(c.loader(50, 3)):
        value, loss = c.forward(one)
        own.append(value - (t - 3))
        loss.backward()
    dist.barrier()
    histogram = c.store.stats()["lookahead"]["staleness"]
    return {"value": c.value, "least": min(own), "stalest": max(histogram)}


def secured(open_store: Open, rank: int, world: int) -> Any:
    """As on several machines: with TLS and tokens of this job."""
    machine = {"machine": f"machine {rank}", "address": "127.0.0.1"}
    before = hosts.this_machine
    hosts.this_machine = lambda: machine
    os.environ["PERSIA_JOB_SECRET"] = "of all ranks"
    try:
        c = Counter(open_store(persia.optim.SGD(lr=1.0)))
    finally:
        hosts.this_machine = before
        del os.environ["PERSIA_JOB_SECRET"]
    for one in c.loader(5):
        c.forward(one)[1].backward()
    dist.barrier()
    hosting = engine_of(c.store).connection.hosting
    assert hosting is not None
    security = hosting.security
    return {
        "value": c.value,
        "tls": bool(security.ca and security.cert and security.token),
        "refused": _refused(hosting.addresses[1 - rank], "secured"),
    }


def one_machine(open_store: Open, rank: int, world: int) -> Any:
    """A process without the job's token reads nothing."""
    c = Counter(open_store(persia.optim.SGD(lr=1.0)))
    dist.barrier()
    hosting = engine_of(c.store).connection.hosting
    assert hosting is not None
    return _refused(hosting.addresses[1 - rank], "one_machine")


def several(open_store: Open, rank: int, world: int) -> Any:
    """Two stores of a process on the same servers."""
    first, other = (
        Counter(open_store(persia.optim.SGD(lr=1.0), grad_division=False))
        for _ in range(2)
    )
    text = ""
    for i, one in enumerate(first.loader(3)):
        first.forward(one)[1].backward()
        if i == 1:
            try:
                next(iter(other.loader(1)))
            except persia.errors.InvalidArgument as error:
                text = str(error)
    for one in other.loader(2):
        other.forward(one)[1].backward()
    first.store.flush()
    other.store.flush()
    dist.barrier()
    return {"text": text, "value": first.value}


def _refused(address: str, namespace: str) -> bool:
    """Whether a client without certificate and token is."""
    try:
        persia.Store(
            servers=address,
            namespace=namespace,
            timeout=2.0,
            rank=0,
            world_size=1,
        )
    except (persia.errors.AccessDenied, persia.errors.Unavailable):
        return True
    return False


def stuck(open_store: Open, rank: int, world: int) -> Any:
    """Rank 1 does not send its part: an error names it."""
    store = open_store(persia.optim.SGD(lr=1.0), grad_division=False)
    c = Counter(store)
    text = ""
    iterator = iter(c.loader(3))
    loss = c.forward(next(iterator))[1]
    if rank == 0:
        loss.backward()
        try:
            next(iterator)
        except persia.errors.DeadlineExceeded as error:
            text = str(error)
    dist.barrier()
    iterator.close()
    dist.barrier()
    for one in c.loader(2):  # both go on
        c.forward(one)[1].backward()
    dist.barrier()
    return {"text": text, "value": c.value}


def cut_off(open_store: Open, rank: int, world: int) -> Any:
    """Rank 1 does not reach a server when a pass begins."""
    store = open_store(persia.optim.SGD(lr=1.0), grad_division=False)
    c = Counter(store)
    texts = []
    join = _core.cluster_join

    def fail(handle: int) -> int:
        raise persia.errors.Unavailable("no route to the server")

    for attempt in range(2):
        if rank == 1 and attempt == 0:
            _core.cluster_join = fail
        try:
            for one in c.loader(2):
                c.forward(one)[1].backward()
        except persia.errors.Unavailable as error:
            texts.append(str(error))
        _core.cluster_join = join
    dist.barrier()
    return {"texts": texts, "value": c.value}


def differ(open_store: Open, rank: int, world: int) -> Any:
    """One rank divides its gradients, the other does not."""
    store = open_store(persia.optim.SGD(lr=1.0), grad_division=rank == 0)
    c = Counter(store)
    text = ""
    try:
        for one in c.loader(2):
            c.forward(one)[1].backward()
    except persia.errors.InvalidArgument as error:
        text = str(error)
    dist.barrier()
    return {"text": text, "value": c.value}


def late(open_store: Open, rank: int, world: int) -> Any:
    """The last one: rank 0 ends at once, rank 1 still needs its rows."""
    c = Counter(open_store(persia.optim.SGD(lr=1.0)))
    c.store.set_rows("t", range(100), torch.ones(100, 4))
    dist.barrier()
    if rank == 1:
        time.sleep(2.0)
    return {"sum": float(c.store.rows("t", range(100)).sum())}


def scaled(open_store: Open, rank: int, world: int) -> Any:
    """GradScaler: what overflows on rank 1 makes no rank step."""
    store = open_store(persia.optim.SGD(lr=1.0), update="step")
    c = Counter(store)
    dense = nn.Linear(4, 1)
    adam = torch.optim.SGD(dense.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    values, scales = [], []
    for t, one in enumerate(c.loader(6)):
        out = c.model(one.ids).values()
        loss = dense(torch.ones(1, 4)).sum() - out.sum()
        if rank == 1 and t == 2:
            loss = loss + (out * float("inf")).sum()
        scaler.scale(loss).backward()
        if t % 2:
            scaler.unscale_(store.optimizer)
        scaler.step(store.optimizer)
        scaler.step(adam)
        scaler.update()
        store.optimizer.zero_grad()
        adam.zero_grad()
        store.flush()
        dist.barrier()
        values.append(c.value)
        dist.barrier()
        scales.append(scaler.get_scale())
    return {"values": values, "scales": scales}


def clipped(open_store: Open, rank: int, world: int) -> Any:
    """One norm over dense, sparse and ranks."""
    store = open_store(persia.optim.SGD(lr=1.0), update="step")
    model = Model(store)
    net = nn.parallel.DistributedDataParallel(model)
    one = batch(rank)
    loss_of(net(one.ids), one).backward()
    dense = model.linear.weight.grad
    bias = model.linear.bias.grad
    assert dense is not None and bias is not None
    squares = float(dense.square().sum() + bias.square().sum())
    norm = persia.clip_grad_norm_(net, 0.01)
    store.optimizer.step()
    store.flush()
    dist.barrier()
    ids = torch.arange(IDS)
    return {
        "norm": float(norm),
        "dense": squares,
        "clipped": float((dense.square().sum() + bias.square().sum()).sqrt()),
        "x": store.rows("x", ids),
        "y": store.rows("y", ids),
    }


def joined(open_store: Open, rank: int, world: int) -> Any:
    """GradScaler and one norm where rank 0 has fewer batches, twice."""
    store = open_store(persia.optim.SGD(lr=1.0), update="step")
    model = Model(store)
    net = nn.parallel.DistributedDataParallel(model)
    dense = torch.optim.SGD(model.linear.parameters(), 0.1)
    steps: list[tuple[int, float]] = []
    for epoch in range(2):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        own = [batch(10 * epoch + i) for i in range(2 + 3 * rank)]
        with net.join():
            for i, one in enumerate(persia.DataLoader(own, model, 1)):
                loss = loss_of(net(one.ids), one)
                if rank == 1 and i == 3:
                    loss = loss * float("inf")
                dense.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(dense)
                scaler.unscale_(store.optimizer)
                norm = persia.clip_grad_norm_(net, 1.0)
                scaler.step(dense)
                scaler.step(store.optimizer)
                scaler.update()
                steps.append((i, float(norm)))
    store.flush()
    dist.barrier()
    weight = model.linear.weight.detach().clone()
    updates = store.updates
    store.close()
    return {"steps": steps, "weight": weight, "updates": updates}


def again(open_store: Open, rank: int, world: int) -> Any:
    """The same with two stores, one after the other."""
    return [joined(open_store, rank, world) for _ in range(2)]


def removed(open_store: Open, rank: int, world: int) -> Any:
    """One rank erases rows of all, then each drops the table."""
    ids = torch.arange(100)

    def add(dim: int) -> None:
        store.add_table(persia.EmbeddingBagConfig("t", dim, ["f"]))
        dist.barrier()

    store = open_store(persia.optim.SGD(lr=1.0))
    add(4)
    erased = 0
    if rank == 0:
        store.set_rows("t", ids, torch.ones(100, 4))
        erased = store.erase("t", ids[:30])
    dist.barrier()
    left = store.contains("t", ids)
    dist.barrier()
    store.drop("t")
    dist.barrier()
    add(6)
    rows = store.rows("t", ids)
    return {
        "erased": erased,
        "left": left,
        "width": rows.shape[1],
        "rows": len(store.ids("t")),
    }


def main() -> None:
    folder, *wanted = sys.argv[1:]
    # Without a name torch takes the backends of all devices that it has.
    dist.init_process_group(None if "=" in wanted[0] else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for one in wanted:
        name, _, addresses = one.partition("=")

        def open_store(*args: Any, **kwargs: Any) -> persia.Store:
            return persia.Store(
                *args,
                servers=addresses or None,  # noqa: B023
                namespace=name,  # noqa: B023
                timeout=3.0 if name == "stuck" else 20.0,  # noqa: B023
                threads=1,
                **kwargs,
            )

        result = globals()[name.partition("-")[0]](open_store, rank, world)
        torch.save(result, Path(folder) / f"{name}.{rank}.pt")
        print(f"{name}: done on rank {rank}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.pop("PERSIA_SERVERS", None)
    main()
