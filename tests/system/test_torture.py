"""Short rounds of random kills; ``make test-long`` has more of them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from persia import _core
from tests.system.processes import ROOT, environment

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

ROUNDS = 10


@pytest.mark.timeout(400)
def test_short_rounds() -> None:
    """No row is above its count, no update is torn, what is missing was told,
    and all ends."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "persia", "torture", "--short"),
            *("--minutes", "0", "--rounds", str(ROUNDS)),
        ],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"rounds +{ROUNDS}\n", done.stdout)
