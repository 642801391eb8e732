"""How many servers a job needs: memory, network and requests of each.

The formulas are these few functions; tests hold them against tables that are
really filled and messages that are really encoded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from persia import _core
from persia.errors import InvalidArgument

DTYPES = {"fp32": _core.FP32, "bf16": _core.BF16, "int8": _core.INT8}

#: dtype on the wire -> bytes of a value, bytes of a row's scale.
WIRE = {"fp32": (4, 0), "fp16": (2, 4), "bf16": (2, 0)}

# A bucket of the index is a cache line for 12 rows; the load of a page moves
# between 0.55 and 0.70 and is 0.62 on average of many.
_INDEX_BYTES = 64 / 12 / 0.62

_ID_BYTES = 8
_HINT_BYTES = 4  # a row number, which travels back with the gradient
_REQUEST_BYTES = 100  # who asks, number of the update, lengths
_TABLE_BYTES = 45  # a table's part of a request: hyper-parameters, padding

_SHARDS_MAX = 4096
_TABLES_MAX = 4096  # of a store
_RANGES = 4096  # slots of all servers: a shard has some of them
_SLOTS = 8 * (2**32 - 1)  # rows of one table in one shard


def row_stride(dim: int, dtype: str, optimizer: str) -> int:
    """Bytes of a row: id, clock, vector and state, as the core lays it out."""
    if optimizer not in _core.TABLE_OPTIONS["optimizer"]:
        raise InvalidArgument(
            f"optimizer is {optimizer!r}, need one of "
            f"{', '.join(_core.TABLE_OPTIONS['optimizer'])}"
        )
    store = _core.Store(1, 0)
    try:
        number, _ = store.declare(
            name="plan",
            seed=0,
            dim=dim,
            dtype=DTYPES[dtype],
            optimizer=_core.TABLE_OPTIONS["optimizer"].index(optimizer),
            momentum=0,
            init=_core.INIT_UNIFORM,
            init_a=0.0,
            init_b=0.0,
            state_init=0.0,
            missing=_core.MISSING_INIT,
            nonfinite=_core.NONFINITE_RAISE,
            capacity=0,
            full=_core.FULL_RAISE,
            admission=1.0,
            evict_updates=0,
            evict_seconds=0,
            evict_score="",
            admit=0,
            sightings=0,
            sightings_kept=0,
        )
        return store.stats(number)["row_bytes"]
    finally:
        store.close()


def bytes_a_row(dim: int, dtype: str, optimizer: str) -> float:
    """Memory of a row with its part of the index, in a large table."""
    return row_stride(dim, dtype, optimizer) + _INDEX_BYTES


def message_bytes(
    ids: Sequence[float], dim: int, wire: str
) -> tuple[float, float]:
    """(to the server, from it): the pull and the push of one batch, with
    their replies.

    Args:
        ids: distinct ids of each table at this shard.
        dim: elements of a vector.
        wire: dtype of vectors and gradients.
    """
    value, scale = WIRE[wire]
    n, tables = sum(ids), len(ids)
    row = dim * value + scale + _HINT_BYTES
    fixed = _REQUEST_BYTES + tables * _TABLE_BYTES
    to = 2 * fixed + n * (_ID_BYTES + _ID_BYTES + row)
    return to, fixed + n * row


@dataclasses.dataclass(frozen=True)
class Plan:
    """What :func:`plan` found. Bytes, seconds; rates are of one server."""

    shards: int
    because: str
    """What asks for so many."""
    parameters: float
    row_bytes: float
    memory: float
    """Of all rows together."""
    shard_rows: float
    """Of the shard that has most."""
    shard_memory: float
    bytes_in: float
    bytes_out: float
    ids: float
    """Distinct ids a second."""
    calls: float


def plan(
    rows: float,
    dim: int,
    *,
    optimizer: str = "adagrad",
    row_dtype: str = "fp32",
    qps: float = 0.0,
    batch_size: int = 1024,
    ids: int = 26,
    distinct: float = 1.0,
    tables: int = 1,
    wire_dtype: str = "fp32",
    server_memory: float = 256 * 2**30,
    server_network: float = 25e9 / 8,
    server_ids: float = 5e6,
    headroom: float = 0.25,
) -> Plan:
    """The smallest number of servers on which a job fits.

    Args:
        rows: of all tables together.
        dim: elements of a vector.
        optimizer: of the embeddings.
        row_dtype: of stored vectors: fp32, bf16 or int8.
        qps: samples that are trained a second, all ranks together.
        batch_size: samples of a rank's batch: one pull and one push to each
            server.
        ids: of a sample.
        distinct: share of a batch's ids that differ, more than 0, to 1.
        tables: in which they are looked up.
        wire_dtype: of vectors and gradients on the wire.
        server_memory: bytes of a server.
        server_network: bytes a second of a server, each way.
        server_ids: distinct ids a second that a server pulls and pushes:
            ``benchmarks.cluster`` of the source tree measures it.
        headroom: share of memory, network and ids to be left free.

    Raises:
        InvalidArgument: a number out of its range, or more servers than
            there can be.
    """
    _check(
        rows=rows,
        dim=dim,
        row_dtype=row_dtype,
        wire_dtype=wire_dtype,
        qps=qps,
        batch_size=batch_size,
        ids=ids,
        distinct=distinct,
        headroom=headroom,
        tables=tables,
        server={
            "server_memory": server_memory,
            "server_network": server_network,
            "server_ids": server_ids,
        },
    )
    usable = 1 - headroom
    row = bytes_a_row(dim, row_dtype, optimizer)
    batch_ids = batch_size * ids * distinct
    batches = qps / batch_size

    def at(shards: int) -> Plan:
        share = math.ceil(_RANGES / shards) / _RANGES
        per_table = [batch_ids * share / tables] * tables
        to, back = message_bytes(per_table, dim, wire_dtype)
        return Plan(
            shards=shards,
            because="one is enough",
            parameters=rows * dim,
            row_bytes=row,
            memory=rows * row,
            shard_rows=rows * share,
            shard_memory=rows * share * row,
            bytes_in=batches * to,
            bytes_out=batches * back,
            ids=batches * batch_ids * share,
            calls=2 * batches,
        )

    def lacks(p: Plan) -> str:
        """What is too much for one of so many servers."""
        if p.shard_memory > server_memory * usable:
            return "memory"
        if p.shard_rows / tables > _SLOTS:
            return "room for the rows of a table"
        if max(p.bytes_in, p.bytes_out) > server_network * usable:
            return "network"
        return "ids a second" if p.ids > server_ids * usable else ""

    low, high, because = 1, _SHARDS_MAX, "one is enough"
    most = at(high)
    if missing := lacks(most):
        link = max(most.bytes_in, most.bytes_out) / usable
        remedy = {
            "memory": "`server_memory` of at least "
            f"{math.ceil(most.shard_memory / usable / 2**30)}GiB, "
            "`row_dtype=bf16`, or an optimizer with less state",
            "network": "`server_network` of at least "
            f"{math.ceil(link * 8 / 1e9)} Gbit/s, or `wire_dtype=fp16`",
            "ids a second": "`server_ids` of at least "
            f"{most.ids / usable:.2g}",
        }.get(missing, "divide them among more `tables`")
        raise InvalidArgument(
            f"{_SHARDS_MAX} servers, the most there can be, have too little "
            f"{missing}: {remedy}"
        )
    while low < high:  # more servers never lack what fewer have
        middle = (low + high) // 2
        missing = lacks(at(middle))
        if missing:
            low, because = middle + 1, missing
        else:
            high = middle
    return dataclasses.replace(at(low), because=because)


def _check(
    *,
    rows: float,
    dim: int,
    row_dtype: str,
    wire_dtype: str,
    qps: float,
    batch_size: int,
    ids: int,
    distinct: float,
    headroom: float,
    tables: int,
    server: Mapping[str, float],
) -> None:
    wrong = [
        f"{name} is {value!r}, need {need}"
        for name, value, need, good in (
            ("rows", rows, "at least 1", 1 <= rows < math.inf),
            ("dim", dim, "1 to 4096", 1 <= dim <= 4096),
            ("row_dtype", row_dtype, " or ".join(DTYPES), row_dtype in DTYPES),
            ("wire_dtype", wire_dtype, " or ".join(WIRE), wire_dtype in WIRE),
            ("qps", qps, "0 or more", 0 <= qps < math.inf),
            ("batch_size", batch_size, "at least 1", batch_size >= 1),
            ("ids", ids, "at least 1", ids >= 1),
            (
                "tables",
                tables,
                f"1 to {_TABLES_MAX}, as many as a store may have",
                1 <= tables <= _TABLES_MAX,
            ),
            ("distinct", distinct, "more than 0, to 1", 0 < distinct <= 1),
            ("headroom", headroom, "0 to below 1", 0 <= headroom < 1),
            *(
                (name, value, "more than 0, finite", 0 < value < math.inf)
                for name, value in server.items()
            ),
        )
        if not good
    ]
    if wrong:
        raise InvalidArgument("; ".join(wrong))
