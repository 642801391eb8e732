"""Updates in the background: with a staleness of at least 1 the loop goes on
while they are applied.

As in test_loader.py, row 7 counts the updates: it begins at 0 and each adds 1.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import persia
from persia import Batch, JaggedBatch, errors
from persia.store.engine import engine_of

NAN = float("nan")


@pytest.fixture(autouse=True)
def idle_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads torch has here."""
    monkeypatch.setattr("persia.loop.loader.nothing_to_hide", lambda *_: False)


class Counter:
    """A store whose row 7 counts its updates."""

    def __init__(self, **arguments: Any) -> None:
        self.store = persia.Store(persia.optim.SGD(lr=1.0), **arguments)
        self.model = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig(
                    "t", embedding_dim=4, feature_names=["f"], init=0.0
                )
            ],
        )

    def loader(self, n: int, staleness: int | None = 1) -> Any:
        def source() -> Iterator[Batch]:
            for _ in range(n):
                yield Batch(None, JaggedBatch(["f"], torch.tensor([7])))

        return persia.DataLoader(source(), self.model, staleness)

    def forward(self, batch: Batch) -> tuple[int, Tensor]:
        """(updates seen, a loss whose backward adds one update)."""
        out = self.model(batch.ids).values()
        return int(out[0, 0]), -out.sum()

    def train(self, n: int, staleness: int | None, bad: int) -> None:
        """A loop in which one batch has a gradient of NaN."""
        self.done = 0
        for t, batch in enumerate(self.loader(n, staleness)):
            loss = self.forward(batch)[1]
            self.done += 1
            (loss * NAN if t == bad else loss).backward()

    @property
    def value(self) -> int:
        return int(self.store.rows("t", [7])[0, 0])


def test_every_update_is_applied_once() -> None:
    c = Counter()
    for batch in c.loader(300):
        c.forward(batch)[1].backward()
    assert c.value == c.store.updates == 300
    stats = c.store.stats()
    assert stats["pending"] == stats["updates_failed"] == 0
    assert (
        stats["lookahead"]["dropped"] == stats["lookahead"]["abandoned"] == 0
    )


def test_looking_at_rows_waits_for_updates() -> None:
    c = Counter()
    for t, batch in enumerate(c.loader(100, 3)):
        c.forward(batch)[1].backward()
        if t % 3 == 0:
            assert c.value == t + 1
        elif t % 3 == 1:
            assert c.store.updates == t + 1
        else:
            with torch.no_grad():  # evaluation does so, too
                out = c.model({"f": torch.tensor([7])}).values()
            assert int(out[0, 0]) == t + 1


def test_an_evaluation_loop_sees_all_updates() -> None:
    c = Counter()
    for t, batch in enumerate(c.loader(30, 4)):
        c.forward(batch)[1].backward()
        with torch.no_grad():
            for other in c.loader(3, 2):
                assert c.forward(other)[0] == t + 1


def test_break_loses_nothing() -> None:
    c = Counter()
    for t, batch in enumerate(c.loader(100, 5)):
        c.forward(batch)[1].backward()
        if t == 40:
            break
    assert c.value == 41
    c.forward(Batch(None, JaggedBatch(["f"], torch.tensor([7]))))[1].backward()
    assert c.value == 42


def test_ids_may_change_after_the_backward() -> None:
    c = Counter()
    c.store.set_rows("t", [8], [[0.0] * 4])
    for batch in c.loader(50, 2):
        c.forward(batch)[1].backward()
        batch.ids.values().fill_(8)
    assert c.value == 50
    assert int(c.store.rows("t", [8])[0, 0]) == 0


def test_an_error_is_raised_once_by_flush() -> None:
    c = Counter()
    iterator = iter(c.loader(10, 3))
    (c.forward(next(iterator))[1] * NAN).backward()
    with pytest.raises(errors.NonFiniteGradient, match="table t"):
        c.store.flush()
    c.store.flush()
    c.forward(next(iterator))[1].backward()
    c.store.flush()
    assert c.value == 1
    stats = c.store.stats()
    assert stats["updates_failed"] == stats["lookahead"]["dropped"] == 1


@pytest.mark.parametrize("staleness", [1, 4, None])
def test_an_error_reaches_the_loop(staleness: int | None) -> None:
    c = Counter()
    with pytest.raises(errors.NonFiniteGradient):
        c.train(20, staleness, bad=5)
    assert 6 <= c.done <= 8  # 2 may be under way
    c.store.flush()  # it was told
    assert c.value == c.done - 1
    assert c.store.stats()["updates_failed"] == 1


def test_the_error_of_the_last_update_ends_the_loop() -> None:
    c = Counter()
    with pytest.raises(errors.NonFiniteGradient):
        c.train(20, 1, bad=19)
    assert c.value == 19


def test_the_next_backward_tells_and_is_applied() -> None:
    c = Counter()
    iterator = iter(c.loader(10, 5))
    bad, good = (c.forward(next(iterator))[1] for _ in range(2))
    (bad * NAN).backward()
    engine_of(c.store).core.settle()
    with pytest.raises(errors.NonFiniteGradient):
        good.backward()
    c.store.flush()
    assert c.value == 1


def test_a_forward_tells() -> None:
    c = Counter()
    iterator = iter(c.loader(10, 5))
    (c.forward(next(iterator))[1] * NAN).backward()
    engine_of(c.store).core.settle()
    with pytest.raises(errors.NonFiniteGradient):
        c.model({"f": torch.tensor([7])})
    c.model({"f": torch.tensor([7])})


def test_close_waits_and_tells() -> None:
    c = Counter()
    for t, batch in enumerate(c.loader(10, 5)):
        (c.forward(batch)[1] * (NAN if t == 3 else 1.0)).backward()
        if t == 3:
            break
    with pytest.raises(errors.NonFiniteGradient):
        c.store.close()
    c.store.close()
    with pytest.raises(errors.Closed):
        c.store.rows("t", [7])


def test_an_exception_in_a_with_block_is_the_one_raised() -> None:
    c = Counter()

    def run() -> None:
        with c.store:
            iterator = iter(c.loader(10, 5))
            (c.forward(next(iterator))[1] * NAN).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


def test_tensors_are_freed_after_their_update() -> None:
    c = Counter()
    alive = []
    for t, batch in enumerate(c.loader(20, 3)):
        alive.append(weakref.ref(batch.ids.values()))
        c.forward(batch)[1].backward()
        if t == 10:
            break
    del batch
    c.store.flush()
    gc.collect()
    assert not any(r() is not None for r in alive)


def test_flush_has_a_deadline() -> None:
    c = Counter()
    c.store.flush(10.0)
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            c.store.flush(wrong)


def test_gradients_of_other_ids_are_of_the_last_batch() -> None:
    """They are in its bound."""
    for staleness in (0, 3):
        c = Counter()
        for t, _ in enumerate(c.loader(20, staleness)):
            ids = JaggedBatch(["f"], torch.tensor([7, 8]))
            seen, loss = c.forward(Batch(None, ids))
            assert t - staleness <= seen <= t
            loss.backward()
        assert c.value == 20


def test_a_synchronous_loop_beside_waits() -> None:
    c = Counter()
    for t, (one, two) in enumerate(
        zip(c.loader(20, 1), c.loader(20, 0), strict=True)
    ):
        c.forward(one)[1].backward()
        assert c.store.stats()["pending"] == 0
        seen, loss = c.forward(two)
        assert seen >= 2 * t
        loss.backward()
    assert c.value == 40
