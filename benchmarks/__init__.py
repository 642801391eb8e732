"""Benchmarks: one command each (``python -m benchmarks.table``), JSON lines out."""
