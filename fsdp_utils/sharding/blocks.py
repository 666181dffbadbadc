"""Find the transformer blocks of a model."""

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_utils.sharding.names import WRAPPED, plain_name
from fsdp_utils.sharding.units import find_units, parameter_sizes, within

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# A repeated class with less than this share of the parameters in blocks is not worth units of its own ...
SMALL = 0.1
# ... unless all of it, which the root's unit would keep gathered, is as large as this part of a block
OF_A_BLOCK = 0.5


def transformer_block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of this model's transformer blocks, which should be FSDP units.

    Candidates are the modules in a ModuleList, ModuleDict or Sequential. Where a transformers model names its
    blocks (`_no_split_modules`), these are taken; elsewhere the outermost repeated classes, if they hold at
    least a tenth of all candidates' parameters, or half as many as one of the largest blocks (as a vision
    tower does). Single layers (nn.Linear in a Sequential) are not blocks.

    Args:
        model: any module, sharded or not, on any device, "meta" too.

    Returns:
        The classes, as FSDP1's ModuleWrapPolicy takes them: one for a decoder or an encoder, two or more
        where they differ.

    Raises:
        ValueError: nothing is repeated.

    Example::

        for block in transformer_block_classes(model):
            print(block.__name__)  # Block
    """
    in_units, in_none = parameter_sizes(model, find_units(model, also_empty=True))
    parameters = {name: size for some in (*in_units.values(), in_none) for name, size in some.items()}
    sizes: Counter[type[nn.Module]] = Counter()
    blocks: Counter[type[nn.Module]] = Counter()
    named = set()
    for name, block, is_named in _candidates(model):
        sizes[_class_of(block)] += sum(within(name, parameters).values())
        blocks[_class_of(block)] += 1
        if is_named:
            named.add(_class_of(block))
    total = sum(sizes.values())
    classes = named | {cls for cls, size in sizes.items() if size > 0 and size >= SMALL * total}
    largest = max((sizes[cls] / blocks[cls] for cls in classes), default=0)
    classes |= {cls for cls, size in sizes.items() if size > 0 and size >= OF_A_BLOCK * largest}
    if not classes:
        raise ValueError(
            f"{_class_of(model).__name__}: found no transformer blocks. Expected a class that stands at "
            "least twice in a ModuleList, ModuleDict or Sequential and holds parameters. Give the repeated "
            "part of the model a class of its own, or call fully_shard on its parts yourself."
        )
    return classes


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """The outermost modules that may be blocks: name, module, and whether the model names its class."""
    names: set[str] = set()
    for module in model.modules():
        # transformers: None, a list or a set of class names, of which some may not occur in this model,
        # and some are no blocks (embeddings). In a composite model, its parts have it.
        names.update(getattr(module, "_no_split_modules", None) or ())
    in_containers = [unwrapped(child) for parent in model.modules() for child in _contained(parent)]
    counts = Counter(map(_class_of, in_containers))
    named = {child for child in in_containers if _class_of(child).__name__ in names}

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, bool]]:
        for child_name, wrapped in module.named_children():
            name, child = plain_name(prefix, child_name), unwrapped(wrapped)
            if child in named:
                yield name, child, True
            elif counts[_class_of(child)] > 1 and named.isdisjoint(child.modules()):
                yield name, child, False
            else:
                yield from walk(child, name)

    return walk(unwrapped(model), "")


def _contained(parent: nn.Module) -> list[nn.Module]:
    """The children that may be blocks, by their container and their class."""
    if not isinstance(parent, _CONTAINERS):
        return []
    return [child for child in parent.children() if not _is_single_layer(unwrapped(child))]


def _is_single_layer(module: nn.Module) -> bool:
    cls = _class_of(module)
    is_leaf_of_torch = cls.__module__.startswith("torch.nn.") and not list(module.children())
    return cls in _CONTAINERS or is_leaf_of_torch


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers around it."""
    inner = [child for name, child in module.named_children() if name in WRAPPED]
    return unwrapped(inner[0]) if inner else module


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The class as it was written: fully_shard puts one of its own before it."""
    line = type(module).__mro__
    return line[line.index(FSDPModule) + 1] if FSDPModule in line else line[0]


def outermost(
    model: nn.Module, classes: tuple[type[nn.Module], ...], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The blocks by name, with the checkpoint wrapper around a block if it has one."""
    for name, child in model.named_children():
        if isinstance(unwrapped(child), classes):
            yield plain_name(prefix, name), child
        else:
            yield from outermost(child, classes, plain_name(prefix, name))


def by_shared_parameters(blocks: list[nn.Module]) -> list[tuple[list[nn.Module], set[nn.Parameter]]]:
    """Group the blocks so that no two groups share a parameter; with the parameters of each group."""
    groups: list[tuple[list[nn.Module], set[nn.Parameter]]] = []
    for block in blocks:
        modules, parameters = [block], set(block.parameters())
        for group in [group for group in groups if not group[1].isdisjoint(parameters)]:
            groups.remove(group)
            modules, parameters = group[0] + modules, group[1] | parameters
        groups.append((modules, parameters))
    return groups
