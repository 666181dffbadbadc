"""What the parts of a model are called, whatever it is wrapped in."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_flat
from fsdp_utils.torch_internals.names import COMPILED, get_param_to_fqns

# The wrapped model in torch.compile's module, and in Lightning Fabric's.
_INNER = (COMPILED, "_forward_module")


def unsharded_wrappers_off(model: nn.Module) -> nn.Module:
    """The model without the wrappers around it that shard nothing: DDP, torch.compile, Lightning Fabric.

    What is inside has the same names, whichever of them are around it and in which order.
    """
    while True:
        children = dict(model.named_children())
        inner = next((children[name] for name in _INNER if name in children), None)
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif inner is not None and not isinstance(model, FSDP1):
            model = inner
        else:
            return model


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of the wrappers that are modules of their own."""
    while (inner := unsharded_wrappers_off(model)) is not model or isinstance(model, FSDP1):
        model = inner.module if isinstance(inner, FSDP1) else inner
    return model


def optimizer_classes(optimizer: Optimizer) -> list[str]:
    """class_names() of an optimizer, or of the one in a wrapper."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # Accelerate's wrapper
        optimizer = inner
    return class_names(type(optimizer))


def class_names(kind: type) -> list[str]:
    """The names of that class of optimizers and of those it is derived from, without Optimizer itself."""
    classes = [one for one in kind.__mro__ if issubclass(one, Optimizer) and one is not Optimizer]
    return [one.__name__ for one in classes]


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter that an optimizer may hold, with the name or (FSDP1's flat ones) names it goes by."""
    return {
        param: [clean(model, name) for name in names] for param, names in get_param_to_fqns(model).items()
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are also there under an earlier name -> that earlier name."""
    first: dict[int, str] = {}
    tied = {}
    for raw_name, param in model.named_parameters(remove_duplicate=False):
        name = clean(model, raw_name)
        if (earlier := first.setdefault(id(param), name)) != name:
            tied[name] = earlier
    for path, module in model.named_modules():
        # FSDP1 without use_orig_params has one flat parameter, which remembers what was tied.
        flat = fsdp1_flat(module) if isinstance(module, FSDP1) else None
        for info in Flat(flat).tied:
            name, earlier = (
                clean(model, ".".join(filter(None, (path, *inner))))
                for inner in (
                    (info.module_name, info.param_name),
                    (info.prim_module_name, info.prim_param_name),
                )
            )
            tied[name] = earlier
    return tied


def clean(model: nn.Module, name: str) -> str:
    """The name without what wrappers add to it, also wrappers of a part of the model."""
    module: object = model
    parts = []
    for part in name.split("."):
        if not (isinstance(module, DistributedDataParallel) and part == "module"):
            parts.append(part)
        module = getattr(module, part, None)
    return plain_name(*parts)


def has_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FSDP1) for module in model.modules())


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that torch's FSDP1 code gives about torch's own deprecated calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=FutureWarning, message=".*(ShardedTensor|FSDP.state_dict_type)"
        )
        warnings.filterwarnings("ignore", category=UserWarning, message=".*_get_pg_default_device")
        warnings.filterwarnings("ignore", category=UserWarning, message="Multiple backends are registered")
        yield
