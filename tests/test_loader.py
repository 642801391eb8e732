"""persia.DataLoader against plain loops, and its bound on staleness.

The oracle of staleness is a table itself: every batch holds id 7, whose row
begins at 0; with SGD(lr=1) and a gradient of -1 each update adds 1 to it. So
a vector read by a forward is the number of updates that its lookup saw.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persia
from persia import Batch, JaggedBatch, errors
from tests.loaders import Counter

pytestmark = pytest.mark.usefixtures("idle_core")


def jagged(
    seed: int, samples: int = 32, weighted: bool = False
) -> JaggedBatch:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * samples,), generator=g)
    n = int(lengths.sum())
    return JaggedBatch(
        ["a", "b", "c"],
        torch.randint(0, 60, (n,), generator=g),
        lengths=lengths,
        weights=torch.rand(n, generator=g) if weighted else None,
    )


def batches(n: int = 30, weighted: bool = False) -> Iterator[Batch]:
    for i in range(n):
        label = torch.rand(32, generator=torch.Generator().manual_seed(i))
        yield Batch(None, jagged(i, weighted=weighted), label.round())


class Model(nn.Module):
    """Pooled and sequence features of one store, and a linear layer."""

    def __init__(self, store: persia.Store, weighted: bool = False) -> None:
        super().__init__()
        self.bags = persia.EmbeddingBagCollection(
            store=store,
            is_weighted=weighted,
            tables=[
                persia.EmbeddingBagConfig(
                    "x", embedding_dim=8, feature_names=["a"], pooling="mean"
                ),
                persia.EmbeddingBagConfig(
                    "y", embedding_dim=16, feature_names=["b", "c"]
                ),
            ],
        )
        self.rows = persia.EmbeddingCollection(
            store=store,
            tables=[
                persia.EmbeddingConfig(
                    "x", embedding_dim=8, feature_names=["a"]
                )
            ],
            share=True,
        )
        torch.manual_seed(0)
        self.linear = nn.Linear(40, 1)

    def forward(self, ids: Any) -> Tensor:
        pooled: Tensor = self.linear(self.bags(ids).values())
        return pooled[:, 0] + self.rows(ids)["a"].values().square().mean()


def state_of(store: persia.Store) -> dict[str, tuple[Tensor, ...]]:
    return {
        name: store.rows_and_state(name, torch.arange(60))
        for name in store.tables
    }


def same(a: dict[str, tuple[Tensor, ...]], b: Any) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, y) for t in a for x, y in zip(a[t], b[t], strict=True)
    )


def train(
    loop: Callable[[Any, nn.Module], Any],
    update: str = "backward",
    weighted: bool = False,
    optimizer: Any = None,
    accumulate: int = 1,
    compiled: str | None = None,
) -> tuple[dict[str, tuple[Tensor, ...]], Tensor, dict[str, Any]]:
    """Trains; gives rows and states, dense weights and the loader's stats."""
    store = persia.Store(
        optimizer or persia.optim.Adagrad(lr=0.1), update=update
    )
    model = Model(store, weighted)
    call: Any = torch.compile(model, backend=compiled) if compiled else model
    dense = torch.optim.SGD(model.linear.parameters(), 0.1)
    for i, batch in enumerate(loop(batches(weighted=weighted), model)):
        loss = nn.functional.binary_cross_entropy_with_logits(
            call(batch.ids), batch.label
        )
        loss.backward()
        if (i + 1) % accumulate == 0:
            dense.step()
            dense.zero_grad()
            if update == "step":
                store.optimizer.step()
    return state_of(store), model.linear.weight, store.stats()["lookahead"]


def plain(source: Any, model: nn.Module) -> Any:
    return source


def ahead(staleness: int | None) -> Callable[[Any, nn.Module], Any]:
    return lambda source, model: persia.DataLoader(source, model, staleness)


# -- the same bits --------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_synchronous_has_the_bits_of_the_plain_loop(
    update: str, weighted: bool
) -> None:
    rows, weight, _ = train(plain, update, weighted)
    rows_ahead, weight_ahead, stats = train(ahead(0), update, weighted)
    assert same(rows, rows_ahead)
    assert torch.equal(weight, weight_ahead)
    assert stats["prefetched"] == 60  # two modules
    assert stats["not_prefetched"] == 0
    assert stats["staleness"] == {0: 30}
    assert stats["abandoned"] == stats["skipped"] == stats["waited"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: persia.optim.SGD(lr=0.1, momentum=0.9),
        lambda: persia.optim.RowWiseAdagrad(lr=0.1),
        lambda: persia.optim.Adam(lr=0.01),
    ],
)
def test_synchronous_bits_with_every_optimizer(make: Any) -> None:
    assert same(
        train(plain, optimizer=make())[0], train(ahead(0), optimizer=make())[0]
    )


@pytest.mark.parametrize("staleness", [1, 4, None])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_without_prefetch_the_bits_are_those_of_the_plain_loop(
    update: str, staleness: int | None, idle_core: bool
) -> None:
    def loop(source: Any, model: nn.Module) -> Any:
        return persia.DataLoader(source, model, staleness, prefetch=False)

    rows, weight, _ = train(plain, update)
    rows_ahead, weight_ahead, stats = train(loop, update)
    assert same(rows, rows_ahead)
    assert torch.equal(weight, weight_ahead)
    assert stats["staleness"] == {0: 30}
    assert stats["prefetch"] is False


@pytest.mark.parametrize("prefetch", ["auto", True, False])
def test_the_decision_to_prefetch_is_shown(
    prefetch: bool | str, idle_core: bool
) -> None:
    c = Counter()
    assert c.stats["prefetch"] is None
    for batch in persia.DataLoader(c.source(50), c.model, 1, None, prefetch):
        c.forward(batch)[1].backward()
    decision = idle_core if prefetch == "auto" else prefetch
    assert c.stats["prefetch"] is decision
    assert max(c.stats["staleness"]) == decision


def test_synchronous_bits_with_accumulation() -> None:
    rows, weight, _ = train(plain, "step", accumulate=3)
    rows_ahead, weight_ahead, stats = train(ahead(0), "step", accumulate=3)
    assert same(rows, rows_ahead)
    assert torch.equal(weight, weight_ahead)
    assert stats["abandoned"] == 0
    assert stats["staleness"] == {0: 30}


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
)
def test_compiled_forwards_are_served_ahead(backend: str) -> None:
    torch._dynamo.reset()
    rows, _, _ = train(plain, compiled=backend)
    rows_ahead, _, stats = train(ahead(0), compiled=backend)
    for table, (vectors, *_) in rows.items():
        assert torch.allclose(vectors, rows_ahead[table][0], atol=1e-6)
    assert stats["prefetched"] == 60
    assert stats["not_prefetched"] == 0
    assert stats["staleness"] == {0: 30}


def test_asynchronous_trains() -> None:
    rows, _, stats = train(ahead(None))
    assert stats["prefetched"] == 60
    assert max(stats["staleness"]) <= 6  # 4 ahead, 2 updates under way
    assert all(bool(t[0].isfinite().all()) for t in rows.values())


# -- the bound ------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 2, 5, 20])
def test_staleness_is_bounded_and_measured(
    staleness: int, idle_core: bool
) -> None:
    c = Counter()
    for t, batch in enumerate(c.loader(100, staleness)):
        seen, loss = c.forward(batch)
        assert t - staleness <= seen <= t
        loss.backward()
    assert c.value == 100
    histogram = c.stats["staleness"]
    assert sum(histogram.values()) == 100
    if idle_core:  # it takes 8 ahead, and 2 updates may be under way
        assert min(staleness, 8) <= max(histogram) <= min(staleness, 10)
    else:
        assert histogram == {0: 100}


def test_without_an_idle_core_nothing_is_done_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    try:
        for n, stale in ((cores, 0), (cores + 1, 0), (cores - 1, 1)):
            if n == 0:
                continue
            torch.set_num_threads(n)
            c = Counter()
            for _, batch in zip(range(50), c.loader(90, 1), strict=False):
                c.forward(batch)[1].backward()
            assert max(c.stats["staleness"]) == stale
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(12))
def test_staleness_under_random_schedules(seed: int) -> None:
    """Whatever the loop does, a lookup misses at most `staleness` updates."""
    rng = random.Random(seed)
    staleness = rng.randrange(4)
    c = Counter()
    seen: list[int | None] = []
    updated: list[bool] = []
    losses: dict[int, Tensor] = {}
    for t, batch in enumerate(c.loader(150, staleness)):
        seen.append(None)
        updated.append(False)
        if rng.random() < 0.15:
            continue
        seen[t], losses[t] = c.forward(batch)
        back = t - rng.randrange(3)
        if back in losses and rng.random() < 0.8:
            try:
                losses.pop(back).backward()
                updated[back] = True
            except errors.TicketError:
                c.store.flush()
        if rng.random() < 0.1:
            batch.skip()
    applied = 0
    for one, was in zip(seen, updated, strict=True):
        assert one is None or applied - one <= staleness
        applied += was
    assert applied == c.value > 20
    assert max(c.stats["staleness"]) <= staleness


def test_permits_of_optimizer_steps() -> None:
    c = Counter(update="step")
    for t, batch in enumerate(c.loader(60, 1)):
        seen, loss = c.forward(batch)
        assert t // 4 - 1 <= seen <= t
        loss.backward()
        if t % 4 == 3:
            c.store.optimizer.step()
    assert c.value == 60
    assert c.stats["abandoned"] == 0
    assert max(c.stats["staleness"]) <= 1


# -- several passes over one store -----------------------------------------


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("bounds", [(0, 0), (1, 1), (0, 2), (3, 1)])
def test_the_bound_holds_over_two_loaders(
    bounds: tuple[int, int], joint: bool
) -> None:
    """Batches of both loaders count, whichever backward they share."""
    c = Counter()
    loaders = [c.loader(60, bound) for bound in bounds]
    done = 0
    for step in zip(*loaders, strict=True):
        losses = []
        for batch, bound in zip(step, bounds, strict=True):
            seen, loss = c.forward(batch)
            assert done - bound <= seen <= done
            losses.append(loss)
            if not joint:
                loss.backward()
                done += 1
        if joint:
            torch.stack(losses).sum().backward()
            done += 2
    assert c.value == done == 120
    assert c.stats["abandoned"] == c.stats["dropped"] == 0
    assert sum(c.stats["staleness"].values()) == 120
    assert max(c.stats["staleness"]) <= max(bounds)


def test_steps_over_two_loaders_miss_no_step() -> None:
    c = Counter(update="step")
    done = 0
    for step in zip(c.loader(40, 0), c.loader(40, 0), strict=True):
        for batch in step:
            seen, loss = c.forward(batch)
            assert seen == done
            loss.backward()
        c.store.optimizer.step()
        done += 2
    assert c.value == 80
    assert c.stats["abandoned"] == 0


def test_evaluation_between_batches_takes_no_permit() -> None:
    c = Counter()
    for t, batch in enumerate(c.loader(20, 0)):
        seen, loss = c.forward(batch)
        assert seen == t
        with torch.no_grad():
            for other in c.loader(5, 2):
                assert c.forward(other)[0] == t
        loss.backward()
    assert c.value == 20
    assert c.stats["abandoned"] == 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_loader_within_the_loop_of_another(staleness: int) -> None:
    """The outer batch awaits its backward meanwhile, and loses nothing."""
    c = Counter()
    done = 0
    for batch in c.loader(10, staleness):
        _, outer = c.forward(batch)
        for t, other in enumerate(c.loader(9, staleness)):
            seen, loss = c.forward(other)
            assert done - staleness <= seen <= done
            loss.backward()
            done += 1
            if t == 4:
                break
        outer.backward()
        done += 1
    assert c.value == done == 60
    assert c.stats["abandoned"] == 0
    assert max(c.stats["staleness"]) <= staleness


def test_two_loaders_without_backwards_never_hang() -> None:
    c = Counter()
    losses = []
    for t, (a, b) in enumerate(
        zip(c.loader(30, 0), c.loader(30, 1), strict=True)
    ):
        loss = c.forward(a)[1] + c.forward(b)[1]
        losses.append(loss)
        if t % 3 == 0:
            loss.backward()
    assert c.value == 20
    assert c.stats["abandoned"] > 30
    with pytest.raises(errors.TicketError, match="abandoned"):
        losses[1].backward()


# -- loops that leave the path --------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_continue_on_a_bad_loss_never_hangs(staleness: int) -> None:
    c = Counter()
    late = []
    for t, batch in enumerate(c.loader(50, staleness)):
        _, loss = c.forward(batch)
        if t % 2:
            late.append(loss)
            continue
        loss.backward()
    assert c.value == 25
    assert c.stats["abandoned"] >= 24 - staleness
    with pytest.raises(errors.TicketError, match="abandoned"):
        late[0].backward()
    c.store.flush()
    assert c.value == 25


def test_batches_without_forward() -> None:
    c = Counter()
    assert sum(1 for _ in c.loader(40, 0)) == 40
    assert c.value == 0


def test_skip() -> None:
    c = Counter()
    for batch in c.loader(20, 0):
        _, loss = c.forward(batch)
        batch.skip()
        with pytest.raises(errors.TicketError, match="skipped"):
            loss.backward()
        c.store.flush()
    assert c.stats["skipped"] == 20
    assert c.stats["abandoned"] == c.stats["waited"] == 0
    Batch(None, jagged(0)).skip()  # of no loader: does nothing


def test_a_failed_update_frees_its_permit() -> None:
    c = Counter()
    for t, batch in enumerate(c.loader(20, 0)):
        seen, loss = c.forward(batch)
        assert seen == (t + 1) // 2
        if t % 2:
            with pytest.raises(errors.NonFiniteGradient):
                (loss * float("nan")).backward()
        else:
            loss.backward()
    assert c.value == 10
    assert c.stats["dropped"] == 10
    assert c.stats["abandoned"] == 0


@pytest.mark.parametrize("end", ["break", "exception", "close", "del"])
def test_leaving_the_loop_cancels(end: str, idle_core: bool) -> None:
    c = Counter()
    alive = []

    def source() -> Iterator[Batch]:
        for batch in c.source(100):
            alive.append(weakref.ref(batch.ids.values()))
            yield batch

    iterator = iter(persia.DataLoader(source(), c.model, 3))
    if end in ("break", "exception"):
        try:
            for t, batch in enumerate(iterator):
                c.forward(batch)[1].backward()
                if t == 5:
                    if end == "break":
                        break
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
    else:
        for _ in range(6):
            batch = next(iterator)
            c.forward(batch)[1].backward()
    if end == "close":
        iterator.close()
        with pytest.raises(StopIteration):
            next(iterator)
    late = c.forward(batch)[1]
    del iterator, batch
    c.store.flush()
    gc.collect()
    assert 6 + idle_core <= len(alive) < 12
    assert sum(r() is not None for r in alive) <= 1  # that of `late`
    late.backward()  # a plain forward after the end
    assert c.value == 7
    for batch in c.loader(3, 0):  # and the loop can run again
        c.forward(batch)[1].backward()
    assert c.value == 10


def test_backward_after_the_loop() -> None:
    c = Counter()
    losses = [c.forward(batch)[1] for batch in c.loader(3, 3)]
    for loss in losses:
        loss.backward()
    assert c.value == 3


def test_an_exception_of_the_source_comes_in_its_turn() -> None:
    c = Counter()

    def source() -> Iterator[Batch]:
        yield from c.source(5)
        raise OSError("disk")

    iterator = iter(persia.DataLoader(source(), c.model, 3))
    for _ in range(5):
        c.forward(next(iterator))[1].backward()
    with pytest.raises(OSError, match="disk"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert c.value == 5


def test_ctrl_c_in_the_source() -> None:
    c = Counter()

    def source() -> Iterator[Batch]:
        yield from c.source(3)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(30)

    def run() -> None:
        for batch in persia.DataLoader(source(), c.model):
            c.forward(batch)[1].backward()

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert time.monotonic() - started < 10
    before = c.value
    for batch in c.loader(4, 1):  # the notebook cell runs again
        c.forward(batch)[1].backward()
    assert c.value == before + 4


# -- evaluation -----------------------------------------------------------


@pytest.mark.parametrize("where", ["around the loop", "around the model"])
def test_evaluation_takes_no_permit(where: str) -> None:
    c = Counter()
    if where == "around the loop":
        with torch.no_grad():
            for batch in c.loader(20, 0):
                c.forward(batch)
    else:
        for batch in c.loader(20, 0):
            with torch.no_grad():
                c.forward(batch)
    assert c.stats["prefetched"] == 20
    assert c.stats["abandoned"] == 0
    assert c.value == 0


def test_a_second_iterator_inside_the_loop() -> None:
    c = Counter()
    for t, batch in enumerate(c.loader(12, 0)):
        seen, loss = c.forward(batch)
        assert seen == t
        loss.backward()
        if t % 4 == 0:
            with torch.inference_mode():
                for other in c.loader(5, 1):
                    assert c.forward(other)[0] == t + 1
    assert c.value == 12
    assert c.stats["abandoned"] == 0
    assert c.stats["not_prefetched"] == 0


def test_two_passes_over_the_same_batches() -> None:
    c = Counter()
    data = list(c.source(12))
    for t, batch in enumerate(persia.DataLoader(data, c.model, 1)):
        seen, loss = c.forward(batch)
        assert t - 1 <= seen <= t
        loss.backward()
        with torch.no_grad():
            for other in persia.DataLoader(data, c.model, 1):
                assert c.forward(other)[0] == t + 1
    assert c.stats["not_prefetched"] == 0
    assert c.stats["abandoned"] == 0


def test_two_loops_train_in_turns() -> None:
    c = Counter()
    for one, two in zip(c.loader(20, 1), c.loader(20, 1), strict=True):
        (c.forward(one)[1] + c.forward(two)[1]).backward()
    assert c.value == 40
    assert c.stats["abandoned"] == 0


def test_several_stores() -> None:
    one, two = Counter(), Counter()
    model = nn.ModuleList([one.model, two.model])
    for t, batch in enumerate(persia.DataLoader(one.source(20), model, 0)):
        seen, loss = one.forward(batch)
        also_seen, other = two.forward(batch)
        assert seen == also_seen == t
        (loss + other).backward()
    assert one.value == two.value == 20
    for c in (one, two):
        assert c.stats["prefetched"] == 20
        assert c.stats["abandoned"] == 0


def test_several_forwards_share_a_permit() -> None:
    c = Counter()
    for t, batch in enumerate(c.loader(10, 0)):
        (seen, one), (_, two) = c.forward(batch), c.forward(batch)
        assert seen == 2 * t
        one.backward()
        two.backward()
    assert c.value == 20
    assert c.stats["abandoned"] == 0
    assert c.stats["staleness"] == {0: 10}


def test_several_backwards_of_a_batch(idle_core: bool) -> None:
    """The next lookup begins after the first; it has all of them in the end,
    and those of ids that no batch has."""
    c = Counter()
    for t, batch in enumerate(c.loader(20, 0)):
        for i in range(2):
            seen, loss = c.forward(batch)
            assert seen == 3 * t + i
            loss.backward()
        other = c.model(JaggedBatch(["f"], torch.tensor([7]))).values()
        assert int(other[0, 0]) == 3 * t + 2
        (-other.sum()).backward()
    assert c.value == 60
    assert c.stats["staleness"] == {0: 20}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forwards_hold_no_permit(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    c = Counter()
    needs_grad = torch.zeros(1, requires_grad=True)

    def part(ids: JaggedBatch, x: Tensor) -> Tensor:
        return c.model(ids).values() + x

    for t, batch in enumerate(c.loader(10, 0)):
        out = checkpoint(part, batch.ids, needs_grad, use_reentrant=reentrant)
        assert int(out[0, 0]) == t
        (-out.sum()).backward()
    assert c.value == 10
    assert c.stats["abandoned"] == 0


def test_an_interrupted_batch_was_not_given_out() -> None:
    def source() -> Iterator[JaggedBatch]:
        yield JaggedBatch(["f"], torch.tensor([7]))
        yield JaggedBatch(["f"], torch.tensor([7]))
        raise KeyboardInterrupt  # while it reads ahead of the second one

    c = Counter()
    loader = persia.DataLoader(source(), c.model, 1)
    seen = []

    def loop() -> None:
        for ids in loader:
            seen.append(ids)
            c.model(ids).values().sum().backward()

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert loader.state_dict()["batches"] == len(seen)


# -- errors ---------------------------------------------------------------


@pytest.mark.parametrize("staleness", [-1, 1.5, True, "1"])
def test_bad_staleness(staleness: Any) -> None:
    c = Counter()
    with pytest.raises(errors.InvalidArgument, match="staleness"):
        persia.DataLoader([], c.model, staleness)


def test_bad_arguments() -> None:
    c = Counter()
    with pytest.raises(errors.InvalidArgument, match="no persia module"):
        persia.DataLoader([], nn.Linear(1, 1))
    with pytest.raises(errors.InvalidArgument, match="batches"):
        persia.DataLoader(3, c.model)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="model"):
        persia.DataLoader([], None)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="ids"):
        persia.DataLoader([], c.model, ids=1.5)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="prefetch is 'yes'"):
        persia.DataLoader([], c.model, prefetch="yes")
    with pytest.raises(TypeError):
        len(persia.DataLoader(iter([]), c.model))
    assert list(persia.DataLoader([], c.model)) == []


def test_a_closed_store() -> None:
    c = Counter()
    iterator = iter(c.loader(10, 1))
    next(iterator)
    c.store.close()
    with pytest.raises(errors.Closed):
        for _ in iterator:
            pass
    with pytest.raises(errors.Closed):
        iter(c.loader(1, 1))
