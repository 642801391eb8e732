"""What the ranks of a job do in tests/serving/test_deltas_processes.py.

    python publishing_job.py FOLDER SERVERS

SERVERS: addresses, or "ranks".
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import persia
from persia.serving import Publisher
from tests.serving import models

IDS = torch.arange(-60, 60)


def check(out: Path, want_of: Path) -> None:
    """What was published is an export of the same moment."""
    loaded, want = persia.load_model(out), persia.load_model(want_of)
    loaded.catch_up()
    for table in (t.options.name for t in want.manifest.tables):
        has = want.has_rows(table, IDS)
        assert has.any()
        assert torch.equal(loaded.has_rows(table, IDS), has)
        assert torch.equal(
            loaded.vectors(table, IDS), want.vectors(table, IDS)
        )
    call = models.batch(9)
    assert torch.equal(loaded(*call), want(*call))


def main(folder: Path, servers: str) -> None:
    """Trains with a publisher, then publishes the end."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = models.store(servers=servers, timeout=30, threads=1)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        models.CLICKS["widedeep"](models.bags(store))
    )
    example = models.batch(3)
    torch.manual_seed(rank)
    out, want = folder / "out", folder / "want"
    with Publisher(
        model, out, example=example, every=0.02, rebase=2.0
    ) as publisher:
        count = 0
        for _ in range(60):
            models.train(model, lambda: models.batch(16), 1)
            count += publisher.step()
        publisher.flush()
        assert publisher.publish()
        publisher.flush()
        persia.export(model, want, example=example)
        counts: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(counts, count)
        assert counts[0] > 2 and len(set(counts)) == 1, counts
        versions = [""] * dist.get_world_size()
        dist.all_gather_object(versions, publisher.version)
        assert versions[0] > "v-000001" and len(set(versions)) == 1, versions
    if rank == 0:
        check(out, want)
    dist.barrier()
    store.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
