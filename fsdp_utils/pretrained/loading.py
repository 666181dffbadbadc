"""load_pretrained: read a folder of safetensors straight into the shards of a model.

Why not torch.distributed.checkpoint's HuggingFaceStorageReader, which reads such folders too: it maps files,
so that a rank's peak grows by two to three times its shard (measured with torch 2.13), it converts dtypes
without a warning, ignores what the model does not want, and torch 2.6 does not have it.
"""

import os
import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_utils.checkpoint.collective import TRANSFER_LIMIT_S
from fsdp_utils.checkpoint.errors import CheckpointError, CheckpointMismatchError
from fsdp_utils.checkpoint.files import local_path
from fsdp_utils.checkpoint.state import Held, has_fsdp1
from fsdp_utils.checkpoint.tensor_files import StoredTensors, held_part
from fsdp_utils.distributed.agreement import WAIT_S, agree, fingerprint
from fsdp_utils.pretrained.meta_init import Buffer, compute_buffers, device_of, materialise
from fsdp_utils.pretrained.reading import open_folder
from fsdp_utils.sharding.local_part import local

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
    with fully_shard, and call this instead of to_empty. Before the model is changed, all ranks check the
    names, shapes, dtypes and placements of its tensors, the device, that tied weights are equal if the folder
    has them under several names, and that there is a value for every buffer.

    The format has no hashes: a file that was cut short is noticed, a changed byte is not.

    Args:
        folder: with model.safetensors, or with model.safetensors.index.json and the files that it names, as
            save_pretrained of transformers writes it. Each rank has to see the same one.
        model: wrapped with FSDP2 or DDP, or not at all. Its names have to be those of the files: nothing is
            renamed or joined, as from_pretrained does for some (save_pretrained's save_original_format=False
            writes what the model has). Buffers that are not saved with the model (rotary frequencies) are
            computed anew if they are on meta: by `_init_weights` of a transformers model, else by
            reset_parameters() of their module. Otherwise they stay as they are; a warning names those for
            which that computation gives other values, as to_empty leaves them uninitialised.
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
    patterns = [ignore] if isinstance(ignore, str) else list(ignore)
    opened: list[tuple[StoredTensors, torch.device]] = []

    def facts() -> dict[str, Any]:
        if has_fsdp1(model):
            raise CheckpointError(
                "expected a model in FSDP2 (fully_shard), in DDP or in no wrapper, found one in FSDP1. Load "
                "before wrapping, or use fully_shard"
            )
        place = device_of(model) if device is None else torch.device(device)
        torch.empty(1, device=place)  # an error here, where the device cannot be used
        stored = open_folder(local_path(folder))
        opened.append((stored, place))
        content, own = _fingerprint(stored.specs), _fingerprint(dict(model.named_parameters()))
        return {"content of the folder": content, "model": own, "cast": cast, "ignore": patterns}

    ranks = agree(
        "load_pretrained",
        facts,
        error=CheckpointError,
        topic="pretrained",
        wait_s=wait_s,
        collective_s=TRANSFER_LIMIT_S,
    )
    with ranks.guard():
        ((stored, place),) = opened

        def check() -> tuple[dict[str, list[str]], list[Buffer], list[str]]:
            held = Held.of(model)
            chosen = _choose(str(folder), stored, held, cast, patterns)
            _check_ties(stored, held.of_model(), chosen, place)
            return chosen, *compute_buffers(model, place)

        chosen, computed, odd = ranks.each(check)
        if odd:
            warnings.warn(
                f"load_pretrained: {', '.join(odd[:_SHOWN])}: expected the values that the module computes, "
                f"found others in {len(odd)} buffers, which the folder does not hold. to_empty() leaves them "
                "uninitialised: call load_pretrained in its place, with the model still on meta. If the "
                "program has changed them, there is nothing to do.",
                stacklevel=2,
            )

        def fill() -> None:
            materialise(model, place, computed)
            own = Held.of(model).of_model()
            stored.read_into({names[0]: own[name] for name, names in chosen.items()})

        ranks.consequence = "\nThe model may be partly loaded: do not go on with it."
        ranks.each(fill)


def _fingerprint(tensors: Mapping[str, Any]) -> str:
    """Describe tensors, or their specs, in one line: equal for the same names, dtypes and shapes."""
    specs = [f"{name} {one.dtype} {list(one.shape)}" for name, one in sorted(tensors.items())]
    return f"{len(specs)} tensors, {fingerprint(specs)}"


def _choose(
    folder: str, stored: StoredTensors, held: Held, cast: bool, ignore: list[str]
) -> dict[str, list[str]]:
    """Return the names under which each tensor of the model is in the files; several if it is tied.

    Raises:
        CheckpointError: the files do not hold exactly this model, or a placement cannot be read.
    """
    own = held.of_model()
    for name, tensor in own.items():
        held_part(name, tensor)
    found: dict[str, list[str]] = {name: [] for name in own}
    strange, shapes, dtypes = [], [], {}
    for name, spec in stored.specs.items():
        tensor, file = own.get(held.first_name(name)), stored.chunks[name][0].path.name
        if tensor is None:
            if not any(fnmatchcase(name, pattern) for pattern in ignore):
                strange.append(
                    f"{name}: expected by nothing in the model, found in {file}; ignore=[{name!r}] leaves it "
                    "aside"
                )
            continue
        found[held.first_name(name)].append(name)
        if spec.dtype != tensor.dtype and not cast:
            dtypes.setdefault((tensor.dtype, spec.dtype), []).append(name)
        if spec.shape != tuple(tensor.shape):
            shapes.append(
                f"{name}: expected shape {list(tensor.shape)} (the model's), found {list(spec.shape)} in "
                f"{file}"
            )
    missing = [f"{n}: expected by the model, found in no file" for n, names in found.items() if not names]
    other = [
        f"{first}{f' and {len(more)} more' if more else ''}: expected {dtype} (the model's), found {there}; "
        "cast=True converts"
        for (dtype, there), (first, *more) in dtypes.items()
    ]
    if lines := [line for some in (missing, shapes, other, strange) for line in _first_few(some)]:
        if missing and strange:
            lines.append(
                "Are these the same tensors? transformers renames or joins those of some models as it loads "
                "them; save_pretrained(folder, save_original_format=False) writes a folder with the names of "
                "the model"
            )
        elif missing:
            lines.append("Was it tied to another when it was saved? Then tie it here before wrapping")
        raise CheckpointMismatchError(f"{folder} is not of this model:\n  " + "\n  ".join(lines))
    return found


def _first_few(problems: list[str]) -> list[str]:
    return problems[:_SHOWN] + ([f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])


@torch.no_grad()
def _check_ties(
    stored: StoredTensors, own: dict[str, Tensor], chosen: dict[str, list[str]], device: torch.device
) -> None:
    """Compare this rank's part of what is in the files under several names, one tensor at a time.

    Raises:
        CheckpointError: a file cannot be read, or tied tensors are not equal in the files.
    """
    for key, (first, *others) in chosen.items():
        for name in others:
            pair = [torch.empty_like(own[key], device=device) for _ in range(2)]
            stored.read_into({first: pair[0]})
            stored.read_into({name: pair[1]})
            if not torch.equal(local(pair[0]), local(pair[1])):
                raise CheckpointError(
                    f"{stored.chunks[name][0].path}: expected {name} to equal {first} (they are tied in the "
                    "model), found another tensor. Build the model without tying them"
                )
