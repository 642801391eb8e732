"""A torch without the private parts that Persia uses runs eager."""

from pathlib import Path

import pytest

from tests.ready import ended

ROOT = Path(__file__).parents[1]

WITHOUT = """
import warnings
import torch
from persia.base import torch_private

def absent():
    raise ImportError("moved")

name = "ordered effects of operators"
assert name in torch_private._PARTS and not torch_private.missing()
torch_private._PARTS[name] = absent
assert torch_private.missing() == [name]

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import persia.nn
assert any(issubclass(w.category, UserWarning) and name in str(w.message)
           for w in seen), [str(w.message) for w in seen]

def trained(compiles):
    torch.manual_seed(0)
    table = persia.EmbeddingBagConfig("t", 4, ["a"])
    bags = persia.EmbeddingBagCollection(
        [table], optimizer=persia.optim.SGD(lr=0.1))
    dense = torch.nn.Linear(4, 1)
    def loss(ids):
        return dense(bags(ids).values()).square().sum()
    step = torch.compile(loss, backend="eager") if compiles else loss
    for i in range(3):
        step({"a": torch.tensor([i, 1])}).backward()
    bags.store.flush()
    return bags.store.rows("t", [0, 1, 2]), dense.weight.grad

for a, b in zip(trained(True), trained(False)):
    assert torch.equal(a, b)
counted = torch._dynamo.utils.counters
assert sum(counted["graph_break"].values()) > 0, counted
"""


@pytest.mark.slow
def test_compiled_models_look_up_outside_of_their_graphs() -> None:
    result = ended("-c", WITHOUT, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
