"""The data loader as a process of its own: :class:`Sender`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from persia import _core
from persia.base.check import kind, number, whole
from persia.base.patience import saying_so
from persia.base.traces import begin_traces
from persia.base.warning import warn
from persia.data.batches.batch import Batch, check_tensors, flat
from persia.data.batches.jagged import tensors_of
from persia.distributed.addresses import (
    job_of,
    namespace_of,
    resolve_workers,
    why_workers_away,
)
from persia.distributed.listing import follow
from persia.distributed.peers import peers
from persia.distributed.security import Security


class Sender:
    """Sends batches to embedding workers, for ranks with a
    :class:`persia.Stream`.

    Workers get the batches in turn. Where one's queue is full, :meth:`send`
    waits until ranks have trained. In a ``with`` block that ends without an
    error the epoch is ended, too. Call :meth:`flush` before: only that waits
    until all is trained, and raises what batches ended with.

    Each batch is kept until workers report that it is done. A worker that was
    started again, or has taken the loader for dead, gets its batches once
    more. The batches of one that cannot be reached go to the others. A thread
    does that as long as the sender is open, and tells workers that the loader
    is alive: the epoch of one that is silent for 30 seconds (``persia serve
    worker --loader-silence``) ends.

    Args:
        workers: addresses "host:port" of embedding workers, several with
            commas between or as a list. Default: PERSIA_WORKERS. Lists that
            begin with "file:" or "dns:" are read again while it is open:
            "file:/shared/workers", one address a line, or "dns:name:port".
        namespace: of the servers and workers; default: PERSIA_NAMESPACE,
            else "default".
        name: of what it sends. A process that sends the same batches in the
            same order under the same name continues where an earlier one
            ended, wherever that was killed: batches that all servers have are
            passed over by :meth:`send`. Without a name batches that an earlier
            process had sent are trained again. Another job on the same servers
            needs another name. After a checkpoint was loaded that lacks
            batches which this sender need not keep any more, its methods raise
            :class:`persia.errors.RowsReplaced`: close it (``ended=False``),
            make another with the same name, and send again from the first
            batch on. A sender without a name counts them as ``lost``.
        job: the job that this loader is of: trainers of the same job train
            its batches. Default: PERSIA_RUN_ID, which ``persia launch`` sets,
            else none: trainers that name none train them.
        timeout: seconds after which it is an error that no worker can be
            reached or, with a name, that a server cannot.
        move_after: seconds after which the batches of a worker that cannot be
            reached go to others. Default: a sixth of ``timeout``.
        security: TLS and tokens; default: as the environment says, see
            :meth:`persia.distributed.Security.from_environment`.

    Raises:
        Unavailable: no worker can be reached within the timeout; or, with a
            name, a server.
        SchemaMismatch: a worker is of another namespace.
        AccessDenied: a token or certificate is missing.
    """

    def __init__(
        self,
        workers: str | Sequence[str] | None = None,
        *,
        namespace: str | None = None,
        name: str | None = None,
        job: str | None = None,
        timeout: float = 60.0,
        move_after: float | None = None,
        security: Security | None = None,
    ) -> None:
        timeout = number("timeout", timeout, 1e-9, 1e9)
        begin_traces("loader")
        given = security
        addresses, security = resolve_workers(workers, security)
        namespace = namespace_of(namespace)
        config = {
            "addresses": addresses,
            "namespace": namespace,
            "rank": 0,
            "world": 0,
            "timeout": timeout,
            "dtype": 0,
            "security": security.arguments(),
            "move_after": timeout / 6
            if move_after is None
            else number("move_after", move_after, 0, 1e9),
            "stream": 0 if name is None else _stream(name),
            "job": job_of(job),
        }
        cause = partial(why_workers_away, addresses, namespace, security)
        with saying_so(addresses, timeout, cause, "embedding workers"):
            self._core = _core.Sender(config)
        peers.watch()
        follow(self, workers, given, partial(_list, config))
        self._open = False  # batches were sent since the last end
        self._closed = False
        self._raised = 0  # of the batches that failed, by flush()

    def send(self, batch: Batch) -> None:
        """Sends one batch; returns when a worker has it in its queue.

        Raises:
            MissingFeature: the model looks up a feature that the batch has
                not.
            ShapeError: a tensor does not have an entry for each sample, or
                one that is aligned with a feature for each of its ids.
            InvalidArgument: there are more than 4096 tensors, or one has a
                name that cannot be sent.
            LimitReached: the batch is larger than the worker's queue or
                message limit.
            Unavailable: no worker can be reached within the timeout.
            Closed: whether an earlier batch was sent is not known, because
                sending it was interrupted or failed.
            RowsReplaced: see the argument ``name``; so do the other methods.
        """
        kind("batch", batch, Batch, "a persia.Batch")
        ids = batch.ids
        check_tensors(batch)
        tensors = [
            (
                name,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                _raw(t),
            )
            for name, t in flat(batch).items()
        ]
        self._open = True
        values, offsets, weights = tensors_of(ids)
        self._core.send(
            ids.stride(),
            ids.keys(),
            _raw(values),
            None if offsets is None else _raw(offsets),
            None if weights is None else _raw(weights.float()),
            tensors,
        )

    @property
    def lineage(self) -> int:
        """The lineage of the rows that have what is done. A checkpoint that
        is loaded changes it."""
        return int(self._core.counts()["lineage"])

    @property
    def position(self) -> int:
        """The number of batches, from the first one on, that are done. At the
        start that is what all servers have."""
        return self._core.counts()["position"]

    def skip(self, number: int) -> None:
        """There are no batches up to this number: the next one that is sent
        is ``number`` + 1. Waits until those that were sent are trained."""
        self._core.skip(whole("number", number, 0, 2**63 - 1))

    def claim(self, epochs: int = 1) -> str:
        """Asks workers for the batches of this name, of so many epochs.

        A claim counts as long as the sender is open. That of a sender that
        workers have not heard of for ten seconds (a third of ``persia serve
        worker --loader-silence``) ends.

        Returns:
            whether they are this sender's ("own") or another one's ("held"),
            or all of them are trained ("ended").

        Raises:
            Unavailable: no worker can be reached within the timeout.
        """
        answer = self._core.claim(whole("epochs", epochs, 1, 2**31 - 1))
        return {0: "own", 2: "held", 3: "ended"}[answer]

    def end(self) -> None:
        """Ends an epoch: the ranks' loops end when they have all batches."""
        self._core.end()
        self._open = False

    def flush(self, timeout: float | None = None) -> None:
        """Returns when every batch that was sent is trained or has failed.

        A loader that must lose none flushes before it ends: a worker that is
        killed loses its queue, and only the loader has its batches then.

        Args:
            timeout: seconds without a batch that becomes trained; None: as
                long as it takes.

        Raises:
            DeadlineExceeded: no batch was trained for ``timeout``.
            Unavailable: no worker can be reached for the timeout of the
                sender.
            MissingFeature, LimitReached, NonFiniteGradient: a batch ended
                without an update for that reason, since the last call; the
                text has its number. ``stats()["failed"]`` counts all of them.
            UpdatesLost: the same, as trainers took a batch four times and
                returned no gradients that were applied. What servers lost of
                trained batches is not raised: see ``stats()["lost"]``.
        """
        if timeout is not None:
            timeout = number("timeout", timeout, 1e-9, 1e9)
        try:
            self._core.flush(timeout or 0.0)
        finally:
            self._raised = self._core.counts()["failed"]

    def stats(self) -> dict[str, int]:
        """Batches. ``sent``: in all. ``done``: of them, from the first on,
        those that need not be sent again, as far as workers have reported.
        ``passed``: over, as all servers have them. ``moved``: sent again,
        after a worker was started again or could not be reached.
        ``failed``: of ``done``, batches without an update; :meth:`flush`
        raises why. ``lost``: batches that were trained, and are not in the
        rows of the servers any more: a server was started again without
        them, or a checkpoint was loaded (with a name see
        :class:`persia.errors.RowsReplaced`). ``away``: workers that cannot
        be reached now. ``sending_ns``: how long it sent, or waited until a
        worker had room."""
        counts = self._core.counts()
        del counts["stream"], counts["position"], counts["lineage"]
        return counts

    def close(self, ended: bool = True) -> None:
        """Ends the epoch, if batches were sent in it, and the connection;
        waits for no batch, see :meth:`flush`. Workers do not wait for more
        epochs of this loader.

        Args:
            ended: False: workers wait, for a while, for another sender that
                continues, and the epoch does not end.
        """
        if ended and self._open:
            self.end()
        self._open = False
        if not self._closed:
            self._warn_failed()
        self._closed = True
        self._core.close(ended)

    def _warn_failed(self) -> None:
        failed = self._core.counts()["failed"] - self._raised
        if failed:
            warn(
                f"persia.data.Sender: {failed} batches ended without an "
                "update; flush() before the end raises why"
            )

    def __enter__(self) -> Sender:
        return self

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(ended=error is None)


def _list(config: dict[str, Any], sender: Sender, found: list[str]) -> None:
    """The workers are these now."""
    sender._core.set_workers(config | {"addresses": found})


def _stream(name: str) -> int:
    """The number of a name; not 0."""
    text = kind("name", name, str, "a string").encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"persia-loader")
    return int.from_bytes(digest.digest(), "little") or 1


def _raw(tensor: Tensor) -> Any:
    """Its bytes, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
