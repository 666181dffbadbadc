"""Imported once by the fork server, so that the ranks, which are forked from it, need not import it."""

import contextlib
import gc
import importlib

from fsdp_utils.torch_internals.names import DYNAMO

# Garbage collection is off: these objects live until exit. A collection takes a second here, 0.2 s on a rank,
# and another second at the end of a process.
gc.disable()
for module in (
    DYNAMO,  # fully_shard imports it: most of a second on each rank
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "fsdp_utils.distributed.rank_process",
):
    with contextlib.suppress(ImportError):  # a rank that needs it raises this again
        importlib.import_module(module)
gc.freeze()
gc.enable()
