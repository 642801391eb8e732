"""What the ranks of a job do in tests/system/test_frameworks.py.

    torchrun ... frameworks.py FOLDER plain | lightning | accelerate

Each trains one model on the same batches, in the loop that its name says, and
leaves the rows and the dense weights in FOLDER/NAME.RANK.pt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import persia
from tests.system.ranks import STEPS, Model, batch, everything, loss_of

EPOCHS = 2


class Batches:
    """Those of this rank. Lightning takes a list for several loaders."""

    def __iter__(self) -> Iterator[persia.Batch]:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return iter([batch(world * i + rank) for i in range(STEPS)])


def made() -> Model:
    return Model(persia.Store(persia.optim.Adam(lr=0.05)))


def dense_of(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.linear.parameters(), 0.1)


def plain() -> Model:
    """The loop that the others are measured by."""
    dist.init_process_group("gloo")
    model = made()
    net = nn.parallel.DistributedDataParallel(model)
    dense = dense_of(model)
    for _ in range(EPOCHS):
        for one in persia.DataLoader(Batches(), model, staleness=0):
            dense.zero_grad()
            loss_of(net(one.ids), one).backward()
            dense.step()
    return model


def accelerate() -> Model:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = made()
    net, dense = accelerator.prepare(model, dense_of(model))
    for _ in range(EPOCHS):
        for one in Batches():
            dense.zero_grad()
            accelerator.backward(loss_of(net(one.ids), one))
            dense.step()
    return model


def lightning() -> Model:
    import lightning as pl

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = made()

        def training_step(self, one: Any, step: int) -> Tensor:
            return loss_of(self.model(one.ids), one)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return dense_of(self.model)

    left: list[Model] = []

    class Leaves(pl.Callback):
        """Lightning ends the process group with the training."""

        def on_train_end(self, trainer: Any, module: Any) -> None:
            left.append(module.model)
            save(module.model, "lightning")

    pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        callbacks=[Leaves()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), Batches())
    return left[0]


def save(model: Model, name: str) -> None:
    store = model.bags.store
    found = everything(store, model) | {"updates": store.updates}
    torch.save(found, Path(sys.argv[1]) / f"{name}.{os.environ['RANK']}.pt")
    dist.barrier()


def main() -> None:
    name = sys.argv[2]
    loops = {"plain": plain, "lightning": lightning, "accelerate": accelerate}
    model = loops[name]()
    if dist.is_initialized():
        save(model, name)
        model.bags.store.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
