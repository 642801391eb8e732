"""What another number of servers costs: the forecast against moves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from persia import _core, errors
from persia.cli.app import app
from persia.distributed import costs, planning
from persia.distributed.rounds import Rounds, foreseen
from persia.distributed.scaling import Scaling
from persia.distributed.status import ask
from tests.test_moves import Server, addresses, scale, serving
from tests.test_shards import Counter

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

ROWS = 120_000


def received(server: Server) -> int:
    """Bytes of the calls that bring shards to it."""
    return server.shards.core.calls()["Move"][2]


def held(server: Server) -> tuple[int, int]:
    """Rows of a server, and their bytes."""
    tables = [t for s in server.shards.stats().values() for t in s["tables"]]
    return sum(t["rows"] for t in tables), sum(t["bytes"] for t in tables)


@pytest.mark.parametrize("to", [1, 3])
def test_a_move_costs_what_was_foreseen(to: int, tmp_path: Path) -> None:
    """Rows, memory, and bytes between servers."""
    with serving(tmp_path, memory_limit="1GiB") as servers:
        counter = Counter(addresses(servers[:2]))
        ids = torch.arange(ROWS)
        counter.store.set_rows("t", ids, torch.ones(ROWS, 2))
        with Scaling(addresses(servers)) as scaling:
            places = scaling.places()
        found = ask(addresses(servers), interval=0.0)
        cost = costs.of_job(places, to, found)
        before = [received(server) for server in servers]
        had = [held(server) for server in servers]
        scale(servers, to)
        sent = sum(map(received, servers)) - sum(before)
        moved = 0
        for server, was, foreseen_ in zip(
            servers, had, cost.servers, strict=True
        ):
            rows, memory = held(server)
            assert foreseen_.rows == (was[0], rows)
            assert foreseen_.shards[1] == len(server.shards.here())
            assert foreseen_.memory[0] == was[1]
            # Memory is that of tables which grew otherwise.
            assert foreseen_.memory[1] == pytest.approx(memory, rel=0.25)
            moved += max(rows - was[0], 0)
        assert cost.moves == (1 if to == 3 else 2)
        assert cost.rows == moved and cost.again == 0
        row = planning.row_stride(2, "fp32", "sgd")
        assert moved * row <= sent <= cost.bytes <= 1.2 * moved * row
        counter.store.close()


def test_the_command_foresees_the_same(tmp_path: Path) -> None:
    """From the options alone, ids being divided at random."""
    words = ["--rows", str(ROWS), "--dim", "2", "--optimizer", "sgd"]
    words += ["--scale", "2:3", "--shards", "4", "--json"]
    said = CliRunner().invoke(app, ["plan", *words])
    assert said.exit_code == 0, said.output
    plan = json.loads(said.stdout)
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        ids = torch.arange(ROWS)
        counter.store.set_rows("t", ids, torch.ones(ROWS, 2))
        result = CliRunner().invoke(
            app,
            [
                *("scale", "ps", "--to", "3", "--dry-run", "--json"),
                *("--servers", ",".join(addresses(servers))),
            ],
        )
        assert result.exit_code == 0, result.output
        cost = json.loads(result.stdout.splitlines()[-1])["cost"]
        assert [len(s.shards.here()) for s in servers] == [2, 2, 0]
        counter.store.close()
    assert plan["moves"] == cost["moves"] == 1
    assert plan["rows"] == pytest.approx(cost["rows"], rel=0.03)
    assert plan["bytes"] == pytest.approx(cost["bytes"], rel=0.05)
    for a, b in zip(plan["servers"], cost["servers"], strict=True):
        assert a["shards"] == b["shards"]
        assert a["memory"] == pytest.approx(b["memory"], rel=0.25)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(
        app, ["plan", "--rows", "1e9", *words], env={"COLUMNS": "200"}
    )


def test_the_command_for_people() -> None:
    result = invoke("--scale", "8:16", "--qps", "1e6")
    assert result.exit_code == 0, result.output
    assert "server 0 and 7 others" in result.output
    assert "4 to 2" in result.output and "0 to 2" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["--scale", "2"],
        ["--scale", "0:2"],
        ["--scale", "2:0"],
        ["--scale", "2:3", "--shards", "2"],
        ["--scale", "3:2", "--shards", "2"],
        ["--scale", "2:5000"],
        ["--scale", "2:3", "--move-rate", "0"],
        ["--scale", "2:3", "--move-slows", "1"],
        ["--scale", "2:3", "--distinct", "0"],
    ],
)
def test_wrong_numbers(words: list[str]) -> None:
    result = invoke(*words)
    assert result.exit_code
    assert isinstance(result.exception, errors.InvalidArgument | SystemExit)


def test_a_copy_of_what_does_not_change() -> None:
    assert foreseen(1000.0, 100.0, 0.0) == (1000.0, 40.0, 0.0)
    assert foreseen(0.0, 100.0, 5.0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("changes", [1.0, 1e3, 1e5, 1e7])
def test_a_copy_ends_whatever_changes(changes: float) -> None:
    rows, rate = 1e6, 1e5
    copy = foreseen(rows, rate, changes)
    assert rows <= copy.rows < 20 * rows and math.isfinite(copy.seconds)
    # The rest is short, or the server has no more time for it.
    assert copy.pause <= max(0.01, rows / rate)
    if changes <= rate / 100:
        assert copy.pause <= 0.01


def test_rounds_take_more_of_the_time_where_they_do_not_shrink() -> None:
    rounds = Rounds()
    shares = [rounds.share]
    while not rounds.is_last(1e6, 10.0, 1e6):
        shares.append(rounds.share)
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert Rounds().is_last(1e6, 1.0, 10.0)
