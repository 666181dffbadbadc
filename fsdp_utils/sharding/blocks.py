"""Find the transformer blocks of a model."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_utils.sharding.names import plain_name, unwrapped
from fsdp_utils.sharding.units import find_units, parameter_sizes, within

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OF_A_BLOCK = 0.5  # a repeated class, all of which is smaller than this part of a block, may stay in the root


def transformer_block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Find the classes of this model's transformer blocks, which should be FSDP units.

    Candidates are the modules in a ModuleList, ModuleDict or Sequential. Where a transformers model names its
    blocks (`_no_split_modules`), these are taken; elsewhere the outermost repeated classes, if all modules of
    one hold half as many parameters as the largest block (as a vision tower does). Single layers (nn.Linear
    in a Sequential) are not blocks.

    Args:
        model: any module, sharded or not, on any device, "meta" too.

    Returns:
        The classes, as FSDP1's ModuleWrapPolicy takes them: two or more where encoder and decoder differ.

    Raises:
        ValueError: nothing is repeated.

    Example::

        for block in transformer_block_classes(model):
            print(block.__name__)  # Block
    """
    # transformers: None or class names, in a composite model of its parts
    names = set().union(*(getattr(module, "_no_split_modules", None) or () for module in model.modules()))
    lists = (module for module in model.modules() if isinstance(module, _CONTAINERS))
    contained = [unwrapped(child) for one in lists for child in one.children()]
    candidates = [child for child in contained if not _is_single_layer(child)]
    counts = Counter(map(class_of, candidates))
    named = {child for child in candidates if class_of(child).__name__ in names}

    def may_be_block(module: nn.Module) -> bool:
        return module in named or (counts[class_of(module)] > 1 and named.isdisjoint(module.modules()))

    by_unit = parameter_sizes(model, find_units(model, also_empty=True))
    parameters = {name: size for some in by_unit.values() for name, size in some.items()}
    sizes: dict[type[nn.Module], list[int]] = defaultdict(list)
    for name, block in _outermost(model, may_be_block):
        sizes[class_of(unwrapped(block))].append(sum(within(name, parameters).values()))
    enough = max(1, _OF_A_BLOCK * max((max(some) for some in sizes.values()), default=0))
    classes = {cls for cls, some in sizes.items() if cls.__name__ in names or sum(some) >= enough}
    if not classes:
        raise ValueError(
            f"{class_of(model).__name__}: found no transformer blocks. Expected a class that stands at "
            "least twice in a ModuleList, ModuleDict or Sequential and holds parameters. Give the repeated "
            "part of the model a class, or call fully_shard on its parts yourself."
        )
    return classes


def _is_single_layer(module: nn.Module) -> bool:
    cls = class_of(module)
    is_leaf_of_torch = cls.__module__.startswith("torch.nn.") and not list(module.children())
    return cls in _CONTAINERS or is_leaf_of_torch


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class as it was written: fully_shard puts another one before it."""
    line = type(module).__mro__
    return line[line.index(FSDPModule) + 1] if FSDPModule in line else line[0]


def transformer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks by name, each with the checkpoint wrapper around it if it has one.

    Raises:
        ValueError: nothing is repeated.
    """
    classes = tuple(transformer_block_classes(model))
    return dict(_outermost(model, lambda module: isinstance(module, classes)))


def _outermost(
    module: nn.Module, wanted: Callable[[nn.Module], bool], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if wanted(unwrapped(child)):
            yield plain_name(prefix, name), child
        else:
            yield from _outermost(child, wanted, plain_name(prefix, name))


def separate(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """List the blocks that share no parameter with another one, or with the rest of the model.

    Only these can be units; scalars do not count.
    """

    def holders(module: nn.Module) -> Counter[nn.Parameter]:
        return Counter(p for one in module.modules() for p in one.parameters(recurse=False) if p.dim())

    of_model = holders(model)
    return [block for block in blocks if all(of_model[p] == n for p, n in holders(block).items())]
