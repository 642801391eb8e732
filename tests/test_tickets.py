"""When gradients are summed and pushed, and what may not be pushed twice."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import persia
from persia import errors

IDS = torch.tensor([1, 2])


def make(update: str = "backward", lr: float = 1.0, **store: Any) -> Any:
    return persia.EmbeddingBagCollection(
        store=persia.Store(persia.optim.SGD(lr=lr), update=update, **store),
        tables=[persia.EmbeddingBagConfig("t", 4, feature_names=["f"])],
    )


def ids(*values: int) -> persia.JaggedBatch:
    return persia.JaggedBatch(["f"], torch.tensor(values))


def rows(bags: Any) -> torch.Tensor:
    out: torch.Tensor = bags.store.rows("t", IDS)
    return out


def test_a_backward_that_keeps_the_graph_is_refused_before_it_moves() -> None:
    bags = make()
    before = rows(bags)
    loss = bags(ids(1, 2)).values().sum()
    with pytest.raises(errors.TicketError):
        loss.backward(retain_graph=True)
    torch.testing.assert_close(rows(bags), before)
    assert bags.store.updates == 0
    bags(ids(1, 2)).values().sum().backward()
    torch.testing.assert_close(rows(bags), before - 1)


def test_second_backward_raises() -> None:
    bags = make()
    before = rows(bags)
    loss = bags(ids(1, 2)).values().sum()
    loss.backward()
    with pytest.raises(errors.TicketError):
        loss.backward()
    torch.testing.assert_close(rows(bags), before - 1)
    assert bags.store.updates == 1


@pytest.mark.parametrize("loader", [False, True])
def test_several_backwards_add_up_with_update_step(loader: bool) -> None:
    bags = make("step")
    before = rows(bags)
    weight = before.clone().requires_grad_()
    batches: Any = [ids(1, 2, 2)] * 3
    if loader:
        batches = persia.DataLoader(batches, bags, staleness=0)
    for batch in batches:
        out = bags(batch).values()
        theirs = weight[[0, 1, 1]]
        for one in (out, theirs):
            one.square().sum().backward(retain_graph=True)
            (one * torch.arange(4)).sum().backward(retain_graph=True)
            one.sum().backward()
        with pytest.raises(RuntimeError):  # torch's: the graph is freed
            out.sum().backward()
        bags.store.optimizer.step()
        assert weight.grad is not None
        with torch.no_grad():
            weight -= weight.grad
        weight.grad = None
        torch.testing.assert_close(rows(bags), weight.detach())
    assert bags.store.updates == 3


def test_second_backward_through_a_layer_that_was_freed() -> None:
    bags = make()
    before = rows(bags)
    loss = torch.nn.Linear(4, 1)(bags(ids(1, 2)).values()).sigmoid().sum()
    loss.backward()
    once = rows(bags)
    with pytest.raises(RuntimeError):  # torch's, or ours
        loss.backward()
    assert not torch.equal(before, once)
    assert torch.equal(rows(bags), once)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_forward_from_before_a_load(tmp_path: Path, update: str) -> None:
    bags = make(update)
    store = bags.store
    bags(ids(1, 2)).values().sum().backward()
    store.optimizer.step()
    store.save(tmp_path)
    saved = rows(bags)
    store.set_rows("t", IDS, torch.full((2, 4), 100.0))
    loss = bags(ids(1, 2)).values().square().sum()
    store.load(tmp_path)
    with pytest.raises(errors.TicketError, match="before a checkpoint"):
        loss.backward()
    store.optimizer.step()
    assert torch.equal(rows(bags), saved)
    bags(ids(1, 2)).values().sum().backward()
    store.optimizer.step()
    assert torch.equal(rows(bags), saved - 1)


def test_create_graph_raises() -> None:
    bags = make()
    before = rows(bags)
    loss = bags(ids(1, 2)).values().square().sum()
    with pytest.raises(errors.TicketError, match="create_graph"):
        loss.backward(create_graph=True)
    assert torch.equal(rows(bags), before)


def test_one_update_for_all_forwards_of_a_backward() -> None:
    bags = make()
    bags.store.optimizer.param_groups[0]["lr"] = 1.0
    before = rows(bags)
    a, b = bags(ids(1, 2)).values(), bags(ids(2, 1)).values()
    (a.sum() + 3 * b.sum()).backward()
    assert bags.store.updates == 1
    torch.testing.assert_close(rows(bags), before - 4)


def test_update_step_accumulates() -> None:
    bags = make("step")
    before = rows(bags)
    for _ in range(3):
        bags(ids(1, 2)).values().sum().backward()
    assert torch.equal(rows(bags), before)
    assert bags.store.stats()["held"] == 3
    bags.store.optimizer.step()
    torch.testing.assert_close(rows(bags), before - 3)
    assert bags.store.updates == 1
    bags.store.optimizer.step()  # nothing waits: nothing happens
    assert bags.store.updates == 1


def test_zero_grad_drops_what_waits() -> None:
    bags = make("step")
    before = rows(bags)
    bags(ids(1, 2)).values().sum().backward()
    bags.store.optimizer.zero_grad()
    bags.store.optimizer.step()
    assert torch.equal(rows(bags), before)
    assert bags.store.stats()["gradients_discarded"] == 1


def test_accumulated_adagrad_is_one_update() -> None:
    """The squares are of the sum, not the sum of squares."""
    one = persia.EmbeddingBagCollection(
        store=persia.Store(persia.optim.Adagrad(lr=0.1), update="step"),
        tables=[persia.EmbeddingBagConfig("t", 4, feature_names=["f"])],
    )
    weight = torch.nn.Parameter(rows(one).clone())
    theirs = torch.optim.Adagrad([weight], lr=0.1)
    for _ in range(2):
        g = torch.randn(2, 4)
        one(ids(1, 2)).values().backward(g)
        weight.grad = g if weight.grad is None else weight.grad + g
    one.store.optimizer.step()
    theirs.step()
    torch.testing.assert_close(rows(one), weight.detach())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_forward_is_pushed_once(reentrant: bool) -> None:
    bags = make()
    linear = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = linear(bags(ids(1, 2)).values() + x)
        return out.tanh()

    before = rows(bags)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert bags.store.updates == 1
    after = rows(bags)
    other = make()
    assert torch.equal(rows(other), before)
    out = linear(other(ids(1, 2)).values() + x.detach()).tanh()
    out.sum().backward()
    assert torch.equal(rows(other), after)


def test_forwards_are_summed_in_their_order() -> None:
    """The bits do not depend on the order in which backward visits them."""
    g = [torch.randn(2, 4) * 10.0**k for k in (0, 4, -4)]
    results = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        bags = make("step")
        outs = [bags(ids(1, 2)).values() for _ in g]
        for k in order:
            outs[k].backward(g[k])
        bags.store.optimizer.step()
        results.append(rows(bags))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_forward_without_backward_leaves_nothing() -> None:
    bags = make()
    for _ in range(10):
        bags(ids(1, 2)).values().sum()
    assert bags.store.stats()["held"] == 0
    assert bags.store.stats()["tables"]["t"]["rows"] == 0
    bags(ids(1, 2)).values().sum().backward()
    assert bags.store.updates == 1


def test_backward_that_an_exception_ends_is_dropped() -> None:
    bags = make()
    before = rows(bags)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    # Made first, so visited last; the update waits for both lookups.
    first = Fails.apply(bags(ids(1, 2)).values())
    loss = (bags(ids(1, 2)).values() * 5).sum() + first.sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    assert bags.store.stats()["held"] == 1
    bags(ids(1, 2)).values().sum().backward()
    torch.testing.assert_close(rows(bags), before - 1)
    assert bags.store.stats()["gradients_discarded"] == 1


def test_autograd_grad_of_other_inputs_pushes_nothing() -> None:
    bags = make()
    before = rows(bags)
    w = torch.ones(4, requires_grad=True)
    out = bags(ids(1, 2)).values() * w
    (g,) = torch.autograd.grad(out.sum(), [w])
    torch.testing.assert_close(g, before.sum(0))
    assert torch.equal(rows(bags), before)
    assert bags.store.stats()["held"] == 0


@pytest.mark.parametrize("update", ["backward", "step"])
def test_autograd_grad_of_an_anchor_is_refused(update: str) -> None:
    bags = make(update)
    before, (anchor,) = rows(bags), bags.parameters()
    out = bags(ids(0, 1)).values()
    for _ in range(2):
        with pytest.raises(persia.errors.InvalidArgument):
            torch.autograd.grad(out.sum(), [anchor], retain_graph=True)
    bags.store.optimizer.step()
    assert torch.equal(rows(bags), before)
    (out * 1.0).sum().backward()
    bags.store.optimizer.step()
    assert not torch.equal(rows(bags), before)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_backward_to_some_inputs_trains_rows_that_are_among_them(
    update: str,
) -> None:
    one, other = make(update), make(update)
    for step in range(3):
        for bags, inputs in (
            (one, list(one.parameters())),
            (other, None),
        ):
            w = torch.ones(1, requires_grad=True)
            loss = (bags(ids(0, step)).values() * w).sum()
            loss = loss + bags(ids(1, step)).values().sum()
            loss.backward(inputs=inputs)
            assert (w.grad is None) == (inputs is not None)
            bags.store.optimizer.step()
            assert bags.store.updates == step + 1
        assert torch.equal(rows(one), rows(other))
    before = rows(one)
    w = torch.ones(1, requires_grad=True)
    (one(ids(0, 1)).values() * w).sum().backward(inputs=[w])
    one.store.optimizer.step()
    assert w.grad is not None and torch.equal(rows(one), before)


def test_modules_of_one_store_share_rows_and_updates() -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[persia.EmbeddingBagConfig("t", 4, feature_names=["f"])],
    )
    sequences = persia.EmbeddingCollection(
        store=store,
        tables=[persia.EmbeddingConfig("t", 4, feature_names=["f"])],
        share=True,
    )
    before = store.rows("t", IDS)
    batch = ids(1, 2)
    loss = bags(batch).values().sum()
    loss = loss + 2 * sequences(batch)["f"].values().sum()
    loss.backward()
    assert store.updates == 1
    torch.testing.assert_close(store.rows("t", IDS), before - 3)


def test_a_contradicting_table_is_an_error() -> None:
    bags = make()
    with pytest.raises(errors.SchemaMismatch, match="embedding_dim"):
        persia.EmbeddingBagCollection(
            store=bags.store,
            tables=[persia.EmbeddingBagConfig("t", 8)],
            share=True,
        )
    with pytest.raises(errors.SchemaMismatch, match="optimizer"):
        persia.EmbeddingBagCollection(
            store=bags.store,
            tables=[
                persia.EmbeddingBagConfig(
                    "t", 4, optimizer=persia.optim.Adam()
                )
            ],
            share=True,
        )


@pytest.mark.parametrize("what", ["gradient", "ids"])
def test_tensors_may_not_change_before_the_step(what: str) -> None:
    bags = make("step")
    before = rows(bags)
    batch, g = ids(1, 2), torch.ones(2, 4)
    bags(batch).values().backward(g)
    (g if what == "gradient" else batch.values()).mul_(2)
    with pytest.raises(errors.TicketError, match="in place"):
        bags.store.optimizer.step()
    assert torch.equal(rows(bags), before)
    bags(ids(1, 2)).values().backward(g)
    bags.store.optimizer.step()
    assert bags.store.updates == 1


@pytest.mark.slow
def test_gradients_that_wait_are_bounded() -> None:
    bags = make("step")
    batch = ids(1)

    def forever() -> None:
        for _ in range(20000):
            bags(batch).values().sum().backward()

    with pytest.raises(errors.LimitReached, match="step"):
        forever()
    bags.store.optimizer.zero_grad()


def test_threads_have_backwards_of_their_own() -> None:
    """The end of one thread's backward leaves alone what another holds."""
    bags = make()
    before = rows(bags)
    inside, go_on = threading.Event(), threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go_on.wait(20)
            return g

    def other() -> None:
        first = Waits.apply(bags(ids(1, 2)).values())
        (bags(ids(1, 2)).values().sum() * 10 + first.sum()).backward()

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(20)
    assert bags.store.stats()["held"] == 1
    bags(ids(1, 2)).values().sum().backward()
    torch.testing.assert_close(rows(bags), before - 1)
    go_on.set()
    thread.join()
    torch.testing.assert_close(rows(bags), before - 12)
    assert bags.store.updates == 2


def in_threads(n: int, work: Any) -> None:
    """Runs ``work(i)`` in n threads that change often; raises what they do."""
    failed: list[BaseException] = []

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []


def test_threads_train_one_module() -> None:
    bags = make()
    before = rows(bags)
    in_threads(
        4,
        lambda i: [
            bags(ids(1 + i % 2)).values().sum().backward() for _ in range(300)
        ],
    )
    torch.testing.assert_close(rows(bags), before - 600)
    assert bags.store.updates == 1200


def test_threads_declare_and_train_tables_of_one_store() -> None:
    store = persia.Store(persia.optim.SGD(lr=1.0))

    def work(i: int) -> None:
        for j in range(20):
            bags = persia.EmbeddingBagCollection(
                store=store,
                tables=[persia.EmbeddingBagConfig(f"{i}.{j}", 4, ["f"])],
            )
            before = store.rows(f"{i}.{j}", IDS)
            for _ in range(5):
                bags(ids(1, 2)).values().sum().backward()
            after = store.rows(f"{i}.{j}", IDS)
            torch.testing.assert_close(after, before - 5)

    in_threads(4, work)
    assert store.updates == 400


def test_a_table_is_made_while_updates_are_on_their_way() -> None:
    bags = make(threads=2)
    loader = persia.DataLoader(
        [ids(*range(i, i + 20_000)) for i in range(30)],
        bags,
        staleness=4,
        ids=lambda batch: batch,
    )
    cores = torch.get_num_threads()
    torch.set_num_threads(1)  # else nothing is done ahead
    try:
        for i, batch in enumerate(loader):
            bags(batch).values().sum().backward()
            bags.store.add_table(persia.EmbeddingBagConfig(f"x{i}", 4))
    finally:
        torch.set_num_threads(cores)
    assert bags.store.updates == 30
