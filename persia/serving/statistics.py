"""What a version has answered, by the names of Triton's statistics."""

from __future__ import annotations

import threading
import time
from typing import Any

#: Of requests that were answered, and of those that failed.
KINDS = (
    *("success", "fail", "queue"),
    *("compute_input", "compute_infer", "compute_output"),
)


class Statistics:
    """Counts requests, and sums the time that they took."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found = {kind: [0, 0] for kind in KINDS}
        self._batches = 0
        self._last = 0

    def add(self, kind: str, ns: int, n: int = 1) -> None:
        """`n` requests took `ns` nanoseconds together."""
        with self._lock:
            one = self._found[kind]
            one[0] += n
            one[1] += ns

    def computed(self, n: int, **ns: int) -> None:
        """A batch of `n` requests was computed.

        Args:
            n: requests.
            ns: of them together, by kind.
        """
        with self._lock:
            self._batches += 1
            self._last = time.time_ns() // 1_000_000
            for kind, took in ns.items():
                one = self._found[kind]
                one[0] += n
                one[1] += took

    def document(self) -> dict[str, Any]:
        """As Triton answers it; `last_inference` is in milliseconds since
        1970."""
        with self._lock:
            return {
                "last_inference": self._last,
                "inference_count": self._found["success"][0],
                "execution_count": self._batches,
                "inference_stats": {
                    kind: {"count": n, "ns": ns}
                    for kind, (n, ns) in self._found.items()
                },
            }
