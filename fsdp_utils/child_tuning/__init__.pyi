from fsdp_utils.child_tuning.fisher import fisher_mask as fisher_mask
from fsdp_utils.child_tuning.optimizer import ChildTuningAdamW as ChildTuningAdamW
