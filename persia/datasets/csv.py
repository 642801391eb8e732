"""CSV files with a declared schema."""

from __future__ import annotations

import os

from persia.data.formats.files import Files
from persia.data.formats.paths import Paths
from persia.data.schema.schema import Schema


class CSV(Files):
    """CSV files, plain or compressed (.gz, .zst, .bz2, .lz4), as batches.

    :class:`persia.data.Files` of the format "csv", where bytes that are no
    UTF-8 are hashed as they are.

    Args:
        paths: a path, a glob, or a list of them.
        schema: a :class:`persia.data.Schema`, the path of a YAML file, or the
            name of a preset: "adult", "avazu", "movielens".
        batch_size: samples of a batch.
        samples: (first, end) of the lines to read.
        strict: raise MalformedData at a malformed line.
        drop_last: leave out a last batch that is smaller.
        shuffle: False, or how many samples to mix at a time.
        seed: of the shuffle.
        rank, world_size: take every world_size-th block of batch_size lines.
    """

    def __init__(
        self,
        paths: Paths,
        schema: Schema | str | os.PathLike[str],
        batch_size: int = 1024,
        *,
        samples: tuple[int, int | None] = (0, None),
        strict: bool = False,
        drop_last: bool = False,
        shuffle: bool | int = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(
            paths,
            schema if isinstance(schema, Schema) else Schema.load(schema),
            batch_size,
            format="csv",
            samples=samples,
            strict=strict,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            encoding=None,
            rank=rank,
            world_size=world_size,
        )
