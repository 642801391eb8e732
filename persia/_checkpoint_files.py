"""The files of a checkpoint: the manifest, and folders that appear whole.

All access to the file system that is not a row file's is here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic

from persia import _core
from persia.errors import CorruptFile, SchemaMismatch, StorageError

FORMAT = "persia.checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
LATEST = "LATEST"
TEMPORARY = ".tmp-"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")


# ---- the manifest ----------------------------------------------------------


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True
    )


class File(_Entry):
    """A file of the folder; its checksum is the CRC-32C of all its bytes."""

    name: str = pydantic.Field(pattern="^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    bytes: int = pydantic.Field(ge=0)
    crc32c: str = pydantic.Field(pattern="^[0-9a-f]{8}$")


class RowFile(File):
    """A safetensors file with rows of one table."""

    rows: int = pydantic.Field(ge=0)


class Table(_Entry):
    """A table: its options, and its rows and clock at the checkpoint."""

    name: str
    seed: int
    dim: int
    dtype: str
    optimizer: str
    momentum: bool
    init: str
    init_a: float
    init_b: float
    state_init: float
    admission: float
    missing: str
    nonfinite: str
    capacity: int
    full: str
    state_floats: int
    rows: int = pydantic.Field(ge=0)
    pushes: int = pydantic.Field(ge=0, lt=1 << 64)
    files: list[RowFile]


class Manifest(_Entry):
    """What a checkpoint holds."""

    format: Literal["persia.checkpoint"]
    version: Literal[1]
    id: str
    lineage: str
    step: int = pydantic.Field(ge=0)
    shards: Literal[1]
    updates: int = pydantic.Field(ge=0, lt=1 << 64)
    saved: str
    torch: str
    tables: list[Table]
    dense: File


def encode_manifest(document: dict[str, Any]) -> bytes:
    """The one text of a manifest: it ends with a checksum of the rest."""
    body = {key: document[key] for key in document if key != "crc32c"}
    crc = _core.ckpt_crc(json.dumps(body, sort_keys=True).encode())
    text = json.dumps(body | {"crc32c": f"{crc:08x}"}, indent=1)
    return (text + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder: CorruptFile, StorageError, SchemaMismatch."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise StorageError(
            f"{folder} has no {MANIFEST}: it is not a complete checkpoint"
        ) from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    try:
        document = json.loads(raw)
        if not isinstance(document, dict) or encode_manifest(document) != raw:
            raise ValueError("its text is not what its checksum says")
        del document["crc32c"]
    except (ValueError, KeyError, RecursionError) as error:
        raise CorruptFile(f"{path} is truncated or altered: {error}") from None
    if (document.get("format"), document.get("version")) != (FORMAT, VERSION):
        raise SchemaMismatch(
            f"{path} has format {document.get('format')!r}, version "
            f"{document.get('version')!r}; this Persia reads {FORMAT!r}, "
            f"version {VERSION}: load it with the Persia that wrote it"
        )
    try:
        return Manifest.model_validate(document)
    except pydantic.ValidationError as error:
        raise CorruptFile(f"{path} is not a manifest: {error}") from None


# ---- writing ---------------------------------------------------------------


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    with opened(folder) as descriptor:
        os.fsync(descriptor)


def write_file(path: Path, fill: Callable[[Any], object]) -> None:
    """Makes a new file of what ``fill(file)`` writes, and syncs it."""
    with path.open("xb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One save at a time in a root; a killed process leaves no lock."""
    with (root / ".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"another save into {root} is going on; wait for it, or save "
                "into another folder"
            ) from None
        yield


def publish(root: Path, temporary: Path, name: str) -> None:
    """Gives a complete folder its name, then LATEST that name.

    What had the name before is then at ``temporary``.
    """
    if (root / name).exists():
        with opened(root) as descriptor:
            _core.ckpt_exchange(descriptor, temporary.name, name)
    else:
        temporary.rename(root / name)
    sync_folder(root)
    latest = root / f"{TEMPORARY}{LATEST}"
    latest.unlink(missing_ok=True)
    write_file(latest, lambda file: file.write(f"{name}\n".encode()))
    latest.rename(root / LATEST)
    sync_folder(root)


def remove_temporary(root: Path) -> None:
    """Removes what interrupted saves have left."""
    for entry in root.glob(f"{TEMPORARY}*"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def prune(root: Path, keep: int, newest: str) -> None:
    """Removes all but the newest ``keep``; a folder vanishes in one step."""
    old = [f"step-{step}" for step in steps(root)]
    old.remove(newest)
    for name in old[: max(0, len(old) - (keep - 1))]:
        away = root / f"{TEMPORARY}old-{name}-{secrets.token_hex(4)}"
        (root / name).rename(away)
        shutil.rmtree(away)


# ---- finding ---------------------------------------------------------------


def steps(root: Path) -> list[int]:
    """The complete checkpoints of a root, in the order of their saving."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in root.iterdir():
            match = _STEP.fullmatch(entry.name)
            manifest = entry / MANIFEST
            if match and manifest.is_file():
                found.append((manifest.stat().st_mtime_ns, int(match[1])))
    return [step for _, step in sorted(found)]


def find(path: Path, step: int | None) -> Path:
    """The folder of a checkpoint: a step of a root, its latest, or itself."""
    there = steps(path)
    listed = ", ".join(map(str, sorted(there))) or "none"
    if step is not None:
        if step not in there:
            raise StorageError(
                f"{path} has no complete checkpoint of step {step}; steps "
                f"there: {listed}"
            )
        return path / f"step-{step}"
    if (path / MANIFEST).exists():
        return path
    latest = path / LATEST
    try:
        name = latest.read_bytes().decode("ascii", "replace")
    except FileNotFoundError:
        advice = "; choose one with step=" if there else ""
        raise StorageError(
            f"{path} is no checkpoint: it has neither {LATEST} nor "
            f"{MANIFEST}; steps there: {listed}{advice}"
        ) from None
    except OSError as error:
        raise StorageError(f"{latest} cannot be read: {error}") from error
    name = name.removesuffix("\n")
    if not _STEP.fullmatch(name):
        raise CorruptFile(f"{latest} names no step: it holds {name[:40]!r}")
    if not (path / name / MANIFEST).exists():
        raise CorruptFile(
            f"{latest} names {name}, which is not there; steps there: {listed}"
        )
    return path / name
