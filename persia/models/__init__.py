"""Click models in plain torch, to use as they are or to copy and change.

A model takes its embeddings as the first argument and is an ordinary
``nn.Module`` after that: ``model(dense, ids)`` gives one logit a sample.
"""

from persia.models.deepfm import DeepFM
from persia.models.dlrm import DLRM

__all__ = ["DLRM", "DeepFM"]
