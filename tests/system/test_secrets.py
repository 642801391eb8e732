"""Secrets that are planted in everything a user can give are in nothing that
Persia writes: output, files, arguments of its processes."""

from __future__ import annotations

import http.server
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from persia import _core
from tests.ready import ended
from tests.system.processes import environment, marked

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

SECRET = secrets.token_hex(12)
CSV = "label,a,b,c\n" + "".join(
    f"{i % 3 == 0:d},{i % 7},x{i % 11},{i / 100}\n" for i in range(4000)
)


def run(*words: str, status: int | None = None, **more: str) -> str:
    """All that a command prints."""
    done = ended("-m", "persia", *words, env=environment(**more), timeout=120)
    text = done.stdout + done.stderr
    if status is not None:
        assert done.returncode == status, text
    return text


def holders(folder: Path) -> list[str]:
    """The files that have it."""
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


# ---- sources that cannot be read -------------------------------------------

BAD = {
    "s3": "s3://key:{}@bucket/a.csv?scheme=http&endpoint_override=ADDRESS",
    "unquoted": "s3://key:a/{}@bucket/a.csv?scheme=http",
    "option": "s3://bucket/a.csv?session={}",
    "http": "http://me:{}@ADDRESS/a.csv?sig={}",
    "hdfs": "hdfs://me:{}@ADDRESS/a.csv",
    "chained": "simplecache::http://me:{}@ADDRESS/a.csv?sig={}",
    "kafka": "kafka://me:{}@ADDRESS/t?group=g&timeout=1",
    "registry": "kafka://ADDRESS/t?group=g&timeout=1"
    "&value_registry=http://me:{}@ADDRESS",
}
#: Commands, and which of these they are tried with.
COMMANDS = {
    "train DATA": "s3 unquoted http hdfs kafka",
    "train synthetic --samples 2000 --save DATA": "s3 option",
    "train FILE --eval-data DATA": "chained",
    "train --resume DATA": "s3 option",
    "train DATA --schema avazu": "kafka registry",
    "feed DATA --schema avazu --workers ADDRESS --timeout 1": "s3 registry",
    "evaluate DATA FILE": "option",
    "schema DATA": "s3 http",
    "prepare DATA OUT --schema avazu": "unquoted",
    "checkpoint ls DATA": "s3 option hdfs",
    "rows get t 1 --checkpoint DATA": "s3",
    "status DATA --timeout 1": "http",
}


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    """The address of a web server that refuses everything."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403, f"no {self.path}")

        do_HEAD = do_PUT = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("words", COMMANDS)
def test_sources_that_cannot_be_read(
    words: str, refusing: str, tmp_path: Path
) -> None:
    """With tracebacks."""
    file = tmp_path / "a.csv"
    file.write_text(CSV)
    for kind in COMMANDS[words].split():
        filled = BAD[kind].replace("{}", SECRET)
        command = [
            word.replace("DATA", filled)
            .replace("FILE", str(file))
            .replace("OUT", str(tmp_path / f"out-{kind}"))
            .replace("ADDRESS", refusing)
            for word in words.split()
        ]
        text = run("--debug", *command, AWS_MAX_ATTEMPTS="1")
        assert text and SECRET not in text, text
        if words == "schema DATA" and kind == "s3":
            assert "environment" in text  # that has its keys
    assert not holders(tmp_path)


def test_a_secret_where_its_file_should_be() -> None:
    """The option is named, the value is not."""
    for secret in (SECRET, f"{SECRET}/{SECRET}.{SECRET}"):
        text = run("serve", "ps", "--port", "0", "--token-file", secret)
        assert "token" in text and SECRET not in text, text


# ---- sources that can ------------------------------------------------------


@pytest.mark.long
def test_a_training_that_succeeds(
    endpoint: str, bucket: fs.FileSystem, tmp_path: Path
) -> None:
    """Its checkpoint, logs and report; then it is continued without a key."""
    with bucket.open_output_stream("bucket/a.csv") as out:
        out.write(CSV.encode())
    where = f"scheme=http&endpoint_override={endpoint}&region=us-east-1"
    data = f"s3://me{SECRET}:key{SECRET}@bucket/a.csv?{where}"
    flags = ["--save", str(tmp_path / "out")]
    flags += ["--curves", str(tmp_path / "l.csv")]
    # Whoever they are, moto lets them in.
    texts = [run("train", data, "--batch-size", "100", *flags, status=0)]
    report = ["--out", str(tmp_path / "report.html"), "--curves"]
    keys = {
        "AWS_ACCESS_KEY_ID": f"me{SECRET}",
        "AWS_SECRET_ACCESS_KEY": f"key{SECRET}",
    }
    root = str(tmp_path / "out")
    texts += [
        run(
            "report", root, *report, str(tmp_path / "l.csv"), status=0, **keys
        ),
        run("predict", root, data),
        run("checkpoint", "inspect", root, "--json", status=0),
        run("schema", data, status=0),
        run(
            *("prepare", data, str(tmp_path / "sorted")),
            *("--schema", str(tmp_path / "none.yaml")),
        ),
        run("train", "--resume", root, "--epochs", "2", status=0, **keys),
        run(
            "train",
            "--resume",
            root,
            "--epochs",
            "3",
            "--data",
            data,
            status=0,
        ),
    ]
    assert SECRET not in "".join(texts)
    assert (tmp_path / "report.html").exists()
    assert not holders(tmp_path)


# ---- processes -------------------------------------------------------------


def test_arguments_of_processes(
    endpoint: str, bucket: fs.FileSystem, tmp_path: Path
) -> None:
    with bucket.open_output_stream("bucket/a.csv") as out:
        out.write(CSV.encode())
    where = f"scheme=http&endpoint_override={endpoint}&region=us-east-1"
    data = f"s3://me{SECRET}:key{SECRET}@bucket/a.csv?{where}"
    mark = secrets.token_hex(8)
    feed = f"--epochs 1 --eval-data={data} --batch-size 100"
    job = [sys.executable, "-c", "print('ready', flush=True); input()"]
    command = [
        "launch",
        "--embedding-workers",
        "1",
        "--loaders",
        "1",
        "--data",
        data,
    ]
    command += ["--feed", feed, "--grace", "5", "--", *job]
    process = subprocess.Popen(
        [sys.executable, "-m", "persia", *command],
        env=environment(mark),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = []
        while not any("sending" in line for line in lines):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        words = marked(mark)
        assert any("feed" in line for line in words.values())
        assert not [line for line in words.values() if SECRET in line]
    finally:
        process.terminate()
        rest = process.communicate(timeout=60)[0]
        process.kill()
    assert SECRET not in "".join(lines) + rest


@pytest.mark.parametrize("flag", ["--token {}", "--token={}"])
def test_a_token_as_an_argument(flag: str, tmp_path: Path) -> None:
    words = ["serve", "ps", "--port", "0", *flag.replace("{}", SECRET).split()]
    process = subprocess.Popen(
        [sys.executable, "-m", "persia", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert SECRET.encode() not in line and b"serve" in line
    finally:
        process.terminate()
        text = process.communicate(timeout=60)[0]
    assert SECRET not in text
