"""Private classes and functions of torch, under the names that the library has for them.

`NAMES` says what each is for, and why nothing public serves. Each exists since torch 2.9, the oldest that the
tests were run with. Importing one from here imports torch's module, with an error that tells its purpose.

Other files may name `torch.utils._pytree` and `torch.utils._python_dispatch`, torch's documented way
to extend it, and operators under `torch.ops`, whose names are part of saved programs.
"""

import importlib
import pkgutil
import sys
from typing import Any, NamedTuple


class Private(NamedTuple):
    owner: str  # the module, or "module:Class"
    name: str
    why: str  # what for, and why nothing public serves


_FSDP1 = "torch.distributed.fsdp._runtime_utils"
_FLAT = "torch.distributed.fsdp._flat_param"
_FSDP2 = "torch.distributed.fsdp._fully_shard"  # in torch.distributed._composable.fsdp before 2.6
_HOOK = "to observe when a unit computes in backward: nn.Module's hooks do not run around FSDP's own work"
_FAKE = "replaced while a rank is simulated on fake tensors without memory: FSDP has no switch for that"

# What is imported from here, by the name that it has here.
NAMES: dict[str, Private] = {
    # FSDP
    "FlatParamHandle": Private(_FLAT, "FlatParamHandle", "its unshard and reshard are recorded: " + _HOOK),
    "FSDPParam": Private(f"{_FSDP2}._fsdp_param", "FSDPParam", "gradients of microbatches; nothing lists it"),
    "FSDPParamGroup": Private(
        f"{_FSDP2}._fsdp_param_group",
        "FSDPParamGroup",
        "its unshard, reshard and post_backward are recorded; set_custom_all_gather sees no freeing",
    ),
    "fsdp2_pre_backward": Private(f"{_FSDP2}._fsdp_state:FSDPState", "_pre_backward", _HOOK),
    "fsdp1_pre_backward": Private(_FSDP1, "_pre_backward_hook", _HOOK),
    "fsdp1_post_backward": Private(_FSDP1, "_post_backward_hook", _HOOK),
    # for a unit whose parameters are all frozen
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
        "torch.distributed.fsdp._common_utils", "_get_param_to_fqns", "names inside flat parameters"
    ),
    # DTensor and ShardedTensor
    "dtensor_shapes": Private(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator",
        "_propagate_tensor_meta_non_cached",
        "works on fake tensors of the global size, which a record of allocations has to leave out",
    ),
    "ShardedTensor": Private(
        "torch.distributed._shard.sharded_tensor", "ShardedTensor", "FSDP1's sharded state dict; never public"
    ),
    # fake tensors, autograd, the profiler, the compiler
    "FakeTensorMode": Private(
        "torch._subclasses.fake_tensor", "FakeTensorMode", "as torch's documentation does"
    ),
    "detect_fake_mode": Private(
        "torch._guards", "detect_fake_mode", "is a FakeTensorMode on? nothing public says it"
    ),
    "sequence_nr": Private(
        "torch.autograd", "_get_sequence_nr", "was anything computed? nothing public counts"
    ),
    "disable_dynamo": Private(
        "torch._compile", "_disable_dynamo", "torch.compiler.disable imports torch._dynamo, a second"
    ),
    # operators of torch's own optimizers; without torch.compile nothing public is as fast
    "foreach_add_": Private("torch", "_foreach_add_", "counts the steps, as torch.optim.AdamW does"),
    "foreach_copy_": Private("torch", "_foreach_copy_", "brings gradients into one piece of memory"),
    "fused_adamw_": Private("torch", "_fused_adamw_", "AdamW in one pass over the memory"),
}
# What wrappers call the module that they wrap: FSDP1, activation checkpointing, torch.compile. These and
# FLAT_PARAM are parts of parameters' names; FSDP.module and the like do not say under which name.
COMPILED = "_orig_mod"
WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", COMPILED)
FLAT_PARAM = "_flat_param"
# A slow import that fully_shard, and the first step of an optimizer, need: to be imported beforehand.
DYNAMO = "torch._dynamo"


def place(name: str) -> tuple[Any, str]:
    """The object and the attribute behind a name of NAMES, for mock.patch.object(*place(...), other)."""
    private = NAMES[name]
    owner, _, attribute = private.owner.partition(":")
    found = importlib.import_module(owner)
    return (pkgutil.resolve_name(f"{owner}:{attribute}") if attribute else found), private.name


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
