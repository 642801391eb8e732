"""Values of a training over its steps: where they are written, and those of
the embeddings."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from persia import errors

if TYPE_CHECKING:
    from persia.store.store import Store

_COLUMNS = ("step", "name", "value")


class Log(Protocol):
    """Anything that takes values: those here, or a run of Weights & Biases."""

    def log(self, values: dict[str, float], step: int) -> object:
        """Writes values by name, of an optimizer step."""


class CSVLog:
    """Writes values to a CSV file of the columns step, name and value.

    ``pandas.read_csv(path).pivot(index="step", columns="name")`` makes a
    table of it.

    Args:
        path: the file. Lines are added to one that exists.

    Raises:
        StorageError: it cannot be written, or it is a file of other columns.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+", encoding="utf-8", newline="") as file:
                file.seek(0)
                first = file.readline()
                if not first:
                    csv.writer(file).writerow(_COLUMNS)
        except (OSError, UnicodeDecodeError) as error:
            raise errors.StorageError(f"{path}: {error}") from None
        if first and first.rstrip("\r\n") != ",".join(_COLUMNS):
            raise errors.StorageError(
                f"{path} has the columns {first[:80]!r}, not "
                f"{','.join(_COLUMNS)!r}; choose another file"
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Adds a line for each value.

        Raises:
            StorageError: writing failed.
        """
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows(
                    (step, name, value) for name, value in values.items()
                )
        except OSError as error:
            raise errors.StorageError(f"{self.path}: {error}") from None


def read_csv(
    path: str | os.PathLike[str],
) -> dict[str, list[tuple[float, float]]]:
    """The values that a :class:`CSVLog` wrote: (step, value) by name, in the
    order of the file.

    Raises:
        StorageError: the file cannot be read, or has other columns.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                point = float(row["step"]), float(row["value"])
                found.setdefault(row["name"], []).append(point)
    except OSError as e:
        raise errors.StorageError(f"{path}: {e.strerror or e}") from None
    except (KeyError, TypeError, ValueError, csv.Error) as e:
        raise errors.StorageError(
            f"{path} is no log of the columns {','.join(_COLUMNS)}: {e!r}"
        ) from None
    return found


class TensorBoardLog:
    """Writes values for TensorBoard (``pip install tensorboard``).

    Args:
        folder: that ``tensorboard --logdir`` reads.

    Raises:
        InvalidArgument: TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise errors.InvalidArgument(
                f"a log for TensorBoard ({folder}) needs it: pip install "
                "tensorboard, or give a file that ends in .csv"
            ) from None
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Writes them and flushes."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def health(store: Store) -> dict[str, float]:
    """What the tables of a store do, as values for a :class:`Log`.

    Of each table ``NAME``: ``NAME/rows`` (rows now), ``NAME/bytes``,
    ``NAME/created``, ``NAME/evicted`` and ``NAME/refused`` (since the store
    or its server began), and ``NAME/unseen`` (the share of looked-up ids
    that had no row). Besides, ``staleness/mean`` and ``staleness/max``: the
    batches that a lookup really missed.
    """
    stats = store.stats()
    values: dict[str, float] = {}
    for name, table in stats["tables"].items():
        for key in ("rows", "bytes", "created", "evicted", "refused"):
            values[f"{name}/{key}"] = float(table[key])
        if table["pulled"]:
            values[f"{name}/unseen"] = table["missed"] / table["pulled"]
    counts: Mapping[int, int] = stats["lookahead"]["staleness"]
    if total := sum(counts.values()):
        missed = sum(batches * n for batches, n in counts.items())
        values["staleness/mean"] = missed / total
        values["staleness/max"] = float(max(counts))
    return values
