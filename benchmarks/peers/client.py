"""Starts the peers' interpreter and calls what runs there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"


def available() -> bool:
    """Whether ``make bench PEERS=1`` has made the peers' environment."""
    return PYTHON.exists()


class Peers:
    """The process of the peers; a context manager that ends it."""

    def __init__(self) -> None:
        log = ROOT / "build" / "benchmarks" / "peers.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [str(PYTHON), "-m", "benchmarks.peers.runner"],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = log

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def call(self, name: str, /, **args: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(
            json.dumps({"call": name, "args": args}) + "\n"
        )
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                "the peers' process ended with status"
                f" {self._process.wait()}; see {self._log}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(
                f"peer, in {name}({args}): {answer['error']}; see {self._log}"
            )
        return answer["result"]

    def versions(self) -> dict[str, str]:
        result: dict[str, str] = self.call("versions")
        return result

    def open(self, name: str, kind: str, **args: Any) -> PeerObject:
        """Makes an object there; kind is one of the runner's."""
        self.call("open", name=name, kind=kind, **args)
        return PeerObject(self, name)


class PeerObject:
    """Methods of an object in the peers' process."""

    def __init__(self, peers: Peers, name: str) -> None:
        self._peers, self._name = peers, name

    def call(self, method: str, /, **args: Any) -> Any:
        return self._peers.call(method, name=self._name, **args)
