"""Options of ``persia serve``, and what is said of wrong ones."""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from persia import _core, errors
from persia.base.options import read_yaml, validated
from persia.cli.app import app
from persia.distributed.server import ServeConfig, find_shard
from persia.distributed.serving import core_holes, few_files
from persia.distributed.worker import WorkerConfig
from persia.serving.config import ModelConfig
from tests.system.processes import wait_until


@pytest.mark.parametrize(
    ("shard", "shards", "environment", "host", "found"),
    [
        ("0/2", None, {}, "h", (0, 2)),
        ("1/2", 2, {}, "h", (1, 2)),
        ("3", 4, {}, "h", (3, 4)),
        ("3", None, {"PERSIA_SHARDS": "5"}, "h", (3, 5)),
        ("auto", 4, {}, "persia-ps-3", (3, 4)),
        ("auto", 40, {}, "persia-ps-12.persia.svc", (12, 40)),
        ("auto", 4, {"POD_NAME": "ps-2"}, "other-0", (2, 4)),
        ("auto", 4, {"JOB_COMPLETION_INDEX": "1"}, "ps-2", (1, 4)),
        ("auto", 4, {"PERSIA_SHARD": "0"}, "ps-2", (0, 4)),
        ("auto/4", None, {}, "ps-2", (2, 4)),
    ],
)
def test_the_shard_is_found(
    shard: str,
    shards: int | None,
    environment: dict[str, str],
    host: str,
    found: tuple[int, int],
) -> None:
    assert find_shard(shard, shards, environment, host) == found


@pytest.mark.parametrize(
    ("shard", "shards", "host", "message"),
    [
        ("2/2", None, "h", "no shard 2 of 2"),
        ("-1/2", None, "h", "no shard -1 of 2"),
        ("x/2", None, "h", "no shard x of 2"),
        ("0", None, "h", "shards"),
        ("0/2", 3, "h", "shard=0/2.*shards=3"),
        ("auto", 4, "workstation", "'workstation'"),
        ("auto", None, "ps-1", "shards"),
        ("0/5000", None, "h", "at most 4096"),
    ],
)
def test_what_is_no_shard_is_named(
    shard: str, shards: int | None, host: str, message: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        find_shard(shard, shards, {}, host)


def test_a_file_of_options(tmp_path: Path) -> None:
    file = tmp_path / "ps.yaml"
    file.write_text(
        "port: 9000\nmemory-limit: 8GiB\nmutual_tls: true\n"
        "checkpoints: /data\nrestore: job/step-12\nor-empty: yes"
    )
    config = validated(ServeConfig, read_yaml(file) | {"port": 1})
    assert config.port == 1
    assert config.memory_limit == 8 << 30
    assert config.message_limit == 256 << 20
    assert config.restore == "job/step-12"
    assert config.mutual_tls and config.or_empty


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prot": 1}, "prot: .*host, port, .*namespace"),
        ({"port": 70000}, "port: .*65535, .*70000"),
        ({"memory_limit": "lots"}, "memory_limit: .*'lots'"),
        ({"message_limit": "1MiB"}, "message_limit: .*2097152"),
        ({"threads": 0}, "threads: "),
        ({"restore": "x"}, "restore.*checkpoints"),
        ({"save_on_exit": "x"}, "save_on_exit.*checkpoints"),
        ({"checkpoints": "c", "restore": "../x"}, "restore: "),
        ({"checkpoints": "c", "save_on_exit": "a/b"}, "save_on_exit: "),
        ({"tls_ca": "ca.pem"}, "tls_ca.*mutual_tls"),
    ],
)
def test_wrong_options_are_named(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        validated(ServeConfig, options)


@pytest.mark.parametrize("kind", [ServeConfig, WorkerConfig, ModelConfig])
def test_all_that_serves_checks_whom_it_serves(kind: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="tls_ca"):
        validated(kind, {"tls_ca": "ca.pem"})
    with pytest.raises(errors.InvalidArgument, match="grace"):
        validated(kind, {"grace": -1})
    # Before it waits for anything.
    with pytest.raises(errors.InvalidArgument):
        validated(kind, {"host": "::"}).security()
    assert validated(kind, {"host": "::", "insecure": True}).security()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "0.0.0.0.*TLS"),
        (["--tls-cert", "/none.pem"], "TLS certificate: /none.pem"),
        (["--token", "a", "--token-file", "b"], "token"),
        (["--mutual-tls"], "mutual TLS"),
        (["--shard", "auto"], "shard=auto"),
        (["--checkpoints", "/proc/none"], "checkpoints=/proc/none"),
        (["--config", "/none.yaml"], "--config /none.yaml"),
    ],
)
def test_what_cannot_be_served_is_an_error(
    flags: list[str], message: str
) -> None:
    with pytest.raises(errors.PersiaError, match=message):
        CliRunner().invoke(
            app,
            ["serve", "ps", "--port", "0", *flags],
            catch_exceptions=False,
        )


@pytest.mark.parametrize(
    ("files", "connections", "told"),
    [
        (1024, 4096, "open 1024 files only: it keeps at most 513"),
        (4096, 64, "4096 files only: it keeps at most 64 conn"),
        (8192, 4096, None),
        (resource.RLIM_INFINITY, 65536, None),
    ],
)
def test_too_few_files_are_told(
    files: int,
    connections: int,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, files))
    text = few_files(connections)
    assert (text is None) if told is None else (text and told in text)


@pytest.mark.parametrize(
    ("options", "holes", "told"),
    [
        ({"host": "0.0.0.0", "insecure": True}, "CVE-1, CVE-2", True),
        ({"host": "ps-0.persia.svc"}, "CVE-1", True),
        ({"host": "0.0.0.0", "insecure": True}, "", False),
        ({"host": "0.0.0.0", "mutual_tls": True}, "CVE-1", False),
        ({"host": "127.0.0.2"}, "CVE-1", False),
        ({"host": "localhost"}, "CVE-1", False),
        ({"host": "::1"}, "CVE-1", False),
    ],
)
def test_holes_of_the_core_are_told_beyond_this_machine(
    options: dict[str, Any], holes: str, told: bool
) -> None:
    text = core_holes(ServeConfig.model_construct(**options), holes)
    assert (text is not None) == told
    if text is not None:
        assert holes in text and "mutual_tls" in text


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
def test_a_channel_may_be_closed_during_a_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        way = _core.Channel(address, {}, 2.0)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(way.stats)
            silent.accept()[0].close()  # it is under way
            way.close()
            assert way.address == "closed"
            error = call.exception(timeout=60)
    assert isinstance(error, errors.PersiaError)
    with pytest.raises(errors.Closed):
        way.stats()


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
@pytest.mark.parametrize("what", ["server", "channel"])
def test_other_threads_run_while_a_dropped_object_ends(what: str) -> None:
    turns = 0
    done = threading.Event()

    def run() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0)  # gives the interpreter lock to who waits for it

    def turns_during_a_drop() -> int:
        held: list[_core.Server | _core.Channel]
        if what == "server":
            server = _core.Server("job", 0, 1, 1, 0, 0, 1 << 20, None)
            server.start("127.0.0.1:0", 1, 8, 8, 1 << 20, {})
            held = [server]
            del server
        else:  # of which one may end before the other thread is awake
            held = [_core.Channel("127.0.0.1:1", {}, 2.0) for _ in range(100)]
        before = turns
        del held
        return turns - before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # none has to give it away
    other = threading.Thread(target=run)
    other.start()
    try:
        wait_until(turns_during_a_drop)
    finally:
        done.set()
        other.join()
        sys.setswitchinterval(interval)


def test_a_server_in_this_process_outlives_its_object() -> None:
    server = _core.Server("job", 0, 1, 1, 0, 0, 1 << 20, None)
    assert server.port == 0
    way = server.channel(10.0)
    server.close()
    with pytest.raises(errors.Closed):
        server.health(True)
    assert way.hello("job", 0)["shards"] == 1
    with pytest.raises(errors.SchemaMismatch, match="namespace 'job'"):
        way.hello("another", 0)
    way.close()
    way.close()
