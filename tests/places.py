"""Where a module computes: a GPU, or the host that stands for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from persia.nn.lookups import Collection
from persia.store.device import Link, link_of


def gpus(n: int) -> pytest.MarkDecorator:
    """Skips where there are fewer."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return pytest.mark.skipif(found < n, reason=f"needs {n} CUDA devices")


class Place:
    """A device.

    Attributes:
        device: where tensors of the dense part are.
        exact: whether it rounds as the CPU does.
        link: of the values.
    """

    def __init__(self, name: str) -> None:
        self.exact = name == "host"
        self.device = torch.device("cpu" if self.exact else name)
        link = (
            Link("host", self.device) if self.exact else link_of(self.device)
        )
        assert link is not None
        self.link = link

    def put(self, model: nn.Module) -> Any:
        """Moves a model and what its tables give."""
        if self.exact:
            for module in model.modules():
                if isinstance(module, Collection):
                    module._link = self.link
        return model.to(self.device)

    def compare(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """The same bits, or what another order of sums may change."""
        if self.exact:
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got.cpu(), want.cpu())


@pytest.fixture(
    params=[
        "host",
        pytest.param("cuda:0", marks=gpus(1)),
        pytest.param("cuda:1", marks=gpus(2)),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    """Each device that is here."""
    return Place(request.param)
