"""The examples of the README and the quick start run as printed there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(path: str) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(program: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_readme(tmp_path: Path) -> None:
    (example,) = blocks("README.md")
    # The same lines over fewer rows: the test is about names and arguments.
    short, changes = re.subn(r"rows=[\d_]+", "rows=20_000", example)
    assert changes == 1
    run(short, tmp_path)
    assert (tmp_path / "out" / "LATEST").exists()


def test_quickstart(tmp_path: Path) -> None:
    (example,) = blocks("docs/quickstart.md")
    assert run(example, tmp_path).startswith("3\n")


def test_migrate(tmp_path: Path) -> None:
    (example,) = blocks("docs/migrate.md")
    found = re.search(
        r"loss ([\d.]+), after 30 steps ([\d.]+)", run(example, tmp_path)
    )
    assert found is not None
    assert float(found[2]) < float(found[1]) / 2


def test_training(tmp_path: Path) -> None:
    example, after = blocks("docs/training.md")
    found = re.findall(r"step (\d+): AUC ([\d.]+)", run(example, tmp_path))
    assert [int(step) for step, _ in found] == [20]
    assert float(found[0][1]) > 0.5
    assert (tmp_path / "log.csv").read_text().startswith("step,name,value")
    words = "train --rows 3000 --threads 1 --save".split()
    folder = tmp_path / "after"
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-m", "persia", *words, str(folder / "out")],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=150,
    )
    assert run(after, folder).startswith("tensor([")
