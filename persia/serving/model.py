"""Models that were exported, loaded without a store."""

from __future__ import annotations

import datetime
import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from persia import _core, errors
from persia.base.torch_private import shape_guards
from persia.data.batches.batch import Batch
from persia.data.schema.schema import Schema
from persia.data.table import Table
from persia.serving.deltas.erased import ErasedIds, read_erased
from persia.serving.deltas.following import DenseParts, Follower
from persia.serving.deltas.packet import PacketTable
from persia.serving.folder import Version, check_file, find_version
from persia.serving.graph import Lookup, bind, read_graph
from persia.serving.mixing import mixes_samples
from persia.serving.plan import plan_of
from persia.serving.rows import open_rows
from persia.serving.sizes import Sizes
from persia.serving.statistics import Statistics
from persia.serving.traces import note_lookup

_POOLING = {
    "sum": _core.POOL_SUM,
    "mean": _core.POOL_MEAN,
    "sqrtn": _core.POOL_SQRTN,
    "none": _core.POOL_NONE,
}


class _Rows(nn.Module):
    """A lookup in mapped files."""

    def __init__(
        self, lookup: Lookup, tables: Mapping[str, _core.RowsFile]
    ) -> None:
        super().__init__()
        self.lookup = lookup
        self._parts = [
            (tables[p.table], p.feature, _POOLING[p.pooling], p.column)
            for p in lookup.parts
        ]
        self._counts = [0, 0]
        self._lock = threading.Lock()

    @property
    def counts(self) -> tuple[int, int]:
        """Ids that were looked up, and those of them without a row."""
        with self._lock:
            return self._counts[0], self._counts[1]

    def forward(
        self, values: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        """float32 [bags, width], or, not pooled, [n, width]."""
        one = self.lookup
        height = n = values.shape[0]
        if one.pooled:
            bags = n if offsets is None else offsets.shape[0] - 1
            height = bags // one.features
        make = torch.empty if one.pooled else torch.zeros
        out = make((height, one.width), dtype=torch.float32)
        began = time.monotonic_ns()
        ids, absent = _core.rows_batch(
            self._parts,
            one.features,
            values.detach().contiguous().numpy(),
            None if offsets is None else offsets.contiguous().numpy(),
            None if weights is None else weights.contiguous().numpy(),
            out.numpy(),
            one.width,
        )
        note_lookup(began)
        with self._lock:
            self._counts[0] += ids
            self._counts[1] += absent
        return out


class ExportedModel(nn.Module):
    """A model that :func:`persia.export` wrote, with its rows mapped.

    It is called as the model that was exported, and gives the same. It has no
    store, and trains nothing. Several threads may call it at once; processes
    of a machine share the memory of its rows.

    Attributes:
        version: the name of the version.
        place: of the version, a folder or a URL.
        folder: whose files are mapped: its own, or that in the cache.
        manifest: what the folder says of it.
        schema: of the data that it was trained on; None: it takes ids.
        columns: the schema of requests, without labels; None: they have ids.
        tasks: names of the labels, where there are several.
        form: of its inputs and outputs, as tensors with names.
        plan: how requests are copied into its inputs; None: each input
            becomes a tensor of its own.
        statistics: of the requests that it answered.
    """

    def __init__(
        self, version: Version, folder: Path, cache: Path | None = None
    ) -> None:
        super().__init__()
        self._cache = cache
        self.place, self.folder = version.place, folder
        self.manifest = manifest = version.manifest
        self.version = manifest.name
        self.form = manifest.form
        self.tasks = tuple(manifest.tasks)
        self.schema: Schema | None = None
        if manifest.schema_file is not None:
            check_file(self.folder, manifest.schema_file)
            self.schema = Schema.load(self.folder / manifest.schema_file.name)
        self.columns = _without_labels(self.schema)
        self.plan = plan_of(self.form) if self.columns is None else None
        tables = {
            t.options.name: open_rows(
                self.folder, t.file.name, t.type, t.key, t.options
            )
            for t in manifest.tables
        }
        check_file(self.folder, manifest.dense)
        with (self.folder / manifest.dense.name).open("rb") as file:
            program = read_graph(file)
        self._sizes = Sizes(shape_guards(program), self.form.inputs)
        self._root = version.above
        self._tables = tables
        self._lookups = {
            name: _Rows(one, tables) for name, one in manifest.lookups.items()
        }
        graph = bind(program, self._lookups.__getitem__)
        graph.requires_grad_(False)
        self._dense = DenseParts(graph, program.state_dict)
        self.training = False
        self.statistics = Statistics()
        self.follower: Follower | None = None
        if manifest.chain is not None:
            self.follower = Follower(
                manifest.chain,
                [
                    PacketTable(
                        name=t.options.name, type=t.type, dim=t.options.dim
                    )
                    for t in manifest.tables
                ],
                list(tables.values()),
                self._dense,
            )
        self._erased = 0
        self.apply_erased(read_erased(self._root))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives that was exported, without gradient.

        Raises:
            InvalidArgument, MissingFeature, ShapeError, DtypeError,
            OffsetsError: it is no call of that model.
        """
        return self.form.give(self.run(self.form.flatten(args, kwargs)))

    @torch.no_grad()
    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, in the order of ``form.outputs``, of inputs in the
        order of ``form.inputs``, which :meth:`Form.check` has checked.

        Raises:
            ShapeError: the graph is not made for their sizes.
        """
        self._sizes.check(tensors)
        with self._dense.used() as graph:
            found: tuple[Tensor, ...] = graph(*tensors)
        return found

    @functools.cached_property
    def joins(self) -> bool:
        """Whether samples of several requests are computed together: what is
        said of one depends on no other."""
        return not mixes_samples(self._dense.graph, self.form)

    def scores(self, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """The outputs by name; of a model of clicks its probabilities, as
        ``score``, or ``score.<task>``."""
        if not self.manifest.clicks:
            names = [one.name for one in self.form.outputs]
            return dict(zip(names, outputs, strict=True))
        found = outputs[0].float().sigmoid()
        if not self.tasks:
            return {"score": found.reshape(len(found))}
        return {
            f"score.{task}": found[:, i] for i, task in enumerate(self.tasks)
        }

    def tensors_of(self, batch: Batch) -> list[Tensor]:
        """The inputs of ``model(batch.dense, batch.ids)``."""
        return self.form.flatten((batch.dense, batch.ids), {})

    def batches_of(self, data: Any, batch_size: int = 1024) -> Table:
        """Raw values as batches: hashed as in the training.

        Args:
            data: all that :class:`persia.data.Table` takes, with the columns
                of the training; those of labels may be missing.
            batch_size: samples of a batch.

        Raises:
            InvalidArgument: the model was exported without a schema.
            MalformedData: a row is malformed.
            SchemaMismatch: a column is missing, or has another type.
        """
        if self.columns is None:
            raise errors.InvalidArgument(
                "the model was exported without a schema: it takes ids"
            )
        return Table(data, self.columns, batch_size, strict=True)

    def predict(self, data: Any) -> Tensor:
        """Probabilities of a click, or what else the model gives first.

        Args:
            data: a :class:`persia.Batch`, or raw values as of
                :meth:`batches_of`.

        Returns:
            float32 [B]; [B, tasks] where there are several labels.
        """
        batches = [data] if isinstance(data, Batch) else self.batches_of(data)
        parts = [self._predicted(batch) for batch in batches]
        empty = (0, len(self.tasks)) if self.tasks else (0,)
        return torch.cat([torch.zeros(empty), *parts])

    def _predicted(self, batch: Batch) -> Tensor:
        every = self.scores(self.run(self.tensors_of(batch)))
        if self.tasks:
            return torch.stack(list(every.values()), 1)
        return next(iter(every.values()))

    def has_rows(self, table: str, ids: Tensor) -> Tensor:
        """Which of ids [n], int64, have a row in a table: bool [n]."""
        out = np.empty(len(ids), np.uint8)
        self._tables[table].contains(ids.contiguous().numpy(), out)
        return torch.from_numpy(out).bool()

    def rows(
        self, table: str, piece: int = 1 << 16
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """All rows of a table, in the order of its file: ids [n] and vectors
        [n, dim], ``piece`` of them at a time."""
        options = next(
            t.options for t in self.manifest.tables if t.options.name == table
        )
        file = self._tables[table]
        for first in range(0, file.rows, piece):
            n = min(piece, file.rows - first)
            ids = np.empty(n, np.int64)
            vectors = np.empty((n, options.dim), np.float32)
            file.read(first, ids, vectors)
            yield ids, vectors

    def vectors(self, table: str, ids: Tensor) -> Tensor:
        """The vectors of ids [n], int64, in a table: float32 [n, dim]; ids
        without a row have what they had in the training."""
        dims = {t.options.name: t.options.dim for t in self.manifest.tables}
        out = torch.empty(len(ids), dims[table])
        self._tables[table].look_up(ids.contiguous().numpy(), out.numpy())
        return out

    def check_rows(self) -> None:
        """Searches for each row of each table; raises CorruptFile."""
        for file in self._tables.values():
            file.check()

    def apply_erased(self, erased: Sequence[ErasedIds]) -> None:
        """From now on ids that were erased have no row.

        Args:
            erased: all that the root notes, from the oldest on; what was
                applied before is left out.
        """
        for one in erased:
            if one.number <= self._erased:
                continue
            for name, ids in one.tables.items():
                if name in self._tables and one.concerns(
                    self.version, self.manifest.chain
                ):
                    self._tables[name].apply(np.array(ids, np.int64), b"")
            self._erased = one.number

    def pass_erased(self, erased: Sequence[ErasedIds]) -> None:
        """The same of a version that follows a chain, whose packets have
        removed them in their order."""
        if erased:
            self._erased = erased[-1].number

    def stop_following(self) -> None:
        """No more packets are applied: what they would have removed, the next
        :meth:`apply_erased` does."""
        self._erased = 0

    def catch_up(self) -> int:
        """Applies the packets that a :class:`persia.serving.Publisher` has
        written since; how many. Requests that run meanwhile get each row as it
        was before or after.

        Raises:
            CorruptFile, SchemaMismatch, StaleLineage: a packet is damaged, or
                not the next one; those before are applied.
            StorageError: it cannot be read.
        """
        if self.follower is None:
            return 0
        return self.follower.catch_up(self._root)

    def verify_packets(self) -> int:
        """Reads the packets behind the version, and applies none; how many.

        Raises: as :meth:`catch_up`; StaleLineage also where one is missing.
        """
        if self.follower is None:
            return 0
        return self.follower.verify(self._root)

    @property
    def lag(self) -> float | None:
        """How old the model is, in seconds since that moment of the training;
        None if its version has no packets."""
        if self.follower is None:
            return None
        made = datetime.datetime.fromisoformat(self.manifest.made)
        return time.time() - max(self.follower.until, made.timestamp())

    @property
    def packets(self) -> int:
        """How many were applied."""
        return 0 if self.follower is None else self.follower.applied

    def limit_rows(self, bytes_: int) -> None:
        """So many bytes may the rows of packets take in each table; 0: any.
        Before the first."""
        for file in self._tables.values():
            file.limit(bytes_)

    def unknown(self) -> tuple[int, int]:
        """Ids looked up so far, and those of them without a row."""
        counts = [one.counts for one in self._lookups.values()]
        return sum(n for n, _ in counts), sum(n for _, n in counts)

    def __reduce__(self) -> tuple[Any, ...]:
        return load_model, (self.place, None, self._cache)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExportedModel:
        return self  # nothing of it changes

    def extra_repr(self) -> str:
        rows = sum(t.rows for t in self.manifest.tables)
        return f"{self.place}, {rows:,} rows"


def load_model(
    path: str | os.PathLike[str],
    version: str | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> ExportedModel:
    """A model that :func:`persia.export` or ``persia export`` wrote.

    Rows are mapped: loading takes as long for any number of them.

    Args:
        path: the root of the versions, or the folder of one; a folder or the
            URL of one in a bucket.
        version: its name in the root; None: the current one.
        cache: the folder in which the last two versions of a bucket are kept;
            None: ``~/.cache/persia/models``.

    Raises:
        CorruptFile: a file is cut off, missing or altered. The bytes of rows
            are read when they are fetched from a bucket, else not: ``persia
            model verify`` does that.
        SchemaMismatch: another Persia, or a newer torch, wrote it.
        StorageError: there is no such version, or it cannot be read.
    """
    found = find_version(path, version)
    kept = None if cache is None else Path(cache)
    return ExportedModel(found, found.root.folder(found, kept), kept)


def _without_labels(schema: Schema | None) -> Schema | None:
    none = {"label": None, "group": None, "weight": None, "timestamp": None}
    none |= {"time_format": None}
    return schema and schema.model_copy(update={**none, "carry": []})
