"""Files on S3, as a local server has it, and through fsspec."""

import contextlib
import functools
import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from persia import errors
from persia.data import Files, Table
from persia.train.config import resolve
from persia.train.sources import check_test, open_data
from tests.sources.test_files import SCHEMA, rows, write
from tests.sources.test_table import same


@pytest.mark.slow
def test_s3(
    uri: Callable[[str], str], bucket: fs.FileSystem, tmp_path: Path
) -> None:
    data = rows(40)
    for suffix in ("parquet", "csv.gz", "jsonl", "arrow"):
        for i in (2, 10):
            local = write(tmp_path / f"day_{i}.{suffix}", data)
            name = f"bucket/logs/day_{i}.{suffix}"
            with bucket.open_output_stream(name, compression=None) as out:
                out.write(local.read_bytes())
        one = Files(uri(f"logs/day_2.{suffix}"), SCHEMA, 16)
        for a, b in zip(one, Table(data, SCHEMA, 16), strict=True):
            assert same(a, b)
        every = Files(uri(f"logs/day_*.{suffix}"), SCHEMA, 16)
        assert [name.rpartition("/")[2] for name in every.files] == [
            f"day_2.{suffix}",
            f"day_10.{suffix}",
        ]
        assert sum(map(len, every)) == 80
    with pytest.raises(errors.StorageError) as info:
        Files(uri("logs/none.csv"), SCHEMA)
    assert "hidden" not in str(info.value)
    with pytest.raises(errors.StorageError):
        Files(uri("logs/none_*.csv"), SCHEMA)
    with pytest.raises(errors.StorageError):
        Files(uri("logs"), SCHEMA)


@pytest.mark.slow
def test_the_last_of_several_remote_files_is_the_test(
    uri: Callable[[str], str], bucket: fs.FileSystem
) -> None:
    """It is where the others are: at the endpoint that the URL names."""
    text = "user,item,click\n" + "u1,2,0\nu2,3,1\n" * 20
    for i in range(3):
        name = f"bucket/days/day_{i}.csv"
        with bucket.open_output_stream(name, compression=None) as out:
            out.write(text.encode())
    options = {"data": uri("days/day_*.csv"), "target_auc": 0.9}
    train, test = open_data(resolve(options))
    assert test is not None
    assert (sum(map(len, train)), sum(map(len, test))) == (80, 40)
    held = resolve(
        {
            "data": uri("days/day_0.csv"),
            "eval_data": uri("days/day_[12].csv"),
        }
    )
    train, test = open_data(held)
    check_test(held, test)
    assert test is not None
    assert (sum(map(len, train)), sum(map(len, test))) == (40, 80)


def test_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    data = rows(40)
    memory = fsspec.filesystem("memory")
    for suffix in ("parquet", "csv"):
        local = write(tmp_path / f"a.{suffix}", data)
        memory.pipe_file(f"/logs/a.{suffix}", local.read_bytes())
        files = Files(f"memory://logs/*.{suffix}", SCHEMA, 16)
        for a, b in zip(files, Table(data, SCHEMA, 16), strict=True):
            assert same(a, b)
    with pytest.raises(errors.StorageError, match="unknown://"):
        Files("unknown://a.csv", SCHEMA)


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[str]:
    """The address of a server on this machine, while it answers so."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Pages(http.server.SimpleHTTPRequestHandler):
    """Whole files only, as Python's server has them."""

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()


@pytest.mark.slow
def test_http(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="http:// needs persia[remote]")
    data = rows(40)
    for suffix in ("parquet", "csv", "csv.gz", "jsonl"):
        write(tmp_path / f"a.{suffix}", data)
    (tmp_path / "big.parquet").write_bytes(b"PAR1" + bytes(12 << 20))
    with serving(functools.partial(Pages, directory=tmp_path)) as address:
        for name in ("parquet", "csv", "csv.gz", "jsonl", "csv?token=x"):
            files = Files(f"http://{address}/a.{name}", SCHEMA, 16)
            assert "token" not in files.files[0]
            for a, b in zip(files, Table(data, SCHEMA, 16), strict=True):
                assert same(a, b)
        for name in ("none.csv", "big.parquet"):
            with pytest.raises(errors.StorageError, match=name):
                list(Files(f"http://{address}/{name}", SCHEMA))


class NameNode(http.server.BaseHTTPRequestHandler):
    """WebHDFS, as a name node that is its only data node has it."""

    def __init__(self, *args: Any, directory: Path) -> None:
        self._root = directory
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        asked = dict(urllib.parse.parse_qsl(url.query))
        name = url.path.removeprefix("/webhdfs/v1").strip("/")
        path = self._root / name
        if not path.exists():
            self._send(
                404,
                {
                    "RemoteException": {
                        "exception": "FileNotFoundException",
                        "message": f"{name} is not there",
                    }
                },
            )
        elif asked["op"] == "OPEN":
            begin = int(asked.get("offset", 0))
            end = begin + int(asked.get("length", path.stat().st_size))
            self._send(200, path.read_bytes()[begin:end])
        elif asked["op"] == "LISTSTATUS" and path.is_dir():
            found = [self._status(one, one.name) for one in path.iterdir()]
            self._send(200, {"FileStatuses": {"FileStatus": found}})
        elif asked["op"] == "LISTSTATUS":
            found = [self._status(path, "")]
            self._send(200, {"FileStatuses": {"FileStatus": found}})
        else:
            self._send(200, {"FileStatus": self._status(path, "")})

    def _status(self, path: Path, name: str) -> dict[str, Any]:
        return {
            "pathSuffix": name,
            "type": "DIRECTORY" if path.is_dir() else "FILE",
            "length": path.stat().st_size if path.is_file() else 0,
        }

    def _send(self, code: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.mark.slow
def test_webhdfs(tmp_path: Path) -> None:
    """Files of Hadoop where its library is not installed."""
    pytest.importorskip("requests", reason="webhdfs:// needs persia[remote]")
    data = rows(40)
    for suffix in ("parquet", "csv", "csv.gz", "jsonl"):
        write(tmp_path / f"a.{suffix}", data)
    with serving(functools.partial(NameNode, directory=tmp_path)) as address:
        for name in ("a.parquet", "*.csv", "a.csv.gz", "a.jsonl"):
            files = Files(f"webhdfs://{address}/{name}", SCHEMA, 16)
            for a, b in zip(files, Table(data, SCHEMA, 16), strict=True):
                assert same(a, b)
        with pytest.raises(errors.StorageError):
            list(Files(f"webhdfs://{address}/none.csv", SCHEMA))


class Expired(http.server.BaseHTTPRequestHandler):
    """An S3 whose every answer is that the token has expired."""

    def do_GET(self) -> None:
        body = b"<Error><Code>ExpiredToken</Code><Message>The provided token "
        body += b"has expired.</Message></Error>"
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.parquet", "day_*.csv"])
def test_expired_credentials(name: str) -> None:
    with serving(Expired) as address:
        options = f"scheme=http&endpoint_override={address}&region=us-east-1"
        with pytest.raises(errors.StorageError) as info:
            Files(f"s3://me:hidden@bucket/{name}?{options}", SCHEMA)
    assert "hidden" not in str(info.value)
    assert name in str(info.value)


class Refusing(http.server.BaseHTTPRequestHandler):
    """An S3 that refuses the bytes of its one file from a place on, where
    ``begin`` is; or closes the connection within them."""

    data = b""
    begin = 0
    cut = False

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.end_headers()

    def do_GET(self) -> None:
        asked = self.headers["Range"].removeprefix("bytes=").split("-")
        first, last = int(asked[0]), min(int(asked[1]), len(self.data) - 1)
        if last < self.begin or self.cut:
            self.send_response(206)
            self.send_header("Content-Length", str(last + 1 - first))
            self.end_headers()
            end = min(last + 1, max(first, self.begin))
            self.wfile.write(self.data[first:end])
            self.close_connection = True
            return
        body = b"<Error><Code>AccessDenied</Code></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "cut"),
    [
        *(("parquet", False), ("csv", False), ("csv.gz", False)),
        *(("jsonl", False), ("arrow", False)),
        pytest.param("csv", True, marks=pytest.mark.long),  # retries
    ],
)
def test_storage_that_fails_in_the_middle(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    cut: bool,
) -> None:
    """Its error has the file's name and the cause; no file is damaged."""
    local = write(tmp_path / f"a.{end}", rows(3000))
    monkeypatch.setattr(Refusing, "data", local.read_bytes())
    monkeypatch.setattr(Refusing, "cut", cut)
    size = len(Refusing.data)
    for begin in (100,) if cut else (0, size // 2):
        monkeypatch.setattr(Refusing, "begin", begin)
        with serving(Refusing) as address:
            options = f"scheme=http&endpoint_override={address}&region=x"
            url = f"s3://me:hidden@bucket/dt=1/a.{end}?{options}"
            with pytest.raises(errors.StorageError, match="dt=1/a") as info:
                list(Files(url, SCHEMA))
        assert not isinstance(info.value, errors.CorruptFile)
        assert "hidden" not in str(info.value)


@pytest.mark.slow
def test_a_bucket_of_another_region() -> None:
    class Elsewhere(Expired):
        body = b"<Error><Code>PermanentRedirect</Code></Error>"

        def do_GET(self) -> None:
            self.send_response(301)
            self.send_header("Content-Length", str(len(self.body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(self.body)

        do_HEAD = do_GET

    with serving(Elsewhere) as address:
        options = f"scheme=http&endpoint_override={address}&region=us-east-1"
        with pytest.raises(errors.StorageError, match=r"\?region="):
            Files(f"s3://me:hidden@bucket/day_*.csv?{options}", SCHEMA)
