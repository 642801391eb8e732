"""The click log of a round: avazu's columns, and one row of a table for each
sample."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from persia.torture.plan import Round

COLUMNS = (
    "id click hour C1 banner_pos site_id site_domain site_category app_id "
    "app_domain app_category device_id device_ip device_model device_type "
    "device_conn_type C14 C15 C16 C17 C18 C19 C20 C21"
).split()
#: Of the model. ``device_ip`` is the number of the sample, ``C14`` that of
#: its batch in the file.
FEATURES = ("device_ip", "site_id", "C14", "app_id")
FILES = 4


def write(made: Round, folder: Path) -> None:
    """The files and their schema."""
    samples = made.per_epoch * made.size
    r = Random(f"data {made.seed}")
    each = samples // FILES
    for file in range(FILES):
        lines = [",".join(COLUMNS)]
        for i in range(file * each, (file + 1) * each):
            row = dict.fromkeys(COLUMNS, "0")
            row |= {
                "id": str(i),
                "click": str(r.randrange(2)),
                "device_ip": str(i),
                "site_id": str(r.randrange(40)),
                "C14": str(i // made.size),
                "app_id": str(r.randrange(500)),
            }
            lines.append(",".join(row.values()))
        (folder / f"part-{file}.csv").write_text("\n".join(lines) + "\n")
    schema = {
        "label": "click",
        "categorical": [{"column": c, "hash": False} for c in FEATURES],
    }
    (folder / "schema.yaml").write_text(json.dumps(schema))


def glob(folder: Path) -> str:
    """What ``persia feed`` reads."""
    return str(folder / "part-*.csv")


def units(made: Round, folder: Path) -> list[Any]:
    """The streams of batches, as the loaders of the round make them."""
    from persia.cli.feed import FeedConfig, train_options
    from persia.data.feeding import parts_of
    from persia.train.sources import open_data

    config = FeedConfig.model_validate(
        {
            "data": glob(folder),
            "schema": str(folder / "schema.yaml"),
            "batch_size": made.size,
            "eval_split": 0.0,
        }
    )
    options = train_options(config)
    if made.kind == "parts":
        return list(parts_of(open_data(options)[0], made.parts).values())
    n = made.loaders
    return [open_data(options, i, n)[0] for i in range(n)]
