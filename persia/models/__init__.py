"""Models in plain torch, to use as they are or to copy and change.

A model takes its embeddings as the first argument and is an ordinary
``nn.Module`` after that. Click models are called as ``model(dense, ids)`` and
give one logit a sample; :class:`MMoE` and :class:`SharedBottom` give one a
task. :class:`TwoTower`, :class:`SASRec` and :class:`HSTU` retrieve: they are
called as ``model(ids)`` and give vectors.
"""

from persia.models.balance import balance_by_tokens, take
from persia.models.dcn import DCNv2
from persia.models.deepfm import DeepFM
from persia.models.din import DIN
from persia.models.dlrm import DLRM
from persia.models.hstu import HSTU
from persia.models.hstu_block import HSTUBlock
from persia.models.losses import Frequencies, in_batch_softmax
from persia.models.mmoe import MMoE, SharedBottom
from persia.models.sasrec import SASRec
from persia.models.sequences import last_states, next_item_loss
from persia.models.two_tower import NearestItems, TwoTower
from persia.models.wide_deep import WideDeep

__all__ = [
    "DIN",
    "DLRM",
    "HSTU",
    "DCNv2",
    "DeepFM",
    "Frequencies",
    "HSTUBlock",
    "MMoE",
    "NearestItems",
    "SASRec",
    "SharedBottom",
    "TwoTower",
    "WideDeep",
    "balance_by_tokens",
    "in_batch_softmax",
    "last_states",
    "next_item_loss",
    "take",
]
