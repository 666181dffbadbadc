"""A training program with FSDP2 that resumes after failures, from a laptop to a cluster.

`torchrun ... -m fsdp_utils.train --config run.yaml --out runs/a` trains, saves in the background, and resumes
from its newest checkpoint; `train(TrainConfig(...))` does it from Python. Uses the other rooms; none of them
imports it. Needs the extra [train].
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
