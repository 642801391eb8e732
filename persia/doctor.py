"""What this machine and this installation are fit for.

:func:`examine` looks at versions, gRPC's core, limits, CPUs, the GPU and the
packages of extras. ``persia doctor`` shows what it finds; where the command
itself cannot start, ``python -m persia.doctor`` does. So nothing else of
Persia is imported before it is examined.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata as metadata
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from json import dumps
from pathlib import Path
from typing import Literal

from persia.base.cpus import cpu_quota, processors, text_of
from persia.base.requirements import AGAIN, install
from persia.base.version import source_tree

#: What a finding means: ``broken`` stops something that every user needs.
State = Literal["ok", "note", "warning", "broken"]

_FILES = 8192  # a server's connections, and a burst of them
_SHM = 1 << 30  # bytes that workers of a DataLoader soon need

_CUDA = Path(__file__).parent / "libpersia_cuda.so"

# What pip installs with persia: distributions by the names of their imports.
PACKAGES = {
    name: name
    for name in (
        *("cryptography", "numpy", "prometheus_client", "pyarrow"),
        *("pydantic", "rich", "typer"),
    )
} | {"yaml": "PyYAML"}
# A package, the extra that brings it, and what for.
EXTRAS = (
    ("fsspec", "remote", "data at URLs that pyarrow does not read"),
    ("aiohttp", "remote", "data over HTTP"),
    ("uvicorn", "serve", "models over HTTP"),
)


# Where a library of the system is not there.
_LIBRARY = (
    "install that library, in the version that Persia was built with (Debian "
    "12 has gRPC's in libgrpc29), or a wheel of Persia, which has its own"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        name: what was looked at.
        state: how it is.
        value: what was found.
        remedy: what to do about it; empty where nothing need be done.
    """

    name: str
    state: State
    value: str
    remedy: str = ""


def examine(root: Path = Path("/")) -> list[Finding]:
    """Looks at everything; takes the seconds that torch's import takes.

    Args:
        root: where ``proc``, ``sys`` and ``dev`` lie.

    Returns:
        The findings, in a fixed order. Nothing raises: a look that fails is
        a finding of state ``broken``.
    """
    looks: list[Callable[[], Iterator[Finding]]] = [
        _versions,
        _torch,
        _core,
        _grpc,
        lambda: _processors(root),
        lambda: _memory(root),
        _limits,
        lambda: _gpu(root),
        _packages,
    ]
    found: list[Finding] = []
    for look in looks:
        try:
            found += look()
        except Exception as error:
            name = getattr(look, "__name__", "look").strip("_")
            text = f"{type(error).__name__}: {error}"
            found.append(
                Finding(name, "broken", text, "report this as a bug of Persia")
            )
    return found


def show(found: list[Finding]) -> str:
    """The findings as lines: state, name, value; remedies below."""
    lines = []
    for one in found:
        lines.append(f"{one.state:8}{one.name:19}{one.value}")
        if one.remedy:
            lines.append(f"{'':27}-> {one.remedy}")
    return "\n".join(lines)


# ---- the installation ------------------------------------------------------


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", platform.python_version())
    system = " ".join(platform.libc_ver())
    yield Finding(
        "system", "ok", f"{platform.system()} {platform.release()}, {system}"
    )
    tree = source_tree()
    try:
        version = metadata.version("persia") if tree is None else str(tree)
    except metadata.PackageNotFoundError:
        version = str(Path(__file__).parent)
    if version.startswith("0.1"):
        yield Finding(
            "persia",
            "broken",
            f"{version}, which is the original of 2022",
            "pip uninstall persia, then install as docs/install.md tells",
        )
    else:
        yield Finding("persia", "ok", version)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding(
            "torch",
            "broken",
            f"cannot be imported: {error}",
            install(["torch"]),
        )
        return
    yield Finding("torch", "ok", torch.__version__)
    try:
        updates = _step()
    except Exception as error:
        yield Finding(
            "a step",
            "broken",
            f"{type(error).__name__}: {error}",
            AGAIN,
        )
        return
    yield Finding("a step", "ok", f"{updates} update of embedding rows")


def _step() -> int:
    """Trains a table of this process, and counts the updates: whatever the
    environment names, no server or rank of a job takes part."""
    import torch

    import persia

    store = persia.Store(
        servers="embedded", namespace="doctor", rank=0, world_size=1
    )
    try:
        rows = persia.EmbeddingBagCollection(
            store=store, tables=[persia.EmbeddingBagConfig("t", 4, ["t"])]
        )
        rows({"t": torch.tensor([1, 2])}).values().sum().backward()
        return store.stats()["updates"]
    finally:
        store.close()


def remedy_of(error: BaseException) -> str:
    """What to do where the C core could not be loaded."""
    missing = "cannot open shared object file" in str(error)
    return _LIBRARY if missing else AGAIN


def _core() -> Iterator[Finding]:
    try:
        importlib.import_module("persia._core")
    except (ImportError, OSError) as error:
        yield Finding(
            "C core",
            "broken",
            f"cannot be loaded: {error}",
            remedy_of(error),
        )
        return
    yield Finding("C core", "ok", str(Path(__file__).parent))


def _grpc() -> Iterator[Finding]:
    try:
        core = importlib.import_module("persia._core")
    except (ImportError, OSError):
        return  # told already
    if not core.GRPC[0].isdigit():
        yield Finding(
            "gRPC core",
            "warning",
            "none: tables in this process only, no servers",
            "install the wheel, or libgrpc-dev and build again",
        )
    elif core.GRPC_HOLES:
        yield Finding(
            "gRPC core",
            "warning",
            f"{core.GRPC}, with published holes: {core.GRPC_HOLES}",
            "install the wheel, which has a current core; until then serve "
            "beyond this machine with --mutual-tls",
        )
    else:
        yield Finding("gRPC core", "ok", core.GRPC)


def _packages() -> Iterator[Finding]:
    missing = [p for p in PACKAGES if importlib.util.find_spec(p) is None]
    if missing:
        yield Finding(
            "packages",
            "broken",
            f"missing: {', '.join(missing)}",
            install(PACKAGES[name] for name in missing),
        )
    else:
        yield Finding("packages", "ok", "all that persia needs")
    for package, extra, purpose in EXTRAS:
        if importlib.util.find_spec(package) is not None:
            yield Finding(package, "ok", purpose)
        else:
            yield Finding(
                package,
                "note",
                f"is not installed; serves {purpose}",
                install([package], extra),
            )


# ---- the machine -----------------------------------------------------------


def _processors(root: Path) -> Iterator[Finding]:
    quota = cpu_quota(root)
    cores = processors(root)
    text = f"{len(os.sched_getaffinity(0))}"
    if quota is not None:
        text += f", quota of the container {quota:g}"
    yield Finding("CPUs", "ok", text)
    if (torch := sys.modules.get("torch")) is None:
        return
    threads = torch.get_num_threads()
    if threads <= max(1, cores):
        yield Finding("torch threads", "ok", f"{threads}")
        return
    good = max(1, int(cores))
    yield Finding(
        "torch threads",
        "warning",
        f"{threads} for {cores:g} CPUs: threads that spin wait for each other",
        f"export OMP_NUM_THREADS={good}, or persia train --threads {good}",
    )


def _memory(root: Path) -> Iterator[Finding]:
    mode = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = mode.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        yield Finding("huge pages", "ok", chosen)
    else:
        yield Finding(
            "huge pages",
            "warning",
            f"{chosen or 'none'}: large tables are read slower",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as "
            "root of the host",
        )
    if (shm := root / "dev/shm").is_dir():
        found = os.statvfs(shm)
        size = found.f_blocks * found.f_frsize
        text = f"{size / 2**20:,.0f} MiB"
        if size >= _SHM:
            yield Finding("/dev/shm", "ok", text)
        else:
            yield Finding(
                "/dev/shm",
                "warning",
                f"{text}: workers of torch's DataLoader share batches there",
                "docker run --shm-size=2g, or num_workers=0",
            )


def _limits() -> Iterator[Finding]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    text = "any number" if hard == resource.RLIM_INFINITY else f"{hard}"
    if hard == resource.RLIM_INFINITY or hard >= _FILES:
        yield Finding("open files", "ok", text)
    else:
        yield Finding(
            "open files",
            "warning",
            f"{text}: a server keeps few connections",
            f"raise it to {_FILES} or more (ulimit -Hn, LimitNOFILE=, "
            "--ulimit nofile=)",
        )


def _gpu(root: Path) -> Iterator[Finding]:
    if (torch := sys.modules.get("torch")) is None:
        return
    if torch.cuda.is_available():
        names = [
            torch.cuda.get_device_name(i)
            for i in range(torch.cuda.device_count())
        ]
        yield Finding("GPU", "ok", ", ".join(names))
        if _CUDA.exists():
            yield Finding("GPU library", "ok", str(_CUDA))
        else:
            yield Finding(
                "GPU library",
                "warning",
                f"there is no {_CUDA}: rows reach the GPU by torch's own "
                "copies, and are not pooled there",
                "build Persia where nvcc is installed",
            )
    elif not (root / "dev/nvidia0").exists():
        yield Finding("GPU", "ok", "none: the dense model runs on the CPU")
    else:
        yield Finding(
            "GPU",
            "warning",
            "there is one, and this torch cannot use it",
            "install a build of torch for CUDA, and NVIDIA's driver"
            if torch.version.cuda is None
            else "install a driver of NVIDIA that fits torch's CUDA "
            f"{torch.version.cuda}",
        )


def main(json: bool = False) -> int:
    """Prints the findings; 1 if something is broken, else 0."""
    found = examine()
    if json:
        print(dumps([dataclasses.asdict(one) for one in found]))
    else:
        print(show(found))
    return int(any(one.state == "broken" for one in found))


if __name__ == "__main__":
    sys.exit(main())
