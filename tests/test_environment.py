"""Variables that Kubernetes makes for services are no options."""

from __future__ import annotations

import ast
import os
import warnings
from pathlib import Path

import pytest
import typer.testing

import persia
from persia import errors, prometheus
from persia.base import environment
from persia.cli.app import app
from persia.distributed.addresses import namespace_of, resolve_workers
from persia.distributed.cluster import Settings
from persia.distributed.security import VARIABLES, Security
from persia.distributed.server import find_shard

LINK = "tcp://10.0.0.1:9100"
PACKAGE = Path(persia.__file__).parent


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "warned", set())
    for name in list(os.environ):
        if name.startswith("PERSIA_"):
            monkeypatch.delenv(name)


def test_a_link_is_ignored_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSIA_METRICS_PORT", LINK)
    with pytest.warns(UserWarning, match="PERSIA_METRICS_PORT"):
        assert environment.variable("PERSIA_METRICS_PORT") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert environment.variable("PERSIA_METRICS_PORT") is None


def test_what_reads_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as if they were not set."""
    for name in (
        *VARIABLES,
        *("PERSIA_SERVERS", "PERSIA_WORKERS", "PERSIA_NAMESPACE"),
        *("PERSIA_INSECURE", "PERSIA_SHARDS", "PERSIA_METRICS_PORT"),
    ):
        monkeypatch.setenv(name, LINK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Security.from_environment() == Security()
        assert namespace_of() == "default"
        assert Settings(rank=0, world=1).where() == "embedded"
        with persia.Store(persia.optim.SGD(lr=0.1)) as store:
            assert prometheus.export(store) is None
        for missing in (
            lambda: resolve_workers(None, None),
            lambda: find_shard("0", None),
        ):
            with pytest.raises(errors.InvalidArgument):
                missing()


def test_options_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_PLAN_ROWS", LINK)
    monkeypatch.setenv("PERSIA_PLAN_DIM_PORT_80_TCP", "udp://10.0.0.1:80")
    with pytest.warns(UserWarning, match="PERSIA_PLAN_ROWS") as found:
        done = typer.testing.CliRunner().invoke(
            app, ["plan", "--rows", "1e6", "--dim", "8"]
        )
    assert done.exit_code == 0, done.output
    assert len(found) == 1


def test_all_are_read_here() -> None:
    """No module looks a variable of ours up by itself."""
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "base" / "environment.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            text = ast.unparse(node)
            if not text.startswith(("os.environ.get(", "os.getenv(")):
                continue
            (name, *_) = node.args
            ours = isinstance(name, ast.Constant) and name.value in FOREIGN
            assert ours or ast.unparse(name) in KNOWN, f"{path}: {text}"


FOREIGN = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "NO_COLOR"),
    "NOTIFY_SOCKET",
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS"),
}
KNOWN = {"variable"}  # of torchrun, in cluster.py
