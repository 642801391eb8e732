"""The command line: ``persia`` and ``python -m persia``."""

from persia.cli.app import main

__all__ = ["main"]
