"""Lists of embedding workers that are read again."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from persia.distributed import addresses, listing
from persia.distributed.addresses import resolve, resolve_workers
from persia.distributed.security import Security
from persia.errors import Closed, InvalidArgument
from persia.redaction import shown
from tests.system.processes import wait_until


def test_files_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"one": ["10.0.0.1"], "two": ["10.0.0.2", "10.0.0.3"]}
    monkeypatch.setattr(
        addresses, "addresses_of", lambda host: found.get(host, [])
    )
    path = tmp_path / "list"
    path.write_text("a:1\n\n# none\n two:2 # both\n")
    security = Security()
    assert resolve(f"file:{path},one:3", security)[0] == [
        *("a:1", "10.0.0.2:2", "10.0.0.3:2", "one:3")
    ]
    assert resolve("dns:one:3", security)[0] == ["10.0.0.1:3"]
    assert resolve("dns:none:3", security)[0] == ["none:3"]
    for text in (f"file:{path}.none", f"file:{tmp_path}", "dns:one"):
        with pytest.raises(InvalidArgument):
            resolve(text, security)
    path.write_text("\n")
    with pytest.raises(InvalidArgument):
        resolve(f"file:{path}", security)


@pytest.mark.parametrize("what", ["servers", "workers"])
def test_a_list_that_cannot_be_used_is_named(
    what: str, tmp_path: Path
) -> None:
    """By its file, which is no secret, and by what is in it."""
    path = tmp_path / "list"

    find = resolve if what == "servers" else resolve_workers

    def why() -> str:
        with pytest.raises(InvalidArgument) as error:
            find(f"file:{path}", Security())
        return shown(str(error.value))

    assert str(path) in why() and what in why()
    path.write_text("# none\n")
    assert str(path) in why() and what in why()
    path.write_text("garbage\n")
    assert "garbage" in why() and what in why()


class Owner:
    """Has a list."""

    def __init__(self, path: Path) -> None:
        self.told: list[list[str]] = []
        listing.follow(self, f"file:{path}", Security(), Owner.tell)

    def tell(self, found: list[str]) -> None:
        self.told.append(found)
        if found == ["end:1"]:
            raise Closed("it is")


def threads() -> int:
    return sum(t.name == "persia-workers" for t in threading.enumerate())


def test_a_list_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While there is an owner; one that is empty, or gone, stays."""
    monkeypatch.setattr(listing, "_PERIOD", 0.01)
    path = tmp_path / "list"
    path.write_text("a:1\n")
    owner = Owner(path)
    wait_until(lambda: owner.told == [["a:1"]])
    path.unlink()
    path.with_suffix(".new").write_text("a:1\nb:1\n")
    path.with_suffix(".new").rename(path)
    wait_until(lambda: owner.told[1:] == [["a:1", "b:1"]])
    path.write_text("")
    path.with_suffix(".new").write_text("end:1\n")
    path.with_suffix(".new").rename(path)
    wait_until(lambda: threads() == 0)
    assert len(owner.told) == 3
    path.write_text("a:1\n")  # one that ends no thread
    other = Owner(path)
    assert threads() == 1
    del other
    gc.collect()
    wait_until(lambda: threads() == 0)
    listing.follow(owner, "a:1,b:1", None, Owner.tell)
    assert threads() == 0


def test_a_list_that_cannot_be_used_is_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listing, "_PERIOD", 0.01)
    path = tmp_path / "list"
    path.write_text("no address\n")
    owner = Owner(path)
    wait_until(lambda: len(caplog.records) == 1)
    path.unlink()
    wait_until(lambda: len(caplog.records) == 2)
    path.with_suffix(".new").write_text("end:1\n")
    path.with_suffix(".new").rename(path)
    wait_until(lambda: threads() == 0)
    assert owner.told == [["end:1"]] and len(caplog.records) == 2
