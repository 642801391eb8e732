"""The code of all pages runs as printed there.

The blocks of ``python`` of a page run in order, in one namespace and a folder
of their own. A block that begins with ``# train.py`` becomes that file. Pages
that continue the first example have its names. Blocks of ``sh`` run in
tutorials, and where ``SHELL`` says so.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import importlib.util
import io
import json
import logging
import os
import re
import shlex
import socket
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch
from typer.testing import CliRunner

from persia import _core
from persia.cli.app import app
from tests.docs.pages import DOCS, ROOT, Block, blocks, name_of, pages
from tests.kafka import Cluster
from tests.ready import python
from tests.remote import Servers
from tests.roles import Workers

SHELL = ("docs/howto/reader.md", "docs/howto/tasks.md")
#: Blocks that need more than a folder: what they need is on the page.
NEEDS = {
    "docs/howto/lightning.md": "lightning",
    "docs/tutorials/serve.md": "tritonclient",
    "docs/howto/accelerate.md": "accelerate",
    "docs/howto/libraries.md": "deepctr_torch",
}
#: What a page must print, so that its code did what the page says.
PRINTS = {
    "README.md": r"step 0: loss 0\.\d+, [\d,]+ rows",
    "docs/data.md": r"2000 samples\n[\s\S]*^12 batches\n(300 samples.*\n){2}",
    "docs/howto/accelerate.md": r"^8$",
    "docs/howto/change.md": r"table 'city'[\s\S]*^True$",
    "docs/howto/checkpoint.md": r"\(\d+,\) \(\d+, 16\)",
    "docs/howto/evaluate.md": r"AUC 0\.\d+, log loss 0\.\d+",
    "docs/howto/libraries.md": r"^True$",
    "docs/howto/lightning.md": r"^8 16$",
    "docs/howto/migrate.md": r"loss \d+\.\d+, after 30 steps 0\.\d+",
    "docs/howto/reader.md": r"\(512,\) True",
    "docs/howto/serve.md": r"^True$",
    "docs/howto/sequences.md": r"NDCG@3 (0\.9|1\.0)",
    "docs/howto/tasks.md": r"click: AUC 0.[67].*\nbuy: AUC 0.[67].*\n.*256, 2",
    "docs/howto/train.md": r"step 20: AUC 0\.[5-9]\d*[\s\S]*tensor\(\[",
    "docs/roles.md": r"^100 batches trained$",
    "docs/tutorials/own-csv.md": r"AUC 0\.[6-9]",
    "docs/tutorials/serve.md": (
        r"auc 0\.[78][\s\S]*\"ready\": true[\s\S]*score[\s\S]*scores \[0"
    ),
    "docs/tutorials/servers.md": r"continue after 40 updates",
    "docs/tutorials/torchrun.md": r"rows on 2 ranks[\s\S]*True",
}
#: Addresses that a page names, and those of this test.
INSTEAD: dict[str, str] = {}
FILE = re.compile(r"# (\w+\.py)\n")
FIRST = "[first example]"

PAGES = [
    path
    for path in pages()
    if blocks(path, "python") and name_of(path) != "docs/index.md"
]


def runs_shell(path: Path) -> bool:
    name = name_of(path)
    return name.startswith("docs/tutorials/") or name in SHELL


def first_example() -> str:
    """That of the README, on a few samples."""
    (block,) = blocks(ROOT / "README.md", "python")
    short, changes = re.subn(
        r"samples=[\d_]+, batch_size=\d+",
        "samples=4_096, batch_size=256",
        block.text,
    )
    assert changes == 1
    return short


@contextlib.contextmanager
def as_found() -> Iterator[None]:
    """What pages change of torch is put back."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    level = logging.getLogger().level
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
    logging.getLogger().setLevel(level)


#: What needs no process of its own, with the file for its output.
PLAIN = re.compile(
    r"persia ((?:train|evaluate|predict|checkpoint|schema|export|model) "
    r"[^|&>$]*)"
)


def commands(text: str, folder: Path) -> str | None:
    """Runs a block in this process if each line is a plain command."""
    lines = [re.sub(r"\s+#.*", "", line) for line in text.splitlines()]
    found = [re.fullmatch(PLAIN.pattern + r"(?:> (\S+))?", x) for x in lines]
    if not all(found):
        return None
    out = ""
    for match in found:
        assert match is not None
        done = CliRunner().invoke(app, shlex.split(match[1]))
        assert done.exit_code == 0, done.output
        if match[2]:
            (folder / match[2]).write_text(done.stdout)
        else:
            out += done.stdout
    return out


def shell(text: str, folder: Path) -> str:
    """Runs commands as a user's terminal would, until one fails."""
    printed = commands(text, folder)
    if printed is not None:
        return printed
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    words = {
        "persia": "-m persia",
        "python": "",
        "torchrun": "-m torch.distributed.run",
    }
    for name, arguments in words.items():
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec {python()} {arguments} "$@"\n')
        tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", f"set -eo pipefail\n{text}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_ports(text: str) -> str:
    """The ports of a page's servers, each replaced by one that is free."""
    with contextlib.ExitStack() as stack:
        for port in sorted(set(re.findall(r"\b88\d\d\b", text))):
            bound = stack.enter_context(socket.socket())
            bound.bind(("127.0.0.1", 0))
            text = text.replace(port, str(bound.getsockname()[1]))
    return text


def play(path: Path, folder: Path) -> str:
    """Runs the blocks of a page; what they print."""
    every = [*blocks(path, "python")]
    if runs_shell(path):
        every += blocks(path, "sh")
    every.sort(key=lambda block: block.line)
    names: dict[str, Any] = {"__name__": "__main__"}
    out = io.StringIO()
    if name_of(path) == "README.md":
        exec(first_example(), names)
        return out.getvalue()
    if FIRST in path.read_text(encoding="utf-8"):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(first_example(), names)
    for block in every:
        out.write(_play(path, block, folder, names))
    return out.getvalue()


def _play(
    path: Path, block: Block, folder: Path, names: dict[str, Any]
) -> str:
    file = FILE.match(block.text)
    if file:
        (folder / file[1]).write_text(block.text)
        return ""
    if block.language == "sh":
        return shell(free_ports(block.text), folder)
    # Line numbers of errors are those of the page.
    text = "\n" * block.line + block.text
    for said, here in INSTEAD.items():
        text = text.replace(said, here)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, str(path), "exec"), names)
    return printed.getvalue()


def records(cluster: Cluster) -> None:
    """Clicks in Avro and Protocol Buffers, with their schemas."""
    fastavro = pytest.importorskip("fastavro")
    descriptors = pytest.importorskip("google.protobuf.descriptor_pb2")
    kinds = {"user": "string", "item": "long", "click": "int"}
    fields = [{"name": name, "type": kind} for name, kind in kinds.items()]
    schema = {"type": "record", "name": "Click", "fields": fields}
    Path("registry").mkdir()
    for name in ("clicks.avsc", "registry/1.avsc"):
        Path(name).write_text(json.dumps(schema))
    file = descriptors.FileDescriptorProto(name="clicks.proto", package="shop")
    message = file.message_type.add(name="Click")
    for i, type_ in enumerate((9, 3, 5)):  # string, int64, int32
        message.field.add(name=[*kinds][i], number=i + 1, type=type_, label=1)
    every = descriptors.FileDescriptorSet(file=[file])
    Path("clicks.pb").write_bytes(every.SerializeToString())
    from google.protobuf import descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = message_factory.GetMessageClass(
        pool.FindMessageTypeByName("shop.Click")
    )
    for n in range(300):
        row = {"user": "ann", "item": n, "click": n % 2}
        value = io.BytesIO(b"\0\0\0\0\1")
        value.seek(5)
        fastavro.schemaless_writer(value, schema, row)
        cluster.produce("clicks.avro", [value.getvalue()])
        cluster.produce("clicks.proto", [kind(**row).SerializeToString()])


@contextlib.contextmanager
def kafka_and_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A broker with messages, and files of Criteo's format."""
    pytest.importorskip("confluent_kafka")
    cluster = Cluster()
    users = ["ann", "bob", "cem", "dee"]
    for part in range(4):
        values = [
            json.dumps(
                {
                    "user": users[n % 4],
                    "item": n,
                    "click": int(n % 4 in (1, 2)),
                }
            )
            for n in range(300)
        ]
        cluster.produce("clicks", values, partition=part)
    records(cluster)
    monkeypatch.setitem(INSTEAD, "broker1:9092,broker2:9092", cluster.servers)
    line = "\t".join(["{}", *["3"] * 13, *["68fd1e64"] * 26]) + "\n"
    text = "".join(line.format(n % 2) for n in range(10_500))
    Path("criteo").mkdir()
    for name in ("criteo/day_1.gz", "criteo/day_2.gz", "sample.tsv.gz"):
        Path(name).write_bytes(gzip.compress(text.encode(), 1))
    Path("train.txt").write_text(text[: len(text) // 10 * 7])
    yield
    cluster.end()


@contextlib.contextmanager
def four_roles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two servers and a worker, in the variables that name them."""
    servers = Servers(2)
    workers = Workers(servers.addresses)
    monkeypatch.setenv("PERSIA_SERVERS", servers.text)
    monkeypatch.setenv("PERSIA_WORKERS", ",".join(workers.addresses))
    yield
    trained = workers.stats("trained")
    print(f"{trained} batches trained")
    gc.collect()
    workers.close()
    servers.close()


#: What pages need besides a folder.
AROUND = {"docs/data.md": kafka_and_logs, "docs/roles.md": four_roles}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_of(path)
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"pip install {NEEDS[name]}")
    if (runs_shell(path) or name in AROUND) and not _core.GRPC[0].isdigit():
        pytest.skip("without gRPC")
    monkeypatch.chdir(tmp_path)
    with as_found(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "docs/howto/train.md":
            shell("persia train --samples 3000 --save clicks", tmp_path)
        around = AROUND.get(name, lambda _: contextlib.nullcontext())
        with (
            contextlib.redirect_stdout(io.StringIO()) as rest,
            around(monkeypatch),
        ):
            printed = play(path, tmp_path)
    printed = rest.getvalue() + printed
    if name in PRINTS:
        assert re.search(PRINTS[name], printed, re.MULTILINE), printed


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = DOCS / "tutorials" / "first-model.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert any(cell.get("outputs") for cell in notebook.cells)
    pytest.importorskip("matplotlib")
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3"
    ).execute(cwd=str(tmp_path))
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    plots = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(plots) == 2
    assert "as before" in text
    found = re.search(r"AUC while training ([\d.]+)", text)
    assert found is not None and float(found[1]) > 0.6
