"""A job on a cluster of Ray, which is this machine."""

from __future__ import annotations

import os
import sys

import pytest

from persia import _core
from persia.distributed import run_on_ray
from persia.errors import Unavailable
from tests.system.processes import ROOT

ray = pytest.importorskip("ray", reason="needs persia[ray]")
if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

#: It trains what loaders send, and counts.
JOB = """
import persia
store = persia.Store(persia.optim.SGD(lr=1.0))
bags = persia.EmbeddingBagCollection(
    store=store, tables=[persia.EmbeddingBagConfig("t", 4, ["C1"])]
)
for batch in persia.DataLoader(persia.Stream(), bags, staleness=1):
    bags(batch.ids).values().sum().backward()
store.flush()
assert store.updates == 4, store.updates
raise SystemExit(7)
"""
ENV = {
    "PYTHONPATH": str(ROOT),
    "PERSIA_FEED_DATA": "synthetic",
    "PERSIA_FEED_SAMPLES": "4000",
    "PERSIA_FEED_EVAL_SPLIT": "0",
    "PERSIA_SERVE_PS_INSECURE": "true",
    "PERSIA_SERVE_WORKER_INSECURE": "true",
    "PERSIA_INSECURE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> object:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_all_roles() -> None:
    """They end with the command, whose status is the result."""
    status = run_on_ray(
        [sys.executable, "-c", JOB],
        servers=2,
        embedding_workers=1,
        loaders=2,
        env=ENV,
    )
    assert status == 7


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_role_that_fails_ends_the_job() -> None:
    """A server that others could reach without TLS and token."""
    env = {k: v for k, v in ENV.items() if k != "PERSIA_SERVE_PS_INSECURE"}
    with pytest.raises(Unavailable):
        run_on_ray(
            [sys.executable, "-c", "import time; time.sleep(600)"], env=env
        )
