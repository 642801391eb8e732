"""Batches, and the jagged ids in them."""
