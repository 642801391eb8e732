"""The file of the images agrees with the manifests and the release."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import re
import tomllib

import pytest

from persia.base.health import LIVE
from persia.base.version import RELEASE
from tests.deploy.manifests import DEPLOY, pods, render
from tests.deploy.test_manifests import variables

TEXT = (DEPLOY.parent / "Containerfile").read_text(encoding="utf-8")


def test_the_base_is_pinned_and_the_targets_are_those_of_manifests() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", TEXT, re.MULTILINE)
    assert re.search(r"@sha256:[0-9a-f]{64}$", stages[0][0])
    assert stages[1:] == [
        ("base", "persia-ps"),
        ("base", "persia"),
    ]
    assert f'image.version="{RELEASE}"' in TEXT
    assert set(re.findall(r":(\d+\.\d+\.\d+) ", TEXT)) <= {RELEASE}


def test_health_is_asked_where_every_role_answers() -> None:
    asked = re.search(r"http://127\.0\.0\.1:(\d+)([/\w]+)", TEXT)
    assert asked is not None and asked[2] == LIVE
    given = dict(re.findall(r"\b(PERSIA_\w+)=(\S+)", TEXT))
    assert set(given.values()) == {asked[1]}
    assert set(given) <= variables()
    exposed = re.search(r"^EXPOSE (.*)$", TEXT, re.MULTILINE)
    assert exposed is not None
    for folder in ("overlays/local", "serving"):
        for found in pods(render(folder)):
            ports = {str(p) for n, p in found.ports.items()}
            assert found.role == "trainer" or ports <= set(exposed[1].split())


def test_pods_have_the_user_of_the_image() -> None:
    user = re.search(r"useradd --uid (\d+)", TEXT)
    assert user is not None
    assert set(re.findall(r"^USER (.*)$", TEXT, re.MULTILINE)) == {user[1]}
    for folder in ("overlays/local", "serving"):
        for found in pods(render(folder)):
            context = found.spec["securityContext"]
            assert str(context["runAsUser"]) == user[1]
            assert str(context["fsGroup"]) == user[1]


def test_servers_have_what_they_and_traces_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not torch: by the very line that chooses it."""
    path = DEPLOY.parent / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    own, extras = project["dependencies"], project["optional-dependencies"]
    every = [*own]
    for extra, names in extras.items():
        every += [f'{name}; extra == "{extra}"' for name in names]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: every)
    (code,) = re.findall(r'python -c "(from importlib.*?)" \\', TEXT)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code)
    found = out.getvalue().splitlines()
    wanted = [name for name in own if not name.startswith("torch")]
    assert sorted(found) == sorted(wanted + extras["traces"])
