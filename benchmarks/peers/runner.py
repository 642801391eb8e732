"""Runs in the peers' own interpreter: answers calls over a pair of pipes.

One JSON line a call, ``{"call": NAME, "args": {...}}``, one a result,
``{"result": ...}`` or ``{"error": TEXT}``.  Whatever a peer prints goes to
standard error.  Between calls the process sleeps in a read, so that it takes
nothing from the measurements of others.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def versions() -> dict[str, str]:
    """Versions of the peers in this interpreter."""
    import fbgemm_gpu
    import torch
    import torchrec

    return {
        "torch": torch.__version__,
        "fbgemm": fbgemm_gpu.__version__,
        "torchrec": torchrec.__version__,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    from benchmarks.peers import dlrm, layers

    kinds: dict[str, Callable[..., Any]] = {
        "fbgemm": layers.Fbgemm,
        "fbgemm_threads": layers.FbgemmThreads,
        "torchrec": layers.Torchrec,
        "dlrm": dlrm.Dlrm,
    }
    objects: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, args = request["call"], request["args"]
        answer: dict[str, Any]
        try:
            if name == "versions":
                answer = {"result": versions()}
            elif name == "open":
                key, kind = args.pop("name"), args.pop("kind")
                objects[key] = kinds[kind](**args)
                answer = {"result": None}
            else:
                key = args.pop("name")
                answer = {"result": getattr(objects[key], name)(**args)}
                if name == "close":
                    del objects[key]
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
