"""The data loader as a process of its own: :class:`Sender`."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from persia import _core
from persia.base.check import kind, number
from persia.data.jagged import Batch, tensors_of
from persia.distributed.addresses import MESSAGE_LIMIT, resolve_workers
from persia.distributed.security import Security

__all__ = ["Sender"]

_TENSORS = ("dense", "label", "weight", "timestamp")


class Sender:
    """Sends batches to embedding workers, for ranks with a
    :class:`persia.Stream`.

    Workers get the batches in turn. Where one's queue is full, :meth:`send`
    waits until ranks have trained. In a ``with`` block that ends without an
    error the epoch is ended, too.

    Args:
        workers: addresses "host:port" of embedding workers, several with
            commas between or as a list. Default: PERSIA_WORKERS.
        namespace: of the servers and workers.
        timeout: seconds after which a worker that cannot be reached is an
            error.
        security: TLS and tokens; default: as the environment says, see
            :meth:`persia.distributed.Security.from_environment`.

    Raises:
        Unavailable: a worker cannot be reached.
        SchemaMismatch: a worker is of another namespace.
        AccessDenied: a token or certificate is missing.
    """

    def __init__(
        self,
        workers: str | Sequence[str] | None = None,
        *,
        namespace: str = "default",
        timeout: float = 60.0,
        security: Security | None = None,
    ) -> None:
        addresses, security = resolve_workers(workers, security)
        self._core = _core.Sender(
            {
                "addresses": addresses,
                "namespace": kind("namespace", namespace, str, "a string"),
                "rank": 0,
                "world": 0,
                "timeout": number("timeout", timeout, 1e-9, 1e9),
                "message_limit": MESSAGE_LIMIT,
                "dtype": 0,
                "lost": 0,
                "security": security.arguments(),
            }
        )
        self._open = False  # batches were sent since the last end

    def send(self, batch: Batch) -> None:
        """Sends one batch; returns when a worker has it in its queue.

        Weights of ids are left out.

        Raises:
            MissingFeature: the model looks up a feature that the batch has
                not.
            LimitReached: the batch is larger than the worker's queue or
                message limit.
            Unavailable: the worker cannot be reached within the timeout.
            Closed: whether an earlier batch was sent is not known, because
                sending it was interrupted or failed.
        """
        kind("batch", batch, Batch, "a persia.Batch")
        ids = batch.ids
        tensors = [
            (
                name,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                _raw(t),
            )
            for name in _TENSORS
            if (t := getattr(batch, name)) is not None
        ]
        self._open = True
        values, offsets, _ = tensors_of(ids)
        self._core.send(
            ids.stride(),
            ids.keys(),
            _raw(values),
            None if offsets is None else _raw(offsets),
            tensors,
        )

    def end(self) -> None:
        """Ends an epoch: the ranks' loops end when they have all batches."""
        self._core.end()
        self._open = False

    def flush(self, timeout: float | None = None) -> None:
        """Returns when every batch that was sent is trained, or given up.

        A worker that was started again has lost its queue. This and
        :meth:`send` send it the batches again that are not done: a loader
        that must lose none flushes before it ends.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            DeadlineExceeded: after ``timeout``.
            Unavailable: a worker cannot be reached.
        """
        if timeout is not None:
            timeout = number("timeout", timeout, 1e-9, 1e9)
        self._core.flush(timeout or 0.0)

    def stats(self) -> dict[str, int]:
        """``sent``: batches; ``done``: those of them from the first on that
        are in the tables, as far as workers have told."""
        counts = self._core.counts()
        return {"sent": counts["sent"], "done": counts["done"]}

    def close(self) -> None:
        """Ends the epoch, if batches were sent in it, and the connection."""
        if self._open:
            self.end()
        self._core.close()

    def __enter__(self) -> Sender:
        return self

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._open = False
        self.close()


def _raw(tensor: Tensor) -> Any:
    """Its bytes, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
