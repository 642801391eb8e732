"""Step time of DLRM on a GPU with embeddings in host memory, beside its dense
part alone, the transfer of the distinct rows, and torchrec's tables in managed
memory with a cache of a tenth of the rows: one line of JSON a batch size.
Without a GPU it says so and ends.

usage: python -m benchmarks.gpu [--batch 4096 16384 65536] [--steps 50]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import persia

FEATURES, DENSE, DIM, IDS = 26, 13, 16, 1_000_000
KEYS = [f"f{i}" for i in range(FEATURES)]
CACHED, STALENESS, RATE = 0.1, 4, 0.01


def batches(size: int, steps: int, pinned: bool) -> list[persia.Batch]:
    """Batches of skewed ids, one a feature and sample."""
    made = []
    for _ in range(steps):
        ids = (torch.rand(FEATURES * size) ** 4 * IDS).long()
        batch = persia.Batch(
            torch.randn(size, DENSE),
            persia.JaggedBatch(KEYS, ids),
            torch.randint(0, 2, (size,)).float(),
        )
        made.append(batch.pin_memory() if pinned else batch)
    return made


def timed(run: Callable[[], object]) -> float:
    """Seconds, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def transfer(batch: persia.Batch, device: torch.device) -> Callable[[], None]:
    """Moves as many rows as the batch has distinct ids, and back."""
    every = batch.ids.values().view(FEATURES, -1)
    host = torch.zeros(sum(ids.unique().numel() for ids in every), DIM)
    if device.type == "cuda":
        host = host.pin_memory()
    there = torch.empty(host.shape, device=device)

    def run() -> None:
        there.copy_(host, non_blocking=True)
        host.copy_(there, non_blocking=True)

    return run


class Given(nn.Module):
    """In the place of embeddings: zeros, with gradient."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self._zeros = torch.zeros(size, FEATURES * DIM, device=device)

    def forward(self, ids: Any) -> Given:
        return self

    def values(self) -> torch.Tensor:
        return self._zeros.detach().requires_grad_()


def train(
    model: nn.Module, given: Any, device: torch.device
) -> Callable[[], None]:
    """Trains on batches that are moved to the device; ``given`` makes an
    iteration of (dense, ids, labels)."""
    dense = [
        parameter
        for name, parameter in model.named_parameters()
        if not name.startswith("bags.")
    ]
    optimizer = torch.optim.Adam(dense, lr=RATE)

    def run() -> None:
        for batch in given():
            x, ids, y = (t.to(device, non_blocking=True) for t in batch)
            loss = binary_cross_entropy_with_logits(model(x, ids), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def torchrec_ids(made: list[persia.Batch]) -> list[Any]:
    """The ids as torchrec has them, in pinned memory."""
    from torchrec import KeyedJaggedTensor

    lengths = torch.ones(FEATURES * len(made[0]), dtype=torch.int32)
    return [
        KeyedJaggedTensor(KEYS, b.ids.values(), lengths=lengths).pin_memory()
        for b in made
    ]


def no_torchrec(device: torch.device) -> str | None:
    """Why torchrec is not measured; None: it is."""
    if device.type != "cuda":
        return "its cache needs a CUDA device"
    try:
        import fbgemm_gpu  # noqa: F401
        import torchrec  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        cuda = has("fbgemm::lxu_cache_lookup", "CUDA")
    except RuntimeError:
        cuda = False
    return None if cuda else "fbgemm_gpu is built without CUDA"


def measure(
    size: int, steps: int, device: torch.device, torchrec: bool
) -> dict[str, object]:
    """The step with embeddings, that of the dense part alone, and that with
    torchrec's."""
    made = batches(size, steps, device.type == "cuda")
    store = persia.Store(optimizer=persia.optim.Adagrad(lr=RATE))

    def dlrm(bags: nn.Module | None) -> nn.Module:
        config = persia.EmbeddingBagConfig
        tables = [config(key, DIM, feature_names=[key]) for key in KEYS]
        own = persia.EmbeddingBagCollection(tables, store=store, share=True)
        model = persia.models.DLRM(own, DENSE)
        if bags is not None:  # the same layers over other embeddings
            model.bags = bags  # type: ignore[assignment]
        return model.to(device)

    model = dlrm(None)

    def looked_up() -> Any:
        loader = persia.DataLoader(made, model, staleness=STALENESS)
        return ((b.dense, b.ids, b.label) for b in loader)

    def plain(ids: list[Any]) -> Callable[[], Any]:
        return lambda: (
            (b.dense, i, b.label) for b, i in zip(made, ids, strict=True)
        )

    runs = {
        "step": train(model, looked_up, device),
        "dense": train(
            dlrm(Given(size, device)), plain([b.ids for b in made]), device
        ),
    }
    moves = transfer(made[0], device)
    runs["transfer"] = lambda: [moves() for _ in made]
    if torchrec:
        from benchmarks.peers.layers import torchrec_model

        bags, _ = torchrec_model(
            [IDS] * FEATURES, DIM, "adagrad", RATE, cached=CACHED
        )
        runs["torchrec"] = train(dlrm(bags), plain(torchrec_ids(made)), device)
    for run in runs.values():
        run()  # to warm up
    ms = {name: 1000 * timed(run) / steps for name, run in runs.items()}
    cuda = device.type == "cuda"
    found = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "batch": size,
        **{f"{name}_ms": value for name, value in ms.items()},
        "of_bound": ms["step"] / max(ms["dense"], ms["transfer"]),  # (1.1)
        "of_dense": ms["dense"] / ms["step"],  # (0.9)
        "samples_per_s": 1000 * size / ms["step"],
        "ids_copied": store.stats()["cuda_ids_copied"],
    }
    if torchrec:
        found["of_torchrec"] = ms["torchrec"] / ms["step"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[4096, 16384, 65536]
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a test"
    )
    args = parser.parse_args(argv)
    if args.quick:
        args.batch, args.steps = [256], 3
    if args.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu: skipped, no CUDA device here", file=sys.stderr)
        return 0
    device = torch.device(args.device)
    missing = no_torchrec(device)
    if missing:
        print(
            f"benchmarks.gpu: no torchrec beside: {missing}", file=sys.stderr
        )
    for size in args.batch:
        found = measure(size, args.steps, device, not missing)
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
