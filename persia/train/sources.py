"""The data that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import parse_qsl

from persia import errors
from persia.data import Dataset, Files, Kafka, Schema
from persia.data.formats.paths import find_files
from persia.datasets import (
    Avazu,
    ClickStream,
    Criteo,
    SyntheticCTR,
    Taobao,
    criteo_syn,
    kwai_video,
)
from persia.datasets.criteo import is_criteo
from persia.train import position
from persia.train.config import TrainConfig, is_made
from persia.train.topics import open_topics

SYNTHETIC_TEST_SAMPLES = 200_000
_DRIFT: dict[str, Any] = {
    "windows": 10,
    "churn": 0.2,
    "vocabulary": 10_000,
    "features": 8,
}
_NAMED: dict[str, Callable[..., Files]] = {
    "avazu": Avazu,
    "criteo": Criteo,
    "taobao": Taobao,
}


def open_data(
    config: TrainConfig,
    rank: int = 0,
    world_size: int = 1,
    schema: Schema | None = None,
) -> tuple[Dataset, Dataset | None]:
    """Training data, and what is held out of it or apart to score on; of
    both the share of one rank. Windows are of all
    ranks, so each of these reads all samples, in batches for all of them.

    Args:
        config: the options of the run.
        rank, world_size: whose share.
        schema: of files, with their labels; None: as the options say.
    """
    if config.window is not None:
        size = config.batch_size * world_size
        config = config.model_copy(update={"batch_size": size})
        rank, world_size = 0, 1
    if is_made(config.data):
        return _made(config, rank, world_size)
    if config.data.startswith("kafka://"):
        topics = open_topics(config, rank, world_size)
        _check_label(config, topics.schema)
        if config.eval_data is None:
            return topics, None
        test = open_files(
            config.eval_data,
            topics.schema,
            config.batch_size,
            rank=rank,
            world_size=world_size,
        )
        return topics, test

    def read(paths: str, columns: Schema | str | None) -> Files:
        return open_files(
            paths,
            columns,
            config.batch_size,
            label=config.labels,
            group=config.group,
            shuffle=config.shuffle,
            seed=config.seed,
            rank=rank,
            world_size=world_size,
        )

    held = config.eval_data
    told = held is not None or config.eval_split is not None
    data = read(config.data, schema or config.table_schema)
    data.malformed_limit = config.malformed_limit
    _check_label(config, data.schema)
    wants_last = config.target_auc is not None and not told
    if wants_last and config.window is None and len(data.files) > 1:
        # As MLPerf has it: the last day is the test.
        train, test = data.of_files(0, -1), data.of_files(-1, None)
        test.shuffle = 0
        return train, test
    if config.window is not None:
        return data, None
    if held is not None:
        # By what the training data decided: its moments, its delimiter.
        columns = None if isinstance(data, Criteo) else data.schema
        test = read(held, columns)
        test.shuffle = 0
        return data, test
    share = (
        position.TEST_SHARE if config.eval_split is None else config.eval_split
    )
    if share == 0:
        return data, None
    train, test = data.split(share)
    test.shuffle = 0
    return train, test


def open_files(
    paths: str,
    schema: Schema | str | None,
    batch_size: int,
    **options: Any,
) -> Files:
    """Files of a schema; None: that of NAME:PATH, Criteo's if they look like
    it, else it is inferred. ``options``: of :class:`persia.data.Files`."""
    name, paths = _named(paths)
    make: Any = _NAMED.get(name)
    columns = [options.get("label", ()), options.get("group")]
    if schema is None and make is None:
        first = find_files(paths)[0]
        if first.size is None and (any(columns) or first.suffix):
            raise errors.InvalidArgument(
                f"{first.name!r} is a pipe, which is read once: give the "
                "`schema` of its columns, or write them to a file first"
            )
        make = Criteo if is_criteo(first) else None
    if make is Criteo and schema is None:
        options.pop("label", None)
        options.pop("group", None)
        if any(columns):
            raise errors.InvalidArgument(
                "`label` and `group`: Criteo's lines have one label, and no "
                "names of columns"
            )
    if schema is None and make is not None:
        files: Files = make(paths, batch_size, **options)
        return files
    return Files(paths, schema, batch_size, **options)


def _named(path: str) -> tuple[str, str]:
    """("avazu", PATH) of avazu:PATH; ("", PATH) of others."""
    name, colon, rest = path.partition(":")
    return (name, rest) if colon and name in _NAMED else ("", path)


def check_test(config: TrainConfig, test: Dataset | None) -> None:
    """Finds out before the training whether it can be scored on the files of
    ``--eval-data``: reads the first samples of each.

    Raises:
        SchemaMismatch: a file has other columns.
        MalformedData: no line of them is usable.
        StorageError, CorruptFile: one cannot be read.
    """
    if config.eval_data is None or not isinstance(test, Files):
        return
    found, part = False, test
    for i, name in enumerate(test.files):
        if os.path.exists(name) and not os.path.isfile(name):
            return  # a pipe is read once
        part = test.of_files(i, i + 1)
        part.rank, part.world_size = 0, 1  # a rank may have none of the lines
        batches: Any = iter(part)
        with closing(batches):
            batch = next(batches, None)
        if batch is not None and batch.label is None:
            raise errors.SchemaMismatch(f"`eval_data`: {name!r} has no label")
        found |= batch is not None
    if not found:
        raise errors.MalformedData(f"`eval_data`: {no_sample(part)}")


def check_best(config: TrainConfig, data: Dataset, test: Any) -> None:
    """Raises InvalidArgument unless there are samples that decide which model
    is best, where one is looked for."""
    if config.seeks_best and test is None:
        raise errors.InvalidArgument(
            "`early_stop` and `keep_best` need samples held out: give "
            "`eval_split` or `eval_data`"
        )
    schema = getattr(data, "schema", None)
    if config.best_by == "gauc" and (schema is None or not schema.group):
        raise errors.InvalidArgument(
            "`best_by=gauc`: the data have no group; name its column with "
            "`group`, or in the schema"
        )


def no_sample(batches: Any) -> str:
    """Why there is nothing in a source that was read to its end."""
    text = "there is no sample"
    if names := getattr(batches, "files", None):
        text += f" in {names[0]!r}" + (", ..." if len(names) > 1 else "")
    if count := getattr(batches, "malformed", 0):
        text += f": {count:,} malformed, the first of them "
        text += batches.malformed_lines[0]
    return text


def _check_label(config: TrainConfig, schema: Schema) -> None:
    """Raises unless the label is one that models of clicks are trained on."""
    if not schema.labels and config.table_schema is not None:
        raise errors.InvalidArgument(
            f"`schema={config.table_schema}` has no label to train on: add "
            "'label: COLUMN', or name it with `label`"
        )
    if not schema.labels:
        raise errors.InvalidArgument(
            f"no label was found in {config.data!r}: name its column with "
            f"`label`; or write a schema with 'persia schema {config.data} > "
            "data.yaml', add 'label: COLUMN', and pass `schema=data.yaml`"
        )
    for label in schema.labels:
        if label.is_click:
            continue
        raise errors.InvalidArgument(
            f"label {label.column!r} holds other numbers than 0 and 1, and "
            "persia train predicts clicks: its loss and its scores need 0 or "
            f"1. Write 'label: {{column: {label.column}, threshold: X}}' (or "
            "values: of 0 and 1) in the schema; or train a number with a loss "
            "and a loop of your own"
        )


def _made(
    config: TrainConfig, rank: int, world_size: int
) -> tuple[Dataset, Dataset | None]:
    for name in ("table_schema", "eval_data", "label", "group"):
        if getattr(config, name) is not None:
            raise errors.InvalidArgument(
                f"`{name.removeprefix('table_')}` goes with files, not with "
                f"`data={config.data}`"
            )
    data = _generator(config, rank, world_size)
    held = min(SYNTHETIC_TEST_SAMPLES, config.samples)
    if config.eval_split is not None:
        held = round(config.samples * config.eval_split)
    if config.window is not None and config.eval_split is None:
        held = 0  # the next window is the test
    return data, data.test(held) if held else None


def _generator(
    config: TrainConfig, rank: int, world_size: int
) -> SyntheticCTR | ClickStream:
    name, _, rest = config.data.partition(":")
    name, _, query = name.partition("?")
    options: Any = {
        "seed": config.seed,
        "rank": rank,
        "world_size": world_size,
    }
    sizes: tuple[int, int] = config.samples, config.batch_size
    if name == "synthetic":
        return SyntheticCTR(*sizes, **options)
    if name == "kwai-video":
        return kwai_video(*sizes, **options)
    if name == "criteo-syn":
        return criteo_syn(rest or "100T", *sizes, dim=config.dim, **options)
    given = dict(parse_qsl(query, keep_blank_values=True))
    try:
        drift = _DRIFT | {k: type(_DRIFT[k])(v) for k, v in given.items()}
    except (KeyError, ValueError):
        raise errors.InvalidArgument(
            f"`data={config.data}`: need drift, and after it ?churn=0.2 or "
            f"others of {', '.join(_DRIFT)}, with & between them"
        ) from None
    windows = max(1, int(drift.pop("windows")))
    window_samples = max(1, -(-config.samples // windows))
    return ClickStream(
        *sizes, window_samples=window_samples, **options | drift
    )


def schema_of(data: Dataset) -> str | None:
    """The schema of files or topics as JSON; None: generated, or Criteo's."""
    if not isinstance(data, Files | Kafka) or isinstance(data, Criteo):
        return None
    return data.schema.model_dump_json()
