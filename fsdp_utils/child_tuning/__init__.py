"""Child tuning: fine-tune a part of each gradient, under FSDP too.

`ChildTuningAdamW` is AdamW with a mask on gradients, random or fixed; `fisher_mask` computes a fixed one.
Source: Xu et al., Raise a Child in Large Language Model, https://arxiv.org/abs/2109.05687
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.child_tuning.fisher import fisher_mask
    from fsdp_utils.child_tuning.optimizer import ChildTuningAdamW

__all__ = ["ChildTuningAdamW", "fisher_mask"]
_MODULE_OF = {
    "ChildTuningAdamW": "optimizer",
    "fisher_mask": "fisher",
}
__getattr__ = loader(__name__, _MODULE_OF)
