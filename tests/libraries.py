"""Five libraries of recommenders, in a place of their own.

They are installed without what they depend on, because they pin old versions
of it.  What they import and the tests do not use is an empty module.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "build" / "libraries"
PACKAGES = (
    *("deepctr-torch==0.3.0", "fuxictr==2.3.10", "recbole==1.2.1"),
    *("pytorch-widedeep==1.7.0", "torch-rechub==0.9.0"),
    # What these import first of all.
    *("absl-py==2.5.1", "colorama==0.4.6", "colorlog==6.12.0"),
    *("einops==0.8.2", "tabulate==0.10.0", "tensorboard==2.21.0"),
    *("texttable==1.7.2", "thop==0.1.1.post2209072238"),
)
EMPTY = {"cv2", "gensim", "h5py", "ray", "spacy", "torchvision"} | {
    "transformers"
}
#: Names that the libraries use and NumPy 2 does not have, and what they were.
OF_NUMPY_1 = {
    "Inf": np.inf,
    "bool8": np.bool_,
    "complex_": np.complex128,
    "float_": np.float64,
    "unicode_": np.str_,
}
ROWS, FIELDS, DENSE, BATCH, STEPS = 60, 6, 3, 64, 12
FEATURES = [f"c{i}" for i in range(FIELDS)]
NUMBERS = [f"n{i}" for i in range(DENSE)]


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of ``EMPTY``: each name in them is a class."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in EMPTY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module: Any = ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: type(name, (), {})
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def installed() -> Iterator[None]:
    """The libraries can be imported; skips where pip cannot install them."""
    done, listed = FOLDER / "installed", "\n".join(PACKAGES)
    if not done.is_file() or done.read_text() != listed:
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps")
        where = ("--upgrade", "--target", str(FOLDER))
        if subprocess.run([*pip, *where, *PACKAGES], check=False).returncode:
            pytest.skip("pip cannot install the libraries")
        done.write_text(listed)
    # It looks for some of the empty ones when it is imported.
    importlib.import_module("torchmetrics")
    modules, names, finder = set(sys.modules), dict(vars(np)), _Empty()
    vars(np).update(OF_NUMPY_1)
    sys.path.append(str(FOLDER))
    sys.meta_path.append(finder)
    yield
    sys.meta_path.remove(finder)
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in EMPTY:
            del sys.modules[name]
    for name in set(vars(np)) - set(names):  # recbole adds some
        delattr(np, name)
    vars(np).update(names)


def numbers(batch: int = BATCH) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids [batch, FIELDS], dense [batch, DENSE] and labels [batch]."""
    g = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        yield (
            torch.randint(1, ROWS, (batch, FIELDS), generator=g),
            torch.rand(batch, DENSE, generator=g),
            torch.randint(2, (batch,), generator=g).float(),
        )


def columns() -> tuple[dict[str, Any], Any]:
    """All samples: arrays [STEPS * BATCH] by column, and the labels."""
    batches = list(numbers())
    x = torch.cat([torch.cat([i, d], 1) for i, d, _ in batches]).numpy()
    y = torch.cat([y for _, _, y in batches]).numpy()
    names = enumerate([*FEATURES, *NUMBERS])
    return {name: x[:, i] for i, name in names}, y


def deepctr(name: str, batch: int = BATCH) -> tuple[Any, list[Any]]:
    inputs = importlib.import_module("deepctr_torch.inputs")
    models = importlib.import_module("deepctr_torch.models")
    columns = [
        *(inputs.SparseFeat(f, ROWS, embedding_dim=8) for f in FEATURES),
        *(inputs.DenseFeat(n, 1) for n in NUMBERS),
    ]
    make = getattr(models, name)
    taken = inspect.signature(make).parameters
    options: dict[str, Any] = {"device": "cpu"}
    if "dnn_hidden_units" in taken:
        options["dnn_hidden_units"] = (16,)
    given = [columns] * sum(n.endswith("_feature_columns") for n in taken)
    model = make(*given, **options)
    # Its input: all columns side by side, as floats.
    return model, [(torch.cat([i, d], 1), y) for i, d, y in numbers(batch)]


def rechub(name: str, batch: int = BATCH) -> tuple[Any, list[Any]]:
    basic = importlib.import_module("torch_rechub.basic.features")
    ranking = importlib.import_module("torch_rechub.models.ranking")
    sparse = [basic.SparseFeature(f, ROWS, embed_dim=8) for f in FEATURES]
    dense = [basic.DenseFeature(n) for n in NUMBERS]
    mlp = {"dims": [16], "dropout": 0.0, "activation": "relu"}
    if name == "DCN":
        model = ranking.DCN(dense + sparse, 2, mlp)
    elif name == "DCNv2":
        model = ranking.DCNv2(dense + sparse, 2, mlp)
    elif name == "WideDeep":
        model = ranking.WideDeep(sparse, dense + sparse, mlp)
    else:
        model = getattr(ranking, name)(dense + sparse, sparse, mlp)
    batches = []
    for ids, numeric, y in numbers(batch):
        x = {f: ids[:, i] for i, f in enumerate(FEATURES)}
        x |= {n: numeric[:, i] for i, n in enumerate(NUMBERS)}
        batches.append((x, y))
    return model, batches


def widedeep(name: str, batch: int = BATCH) -> tuple[Any, list[Any]]:
    models = importlib.import_module("pytorch_widedeep.models")
    columns = {n: i for i, n in enumerate([*FEATURES, *NUMBERS])}
    attends = "Transformer" in name or name == "SAINT"
    deep = getattr(models, name)(
        column_idx=columns,
        cat_embed_input=[
            (f, ROWS) if attends else (f, ROWS, 8) for f in FEATURES
        ],
        continuous_cols=NUMBERS,
        **({"input_dim": 8, "n_heads": 2, "n_blocks": 1} if attends else {}),
    )
    return models.WideDeep(deeptabular=deep), [
        ({"deeptabular": torch.cat([i, d], 1)}, y)
        for i, d, y in numbers(batch)
    ]


def recbole_config(name: str, **options: Any) -> Any:
    """The configuration of a model, with the samples as a file below the
    current folder."""
    data, y = columns()
    data = {"user_id": data.pop("c0"), "item_id": data.pop("c1"), **data}
    heads = [f"{n}:{'float' if n in NUMBERS else 'token'}" for n in data]
    lines = ["\t".join([*heads, "label:float"])]
    for row in zip(*data.values(), y):
        lines.append("\t".join(f"{value:g}" for value in row))
    Path("clicks").mkdir()
    Path("clicks/clicks.inter").write_text("\n".join(lines))
    return importlib.import_module("recbole.config").Config(
        model=name,
        dataset="clicks",
        config_dict={
            "data_path": ".",
            "load_col": {"inter": [*data, "label"]},
            "embedding_size": 8,
            "mlp_hidden_size": [16],
            "dropout_prob": 0.0,
            "train_batch_size": BATCH,
            "metrics": ["AUC"],
            "valid_metric": "AUC",
            "eval_args": {
                "split": {"RS": [0.6, 0.2, 0.2]},
                "order": "RO",
                "group_by": "none",
                "mode": "labeled",
            },
            "use_gpu": False,
            "show_progress": False,
            "state": "ERROR",
            **options,
        },
    )


def recbole(name: str, batch: int = BATCH) -> tuple[Any, list[Any]]:
    """In the current folder."""
    data = importlib.import_module("recbole.data")
    models = importlib.import_module("recbole.utils")
    config = recbole_config(name, train_batch_size=batch)
    train, _, _ = data.data_preparation(config, data.create_dataset(config))
    model = models.get_model(name)(config, train.dataset)
    return model, [
        ({k: b[k] for k in b.interaction if k != "label"}, b["label"])
        for b in train
    ]
