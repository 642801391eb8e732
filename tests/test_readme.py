"""The example of the README runs as it is printed there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_readme_example(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # The same lines over fewer rows: the test is about names and arguments.
    short, changes = re.subn(r"rows=[\d_]+", "rows=20_000", example)
    assert changes == 1
    result = subprocess.run(
        [sys.executable, "-c", short],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "LATEST").exists()
