"""Files that Spark writes, of :data:`tests.sources.values.VALUES`.

``python -m tests.spark FOLDER`` writes those of ``tests/sources/spark``. It
needs ``pip install pyspark==4.0.1`` and Java 17.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.sources.values import REFUSED, VALUES

__all__ = ["WRITERS", "expressions", "write"]

#: By name: the settings of a writer.
WRITERS: dict[str, dict[str, str]] = {
    "int96": {"spark.sql.parquet.outputTimestampType": "INT96"},
    "legacy": {
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.parquet.writeLegacyFormat": "true",
    },
    "millis": {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS"},
}

_REFUSED = {
    "struct": "named_struct('a', 1)",
    "map": "map('a', 1)",
    "lists": "array(array(1))",
    "interval": "interval '3' month",
}


def _expression(name: str) -> str | None:
    """A value in SQL; None: Spark has no type for it."""
    value, t = VALUES[name], pa.types
    kind, text = value.array.type, value.text
    integers = {
        "int8": "tinyint",
        "int16": "smallint",
        "uint8": "smallint",
        "int32": "int",
        "uint16": "int",
        "int64": "bigint",
        "uint32": "bigint",
        "uint64": "decimal(20, 0)",
        "float": "float",
        "double": "double",
    }
    if to := integers.get(str(kind)):
        one = "-0.0" if name == "negative_zero" else text
        return f"cast('{one}' as {to})"
    if t.is_decimal128(kind):
        return f"cast('{text}' as decimal({kind.precision}, {kind.scale}))"
    if t.is_timestamp(kind) and kind.unit != "ns":
        return f"timestamp'{text}Z'" if kind.tz else f"timestamp_ntz'{text}'"
    for test, made in (
        (t.is_null, "cast(null as string)"),
        (t.is_boolean, text),
        (t.is_string, f"'{text}'"),
        (t.is_binary, f"cast('{text}' as binary)"),
        (t.is_date32, f"date'{text}'"),
        (t.is_duration, f"interval '{text}' second"),
    ):
        if test(kind):
            return made
    return None


def expressions() -> dict[str, str]:
    """By column: what Spark calls its value."""
    found = {name: _expression(name) for name in VALUES}
    alone = {name: one for name, one in found.items() if one is not None}
    # Without a zone they are in a type of their own.
    for year in 1, 9999:
        text = VALUES[f"year_{year}_us"].text
        alone[f"year_{year}_us"] = f"timestamp'{text}Z'"
    lists = {f"{name}_list": f"array({one})" for name, one in alone.items()}
    assert set(_REFUSED) == set(REFUSED)
    return alone | lists | _REFUSED


def write(folder: Path) -> None:
    """``NAME.parquet`` of each writer."""
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    session = (
        builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "700m")
        .config("spark.sql.session.timeZone", "America/New_York")
        .getOrCreate()
    )
    try:
        columns = [f"{one} as {n}" for n, one in expressions().items()]
        frame = session.sql("select " + ", ".join(columns))
        for name, settings in WRITERS.items():
            for key, value in settings.items():
                session.conf.set(key, value)
            made = folder / f"{name}.folder"
            frame.coalesce(1).write.mode("overwrite").parquet(str(made))
            for key in settings:
                session.conf.unset(key)
            (part,) = made.glob("part-*.parquet")
            part.rename(folder / f"{name}.parquet")
            shutil.rmtree(made)
    finally:
        session.stop()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
