"""A NameNode and a DataNode of HDFS, of a folder that .ci/hadoop made."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Hdfs", "hdfs"]

HADOOP = os.environ.get("PERSIA_TEST_HADOOP", "")
_MAIN = "org.apache.hadoop.hdfs.server"
_START_S = 60
_LOG = """log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %p %c: %m%n
"""
# What Hadoop of 2016 reaches into.
_OPENED = [
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in ("java.lang", "java.lang.reflect", "java.net", "java.util")
]


def _ports(n: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _xml(settings: dict[str, Any]) -> str:
    properties = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in settings.items()
    )
    return f"<configuration>{properties}</configuration>"


class Hdfs:
    """A cluster of one machine.

    Attributes:
        url: of its root.
        environment: what a process needs that opens it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        name, *rest = _ports(5)
        self.url = f"hdfs://127.0.0.1:{name}"
        self._java = shutil.which("java") or pytest.skip("no java")
        conf = folder / "conf"
        for kind in ("hdfs", "datanode"):
            (conf / "webapps" / kind / "WEB-INF").mkdir(parents=True)
        core = {
            "fs.defaultFS": self.url,
            "hadoop.tmp.dir": folder / "data",
        }
        (conf / "core-site.xml").write_text(_xml(core))
        keys = (
            "dfs.namenode.http-address",
            "dfs.datanode.address",
            "dfs.datanode.http.address",
            "dfs.datanode.ipc.address",
        )
        settings: dict[str, Any] = {
            "dfs.replication": 1,
            "dfs.webhdfs.enabled": "false",
            "dfs.permissions.enabled": "false",
            "dfs.client.retry.window.base": 100,
        }
        for key, port in zip(keys, rest, strict=True):
            settings[key] = f"127.0.0.1:{port}"
        (conf / "hdfs-site.xml").write_text(_xml(settings))
        (conf / "log4j.properties").write_text(_LOG)
        jars = sorted(Path(HADOOP, "jars").glob("*.jar"))
        paths = [conf, Path(HADOOP, "classes"), *jars]
        self.environment = os.environ | {
            "JAVA_HOME": str(Path(self._java).resolve().parents[1]),
            "CLASSPATH": ":".join(map(str, paths)),
            "ARROW_LIBHDFS_DIR": str(Path(HADOOP).absolute()),
            "LIBHDFS_OPTS": " ".join(["-Xmx128m", *_OPENED]),
        }
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._run("namenode.NameNode", "-format", "-nonInteractive").wait(60)
        self.start("namenode.NameNode")
        self._await(name)
        self.start("datanode.DataNode")
        self._await(rest[1])

    def _run(self, main: str, *words: str) -> subprocess.Popen[bytes]:
        command = [self._java, "-Xmx256m", *_OPENED, f"{_MAIN}.{main}", *words]
        with (self._folder / f"{main}.log").open("ab") as log:
            return subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log
            )

    def start(self, main: str) -> None:
        self._started[main] = self._run(main)

    def stop(self, main: str) -> None:
        self._started[main].kill()
        self._started[main].wait()

    def close(self) -> None:
        for main in self._started:
            self.stop(main)

    def _await(self, port: int) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            time.sleep(0.2)
        logs = [f.read_text()[-2000:] for f in self._folder.glob("*.log")]
        raise AssertionError("\n".join(logs))


@pytest.fixture
def hdfs(tmp_path: Path) -> Iterator[Hdfs]:
    if not HADOOP:
        pytest.skip("set PERSIA_TEST_HADOOP to a folder of .ci/hadoop")
    cluster = Hdfs(tmp_path)
    yield cluster
    cluster.close()
