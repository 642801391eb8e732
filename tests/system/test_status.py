"""``persia status`` of processes that serve and of trainers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import persia
from persia import _core, errors, prometheus
from persia.cli.app import app
from persia.distributed import addresses
from persia.distributed import status as looking
from persia.distributed.launch import reserve
from tests.system.processes import environment
from tests.system.test_serve import IDS, Client, serving

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "persia", "status", *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def half(shard: int) -> np.ndarray:
    """IDS of one shard of two, by the hash that csrc/ids/ids.h describes."""
    out = []
    for i in map(int, IDS):
        h = (i + 0x9E3779B97F4A7C15) % 2**64
        h = ((h ^ h >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        h = ((h ^ h >> 27) * 0x94D049BB133111EB) % 2**64
        if ((h ^ h >> 31) >> 4 & 4095) * 2 // 4096 == shard:
            out.append(i)
    return np.array(out, dtype="<u8")


def test_two_servers_in_numbers_and_in_words() -> None:
    with (
        serving("--shard", "0/2", "--memory-limit", "1GiB") as a,
        serving("--shard", "1/2") as b,
    ):
        for shard, server in enumerate((a, b)):
            client = Client(server.address)
            client.hello(stream=77)
            client.declare()
            client.push(half(shard), 1)
            client.pull(half(shard))
        flags = ["--interval", "0.1"]
        done = run(b.address, a.address, *flags, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert [s["shard"] for s in found["servers"]] == [0, 1]
        assert [s["address"] for s in found["servers"]] == [
            a.address,
            b.address,
        ]
        (table,) = found["tables"]
        assert (table["name"], table["dim"], table["rows"]) == ("user", 4, 100)
        assert (table["pulled"], table["missed"]) == (100, 0)
        most = max(len(half(0)), len(half(1)))
        assert table["uneven"] == pytest.approx(most / 50)
        same = f"localhost:{a.address.partition(':')[2]}"
        done = run(f"{a.address},{same}", *flags, "--json")
        (table,) = json.loads(done.stdout)["tables"]
        assert table["rows"] == len(half(0))  # of one server, asked twice
        words = run(*flags, PERSIA_SERVERS=f"{a.address}, {b.address}")
        assert words.returncode == 0, words.stderr
        assert "0/2" in words.stdout and "1/2" in words.stdout
        assert "of 1.0 GiB" in words.stdout
        assert re.search(r"user +4 +100 ", words.stdout)
        # One that does not answer is named; the others are shown.
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            nobody = f"127.0.0.1:{closed.getsockname()[1]}"
            part = run(a.address, nobody, *flags, "--timeout", "1")
        assert part.returncode == 1
        assert "Unavailable" in part.stdout and "0/2" in part.stdout
        other = run(a.address, *flags, "--namespace", "another")
        assert other.returncode == 1
        assert "SchemaMismatch" in other.stdout


def test_calls_that_took_long() -> None:
    """The last 128, the newest first; none where none was asked for."""
    with serving("--slow-calls", "1e-9") as server:
        client = Client(server.address)
        client.hello(stream=77)
        client.declare()
        for _ in range(130):
            client.pull(IDS)
        flags = (server.address, "--interval", "0.1")
        done = run(*flags, "--slow", "--json")
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)["servers"]
        assert len(found["slow"]) == 128
        calls = [one["call"] for one in found["slow"]]
        assert calls[0] == "Stats" and calls[-1] == "Pull"
        pull = found["slow"][-1]
        assert 0 < pull["seconds"] < 60 and pull["bytes"] > 8 * len(IDS)
        assert pull["client"] == client.caller.client
        assert pull["peer"].startswith("ipv4:127.0.0.1:")
        assert abs(pull["at"] - time.time()) < 60
        words = run(*flags, "--slow").stdout
        assert "Pull" in words
        (found,) = json.loads(run(*flags, "--json").stdout)["servers"]
        assert found["slow"] == []
    with serving("--slow-calls", "0") as server:
        done = run(server.address, "--slow", "--json", "--interval", "0.1")
        (found,) = json.loads(done.stdout)["servers"]
        assert found["slow"] == []


def test_servers_that_do_not_listen_yet_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looking, "_START", 60)
    with reserve() as held, ThreadPoolExecutor() as pool:
        host, port = held.getsockname()
        address = f"{host}:{port}"
        asked = pool.submit(looking.ask, [address], timeout=60, interval=0)
        made = pool.submit(persia.Store, servers=address)
        time.sleep(1)
        assert not asked.done() and not made.done()
        with serving("--port", str(port)):
            (found,) = asked.result(60)
            assert (found.error, found.address) == ("", address)
            made.result(60).close()


def test_rates_are_what_happened_between_two_looks() -> None:
    with serving() as server:
        client = Client(server.address)
        client.hello(stream=77)
        client.declare()
        stop = threading.Event()

        def pull() -> None:
            while not stop.is_set():
                client.pull(IDS)

        thread = threading.Thread(target=pull)
        thread.start()
        try:
            (found,) = looking.ask([server.address], interval=0.5)
        finally:
            stop.set()
            thread.join()
        assert found.rates["pulls"] > 0
        assert found.rates["pushes"] == found.rates["updates"] == 0
        ids = found.table_rates["user"]["pulled"]
        # Counters of one look are not of exactly one moment: a pull more, or
        # one less, at either look.
        assert ids == pytest.approx(100 * found.rates["pulls"], abs=400)
    with pytest.raises(errors.InvalidArgument, match="PERSIA_SERVERS"):
        looking.ask([])


def train(store: persia.Store, batches: int, staleness: int) -> None:
    bags = persia.EmbeddingBagCollection(
        store=store, tables=[persia.EmbeddingBagConfig("user", 4)]
    )
    ids = [
        persia.JaggedBatch.from_dict({"user": torch.tensor([i, i + 1])})
        for i in range(batches)
    ]
    for batch in persia.DataLoader(ids, bags, staleness=staleness):
        bags(batch).values().sum().backward()


def test_the_staleness_of_trainers() -> None:
    store = persia.Store(persia.optim.SGD(lr=0.1))
    train(store, 30, 3)
    port = prometheus.export(store, 0)
    url = f"http://127.0.0.1:{port}/metrics"
    (trainer,) = looking.ask_trainers([url])
    found = looking.staleness([trainer])
    seen = store.stats()["lookahead"]["staleness"]
    assert found == {k: n for k, n in seen.items() if n}
    assert sum(found.values()) == 30 and max(found) <= 3
    twice = looking.staleness(looking.ask_trainers([url, url]))
    assert twice[0] == 2 * found[0]
    with serving() as server:
        done = run(server.address, url, "--interval", "0", "--json")
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)["staleness"]
        assert {int(k): n for k, n in shown.items()} == found
        words = run(server.address, url, "--interval", "0")
        assert "staleness of lookups" in words.stdout
        done = run(
            url, "--interval", "0", "--json", PERSIA_SERVERS=server.address
        )
        (one,) = json.loads(done.stdout)["servers"]
        assert one["address"] == server.address
    store.close()
    (trainer,) = looking.ask_trainers([url])
    assert not trainer.staleness and "store was closed" in trainer.error


STATS: dict[str, Any] = {
    "uptime_ns": 10**15,
    "memory_used": 7 * 10**11,
    "memory_limit": 10**12,
    "updates": 123456789,
    "parked": 12,
    "duplicates": 1234,
    "failed": 17,
    "boot": 1,
    "tables": [],
}


def test_numbers_are_whole_in_narrow_terminals() -> None:
    from rich.console import Console

    from persia.cli import status as command

    name = "ps-0.ps.production.svc.cluster.local:8888"
    server = looking.ServerStatus(
        name, 0, 12, STATS, {"pulls": 12345.6, "pushes": 2345.6}
    )
    words = "0/12 11d 651.9 GiB of 931.3 123,456,789 12,345.6 2,345.6 1,234 17"
    for width in (30, 80, 300):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command, "console", Console(width=width))
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                command.show(command.servers_table([server]))
        assert set(words.split()) <= set(out.getvalue().split()), width
        cut = 50 if width == 300 else 21  # the first column
        first = "".join(line[:cut] for line in out.getvalue().splitlines())
        assert name in first.replace(" ", ""), width


@pytest.mark.parametrize("name", ["a[/b]", "[bold]user:ant:", ":ant:"])
def test_names_are_shown_as_they_are(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from persia.cli import status as command

    rates = {"pulled": 1.0, "created": 1.0}
    table = looking.TableStatus(name, 4, rows=1, rates=rates)
    command.show(command.tables_table([table]))
    assert f" {name} " in capsys.readouterr().out


def test_failures_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = looking.ServerStatus("[b]a:ant:", error="no [/table] :ant:")
    monkeypatch.setattr(looking, "ask", lambda *_, **__: [server])
    result = CliRunner().invoke(app, ["status", "a"])
    assert "[b]a:ant:: no [/table] :ant:\n" in result.output


def test_a_log_that_waits_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = STATS | {"log_waits_ns": 9 * 10**9}
    rates = {"pulls": 1.0, "pushes": 1.0}
    server = looking.ServerStatus("a:1", 0, 1, stats, rates)
    monkeypatch.setattr(looking, "ask", lambda *_, **__: [server])
    result = CliRunner().invoke(app, ["status", "a:1"])
    assert result.exit_code == 0
    assert re.search(r"(?m)^a:1: .* 9s$", result.output)


@pytest.mark.parametrize("option", ["--interval", "--timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_wrong_seconds_are_named(option: str, value: str) -> None:
    command = ["status", "a:1", option, value]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"'{option}': {float(value)} is not a number" in done.output


class Answers:
    """What listens on a port and answers everybody with these bytes, again and
    again, a moment apart."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/metrics"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self.socket.accept()
                args = (one,)
                threading.Thread(target=self._one, args=args).start()

    def _one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1000)
            for part in self.parts:
                connection.sendall(part)
                time.sleep(0.05)


OK = b"HTTP/1.0 200 OK\r\n"


def test_urls_of_something_else_are_named() -> None:
    pages = {
        "does not speak HTTP": Answers(b"SSH-2.0-OpenSSH_9.2\r\n"),
        "997 bytes of the page lack": Answers(
            OK, b"Content-Length: 1000\r\n\r\nabc"
        ),
        "has none of Persia": Answers(OK, b"\r\nup 1\n"),
        "can't decode": Answers(OK, b"\r\n", bytes(range(256))),
        "no metrics: could not": Answers(
            OK,
            b"\r\n# TYPE persia_staleness histogram\n",
            b'persia_staleness_bucket{le="x"} 1\n',
        ),
        "no whole answer within 2 s": Answers(OK, b"\r\n", *[b"# x\n"] * 400),
    }
    urls = {page.url: words for words, page in pages.items()}
    urls["http://127.0.0.1:x/metrics"] = "Port"
    urls["http://127.0.0.1:99999/metrics"] = "Port out of range"
    urls["http://[::1/metrics"] = "IPv6"
    urls["ftp://127.0.0.1/metrics"] = "need a URL such as http://"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/metrics"
        urls[nobody] = "refused"
        with serving() as server:
            urls[f"http://{server.address}/metrics"] = "does not speak HTTP"
            flags = ["--interval", "0", "--timeout", "2"]
            done = run(server.address, *urls, *flags, COLUMNS="300")
            since = time.monotonic()
            trainers = looking.ask_trainers(list(urls), 2)
            assert time.monotonic() - since < 4
    assert done.returncode == 1, done.stderr
    assert re.search(rf"{server.address} +0/1 ", done.stdout)
    assert not done.stderr
    for words, trainer in zip(urls.values(), trainers, strict=True):
        assert words in trainer.error
        assert f"{trainer.url}: {trainer.error}\n" in done.stdout
    for page in pages.values():
        page.socket.close()


def test_the_port_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store = persia.Store()
    monkeypatch.delenv(prometheus.PORT, raising=False)
    assert prometheus.export(store) is None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv(prometheus.PORT, str(port - 1))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert prometheus.export(store) == port
    with pytest.raises(errors.InvalidArgument, match=f"port {port}"):
        prometheus.export(store)
    monkeypatch.setenv(prometheus.HOST, "192.0.2.1")  # of no machine
    with pytest.raises(errors.InvalidArgument, match=r"of 192\.0\.2\.1"):
        prometheus.export(store, 0)
    assert prometheus.export(store, 0, host="127.0.0.1")
    monkeypatch.setenv(prometheus.PORT, "x")
    with pytest.raises(errors.InvalidArgument, match="'x', need a port"):
        prometheus.export(store)


def test_watch_looks_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def ask(addresses: list[str], **options: object) -> list[object]:
        looks.append(addresses)
        if len(looks) == 3:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(looking, "ask", ask)
    done = CliRunner().invoke(app, ["status", "here:1", "--watch", "--json"])
    assert done.exit_code == 0
    assert len(looks) == 3
    every = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["servers"] for one in every] == [[], []]


def test_lists_of_workers_and_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file, and of all addresses of a name."""
    asked: list[list[str]] = []
    monkeypatch.setattr(
        looking,
        "ask_embedding",
        lambda workers, **_: asked.append(list(workers)) or [],
    )
    monkeypatch.setattr(
        addresses, "addresses_of", lambda host: ["10.0.0.1", "10.0.0.2"]
    )
    (tmp_path / "list").write_text("a:1\nb:1\n")
    log = tmp_path / "log"
    log.write_text('{"at": 0, "text": "scale: servers 1 -> 2: load 1.50"}\n')
    for text in (f"file:{tmp_path}/list", "dns:w:2"):
        words = ["status", "--workers", text, "--scale-log", str(log)]
        done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        assert " servers 1 -> 2: load 1.50" in done.output
    assert asked == [["a:1", "b:1"], ["10.0.0.1:2", "10.0.0.2:2"]]
