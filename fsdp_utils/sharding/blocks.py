"""Find the transformer blocks of a model."""

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_utils.sharding.names import plain_name, unwrapped
from fsdp_utils.sharding.units import find_units, parameter_sizes, within

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# A repeated class with less than this share of the parameters in blocks does not need units ...
SMALL = 0.1
# ... unless all of it, which the root's unit would keep gathered, is as large as this part of a block
OF_A_BLOCK = 0.5


def transformer_block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Find the classes of this model's transformer blocks, which should be FSDP units.

    Candidates are the modules in a ModuleList, ModuleDict or Sequential. Where a transformers model names its
    blocks (`_no_split_modules`), these are taken; elsewhere the outermost repeated classes, if they hold at
    least a tenth of all candidates' parameters, or half as many as one of the largest blocks (as a vision
    tower does). Single layers (nn.Linear in a Sequential) are not blocks.

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
    by_unit = parameter_sizes(model, find_units(model, also_empty=True))
    parameters = {name: size for some in by_unit.values() for name, size in some.items()}
    sizes: Counter[type[nn.Module]] = Counter()
    blocks: Counter[type[nn.Module]] = Counter()
    classes = set()
    for name, block, is_named in _candidates(model):
        cls = _class_of(block)
        sizes[cls] += sum(within(name, parameters).values())
        blocks[cls] += 1
        if is_named:
            classes.add(cls)
    total = sum(sizes.values())
    classes |= {cls for cls, size in sizes.items() if size > 0 and size >= SMALL * total}
    largest = max((sizes[cls] / blocks[cls] for cls in classes), default=0)
    classes |= {cls for cls, size in sizes.items() if size > 0 and size >= OF_A_BLOCK * largest}
    if not classes:
        raise ValueError(
            f"{_class_of(model).__name__}: found no transformer blocks. Expected a class that stands at "
            "least twice in a ModuleList, ModuleDict or Sequential and holds parameters. Give the repeated "
            "part of the model a class, or call fully_shard on its parts yourself."
        )
    return classes


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """The outermost modules that may be blocks: name, module, and whether the model names its class."""
    # transformers: None or class names. Some may not occur in this model, or be embeddings. In a composite
    # model, its parts have them.
    lists = [getattr(module, "_no_split_modules", None) or () for module in model.modules()]
    contained = [
        child
        for parent in model.modules()
        if isinstance(parent, _CONTAINERS)
        for child in map(unwrapped, parent.children())
        if not _is_single_layer(child)
    ]
    counts = Counter(map(_class_of, contained))
    named = {child for child in contained if _class_of(child).__name__ in set().union(*lists)}

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


def _is_single_layer(module: nn.Module) -> bool:
    cls = _class_of(module)
    is_leaf_of_torch = cls.__module__.startswith("torch.nn.") and not list(module.children())
    return cls in _CONTAINERS or is_leaf_of_torch


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The class as it was written: fully_shard puts another one before it."""
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
