"""Benchmarks: one command each, as ``python -m benchmarks.table``."""
