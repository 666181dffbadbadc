"""Private classes and functions of torch, under the names that the library has for them.

`NAMES` says what each is for, and which public name comes closest and why it does not serve. Every one of
them exists since torch 2.9, the oldest that the tests were run with, or longer.
`from fsdp_utils.torch_internals.names import ShardedTensor` imports torch's module then, and its error says
what the name is for if this torch lacks it.

Other files may name these: `torch.utils._pytree` and `torch.utils._python_dispatch`, which have no public
counterpart and are torch's documented way to extend it; and operators under `torch.ops`, whose names are part
of saved programs.
"""
# ruff: noqa: F401 (other files import these names from here)

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import _foreach_add_ as foreach_add_
    from torch import _foreach_copy_ as foreach_copy_
    from torch import _fused_adamw_ as fused_adamw_
    from torch._C._profiler import _RecordFunctionFast as RecordFunctionFast
    from torch._compile import _disable_dynamo as disable_dynamo
    from torch._guards import detect_fake_mode as detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.autograd import _get_sequence_nr as sequence_nr
    from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing as apply_activation_checkpointing,
    )
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper as checkpoint_wrapper,
    )
    from torch.distributed.fsdp._common_utils import _get_param_to_fqns as get_param_to_fqns
    from torch.distributed.fsdp._flat_param import FlatParamHandle as FlatParamHandle
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
    from torch.distributed.fsdp._runtime_utils import _lazy_init as fsdp1_lazy_init
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes


class Private(NamedTuple):
    owner: str  # the module, or "module:Class"
    name: str
    why: str  # what for, and why nothing public serves


_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_FSDP1 = "torch.distributed.fsdp._runtime_utils"
_FLAT = "torch.distributed.fsdp._flat_param"
_FSDP2 = "torch.distributed.fsdp._fully_shard"  # in torch.distributed._composable.fsdp before 2.6
_HOOK = (
    "to observe when a unit computes in backward: torch has no public hooks on what FSDP does, and those of "
    "nn.Module run before or after FSDP's own work, not around it"
)
_FAKE = (
    "replaced while a rank is simulated on fake tensors, which have no memory: FSDP has no switch for that"
)

# What is imported from here, by the name that it has here.
NAMES: dict[str, Private] = {
    # FSDP
    "FlatParamHandle": Private(_FLAT, "FlatParamHandle", "its unshard and reshard are recorded: " + _HOOK),
    "FSDPParam": Private(
        f"{_FSDP2}._fsdp_param",
        "FSDPParam",
        "it holds gradients of microbatches; after an exception it is found by its type, as nothing lists it",
    ),
    "FSDPParamGroup": Private(
        f"{_FSDP2}._fsdp_param_group",
        "FSDPParamGroup",
        "its unshard, reshard and post_backward are recorded. FSDPModule.set_custom_all_gather and "
        "set_custom_reduce_scatter see the communication only, and not when parameters are freed",
    ),
    "fsdp2_pre_backward": Private(f"{_FSDP2}._fsdp_state:FSDPState", "_pre_backward", _HOOK),
    "fsdp1_pre_backward": Private(_FSDP1, "_pre_backward_hook", _HOOK),
    "fsdp1_post_backward": Private(_FSDP1, "_post_backward_hook", _HOOK),
    # of a unit whose parameters are all frozen
    "fsdp1_post_backward_frozen": Private(_FSDP1, "_post_backward_reshard_only_hook", _HOOK),
    "fsdp1_lazy_init": Private(
        _FSDP1, "_lazy_init", "what the first forward does once; to do it before the steps that are simulated"
    ),
    "fsdp1_is_allocated": Private(_FLAT, "_data_ptr_allocated", _FAKE),
    "fsdp1_same_storage": Private(_FLAT, "_same_storage", _FAKE),
    "fsdp2_chunks": Private(
        f"{_FSDP2}._fsdp_param", "_chunk_with_empty", "takes as long as there are ranks; " + _FAKE
    ),
    "get_param_to_fqns": Private(
        "torch.distributed.fsdp._common_utils",
        "_get_param_to_fqns",
        "names of the parameters inside FSDP1's flat ones; named_parameters() gives the flat ones only",
    ),
    # DTensor and ShardedTensor
    "dtensor_shapes": Private(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator",
        "_propagate_tensor_meta_non_cached",
        "works on fake tensors of the global size, which a record of allocations has to leave out",
    ),
    "ShardedTensor": Private(
        "torch.distributed._shard.sharded_tensor",
        "ShardedTensor",
        "what FSDP1's sharded state dict consists of; torch has never had it in a public module",
    ),
    "checkpoint_wrapper": Private(
        _WRAPPER,
        "checkpoint_wrapper",
        "activation checkpointing of a module: documented, but in a private module; "
        "torch.utils.checkpoint.checkpoint wraps a call",
    ),
    "apply_activation_checkpointing": Private(
        _WRAPPER, "apply_activation_checkpointing", "the same for each block of a model"
    ),
    # fake tensors, the dispatcher, autograd, the profiler, the compiler
    "FakeTensorMode": Private(
        "torch._subclasses.fake_tensor",
        "FakeTensorMode",
        "tensors without memory; torch's documentation imports it from this private module",
    ),
    "detect_fake_mode": Private(
        "torch._guards", "detect_fake_mode", "whether a FakeTensorMode is on; nothing public says it"
    ),
    "disable_current_modes": Private(
        "torch.utils._python_dispatch",
        "_disable_current_modes",
        "copies a buffer unseen by selective checkpointing, which expects those of the first forward; "
        "nothing public suspends a TorchDispatchMode",
    ),
    "RecordFunctionFast": Private(
        "torch._C._profiler",
        "_RecordFunctionFast",
        "marks between what is issued; torch.profiler.record_function takes 5 µs, this one 0.2 to 1.5 µs",
    ),
    "sequence_nr": Private(
        "torch.autograd",
        "_get_sequence_nr",
        "the number of autograd's next node, to see whether anything was computed; nothing public counts",
    ),
    "disable_dynamo": Private(
        "torch._compile",
        "_disable_dynamo",
        "keeps an optimizer's step out of torch.compile. torch.compiler.disable is the same, but imports "
        "torch._dynamo at once, which takes a second",
    ),
    # operators of torch's own optimizers; without torch.compile nothing public is as fast
    "foreach_add_": Private("torch", "_foreach_add_", "counts the steps, as torch.optim.AdamW does"),
    "foreach_copy_": Private("torch", "_foreach_copy_", "brings gradients into one piece of memory"),
    "fused_adamw_": Private("torch", "_fused_adamw_", "AdamW in one pass over the memory"),
}
# What wrappers call the module that they wrap: FSDP1, activation checkpointing, torch.compile. These and
# FLAT_PARAM are parts of parameters' names; FSDP.module and the like do not say under which name.
CHECKPOINTED, COMPILED = "_checkpoint_wrapped_module", "_orig_mod"
WRAPPED = ("_fsdp_wrapped_module", CHECKPOINTED, COMPILED)
FLAT_PARAM = "_flat_param"
# A slow import that fully_shard, and the first step of an optimizer, need: to be imported beforehand.
DYNAMO = "torch._dynamo"


def place(name: str) -> tuple[Any, str]:
    """The object and the attribute behind a name of NAMES, for mock.patch.object(*place(...), other)."""
    private = NAMES[name]
    owner, _, attribute = private.owner.partition(":")
    found = importlib.import_module(owner)
    return (pkgutil.resolve_name(f"{owner}:{attribute}") if attribute else found), private.name


if not TYPE_CHECKING:  # a type checker is to complain of a name that is not here

    def __getattr__(name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(*place(name))
        except (ImportError, AttributeError) as error:
            private = NAMES[name]
            raise ImportError(
                f"expected {private.name} in {private.owner} ({private.why}); torch "
                f"{sys.modules['torch'].__version__} does not have it. Use a version that README.md names"
            ) from error
