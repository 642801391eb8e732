"""The data that a configuration names."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlsplit

from persia import errors
from persia.data import Files, Kafka, Schema
from persia.data.paths import find_files
from persia.datasets import Criteo, Dataset, SyntheticCTR
from persia.datasets.criteo import is_criteo
from persia.train import position
from persia.train.config import TrainConfig

__all__ = ["open_data", "open_files", "schema_of"]

SYNTHETIC_TEST_ROWS = 200_000


def open_data(
    config: TrainConfig, shard: tuple[int, int] = (0, 1)
) -> tuple[Dataset, Dataset | None]:
    """Training data, and what is held out of it or apart to score on; of
    both the share of one rank: ``shard`` is (rank, ranks)."""
    if config.data == "synthetic":
        return _synthetic(config, shard)
    if config.data.startswith("kafka://"):
        return _kafka(config, shard)

    def read(paths: str, schema: Schema | str | None) -> Files:
        return open_files(
            paths,
            schema,
            config.batch_size,
            shuffle=config.shuffle,
            seed=config.seed,
            shard=shard,
        )

    data = read(config.data, config.table_schema)
    _check_label(config, data)
    if config.eval_data is not None:
        # By what the training data decided: its moments, its delimiter.
        schema = None if isinstance(data, Criteo) else data.schema
        test = read(config.eval_data, schema)
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
    paths: str, schema: Schema | str | None, batch_size: int, **options: Any
) -> Files:
    """Files of a schema; None: Criteo's if they look like it, else it is
    inferred. ``options``: of :class:`persia.data.Files`."""
    if schema is None and is_criteo(find_files(paths)[0]):
        return Criteo(paths, batch_size, **options)
    return Files(paths, schema, batch_size, **options)


def _check_label(config: TrainConfig, data: Files) -> None:
    if data.schema.label is None:
        raise errors.InvalidArgument(
            f"no label was found in {config.data!r}: write its schema with "
            f"'persia schema {config.data} > data.yaml', add 'label: COLUMN', "
            "and pass --schema data.yaml"
        )


def _synthetic(
    config: TrainConfig, shard: tuple[int, int]
) -> tuple[SyntheticCTR, SyntheticCTR | None]:
    for name in ("table_schema", "eval_data"):
        if getattr(config, name) is not None:
            raise errors.InvalidArgument(
                f"--{name.removeprefix('table_').replace('_', '-')} goes "
                "with files, not with --data synthetic"
            )
    data = SyntheticCTR(
        config.rows, config.batch_size, seed=config.seed, shard=shard
    )
    rows = min(SYNTHETIC_TEST_ROWS, config.rows)
    if config.eval_split is not None:
        rows = round(config.rows * config.eval_split)
    return data, data.test(rows) if rows else None


def _kafka(
    config: TrainConfig, shard: tuple[int, int]
) -> tuple[Kafka, Files | None]:
    """Topics by "kafka://broker:9092/topic?group=name"; several brokers or
    topics have commas between them."""
    url = urlsplit(config.data)
    options: dict[str, Any] = dict(
        parse_qsl(url.query, keep_blank_values=True)
    )
    known = {"group", "value", "dead_letter"}
    if "group" not in options or not set(options) <= known or not url.netloc:
        raise errors.InvalidArgument(
            f"--data {config.data}: need kafka://BROKER:PORT/TOPIC?group=NAME,"
            " and after it &value=arrow or &dead_letter=TOPIC as wanted"
        )
    if config.table_schema is None:
        raise errors.InvalidArgument(
            "--data kafka://: need --schema, as messages to infer one from "
            "differ with time"
        )
    if config.shuffle or config.eval_split:
        raise errors.InvalidArgument(
            "--shuffle and --eval-split go with files, not with --data "
            "kafka://; --eval-data names files to score on"
        )
    data = Kafka(
        url.netloc,
        url.path.removeprefix("/"),
        schema=config.table_schema,
        batch_size=config.batch_size,
        until="latest",
        shard=shard,
        **options,
    )
    if data.schema.label is None:
        raise errors.InvalidArgument(
            f"--schema {config.table_schema} has no label to train on"
        )
    if config.eval_data is None:
        return data, None
    test = open_files(
        config.eval_data, data.schema, config.batch_size, shard=shard
    )
    return data, test


def schema_of(data: Dataset) -> str | None:
    """The schema of files or topics as JSON; None: generated, or Criteo's."""
    if not isinstance(data, Files | Kafka) or isinstance(data, Criteo):
        return None
    return data.schema.model_dump_json()
