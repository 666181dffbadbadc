"""load_pretrained: read a folder of safetensors straight into the shards of a model.

Why not torch.distributed.checkpoint's HuggingFaceStorageReader, which reads such folders too: it maps files,
so that a rank's peak grows by two to three times its shard (measured with torch 2.13), it converts dtypes
without a warning, ignores what the model does not want, and torch 2.6 does not have it.
"""

import io
import os
from collections.abc import Iterable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_utils.checkpoint.collective import collective_call
from fsdp_utils.checkpoint.errors import CheckpointError, CheckpointMismatchError
from fsdp_utils.checkpoint.files import open_regular
from fsdp_utils.checkpoint.state import MODEL, Snapshot, has_fsdp1
from fsdp_utils.distributed.agreement import WAIT_S, fingerprint
from fsdp_utils.pretrained.meta_init import device_of, is_meta, materialise
from fsdp_utils.pretrained.reading import Entry, read_folder, read_part
from fsdp_utils.sharding.local_part import local, local_chunk

_SHOWN = 3  # problems of a kind in one error


def load_pretrained(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    cast: bool = False,
    ignore: Iterable[str] = (),
    device: torch.device | str | None = None,
    wait_s: float = WAIT_S,
) -> None:
    """Load a folder of safetensors into a model that may be sharded, and may still be on the meta device.

    Call it on every rank. Each reads its own part of each tensor, straight into its shard; in addition it
    holds at most 16 MiB, or one row of a tensor. So build the model under `torch.device("meta")`, wrap it
    with fully_shard, and call this instead of to_empty. Names, shapes and dtypes are checked on all ranks
    before the model is touched. Tied weights may be in the folder under one of their names, or under each.

    The format has no hashes: a file that was cut short is noticed, a changed byte is not.

    Args:
        folder: with model.safetensors, or with model.safetensors.index.json and the files that it names, as
            save_pretrained of transformers writes it. Each rank has to see the same one.
        model: wrapped with FSDP2 or DDP, or not at all. Its names have to be those of the files: nothing is
            renamed or joined, as from_pretrained does for some (save_pretrained's save_original_format=False
            writes what the model has). Buffers that are not saved with the model (rotary frequencies) are
            computed anew if they are on meta: by `_init_weights` of a transformers model, else by
            reset_parameters() of their module. Otherwise they stay as they are.
        cast: convert to the model's dtypes where they differ from the files'.
        ignore: patterns such as "lm_head.*" of names in the files that the model does not want.
        device: where to put what is on meta. None is the device of the model's mesh; "cpu" is needed for
            CPUOffloadPolicy on GPUs.
        wait_s: seconds to wait for all ranks to enter.

    Raises:
        CheckpointError: the same on every rank. The model is as it was, unless it says otherwise.

    Example::

        with torch.device("meta"):
            model = Transformer()
        shard(model)
        load_pretrained("exported", model)
    """
    path = Path(folder).absolute()
    ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    found: dict[str, Entry] = {}

    def facts() -> dict[str, Any]:
        if has_fsdp1(model):
            raise CheckpointError(
                "expected a model in FSDP2 (fully_shard), in DDP or in no wrapper, found one in FSDP1. Load "
                "before wrapping, or use fully_shard"
            )
        for name, param in model.named_parameters():
            kinds = {type(one) for one in _placements(param)}
            if strange := [kind.__name__ for kind in kinds - {Shard, Replicate}]:
                raise CheckpointError(
                    f"{name}: expected to be cut along whole rows or columns (Shard) or replicated, found "
                    f"{', '.join(strange)}. FSDP2 over tensor parallelism in one dimension is not supported"
                )
        found.update(read_folder(path))
        specs = [f"{name} {one.dtype} {list(one.shape)}" for name, one in sorted(found.items())]
        content = f"{len(found)} tensors, {fingerprint(specs)}"
        return {"content of the folder": content, "cast": cast, "ignore": ignore}

    with collective_call("load_pretrained", model, (), facts, wait_s=wait_s) as ranks:
        wanted = Snapshot.take(model)
        chosen = ranks.each(lambda: _choose(path, wanted, found, cast=cast, ignore=ignore))
        ranks.consequence = "\nThe model may be partly loaded: do not go on with it."
        if is_meta(model):
            where = device_of(model) if device is None else torch.device(device)
            ranks.each(lambda: materialise(model, where))
            wanted = Snapshot.take(model)  # its tensors are others now
        ranks.each(lambda: _fill(wanted, chosen, found))


def _choose(
    folder: Path, wanted: Snapshot, found: dict[str, Entry], *, cast: bool, ignore: list[str]
) -> dict[str, list[str]]:
    """The names under which each tensor of the model is in the files; several if it is tied.

    Raises:
        CheckpointError: the files do not hold exactly this model.
    """
    chosen: dict[str, list[str]] = {}
    missing, other = [], []
    aliases: dict[str, list[str]] = {}
    for alias, first in wanted.tied.items():
        aliases.setdefault(first, []).append(alias)
    for key, tensor in wanted.tensors.items():
        first = key.removeprefix(MODEL)
        names = [first, *aliases.get(first, [])]
        chosen[key] = there = [name for name in names if name in found]
        if not there:
            missing.append(f"{' or '.join(names)}: expected by the model, found in no file")
        for name in there:
            entry = found[name]
            if entry.shape != tensor.shape:
                other.append(
                    f"{name}: expected shape {list(tensor.shape)} (the model's), found {list(entry.shape)} "
                    f"in {entry.path.name}"
                )
            if entry.dtype != tensor.dtype and not cast:
                other.append(
                    f"{name}: expected {tensor.dtype} (the model's), found {entry.dtype} in "
                    f"{entry.path.name}; cast=True converts it"
                )
    used = {name for names in chosen.values() for name in names}
    strange = [
        f"{name}: expected by nothing in the model, found in {entry.path.name}; ignore=[{name!r}] leaves it "
        "aside"
        for name, entry in found.items()
        if name not in used and not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    if missing or other or strange:
        lines = [line for some in (missing, other, strange) for line in _first_few(some)]
        if missing and strange:
            lines.append(
                "Are these the same tensors? transformers renames or joins those of some models as it loads "
                "them; save_pretrained(folder, save_original_format=False) writes a folder with the names of "
                "the model"
            )
        elif missing:
            lines.append("Was it tied to another when it was saved? Then tie it here before wrapping")
        raise CheckpointMismatchError(f"{folder} is not of this model:\n  " + "\n  ".join(lines))
    return chosen


def _first_few(problems: list[str]) -> list[str]:
    return problems[:_SHOWN] + ([f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])


@torch.no_grad()
def _fill(wanted: Snapshot, chosen: dict[str, list[str]], found: dict[str, Entry]) -> None:
    """Read this rank's part of each tensor, in the order in which they lie in the files."""
    with ExitStack() as stack:
        files: dict[Path, io.RawIOBase] = {}

        def file_of(entry: Entry) -> io.RawIOBase:
            if entry.path not in files:
                files[entry.path] = stack.enter_context(open_regular(entry.path))
            return files[entry.path]

        for key in sorted(chosen, key=lambda key: found[chosen[key][0]][:2]):
            offsets, sizes = local_chunk(wanted.tensors[key])
            target = local(wanted.tensors[key])
            first, *others = chosen[key]
            read_part(found[first], file_of(found[first]), offsets, sizes, target)
            for name in others:
                other = torch.empty_like(target)
                read_part(found[name], file_of(found[name]), offsets, sizes, other)
                if not torch.equal(other, target):
                    raise CheckpointError(
                        f"{found[name].path}: expected {name} to equal {first} (they are tied in the model), "
                        "found another tensor. Build the model without tying them"
                    )


def _placements(tensor: Tensor) -> tuple[Placement, ...]:
    return tensor.placements if isinstance(tensor, DTensor) else ()
