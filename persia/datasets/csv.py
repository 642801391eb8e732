"""CSV files with a declared schema."""

from __future__ import annotations

import os

from persia.data.formats.files import Files
from persia.data.formats.paths import Paths
from persia.data.schema.schema import Schema

__all__ = ["CSV"]


class CSV(Files):
    """CSV files, plain or compressed (.gz, .zst, .bz2, .lz4), as batches.

    :class:`persia.data.Files` of the format "csv", where bytes that are no
    UTF-8 are hashed as they are.

    Args:
        paths: a path, a glob, or a list of them.
        schema: a :class:`persia.data.Schema`, the path of a YAML file, or the
            name of a preset: "adult", "avazu", "movielens".
        batch_size: samples of a batch.
        rows: (first, end) of the lines to read.
        strict: raise MalformedData at a malformed line.
        drop_last: leave out a last batch that is smaller.
        shuffle: 0, or how many rows to mix at a time.
        seed: of the shuffle.
        shard: (rank, world): take every world-th block of batch_size lines.
    """

    def __init__(
        self,
        paths: Paths,
        schema: Schema | str | os.PathLike[str],
        batch_size: int = 4096,
        *,
        rows: tuple[int, int | None] = (0, None),
        strict: bool = False,
        drop_last: bool = False,
        shuffle: int = 0,
        seed: int = 1,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(
            paths,
            schema if isinstance(schema, Schema) else Schema.load(schema),
            batch_size,
            format="csv",
            rows=rows,
            strict=strict,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            encoding=None,
            shard=shard,
        )
