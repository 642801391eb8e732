"""Taobao's display advertising logs, and Avazu's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv

from persia import errors
from persia.data.formats.files import Files
from persia.data.formats.paths import Paths
from persia.data.schema.columns import column_of
from persia.data.schema.schema import Schema
from persia.data.sorting import Prepared, prepare

LOG, ADS, USERS = "raw_sample.csv", "ad_feature.csv", "user_profile.csv"


def Avazu(paths: Paths, batch_size: int = 1024, **options: Any) -> Files:
    """Avazu's click log: 40,428,967 impressions of ten days, in time order.

    A line has a click (17 % of them), the hour, and 22 categories. Get
    ``train.gz`` (1 GB; 5.9 GB as CSV) from the competition
    ``avazu-ctr-prediction`` of Kaggle, whose rules allow its use there and in
    research. Its ``test.gz`` has no clicks.

    Args:
        paths: train.csv or train.gz, or samples of them; a path or a glob.
        batch_size: samples of a batch.
        options: of :class:`persia.data.Files`.
    """
    return Files(paths, "avazu", batch_size, format="csv", **options)


def Taobao(paths: Paths, batch_size: int = 1024, **options: Any) -> Files:
    """Taobao's display advertising, as ``persia prepare`` wrote it.

    26,557,961 impressions of eight days, 5 % of them clicks; 1,140,000 users
    and 846,811 ads. Get ``raw_sample.csv`` (1 GB), ``ad_feature.csv`` and
    ``user_profile.csv`` from Tianchi, data set 56 ("Ad Display/Click Data on
    Taobao.com"; CC BY-NC-SA 4.0). The log is not in time order, and its three
    files are to be joined: ``persia prepare taobao FOLDER OUT`` does both.
    ``behavior_log.csv`` (700 million actions) is not read.

    Args:
        paths: the Parquet files that were written; a path or a glob.
        batch_size: samples of a batch.
        options: of :class:`persia.data.Files`.
    """
    return Files(paths, "taobao", batch_size, format="parquet", **options)


class _Joined:
    """Adds the features of ads and users to lines of the log.

    Attributes:
        columns: those of the log.
        files: what is joined to it.
    """

    columns = ("user", "time_stamp", "adgroup_id", "pid", "clk")

    def __init__(self, folder: Path) -> None:
        self.files = folder / ADS, folder / USERS
        self._ads, self._users = map(_texts_of, self.files)
        self._ad_ids = self._key(self._ads, "adgroup_id", ADS)
        self._user_ids = self._key(self._users, "userid", USERS)

    @staticmethod
    def _key(table: pa.Table, name: str, file: str) -> pa.Array:
        if name not in table.column_names:
            raise errors.SchemaMismatch(
                f"{file} has no column {name!r}; it has {table.column_names}"
            )
        return column_of(table, name)

    def __call__(self, log: pa.Table) -> pa.Table:
        columns = {name: log.column(name) for name in self.columns}
        for table, ids, key, own in (
            (self._ads, self._ad_ids, "adgroup_id", "adgroup_id"),
            (self._users, self._user_ids, "user", "userid"),
        ):
            at = pc.index_in(column_of(log, key), ids)  # null: not known
            for name in table.column_names:
                if name != own:
                    columns[name] = column_of(table, name).take(at)
        return pa.table(columns)


def _texts_of(path: Path) -> pa.Table:
    """A CSV file as texts; spaces around its names do not count."""
    try:
        with pa_csv.open_csv(path) as head:
            names = head.schema.names
        types = {name: pa.string() for name in names}
        table = pa_csv.read_csv(
            path, convert_options=pa_csv.ConvertOptions(column_types=types)
        )
    except OSError as error:
        raise errors.StorageError(f"cannot open {path}: {error}") from error
    except pa.ArrowInvalid as error:
        raise errors.MalformedData(f"{path}: {error}") from error
    return table.rename_columns([name.strip() for name in names])


def prepare_taobao(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    **options: Any,
) -> Prepared:
    """Joins the files of Taobao's data set, sorts them by time, and writes
    Parquet files for :func:`Taobao`.

    Ads and users are held in memory (some 200 MB); the log is not.

    Args:
        folder: with raw_sample.csv, ad_feature.csv and user_profile.csv,
            decompressed.
        out: where the files go.
        options: of :func:`persia.data.prepare`.

    Raises:
        StorageError: a file is missing.
        SchemaMismatch: a file is another one.
    """
    schema = Schema.load("taobao")
    schema = schema.model_copy(update={"timestamp": "time_stamp"})
    return prepare(
        Path(folder) / LOG, schema, out, join=_Joined(Path(folder)), **options
    )
