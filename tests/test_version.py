"""The version of a checkout, and the platforms that are refused."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import persia
from persia.base.platforms import unsupported
from persia.base.version import RELEASE, commit_of, source_tree, version_of

ROOT = Path(__file__).parents[1]


def git(folder: Path, *words: str) -> str:
    """What Git prints, without the settings of this machine."""
    person = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_")
    }
    done = subprocess.run(
        ["git", *person, *words],
        cwd=folder,
        env=environment | {"GIT_CONFIG_GLOBAL": os.devnull},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_a_checkout_is_named_by_its_commit(tmp_path: Path) -> None:
    """As Git says it: branch, packed branch, worktree, no branch."""
    tree = tmp_path / "tree"
    tree.mkdir()
    assert version_of(tree) == RELEASE  # an unpacked source archive
    git(tree, "init", "-q", "-b", "feature/one")
    assert (commit_of(tree), version_of(tree)) == (None, f"{RELEASE}.dev0")
    git(tree, "commit", "-q", "--allow-empty", "-m", "one")
    git(tree, "worktree", "add", "-q", "-b", "two", str(tmp_path / "two"))
    git(tmp_path / "two", "commit", "-q", "--allow-empty", "-m", "two")
    heads = {p: git(p, "rev-parse", "HEAD") for p in (tree, tmp_path / "two")}
    assert len({*heads.values()}) == 2

    def check() -> None:
        for path, head in heads.items():
            assert commit_of(path) == head
            assert version_of(path) == f"{RELEASE}.dev0+g{head[:9]}"

    check()
    git(tree, "pack-refs", "--all")
    check()
    for path in heads:
        git(path, "checkout", "-q", "--detach")
    check()


@pytest.mark.parametrize("text", ["", "ref: refs/heads/none", "gitdir: /no"])
def test_what_git_left_unreadable_is_no_error(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / ".git").write_text(text)
    assert version_of(tmp_path) == f"{RELEASE}.dev0"


def test_the_version_of_this_persia() -> None:
    assert source_tree() == ROOT
    assert version_of(None) == RELEASE
    assert persia.__version__ == version_of(ROOT)
    # As PEP 440 has it, for pip and for who compares.
    parts = r"\d+\.\d+\.\d+(\.dev0(\+g[0-9a-f]{9})?)?"
    assert re.fullmatch(parts, persia.__version__)


def test_platforms() -> None:
    assert unsupported() is None
    assert unsupported("linux", "x86_64", (3, 11, 2)) is None
    assert unsupported("linux", "x86_64", (4, 0)) is None
    for system, machine, python in (
        ("darwin", "arm64", (3, 12)),
        ("darwin", "x86_64", (3, 12)),
        ("win32", "AMD64", (3, 12)),
        ("linux", "aarch64", (3, 12)),
        ("linux", "i686", (3, 12)),
        ("linux", "x86_64", (3, 10)),
    ):
        why = unsupported(system, machine, python)
        assert why is not None and "\n" not in why
        for said in (system, machine, f"{python[0]}.{python[1]}", "Linux"):
            assert said in why


@pytest.mark.slow
def test_the_import_names_an_unsupported_platform() -> None:
    code = "import sys; sys.platform = 'darwin'; import persia"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and "darwin" in last


def test_the_build_names_an_unsupported_platform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["setup.py", "--version"])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
    assert "darwin" in str(raised.value)
