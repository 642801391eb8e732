"""Which unseen ids get a row: ``admission=`` of a table's configuration.

An id that gets none reads as its initial value; its gradients are dropped and
the id is counted as refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from persia import _core, errors
from persia.base.check import real, whole

__all__ = ["Admission", "Probability", "Sightings", "parse"]


class Admission:
    """The base of all policies; use one of its subclasses.

    Attributes:
        policy: its name in checkpoints.
        settings: its fields, and the options of the core that they are.
    """

    policy: ClassVar[str] = ""
    settings: ClassVar[dict[str, str]] = {}

    def options(self) -> dict[str, Any]:
        """Its options of a table, by the names of the core."""
        kind = _core.TABLE_OPTIONS["admit"].index(self.policy)
        given = {
            option: type(_UNSET[option])(getattr(self, field))
            for field, option in self.settings.items()
        }
        return {"admit": kind} | _UNSET | given

    @staticmethod
    def from_options(options: Mapping[str, Any]) -> Admission:
        """The policy that a table has, by what :meth:`options` gave it."""
        name = _core.TABLE_OPTIONS["admit"][options["admit"]]
        (made,) = (c for c in Admission.__subclasses__() if c.policy == name)
        return made(**{f: options[o] for f, o in made.settings.items()})


_UNSET: dict[str, Any] = {
    "admission": 1.0,
    "sightings": 0,
    "sightings_kept": 0,
}


@dataclass(frozen=True)
class Probability(Admission):
    """Admits an unseen id with probability p, at each update with it.

    Args:
        p: in (0, 1]; 1: every id at once.
    """

    p: float
    policy = "probability"
    settings: ClassVar[dict[str, str]] = {"p": "admission"}

    def __post_init__(self) -> None:
        if not 0.0 < real(self.p) <= 1.0:
            raise errors.InvalidArgument(
                f"admission is {self.p!r}, need 'all', a probability in "
                "(0, 1] or an object of persia.admission"
            )


@dataclass(frozen=True)
class Sightings(Admission):
    """Each at its n-th update.

    The updates before are counted in a filter of a bounded size, which is in
    checkpoints. It has 4 bytes for each of ``remember`` ids, on all servers
    together. An id that finds no place there takes that of an old one. About
    one id of a million counts for another one.

    Args:
        n: the update that makes the row, 2 to 255.
        remember: ids whose updates are counted, 1 to 2**36. It is rounded up
            to 65,536 times a power of two.
    """

    n: int
    remember: int = 1 << 20
    policy = "sightings"
    settings: ClassVar[dict[str, str]] = {
        "n": "sightings",
        "remember": "sightings_kept",
    }

    def __post_init__(self) -> None:
        whole("Sightings: n", self.n, 2, 255)
        whole("Sightings: remember", self.remember, 1, 1 << 36)


def as_admission(where: str, value: Any) -> Admission:
    """The policy of ``admission=``: itself, "all" or a probability."""
    if isinstance(value, Admission):
        return value
    try:
        return Probability(1.0 if value == "all" else value)
    except errors.InvalidArgument as error:
        raise errors.InvalidArgument(f"{where}: {error}") from None


def parse(text: str) -> Admission:
    """The policy that an option names.

    Args:
        text: "all", a probability, or "sightings:N" with N updates.

    Raises:
        ValueError: it is none of them.
    """
    word, _, argument = text.partition(":")
    try:
        if word == "sightings":
            return Sightings(int(argument))
        return Probability(1.0 if text == "all" else float(text))
    except ValueError:
        raise ValueError(
            "need all, a probability in (0, 1], or sightings:N with N from 2 "
            "to 255"
        ) from None
