"""The manifests of docs/howto/kserve.md: the commands in them are ones, and
they serve what the page says. There is no cluster here."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import fs

from persia.serving.config import ModelConfig
from persia.serving.process import serving
from tests.serving.conftest import call
from tests.serving.test_bucket import copy

pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "kserve.md"


def objects() -> list[dict[str, Any]]:
    texts = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [one for text in texts for one in yaml.safe_load_all(text)]


def test_the_commands_serve(
    place: Path,
    uri: Callable[[str], str],
    bucket: fs.FileSystem,
    tmp_path: Path,
) -> None:
    copy(place, bucket, "models/clicks")
    service, runtime, chosen = objects()
    assert [one["kind"] for one in (service, runtime, chosen)] == [
        "InferenceService",
        "ServingRuntime",
        "InferenceService",
    ]
    model = chosen["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = runtime["spec"]["supportedModelFormats"]
    assert model["modelFormat"]["name"] in [one["name"] for one in formats]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert re.fullmatch(r"s3://.*/v-[0-9]{6}", model["storageUri"])
    here = {
        "s3://bucket/models/clicks": uri("models/clicks"),
        "/mnt/models": str(place / "out" / "v-000002"),
        "{{.Name}}": chosen["metadata"]["name"],
        "/cache": str(tmp_path),
    }
    for spec in (service["spec"]["predictor"], runtime["spec"]):
        (container,) = spec["containers"]
        args = container["args"]
        for text, other in here.items():
            args = [one.replace(text, other) for one in args]
        assert "serve clicks, version v-000002" in call(*args, "--dry-run")
        (port,) = container["ports"]
        assert f"--port={port['containerPort']}" in args
    volumes = [one["name"] for one in service["spec"]["predictor"]["volumes"]]
    (container,) = service["spec"]["predictor"]["containers"]
    assert [one["name"] for one in container["volumeMounts"]] == volumes
    config = ModelConfig(port=0, threads=1, poll=0, cache=tmp_path)
    with serving(config, (f"clicks={uri('models/clicks')}",)) as one:
        for name in ("readinessProbe", "livenessProbe"):
            probe = container[name]["httpGet"]
            assert probe["port"] == container["ports"][0]["containerPort"]
            at = f"http://{one.address}{probe['path']}"
            assert urllib.request.urlopen(at, timeout=60).status == 200
