"""The example of the page on models runs as printed there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_readme import blocks, run


@pytest.mark.slow
def test_the_page_on_models(tmp_path: Path) -> None:
    (example,) = blocks("docs/models.md")
    name, value = run(example, tmp_path).split()
    assert name == "NDCG@3"
    assert float(value) > 0.9
