"""Deltas: what changed in a training, for models that are served meanwhile."""
