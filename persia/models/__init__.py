"""Click models in plain torch, to use as they are or to copy and change.

A model takes its embeddings as the first argument and is an ordinary
``nn.Module`` after that: ``model(dense, ids)`` gives one logit a sample;
:class:`MMoE` gives one a task.
"""

from persia.models.dcn import DCNv2
from persia.models.deepfm import DeepFM
from persia.models.din import DIN
from persia.models.dlrm import DLRM
from persia.models.mmoe import MMoE
from persia.models.wide_deep import WideDeep

__all__ = ["DIN", "DLRM", "DCNv2", "DeepFM", "MMoE", "WideDeep"]
