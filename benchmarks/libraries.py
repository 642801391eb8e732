"""Models of libraries, converted: ``python -m benchmarks.libraries``.

The processor time of a step, of all threads, against that of the library's
own model with torch's Adagrad for all parameters. The tables are small, so
this is what a lookup costs by itself. A line is the median over a library's
models; ``--quick`` takes two models of each.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import persia
from benchmarks.common import arguments, print_machine, report
from tests import libraries

BENCH = "libraries"
TARGET = 1.3
STEPS = 12  # a round
BATCHES = (64, 1024)
MODELS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "deepctr-torch": (
        libraries.deepctr,
        "DeepFM DCN WDL NFM FiBiNET AutoInt MLR xDeepFM DCNMix AFN IFM "
        "DIFM ONN PNN".split(),
    ),
    "torch-rechub": (libraries.rechub, "DeepFM WideDeep DCN DCNv2".split()),
    "pytorch-widedeep": (
        libraries.widedeep,
        "TabMlp TabResnet TabTransformer FTTransformer SAINT".split(),
    ),
}


def adagrad(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01)


def seconds(
    model: nn.Module, dense: torch.optim.Optimizer, batches: Iterator[Any]
) -> float:
    """Of the processors, for a step of a round."""
    began = time.process_time()
    for x, y in itertools.islice(batches, STEPS):
        loss = nn.functional.mse_loss(model(x).reshape(-1), y)
        dense.zero_grad()
        loss.backward()
        dense.step()
    return (time.process_time() - began) / STEPS


def ratio(model: nn.Module, data: list[Any], rounds: int) -> float:
    """Ours to theirs: the median of rounds in turns, after one of each."""
    ours = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lists that keep an old weight
        persia.convert(ours, optimizer=persia.optim.Adagrad(lr=0.01))
    both = [
        (one.train(), adagrad(one.parameters()), itertools.cycle(data))
        for one in (ours, model)
    ]
    times = [[seconds(*one) for one in both] for _ in range(rounds + 1)]
    return statistics.median(mine / theirs for mine, theirs in times[1:])


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "").parse_args(argv)
    print_machine(BENCH, torch=torch.__version__)
    torch.set_num_threads(1)
    rounds = 3 if options.quick else 4
    with libraries.installed():
        for batch in BATCHES:
            every = []
            for library, (make, names) in MODELS.items():
                found = []
                for name in names[:2] if options.quick else names:
                    torch.manual_seed(options.seed)
                    found.append(ratio(*make(name, batch), rounds))
                line(library, batch, found)
                every += found
            line("all", batch, every)


def line(library: str, batch: int, ratios: list[float]) -> None:
    report(
        BENCH,
        f"{library}, {len(ratios)} models, batch {batch}",
        statistics.median(ratios),
        "of torch's processor time",
        least=min(ratios),
        most=max(ratios),
        target=TARGET,
        at_most=True,
    )


if __name__ == "__main__":
    main()
