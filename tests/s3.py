"""An S3 server on this machine, as fixtures of all tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from pyarrow import fs

__all__ = ["SECRET", "bucket", "endpoint", "uri"]

SECRET = "hidden"


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """The address of an S3 server without anything in it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
                break
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(endpoint: str) -> Iterator[fs.FileSystem]:
    """The file system, with an empty bucket."""
    s3 = fs.S3FileSystem(
        access_key="me",
        secret_key=SECRET,
        scheme="http",
        endpoint_override=endpoint,
        allow_bucket_creation=True,
        allow_bucket_deletion=True,
    )
    s3.create_dir("bucket")
    yield s3
    s3.delete_dir("bucket")


@pytest.fixture
def uri(
    endpoint: str, bucket: fs.FileSystem, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """The URI of a path in the bucket; its keys are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    options = f"scheme=http&endpoint_override={endpoint}"
    return lambda path: f"s3://bucket/{path}?{options}"
