"""The command line: ``persia`` and ``python -m persia``."""

from __future__ import annotations

import atexit
import gc
import os
import sys

from persia.base.environment import variable
from persia.base.signals import end_at_once


def main() -> None:
    """Runs a command. Where a part of the installation cannot be loaded, that
    is one line, and ``persia doctor`` works all the same."""
    # Threads of torch that wait take no processor from others; before torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    atexit.register(gc.freeze)  # nothing is searched for garbage at the end
    end_at_once()  # before what takes a while to import
    try:
        from persia.cli.app import main as run
    except ImportError as error:
        if sys.argv[1:2] == ["doctor"]:
            from persia import doctor

            sys.exit(doctor.main("--json" in sys.argv))
        if (variable("PERSIA_DEBUG") or "0") != "0":
            raise
        text = " ".join(str(error).splitlines())
        line = f"persia: error[{type(error).__name__}]: {text}"
        print(f"{line}; persia doctor examines all parts", file=sys.stderr)
        sys.exit(1)
    run()
