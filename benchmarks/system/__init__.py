"""Systems of several processes, for the benchmarks of the distributed part.

``processes`` starts and ends them, ``trainer`` is what runs in a trainer,
``job`` is a whole training job for torchrun.
"""
