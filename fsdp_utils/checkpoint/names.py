"""What the parts of a model are called, whatever it is wrapped in."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp._common_utils import _get_param_to_fqns
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils._names import plain_name


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of the wrappers that are modules of their own."""
    while True:
        if isinstance(model, FSDP1 | DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = inner
        else:
            return model


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter that an optimizer may hold, with the name or (FSDP1's flat ones) names it goes by."""
    return {
        param: [clean(model, name) for name in names] for param, names in _get_param_to_fqns(model).items()
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
        flat = module._flat_param if isinstance(module, FSDP1) else None
        for info in getattr(flat, "_shared_param_infos", ()):
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
    """The name without what wrappers add to it."""
    plain = plain_name(name)
    return plain.removeprefix("module.") if isinstance(model, DistributedDataParallel) else plain


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
