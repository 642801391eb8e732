"""What a batch of a persia.DataLoader may be, and where its ids are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persia
from persia import Batch, JaggedBatch, errors
from tests.loaders import Counter

pytestmark = pytest.mark.usefixtures("idle_core")


class Duck:
    """A KeyedJaggedTensor as far as modules look."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def keys(self) -> list[str]:
        return ["f"]

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return torch.arange(len(self._values) + 1)

    def weights_or_none(self) -> None:
        return None


@dataclass
class Named:
    label: int
    history: Any


SHAPES: dict[str, tuple[Callable[[], Any], Any, Callable[[Any], Any]]] = {
    "ids itself": (
        lambda: JaggedBatch(["f"], torch.tensor([7])),
        None,
        lambda b: b,
    ),
    "tuple": (
        lambda: (1, JaggedBatch(["f"], torch.tensor([7]))),
        None,
        lambda b: b[1],
    ),
    "place": (
        lambda: (JaggedBatch(["g"], torch.tensor([1])),
                 JaggedBatch(["f"], torch.tensor([7]))),
        1,
        lambda b: b[1],
    ),
    "dict": (
        lambda: {"label": 1, "sparse": JaggedBatch(["f"], torch.tensor([7]))},
        None,
        lambda b: b["sparse"],
    ),
    "key": (
        lambda: {"other": JaggedBatch(["g"], torch.tensor([1])),
                 "sparse": JaggedBatch(["f"], torch.tensor([7]))},
        "sparse",
        lambda b: b["sparse"],
    ),
    "dataclass": (
        lambda: Named(1, JaggedBatch(["f"], torch.tensor([7]))),
        None,
        lambda b: b.history,
    ),
    "attribute": (
        lambda: Named(1, JaggedBatch(["f"], torch.tensor([7]))),
        "history",
        lambda b: b.history,
    ),
    "function": (
        lambda: Named(1, [JaggedBatch(["f"], torch.tensor([7]))]),
        lambda b: b.history[0],
        lambda b: b.history[0],
    ),
    "duck": (lambda: (Duck(torch.tensor([7])), 1), None, lambda b: b[0]),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_any_batch_with_ids(shape: str) -> None:
    make, ids, get = SHAPES[shape]
    c = Counter()
    source = [make() for _ in range(10)]
    for t, batch in enumerate(persia.DataLoader(source, c.model, 0, ids=ids)):
        assert batch is source[t]
        out = c.model(get(batch)).values()
        assert int(out[0, 0]) == t
        (-out.sum()).backward()
    assert c.stats["prefetched"] == 10
    assert c.stats["not_prefetched"] == 0


def test_a_missing_field_is_named_in_its_turn() -> None:
    c = Counter()
    source = [{"sparse": JaggedBatch(["f"], torch.tensor([7]))}, {"x": 1}]
    iterator = iter(persia.DataLoader(source, c.model, ids="sparse"))
    next(iterator)
    with pytest.raises(errors.MissingFeature, match="'sparse'"):
        next(iterator)


def test_other_ids_take_the_plain_path() -> None:
    c = Counter()
    for t, _ in enumerate(c.loader(10, 0)):
        copy = Batch(None, JaggedBatch(["f"], torch.tensor([7, 8])))
        seen, loss = c.forward(copy)
        assert seen == t
        loss.backward()
    assert c.stats["not_prefetched"] == 10
    assert c.stats["prefetched"] == 0
    assert c.value == 10


def test_ids_changed_in_place_are_looked_up_anew() -> None:
    c = Counter()
    c.store.set_rows("t", [8], [[5.0] * 4])
    for batch in c.loader(6, 0):
        batch.ids.values().fill_(8)
        seen, loss = c.forward(batch)
        assert seen == 5 + int(c.stats["batches"]) - 1
        loss.backward()
    assert c.value == 0
    assert c.stats["not_prefetched"] == 6
    assert c.stats["abandoned"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Duck(torch.tensor([7], dtype=torch.int32)),
        lambda: JaggedBatch(["f"], torch.tensor([[7, 0], [7, 0]])[:, 0]),
    ],
    ids=["int32", "columns"],
)
def test_changed_ids_that_a_lookup_copies_are_looked_up_anew(
    make: Callable[[], Any],
) -> None:
    c = Counter()
    c.store.set_rows("t", [8], [[5.0] * 4])
    for given in persia.DataLoader([make()], c.model, 1):
        given.values().fill_(8)
        assert int(c.model(given).values()[0, 0].detach()) == 5
    assert c.stats["not_prefetched"] == 1


def test_a_bad_batch_fails_in_its_forward() -> None:
    c = Counter()
    bad = Duck(torch.tensor([7.5]))
    good = JaggedBatch(["f"], torch.tensor([7]))
    wrong = JaggedBatch(["g"], torch.tensor([7]))
    iterator = iter(persia.DataLoader([bad, good, wrong], c.model, 2))
    with pytest.raises(errors.DtypeError):
        c.model(next(iterator))
    (-c.model(next(iterator)).values().sum()).backward()
    with pytest.raises(errors.MissingFeature, match="'f'"):
        c.model(next(iterator))
    assert c.value == 1


# -- what has no ticket --------------------------------------------------


class Kjt(Duck):
    """One that is copied without its ticket, as torchrec's is."""

    def to(self, device: str) -> Kjt:
        return Kjt(self._values.to(device, copy=True))


WITHOUT_TICKET: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "dict": ({"f": torch.tensor([7])}, lambda b: b),
    "dict with a label": (
        {"f": torch.tensor([7]), "y": torch.tensor([0.5])},
        lambda b: b,
    ),
    "rebuilt": (
        {"f": torch.tensor([7]), "y": torch.tensor([0.5])},
        lambda b: {"f": b["f"].clone()},
    ),
    "dict in a tuple": (({"f": torch.tensor([7])}, 1), lambda b: b[0]),
    "dict as ids": ({"ids": {"f": torch.tensor([7])}}, lambda b: b["ids"]),
    "lists": ({"f": torch.tensor([[7, 7]])}, lambda b: b),
    "lengths": (
        {"f": (torch.tensor([7]), torch.tensor([1, 0]))},
        lambda b: b,
    ),
    "moved": (Kjt(torch.tensor([7])), lambda b: b.to("cpu")),
    "moved narrow": (
        Kjt(torch.tensor([7], dtype=torch.int32)),
        lambda b: b.to("cpu"),
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", WITHOUT_TICKET)
def test_ids_are_known_by_their_contents(shape: str) -> None:
    batch, get = WITHOUT_TICKET[shape]
    c = Counter()
    for t, one in enumerate(persia.DataLoader([batch] * 10, c.model, 0)):
        out = c.model(get(one)).values()
        assert int(out[0, 0]) in (t, 2 * t, 4 * t)
        (-out[0].sum()).backward()
    assert c.stats["prefetched"] == 10
    assert c.stats["not_prefetched"] == 0
    assert c.stats["abandoned"] == 0


def test_a_dict_that_changed_is_looked_up_anew() -> None:
    c = Counter()
    c.store.set_rows("t", [8], [[5.0] * 4])
    source = [{"f": torch.tensor([7])}]
    for batch in persia.DataLoader(source, c.model, 1):
        batch["f"].fill_(8)
        with pytest.warns(UserWarning, match="not_prefetched"):
            out = c.model(batch).values()
        assert int(out[0, 0]) == 5
    assert c.stats["not_prefetched"] == 1


@pytest.mark.filterwarnings("error")
def test_each_module_finds_its_ids() -> None:
    user, item = Counter(), Counter()
    model = nn.ModuleList([user.model, Items(item.store)])
    source = [
        (JaggedBatch(["f"], torch.tensor([7])), {"g": torch.tensor([7])})
        for _ in range(8)
    ]
    for f, g in persia.DataLoader(source, model, 0):
        (-model[0](f).values() - model[1](g)).sum().backward()
    for c in (user, item):
        assert c.value == 8
        assert c.stats["prefetched"] == 8
        assert c.stats["not_prefetched"] == 0


class Items(nn.Module):
    """Another feature in the table of a Counter."""

    def __init__(self, store: persia.Store) -> None:
        super().__init__()
        self.bags = persia.EmbeddingBagCollection(
            store=store,
            tables=[persia.EmbeddingBagConfig("t", 4, ["g"], init=0.0)],
            share=True,
        )

    def forward(self, ids: Any) -> Tensor:
        values: Tensor = self.bags(ids).values()
        return values


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ([(1, 2)] * 5, "ids="),
        ([{"f": torch.tensor([7])}] * 5, "not_prefetched"),
    ],
)
def test_what_is_not_looked_up_ahead_warns_once(
    source: list[Any], match: str
) -> None:
    c = Counter()

    def loop() -> None:
        for _ in persia.DataLoader(source, c.model, 0):
            c.model({"f": torch.tensor([9])}).values().sum().backward()

    with pytest.warns(UserWarning, match=match) as seen:
        loop()
    assert len(seen) == 1
    assert c.stats["not_prefetched"] == 5
