"""The dense part of a training whose rows are on servers, in files of this
machine: ranks that are started again continue with it.

A file is of a *life*: the ranks between two starts. It is replaced as a whole,
and the machines need not have the same ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from persia.errors import CorruptFile, StorageError

_NAME = re.compile(r"(\d{1,9})-(\d{1,18})\.pt")


class Moment(NamedTuple):
    """When a file was written; a later one is greater."""

    life: int
    step: int


class DenseFiles:
    """Those of a job on this machine; the newest stays.

    Args:
        namespace: of the tables.
        run: the name of the job.
        folder: that holds those of all jobs; default: the one for temporary
            files, with a folder of the user.
    """

    def __init__(
        self, namespace: str, run: str, folder: str | None = None
    ) -> None:
        base = Path(
            folder
            or Path(tempfile.gettempdir(), f"persia-dense-{os.getuid()}")
        )
        key = f"{namespace}\0{run}".encode()
        self._base = base
        self.folder = base / hashlib.blake2b(key, digest_size=8).hexdigest()

    def newest(self) -> Moment | None:
        """Of the newest file; None: there is none.

        Raises:
            StorageError: the folder is another user's, or cannot be read.
        """
        moments = self._moments()
        return max(moments) if moments else None

    def write(self, at: Moment, state: Mapping[str, Any]) -> None:
        """Writes a file, and removes the older ones; nothing, if there is a
        newer one.

        Raises:
            StorageError: it cannot be written.
        """
        there = self.newest()
        if there is not None and there > at:
            return
        path = self._path(at)
        new = path.with_name(f"new-{secrets.token_hex(8)}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with new.open("wb") as file:
                    torch.save(dict(state), file)
                new.replace(path)
            finally:
                new.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{path} cannot be written: {error}") from error
        for one in self._moments():
            if one < at:
                self._path(one).unlink(missing_ok=True)

    def read(self, at: Moment) -> bytes:
        """The bytes of a file, for :func:`decoded`.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            return self._path(at).read_bytes()
        except OSError as error:
            raise StorageError(
                f"{self._path(at)} cannot be read: {error}"
            ) from error

    def remove(self) -> None:
        """The job has ended."""
        with contextlib.suppress(OSError, StorageError):
            for one in self._moments():
                self._path(one).unlink(missing_ok=True)
            self.folder.rmdir()

    def _path(self, at: Moment) -> Path:
        return self.folder / f"{at.life}-{at.step}.pt"

    def _moments(self) -> list[Moment]:
        try:
            if self._base.stat().st_uid != os.getuid():
                raise StorageError(
                    f"{self._base} is another user's: set TMPDIR to a folder "
                    "of your own"
                )
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(
                f"{self.folder} cannot be read: {error}"
            ) from error
        found = [m for m in map(_NAME.fullmatch, names) if m]
        return [Moment(int(m[1]), int(m[2])) for m in found]


def decoded(data: bytes, where: object) -> dict[str, Any]:
    """What a file has.

    Raises:
        CorruptFile: it is none of these files.
    """
    try:
        state = torch.load(
            io.BytesIO(data), weights_only=True, map_location="cpu"
        )
    except Exception as error:
        raise CorruptFile(f"{where} cannot be read: {error}") from error
    if not isinstance(state, dict) or state.get("format") != 1:
        raise CorruptFile(f"{where} has no dense part")
    return state
