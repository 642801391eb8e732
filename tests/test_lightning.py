"""The recipes of docs/howto/lightning.md, beside torch's own model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.test_copies import Pair, same, store_of

pl = pytest.importorskip("lightning")


class Squares(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, ids: Tensor, step: int) -> Tensor:
        return (self.net(ids) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Steps(Squares):
    """As the page says where gradients of rows wait for a step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        store_of(self.net).optimizer.step()


@pytest.mark.parametrize("batches", [1, 2])
def test_rows_step_with_the_dense_optimizer(batches: int) -> None:
    pair = Pair("step")
    data = torch.stack([pair.ids() for _ in range(6)])
    for module in (Steps(pair.ours), Squares(pair.theirs)):
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            accumulate_grad_batches=batches,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(list(data), batch_size=None)
        trainer.fit(module, loader)
    assert store_of(pair.ours).updates == 12 // batches
    assert store_of(pair.ours).stats()["held"] == 0
    same(pair.ours, pair.theirs)


def test_freezing_by_the_callback() -> None:
    finetuning: Any = pl.pytorch.callbacks.BaseFinetuning
    pair = Pair()
    before = store_of(pair.ours).rows("one", range(20))
    for model in (pair.ours, pair.theirs):
        finetuning.freeze(model.get_submodule("one"), train_bn=False)
    pair.train()
    assert torch.equal(store_of(pair.ours).rows("one", range(20)), before)
    same(pair.ours, pair.theirs)
    finetuning.make_trainable(pair.ours.get_submodule("one"))
    finetuning.make_trainable(pair.theirs.get_submodule("one"))
    pair.train()
    same(pair.ours, pair.theirs)
