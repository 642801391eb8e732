"""What a checkpoint of ``persia train`` keeps beside the model."""

from __future__ import annotations

import dataclasses
from typing import Any

from persia import errors


@dataclasses.dataclass(frozen=True)
class Extra:
    """``extra`` of ``store.save``, whose keys are these names. What has a
    default is absent in older checkpoints.

    Attributes:
        options: of the run, as :meth:`persia.train.config.TrainConfig.options`
            gives them.
        epoch: from 0.
        batch: of the epoch, of each rank.
        step: of the dense optimizer.
        samples: of the epoch, by all ranks: a batch may have another size
            in the run that continues.
        ranks: of the run.
        placed: whether each rank kept its position in the data.
        left: the epoch is what other numbers of ranks had left of one: see
            :class:`persia.data.sharing.Shared`.
        source: see :func:`persia.train.position.source`.
        keys: names of the id features.
        dense_features: how many there are.
        tasks: names of the labels, where there are several.
        schema: of the data, as a checkpoint keeps it; None: they have none.
        best: the state of :class:`persia.train.best.Best`.
    """

    options: dict[str, Any]
    epoch: int
    batch: int
    step: int = 0
    samples: int | None = None
    ranks: int | None = None
    placed: bool = False
    left: list[Any] = dataclasses.field(default_factory=list)
    source: dict[str, Any] | None = None
    keys: list[str] | None = None
    dense_features: int = 0
    tasks: list[str] = dataclasses.field(default_factory=list)
    schema: Any = None
    best: dict[str, Any] | None = None

    @classmethod
    def of(cls, saved: Any, path: object) -> Extra:
        """What a checkpoint has.

        Args:
            saved: as :func:`persia.checkpoint.read_extra` gives it.
            path: of the checkpoint, for the error.

        Raises:
            SchemaMismatch: it is not of ``persia train``.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            return cls(**{k: v for k, v in saved.items() if k in names})
        except (AttributeError, TypeError):
            raise errors.SchemaMismatch(
                f"{path} was not written by persia train; load it with "
                "Store.load"
            ) from None

    def to_save(self) -> dict[str, Any]:
        """For ``store.save(extra=...)``."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }
