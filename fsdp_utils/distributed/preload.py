"""What one process imports so that no rank has to: the ranks of this machine are its forks."""

import contextlib
import gc
import importlib

from fsdp_utils.torch_internals.names import DYNAMO

# Nothing of it becomes garbage. To look for some takes a second here, 0.2 s for each gc.collect() on a rank,
# and another second where the process ends.
gc.disable()
for module in (
    DYNAMO,  # fully_shard imports it: most of a second on each rank
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "fsdp_utils.distributed.rank_process",
):
    with contextlib.suppress(ImportError):  # who needs it is told on the ranks
        importlib.import_module(module)
gc.freeze()
gc.enable()
