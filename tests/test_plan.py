"""The planner: its formulas against tables that are filled and messages that
are encoded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from typer.testing import CliRunner

from persia import _core, errors
from persia.cli.app import app
from persia.distributed import planning
from tests.protobuf import stubs

TB = 1e12


def filled(dim: int, dtype: str, optimizer: str, rows: int) -> dict[str, int]:
    """The counters of a table with so many rows."""
    store = _core.Store(2, 0)
    number, _ = store.declare(
        name="t",
        seed=1,
        dim=dim,
        dtype=planning.DTYPES[dtype],
        optimizer=_core.TABLE_OPTIONS["optimizer"].index(optimizer),
        momentum=0,
        init=_core.INIT_UNIFORM,
        init_a=-0.01,
        init_b=0.01,
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
    step = 1 << 15
    for first in range(0, rows, step):
        ids = np.arange(first, min(rows, first + step), dtype=np.int64)
        vectors = np.zeros((len(ids), dim), np.float32)
        store.set(number, ids * 2654435761, vectors, None)
    stats = store.stats(number)
    store.close()
    return stats


@pytest.mark.parametrize(
    ("dim", "dtype", "optimizer", "floats"),
    [
        (16, "fp32", "rowwise_adagrad", 16 + 1),
        (16, "bf16", "adagrad", 8 + 16),
        (16, "int8", "rowwise_adagrad", 4 + 1 + 1),
        (4, "fp32", "sgd", 4),
        (64, "fp32", "adam", 3 * 64),
    ],
)
def test_memory_is_that_of_filled_tables(
    dim: int, dtype: str, optimizer: str, floats: int
) -> None:
    # id, clock, vector and state, without gaps
    assert planning.row_stride(dim, dtype, optimizer) == 12 + 4 * floats
    expected = planning.bytes_a_row(dim, dtype, optimizer)
    for rows in (60_000, 100_000, 250_000):
        stats = filled(dim, dtype, optimizer, rows)
        assert stats["rows"] == rows
        assert stats["bytes"] / rows == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("ids", [[4096] * 26, [10_000, 100], [37] * 3])
def test_network_is_that_of_messages(ids: list[int], wire: str) -> None:
    pb, _ = stubs()
    dim, (value, scale) = 16, planning.WIRE[wire]
    caller = pb.Caller(client=2**63, incarnation=3, boot=2**62, lineage=2**61)
    pull = pb.PullRequest(caller=caller, want_rows=True)
    reply = pb.PullReply()
    push = pb.PushRequest(
        caller=caller, stream=2**63, number=10**6, settled=10**6
    )
    done = pb.PushReply(touched=sum(ids), updates=10**6)
    for no, n in enumerate(ids):
        rows = {
            "no": no,
            "dim": dim,
            "values": bytes(n * dim * value),
            "scales": bytes(n * scale),
            "rows": bytes(4 * n),
        }
        pull.tables.add(no=no, ids=bytes(8 * n))
        reply.tables.add(**rows)
        table = push.tables.add(ids=bytes(8 * n), **rows)
        table.hyper.kind = pb.OPTIMIZER_ADAM
        for field in table.hyper.DESCRIPTOR.fields:
            if field.cpp_type == field.CPPTYPE_FLOAT:
                setattr(table.hyper, field.name, 0.5)
    to, back = planning.message_bytes(ids, dim, wire)
    # Our own messages have padding besides.
    room = 200 + 40 * len(ids)
    sent = pull.ByteSize() + push.ByteSize()
    assert to == pytest.approx(sent, abs=room, rel=0.01)
    got = reply.ByteSize() + done.ByteSize()
    assert back == pytest.approx(got, abs=room, rel=0.01)


def test_a_hundred_trillion_parameters() -> None:
    found = planning.plan(
        100e12 / 64,
        64,
        optimizer="rowwise_adagrad",
        row_dtype="bf16",
        server_memory=4 * TB,
        qps=2e6,
    )
    assert found.parameters == 100e12
    row = 12 + 2 * 64 + 4 + 64 / 12 / 0.62
    assert found.row_bytes == pytest.approx(row)
    assert found.memory == pytest.approx(100e12 / 64 * row)
    assert found.because == "memory"
    # As few as hold it at three quarters, and not one less.
    assert found.shard_memory <= 0.75 * 4 * TB
    fewer = math.ceil(4096 / (found.shards - 1)) / 4096 * found.memory
    assert fewer > 0.75 * 4 * TB


def test_what_asks_for_servers_is_told() -> None:
    one = planning.plan(1e6, 16)
    assert (one.shards, one.because) == (1, "one is enough")
    assert one.calls == one.bytes_in == one.ids == 0
    busy = planning.plan(1e6, 16, qps=1e6, ids=26, server_ids=5e6)
    assert busy.because == "ids a second"
    assert busy.ids * busy.shards == pytest.approx(26e6, rel=0.01)
    assert busy.calls == pytest.approx(2e6 / 1024)
    wide = planning.plan(1e6, 256, qps=1e6, wire_dtype="fp32", server_ids=1e9)
    assert wide.because == "network"
    half = planning.plan(1e6, 256, qps=1e6, wire_dtype="fp16", server_ids=1e9)
    assert 0.45 < half.shards / wide.shards < 0.55
    tables = planning.plan(1e12, 1, server_memory=1e15)
    assert tables.because == "room for the rows of a table"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"dim": 5000}, "dim is 5000.* 4096"),
        (
            {"row_dtype": "fp64"},
            "row_dtype is 'fp64'.*fp32.*bf16.*int8",
        ),
        ({"wire_dtype": "int8"}, "wire_dtype is 'int8'"),
        ({"optimizer": "lamb"}, "optimizer is 'lamb'.*sgd, "),
        ({"headroom": 1.0}, "headroom is 1.0"),
        ({"distinct": 0.0}, "distinct is 0.0"),
        ({"ids": 0}, "ids is 0"),
        ({"server_network": 0.0}, "server_network is 0.0"),
        ({"server_network": math.nan}, "server_network is nan"),
        ({"server_ids": 0}, "server_ids is 0"),
        ({"server_ids": math.inf}, "server_ids is inf"),
        ({"server_memory": 0}, "server_memory is 0"),
        ({"tables": 5000}, "tables is 5000, .* 4096"),
        (
            {"rows": 6.25e12, "server_memory": 2**38},
            "4096 servers, .* memory: `server_memory` .*282GiB",
        ),
        ({"qps": 1e13}, "`server_network` of at least .* Gbit/s"),
        ({"qps": 1e9, "server_network": 1e15}, "`server_ids` of at least"),
        ({"rows": 1e15, "server_memory": 1e15}, "`tables`"),
    ],
)
def test_wrong_numbers_are_named(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        planning.plan(**({"rows": 1e6, "dim": 16} | arguments))  # type: ignore[arg-type]


def test_the_command() -> None:
    result = CliRunner().invoke(
        app,
        ["plan", "--rows", "1e12", "--dim", "16", "--qps", "1e5"],
        env={"COLUMNS": "200"},
    )
    assert result.exit_code == 0, result.output
    assert "16.00 T" in result.output
    assert "because of: memory" in result.output
    with pytest.raises(errors.InvalidArgument, match=r"server_memory.*lots"):
        CliRunner().invoke(
            app,
            ["plan", "--rows", "1", "--server-memory", "lots"],
            catch_exceptions=False,
        )
