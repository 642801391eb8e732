"""persia train, whose last rank loses its machine in the middle."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from typing import Any

import torch

from persia.cli import main
from persia.distributed import ranks

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER
_STEPS = 5


def lose_the_machine() -> None:
    """The kernel drops what arrives for connections of this process, and
    answers nothing."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    drop = struct.pack("HL", 1, ctypes.addressof(program))
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, drop)
                    cut += 1
        except OSError:
            continue
    assert cut


class Losing(torch.nn.parallel.DistributedDataParallel):
    """Loses it after some steps."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Of the model."""
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == _STEPS:
            lose_the_machine()
            time.sleep(600)
        return super().forward(*args, **kwargs)


if __name__ == "__main__":
    ranks._SILENT = tuple(
        (level, option, {60_000: 3_000}.get(value, 1))
        for level, option, value in ranks._SILENT
    )
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        from persia.train import run

        run.DistributedDataParallel = Losing  # type: ignore[misc]
    main()
