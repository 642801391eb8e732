"""URLs that are opened."""

from __future__ import annotations

from persia import errors
from persia.redaction import MARK, Location

__all__ = ["whole"]


def whole(url: str) -> str:
    """A path or URL as it was given.

    Raises:
        InvalidArgument: it is what a checkpoint has kept of a URL.
    """
    url = Location(url).whole
    if "://" in url and MARK in url:
        raise errors.InvalidArgument(
            f"{url} is what a checkpoint has kept of a URL, which is neither "
            "key nor signature: give the option with the whole URL again "
            "(--data, --eval-data, --save)"
        )
    return url
