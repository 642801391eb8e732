"""Jobs of two ranks, with their tables on one to three servers
and on the ranks themselves: tests/system/ranks.py has what they do.

The oracle is one process that runs the batches of all ranks in turn and makes
one update of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import persia
from tests.remote import Servers
from tests.system import processes, ranks

WORLD = 2


def launch(folder: Path, *scenarios: str) -> dict[str, list[Any]]:
    """The results of each scenario, by rank."""
    folder.mkdir(exist_ok=True)
    words = (ranks.__file__, str(folder), *scenarios)
    status, text = processes.ranks(WORLD, *words)
    assert status == 0, text
    assert "Exception ignored" not in text, text
    return {
        name: [torch.load(folder / f"{name}.{r}.pt") for r in range(WORLD)]
        for name in (s.partition("=")[0] for s in scenarios)
    }


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: Any) -> dict[str, list[Any]]:
    """Every scenario with the tables on the ranks."""
    names = "train accumulate uneven gaps leaving hybrid scaled clipped"
    names += " joined again removed ended closing secured stuck cut_off differ"
    names += " plain unknown summed mixed held late one_machine"
    return launch(tmp_path_factory.mktemp("ranks"), *names.split())


@pytest.fixture(scope="module")
def on_servers(tmp_path_factory: Any) -> Iterator[dict[str, list[Any]]]:
    """Training with one to three servers, and counting with two."""
    names = {f"{name}-{n}": n for n in (1, 2, 3)
             for name in ("train", "accumulate")}  # fmt: skip
    names |= {"uneven": 2, "gaps": 2, "leaving": 2, "hybrid": 2}
    names |= {"several": 2, "ended": 1, "closing": 1}
    names |= {"plain": 2, "unknown": 2, "summed": 1, "mixed": 2, "turns": 1}
    servers = {name: Servers(n, name) for name, n in names.items()}
    scenarios = [f"{name}={s.text}" for name, s in servers.items()]
    yield launch(tmp_path_factory.mktemp("servers"), *scenarios)
    for one in servers.values():
        one.close()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def close(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(close(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) and a.is_floating_point():
        return torch.allclose(a, b, atol=1e-5, rtol=1e-4)
    return same(a, b)


def one_process(
    optimizer: persia.optim.SparseOptimizer, steps: list[list[int]], lr: float
) -> dict[str, Any]:
    """Each step is a list of batches; the mean of their gradients."""
    store = persia.Store(optimizer, update="step")
    model = ranks.Model(store)
    dense = torch.optim.SGD(model.linear.parameters(), lr)
    for step in steps:
        dense.zero_grad()
        for number in step:
            one = ranks.batch(number)
            (ranks.loss_of(model(one.ids), one) / WORLD).backward()
        store.optimizer.step()
        dense.step()
    return ranks.everything(store, model)


@pytest.fixture(params=["ranks", "1", "2", "3"])
def trained(
    request: Any, on_ranks: dict[str, Any], on_servers: dict[str, Any]
) -> Any:
    """The results of `train` and `accumulate` somewhere."""
    if request.param == "ranks":
        return on_ranks["train"], on_ranks["accumulate"]
    n = request.param
    return on_servers[f"train-{n}"], on_servers[f"accumulate-{n}"]


def test_training_is_that_of_one_process(trained: Any) -> None:
    steps = [
        [100 * epoch + WORLD * i + r for r in range(WORLD)]
        for epoch in range(2)
        for i in range(ranks.STEPS)
    ]
    expected = one_process(persia.optim.Adam(lr=0.05), steps, 0.1)
    for result in trained[0]:
        assert close(result, expected)


def test_accumulation_is_that_of_one_process(trained: Any) -> None:
    steps = [
        [WORLD * i + r for r in range(WORLD) for i in some]
        for some in ((0, 1), (2, 3), (4,))
    ]
    expected = one_process(persia.optim.Adagrad(lr=0.1), steps, 0.0)
    for result in trained[1]:
        assert result.pop("updates") == 3
        assert close(result, expected)


def test_every_layout_gives_the_same_bits(
    on_ranks: dict[str, Any], on_servers: dict[str, Any]
) -> None:
    for name in ("train", "accumulate"):
        first = on_ranks[name][0]
        first.pop("updates", None)
        for results in (
            on_ranks[name],
            *(on_servers[f"{name}-{n}"] for n in (1, 2, 3)),
        ):
            for result in results:
                result.pop("updates", None)
                assert same(result, first)


@pytest.fixture(params=["ranks", "servers"])
def counted(
    request: Any, on_ranks: dict[str, Any], on_servers: dict[str, Any]
) -> Any:
    return on_ranks if request.param == "ranks" else on_servers


def test_a_loop_without_a_loader_has_the_same_bits(counted: Any) -> None:
    for name, same_as in (("plain", "train"), ("summed", "accumulate")):
        (want, _) = counted.get(same_as) or counted[f"{same_as}-2"]
        want.pop("updates", None)
        for result in counted[name]:
            assert same(result, want)


def test_forwards_that_find_no_batch_are_of_the_last_one(
    counted: Any,
) -> None:
    (want, _) = counted.get("train") or counted["train-2"]
    for result in counted["unknown"]:
        assert result.pop("updates") == 2 * ranks.STEPS
        assert same(result, want)


def test_loops_with_and_without_a_loader_follow_each_other(
    counted: Any,
) -> None:
    first, other = counted["mixed"]
    assert first == [0, 2, 4, 14, 16, 18, 20, 22]
    assert other == [*first, 24, 25, 26]  # rank 1 went on by itself


def test_stores_may_train_in_turns(on_servers: dict[str, Any]) -> None:
    for result in on_servers["turns"]:
        assert result == {
            "seen": [0, 0, 2, 2, 4, 4],
            "said": ["UserWarning"] * 2,
        }


def test_ranks_may_end_at_different_times(counted: Any) -> None:
    short, long = counted["uneven"]
    assert long["seen"] == [0, 2, 4, 6, 7, 8, 9, 10, 12]
    assert short["seen"] == [0, 2, 4, 10, 12]
    for result in (short, long):
        assert (result["value"], result["updates"]) == (14, 9)


def test_a_rank_without_gradients_holds_up_nobody(counted: Any) -> None:
    whole, gaps = counted["gaps"]
    assert whole["seen"] == [0, 2, 3, 4, 5, 6, 7, 9]
    # Left out: no forward, no_grad, skip(), continue, NaN.
    assert gaps["seen"] == [0, -1, 3, 4, 5, 1006, 7, 9]
    for result in (whole, gaps):
        assert (result["value"], result["updates"]) == (11, 8)


def test_break_and_another_pass(counted: Any) -> None:
    for result in counted["leaving"]:
        assert result["seen"] == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
        assert result["value"] == 20


def test_a_loop_is_left_at_its_last_batch(counted: Any) -> None:
    for result in counted["ended"]:  # rank 0 has 4 and 4, rank 1 8 and 6
        assert result["value"] == 2 * (4 + 4 + 8 + 6)


def test_a_closed_store_is_in_no_step(counted: Any) -> None:
    for result in counted["closing"]:
        assert result["closed"]
        assert result["more"] == 3 * WORLD


def test_one_store_after_the_other(on_ranks: Any) -> None:
    for first, second in on_ranks["again"]:
        assert first["updates"] == second["updates"] == 12
        for (i, norm), (j, other) in zip(
            first["steps"], second["steps"], strict=True
        ):
            assert i == j
            assert math.isfinite(norm) == math.isfinite(other)


FAILING = """
import persia, torch, torch.distributed as dist
dist.init_process_group("gloo")
with persia.Store(timeout=20) as store:
    if dist.get_rank() == 0:
        raise ValueError("rank 0 has had enough")
    dist.barrier()
"""


def test_a_rank_that_fails_in_a_with_block_ends_at_once(
    tmp_path: Path,
) -> None:
    script = tmp_path / "job.py"
    script.write_text(FAILING)
    status, text = processes.ranks(2, str(script))
    assert status == 1
    assert "ValueError: rank 0 has had enough" in text


def test_hybrid_loses_nothing(counted: Any) -> None:
    for result in counted["hybrid"]:
        assert result["value"] == 100
        assert result["least"] >= 0
        assert result["stalest"] <= 3


def test_one_store_of_a_process_is_in_step(
    on_servers: dict[str, Any],
) -> None:
    for result in on_servers["several"]:
        assert "end that pass first" in result["text"]
        assert result["value"] == 5 * WORLD


def test_several_machines_speak_with_tls(on_ranks: dict[str, Any]) -> None:
    for result in on_ranks["secured"]:
        assert result == {"value": 5, "tls": True, "refused": True}


def test_ranks_of_one_machine_show_a_token(on_ranks: dict[str, Any]) -> None:
    assert on_ranks["one_machine"] == [True, True]


def test_a_rank_that_is_stuck_is_named(on_ranks: dict[str, Any]) -> None:
    waiting, stuck = on_ranks["stuck"]
    assert "rank 1" in waiting["text"]
    assert stuck["text"] == ""
    assert waiting["value"] == stuck["value"] == 4


def test_all_ranks_hear_of_one_that_cannot_join(
    on_ranks: dict[str, Any],
) -> None:
    others, cut_off = on_ranks["cut_off"]
    (text,) = others["texts"]
    assert "rank 1 could not join" in text
    assert cut_off["texts"] == ["no route to the server"]
    assert others["value"] == cut_off["value"] == 4


def test_ranks_that_divide_differently_are_told_so(
    on_ranks: dict[str, Any],
) -> None:
    for result in on_ranks["differ"]:
        assert "factor of gradients 0.5 and 1" in result["text"]
        assert result["value"] == 0


def test_all_ranks_miss_what_one_has_removed(
    on_ranks: dict[str, Any],
) -> None:
    results = on_ranks["removed"]
    assert [r["erased"] for r in results] == [30, 0]
    for result in results:
        assert torch.equal(result["left"], torch.arange(100) >= 30)
        assert (result["width"], result["rows"]) == (6, 0)


def test_a_rank_that_ends_serves_the_others(on_ranks: dict[str, Any]) -> None:
    for result in on_ranks["late"]:
        assert result["sum"] == 400.0


def test_scaler_steps_on_all_ranks_or_on_none(
    on_ranks: dict[str, Any],
) -> None:
    for result in on_ranks["scaled"]:
        assert result["values"] == [1, 2, 2, 3, 4, 5]
        assert result["scales"] == [16.0, 32.0, 16.0, 16.0, 32.0, 32.0]


def test_scaler_and_norm_where_a_rank_has_fewer_batches(
    on_ranks: dict[str, Any],
) -> None:
    """Rank 1 goes on by itself in model.join(); its fourth step overflows."""
    short, long = on_ranks["joined"]
    assert [i for i, _ in short["steps"]] == [0, 1] * 2
    assert [i for i, _ in long["steps"]] == [0, 1, 2, 3, 4] * 2
    together = [norm for i, norm in long["steps"] if i < 2]
    assert together == [norm for _, norm in short["steps"]]
    assert [math.isfinite(n) for _, n in long["steps"]] == [
        *(True, True, True, False, True)
    ] * 2
    assert torch.equal(short["weight"], long["weight"])
    # Of each rank one a step, but for the step that no rank makes.
    assert short["updates"] == long["updates"] == 2 * (2 + 5 - 1)


def test_one_norm_over_dense_sparse_and_ranks(
    on_ranks: dict[str, Any],
) -> None:
    """The gradients of each rank, from what SGD(lr=1) made of its rows."""
    one, two = on_ranks["clipped"]
    ids = torch.arange(ranks.IDS)
    squares = one["dense"]
    change = {"x": torch.zeros(ranks.IDS, 8), "y": torch.zeros(ranks.IDS, 16)}
    for rank in range(WORLD):
        store = persia.Store(persia.optim.SGD(lr=1.0))
        model = ranks.Model(store)
        first = {t: store.rows(t, ids) for t in change}
        alone = ranks.batch(rank)
        (ranks.loss_of(model(alone.ids), alone) / WORLD).backward()
        for table, sum_of in change.items():
            sum_of += first[table] - store.rows(table, ids)
    # As in one process: gradients of equal ids are summed over ranks, too.
    squares += sum(float(x.square().sum()) for x in change.values())
    norm = squares**0.5
    for result in (one, two):
        assert result["norm"] == pytest.approx(norm, rel=1e-4)
        assert result["clipped"] == pytest.approx(
            0.01 / norm * one["dense"] ** 0.5, rel=1e-2
        )
        for table, sum_of in change.items():
            expected = first[table] - sum_of * (0.01 / norm)
            assert torch.allclose(result[table], expected, atol=1e-6)
