"""Data sets as iterables of :class:`persia.Batch`.

Reading, decompressing and hashing run in C and in background threads, also
while the model trains. Nothing here touches a table: all of
it works in the forked workers of ``torch.utils.data.DataLoader`` (pass
``batch_size=None``), which then share the batches among them.
"""

from persia.data.base import value_hash
from persia.datasets.clicks import ClickStream, criteo_syn, kwai_video
from persia.datasets.criteo import Criteo
from persia.datasets.csv import CSV
from persia.datasets.synthetic import SyntheticCTR
from persia.datasets.taobao import Avazu, Taobao, prepare_taobao

__all__ = [
    "CSV",
    "Avazu",
    "ClickStream",
    "Criteo",
    "SyntheticCTR",
    "Taobao",
    "criteo_syn",
    "kwai_video",
    "prepare_taobao",
    "value_hash",
]
