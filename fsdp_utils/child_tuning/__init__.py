"""Child tuning: fine-tune a part of each gradient, under FSDP too.

`ChildTuningAdamW` is AdamW with a mask on gradients, random or fixed; `fisher_mask` computes a fixed one.
Source: Xu et al., Raise a Child in Large Language Model, https://arxiv.org/abs/2109.05687
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
