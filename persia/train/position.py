"""Where a run of ``persia train`` is in its data: kept in its checkpoints,
and found again by a run that has other options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from persia import errors
from persia.data import Dataset, Files, Kafka
from persia.data.sharing import Sharing
from persia.datasets import Criteo
from persia.train.config import TrainConfig, is_made, resolve
from persia.train.extra import Extra
from persia.train.trainer import Trainer

TEST_SHARE = 0.1  # of files, where no option says otherwise


class Position(NamedTuple):
    """Where a run is.

    Attributes:
        epoch: from 0.
        batch: batches of it that this rank has trained.
        offset: samples of the batch after these.
        sharings: the epoch is what is left of one that other ranks began, see
            :class:`persia.data.sharing.Shared`; then both numbers are 0.
    """

    epoch: int
    batch: int = 0
    offset: int = 0
    sharings: tuple[Sharing, ...] = ()


class InTopics:
    """Where a rank is in topics of Kafka, for its checkpoints."""

    def __init__(self, data: Kafka, trainer: Trainer) -> None:
        self._data = data
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """After the batches that are trained, not those taken ahead."""
        return self._data.state_dict(self._trainer.batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._data.load_state_dict(state)
        self._trainer.batch = state["batches"]

    def commit(self) -> None:
        self._data.commit(self.state_dict())


class InFiles:
    """Where a rank is in files, for its checkpoints: a byte of one."""

    def __init__(self, data: Files, trainer: Trainer) -> None:
        self._data = data
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return self._data.state_dict(self._trainer.batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Batches of another size count from the beginning."""
        at = self._trainer
        if at.batch and not at.offset and state["batches"] == at.batch:
            self._data.load_state_dict(state)


def source(config: TrainConfig, data: Dataset | None) -> dict[str, Any]:
    """What decides which samples a pass has, and their order, by option.

    ``data`` tells files and schema from others of the same name, which may
    lie elsewhere by now; without it their names have to do.
    """
    window = {} if config.window is None else {"window": config.window}
    if is_made(config.data):  # row r is a function of (seed, r)
        return {"data": str(config.data), "seed": config.seed} | window
    files: Any = str(config.data)
    schema: Any = config.table_schema and str(config.table_schema)
    if isinstance(data, Files):
        files = [[os.path.basename(name), n] for name, n in data.sizes]
    if isinstance(data, Files) and not isinstance(data, Criteo):
        # Checkpoints from before there were versions have none.
        version = data.schema.hash_version
        schema = data.schema.model_dump_json(
            exclude_defaults=True,
            exclude={"hash_version"} if version == 1 else None,
        )
        if version > 1:
            schema = f"{schema} of version {version}"
    share = TEST_SHARE if config.eval_split is None else config.eval_split
    size = config.batch_size
    return {
        "data": files,
        "schema": schema,
        "eval-split": 0.0 if config.eval_data is not None else share,
        # As many samples are read at a time, whole batches.
        "shuffle": -(-config.shuffle // size) * size,
        "seed": config.seed if config.shuffle else None,
    } | window


def find(
    extra: Extra,
    config: TrainConfig,
    data: Dataset,
    ranks: int,
) -> Position:
    """Where to continue.

    Args:
        extra: of the checkpoint.
        config: of the run that continues.
        data: that it trains on.
        ranks: that it has.

    Raises:
        InvalidArgument: the checkpoint is within an epoch, and with the
            options of this run that place is not known.
    """
    epoch, batch, samples = extra.epoch, extra.batch, extra.samples
    if not batch and not samples:
        return Position(epoch)
    begin = f"the checkpoint was made within epoch {epoch + 1}: "
    then = resolve(extra.options)
    there = extra.source or source(then, None)
    here = source(config, None if extra.source is None else data)
    if here != there:
        names = [n for n in here | there if here.get(n) != there.get(n)]
        differ = "; ".join(
            f"{name}: {here.get(name)} here, {there.get(name)} there"
            for name in names
        )
        raise errors.InvalidArgument(
            f"{begin}to continue there needs the same samples in the same "
            f"order, but they differ by {differ}"
        )
    size, before = config.batch_size, then.batch_size
    if samples is None:
        if size != before:
            raise errors.InvalidArgument(
                f"{begin}it is of an earlier version of Persia, so continue"
                f" with `batch_size={before}`"
            )
        return Position(epoch, batch)
    was = extra.ranks or 1
    # Each rank leaves out the malformed lines of its own share, and a window
    # cuts batches at its ends, so that only the same batches have the same
    # place.
    shares = not is_made(config.data) and max(was, ranks) > 1
    if shares or extra.left or config.window is not None:
        if before != size or (config.window is not None and was != ranks):
            raise errors.InvalidArgument(
                f"{begin}continue with {was} ranks and"
                f" `batch_size={before}`, as it was trained, not {ranks} and"
                f" {size}: other ones have other batches"
            )
        if was == ranks and not extra.left:
            return Position(epoch, batch)
        earlier = [Sharing.of(*one) for one in extra.left]
        return Position(epoch, sharings=(*earlier, Sharing.even(was, batch)))
    batch, offset = divmod(samples, size * ranks)
    if offset and ranks > 1:
        raise errors.InvalidArgument(
            f"{begin}{samples:,} samples are no whole batches of {size} for "
            f"each of {ranks} ranks; continue with another batch size, such as"
            f" `batch_size={before}`"
        )
    return Position(epoch, batch, offset)
