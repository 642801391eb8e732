"""The model of large jobs: cases whose outcome is known, and that it runs."""

import dataclasses
import itertools

import pytest

from benchmarks.model.events import Job, Times, play
from benchmarks.model.growth import Growth, grow

TIMES = Times(
    server_call=1e-3,
    server_id=1e-6,
    client_call=1e-4,
    client_id=1e-7,
    dense=5e-3,
)
ONE = Job(
    servers=1,
    ranks=1,
    ids=1e4,
    staleness=0,
    server_cores=1,
    rank_cores=1,
    latency=2e-3,
    network=1e30,
    steps=200,
)
CLIENT = 1e-4 + 1e4 * 1e-7 / 2  # of a lookup or an update
SERVER = 1e-3 + 1e4 * 1e-6 / 2


def test_a_synchronous_step_is_the_sum_of_its_parts():
    # The next lookup leaves behind the update, and waits for it at the server:
    # what the rank does for it costs no time of its own.
    chain = CLIENT + 2 * SERVER + 2 * ONE.latency + TIMES.dense
    assert play(ONE, TIMES).steps == pytest.approx(1 / chain, rel=0.02)
    alone = ONE._replace(latency=0.0)
    together = play(alone, TIMES, cores=1)
    assert together.steps == pytest.approx(
        1 / (2 * CLIENT + 2 * SERVER + TIMES.dense), rel=0.02
    )


def test_staleness_hides_all_but_the_slowest_part():
    job = ONE._replace(staleness=8)
    found = play(job, TIMES)
    assert found.steps == pytest.approx(1 / (2 * SERVER), rel=0.02)
    assert found.busy == pytest.approx(1.0, rel=0.05)
    quick = play(job._replace(server_cores=100), TIMES)
    assert quick.steps == pytest.approx(1 / TIMES.dense, rel=0.02)
    far = play(job._replace(server_cores=100, latency=0.1), TIMES)
    cycle = 0.4 + 2 * CLIENT + 2 * SERVER / 100 + TIMES.dense
    assert far.steps == pytest.approx(9 / cycle, rel=0.1)
    slow = play(job._replace(server_cores=100, network=1e6), TIMES)
    assert slow.steps == pytest.approx(1e6 / (2 * 1e4 * 46), rel=0.05)


def test_one_machine_has_so_many_cores():
    job = ONE._replace(staleness=8, ranks=2, servers=2)
    work = 4 * 1e-4 + 1e4 * 1e-7 + 4 * 1e-3 + 1e4 * 1e-6 + TIMES.dense
    for cores in (1, 2):
        found = play(job, TIMES, cores=cores)
        assert found.steps == pytest.approx(cores / work, rel=0.05)


def test_more_servers_carry_more_ranks():
    job = Job(1, 64, 4e4, 8, 64, steps=20)
    rates = [
        play(job._replace(servers=n), TIMES).steps for n in (1, 2, 4, 8, 16)
    ]
    for few, many in itertools.pairwise(rates):
        assert few < many <= 2.05 * few


GROWTH = Growth(
    shards=32,
    least=2,
    most=16,
    rows=9e7,
    fresh=1.0,
    row_bytes=100.0,
    limit=1e9,
    rate=1e6,
    changes=1.0,
    slows=0.1,
    period=10.0,
)


@pytest.mark.parametrize("side_by_side", [True, False])
def test_servers_follow_the_rows(side_by_side):
    growth = dataclasses.replace(GROWTH, side_by_side=side_by_side)
    points = list(grow(growth, lambda n: (2e4, 0.1), 3e4))
    last = points[-1]
    # 9 GB in 32 shards: a server of 1 GB holds 3.
    assert last.seconds >= 3e4 and last.servers == 11
    assert max(p.fullest for p in points) <= 1.0
    assert not last.moving


def test_rows_may_grow_faster_than_shards_move():
    growth = dataclasses.replace(GROWTH, rate=1e3, side_by_side=False)
    points = list(grow(growth, lambda n: (1e6, 0.1), 3e4))
    assert points[-1].fullest > 1 and points[-1].servers < 16


def test_servers_end_that_are_not_needed():
    growth = dataclasses.replace(GROWTH, rows=1e6, least=1, into=60.0)
    growth = dataclasses.replace(growth, limit=1e12)
    points = list(grow(growth, lambda n: (1e4, 2.0 if n < 3 else 0.8), 3e3))
    assert points[-1].servers == 3


@pytest.mark.long
def test_it_runs(capsys, tmp_path):
    from benchmarks.model import __main__ as model
    from tests.benchmarks.test_benchmarks import lines

    model.main(["--quick", "--plot", str(tmp_path / "a.svg")])
    found = {line["case"]: line for line in lines(capsys)}
    assert "error of the model" in found
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1
