"""load_distributed: all ranks check everything before the first byte goes into the model."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from fsdp_utils.checkpoint.codec import decode
from fsdp_utils.checkpoint.collective import call, collective_call, named_values
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import local_path
from fsdp_utils.checkpoint.folder import MANIFEST, check_files, find, read_manifest
from fsdp_utils.checkpoint.restore import (
    Targets,
    match_model,
    match_optimizers,
    new_state,
    put_back_model,
    put_back_optimizers,
)
from fsdp_utils.checkpoint.state import MODEL, Held, Optimizers, listed, unwrapped
from fsdp_utils.checkpoint.tensor_files import open_tensors, share
from fsdp_utils.distributed.agreement import WAIT_S
from fsdp_utils.sharding.unsaved_buffers import warning_of

_NOT_STRICT = "strict=False loads what both have, and returns the names of the rest"


class PerRank(list[Any]):
    """The values that one name in per_rank had on each rank, in the order of the ranks that saved them.

    `load_distributed` returns it where the number of ranks is another one now: the program decides what its
    ranks make of them.

    Example::

        rng = load_distributed("run", model, optimizer)["rng"]
        if isinstance(rng, PerRank):
            print(f"saved by {len(rng)} ranks")  # saved by 2 ranks
            rng = rng[get_rank() % len(rng)]
        torch.set_rng_state(rng)
    """


class LoadedState(dict[str, Any]):
    """The state that a load returns, by name, and what of the model it did not load.

    Attributes:
        missing_keys: names in the model that were not loaded, and are as they were.
        unexpected_keys: names in the checkpoint that were left aside.

    Example::

        model.score = nn.Linear(8, 2)
        loaded = load_distributed("run", model, strict=False)
        print("start anew:", loaded.missing_keys)
    """

    def __init__(self, state: Mapping[str, Any], missing_keys: list[str], unexpected_keys: list[str]) -> None:
        super().__init__(state)
        self.missing_keys, self.unexpected_keys = missing_keys, unexpected_keys


def load_distributed(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    step: int | str = "latest",
    state: Mapping[str, Any] | None = None,
    strict: bool = True,
    cast: bool = False,
    wait_s: float = WAIT_S,
) -> "LoadedState":
    """Load what save_distributed saved, into any wrapper of the same model. Call it on every rank.

    Args:
        directory: as for save_distributed.
        model: with parameters on their devices (not on meta); their values are replaced. A warning names
            buffers that are not saved with the model, such as rotary frequencies, where their values are not
            those of the saved model: to_empty() leaves them uninitialised.
        optimizer: one or several, over the parameters of those that were saved, in the same groups, each in
            a related class, such as Adam and AdamW; their order and names may be others. Their settings (lr,
            betas, weight_decay and all else in param_groups) become those that were saved: change a setting
            after loading. None leaves what was saved aside.
        step: of which step; "latest" is the checkpoint that was saved last.
        state: objects by the name under which they were saved, to be loaded in place by load_state_dict(),
            after the model and the optimizer. The dict that is returned holds what they were given, too.
        strict: False loads what the model and the checkpoint both have, in the same shapes, and leaves the
            rest of the model as it is. An optimizer has to match all the same.
        cast: convert to the model's dtypes where they differ from the saved ones.
        wait_s: as for save_distributed, in seconds.

    Returns:
        The state that was saved, and "step". A value of per_rank comes back to the rank that saved it, when
        there are as many ranks as then; otherwise as a PerRank. A DTensor comes back over the model's mesh,
        sharded as the parameter of the same name and shape is (an average of the weights), else along the
        same dimensions as before; or as a full tensor where the model is not sharded by FSDP2.

    Raises:
        CheckpointError: the same on every rank. Model and optimizer are as they were, unless it says
            otherwise.

    Example::

        state = load_distributed("run", model, optimizer, state={"scheduler": scheduler})
        torch.set_rng_state(state["rng"])
        print(state["step"], state["epoch"])  # 7 3
    """
    model, optimizers = unwrapped(model, sharded=False), listed(optimizer)
    objects: dict[str, Any] = {}

    def facts() -> dict[str, Any]:
        if step != "latest" and type(step) is not int:
            raise CheckpointError(f'expected step to be a whole number or "latest", found {step!r}')
        objects.update(named_values(state, "state"))
        return {
            "directory": str(local_path(directory)),
            "step": step,
            "strict": strict,
            "cast": cast,
            "state": sorted(objects),
        }

    with collective_call("load_distributed", model, optimizers, facts, wait_s=wait_s) as ranks:
        checkpoint = ranks.first(lambda: find(directory, step))
        manifest = ranks.each(lambda: read_manifest(checkpoint))
        ranks.same("checkpoint", {str(checkpoint / MANIFEST): manifest["blake3"]})
        # What is read after that is what was saved: nothing else looks for damage.
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        mine = share(sizes, ranks.rank, ranks.world_size)
        ranks.each(lambda: check_files(checkpoint, manifest, mine, threads=ranks.threads()))
        held = ranks.each(lambda: Held(model))

        def match() -> tuple[Any, ...]:
            stored, plain = open_tensors(checkpoint, manifest), manifest["plain"]
            targets = Targets(held, stored.specs)
            found = {k.removeprefix(MODEL): spec for k, spec in stored.specs.items() if k.startswith(MODEL)}
            found |= {alias: found[name] for alias, name in manifest["tied"].items()}
            names, *left = match_model(held, found, str(checkpoint), _NOT_STRICT, cast=cast, strict=strict)
            targets.of_model(names, manifest["tied"])
            settings = match_optimizers(held, model, optimizers, plain, targets)
            extra, own = decode(plain["extra"], targets.full), held.plain["extra"].keys()
            if strict and own != extra.keys():
                raise CheckpointError(
                    f"expected the model's state besides tensors to have {sorted(own)[:5]}, found "
                    f"{sorted(extra)[:5]} in the checkpoint; {_NOT_STRICT}"
                )
            values = decode(plain["state"], targets.of_state)
            # What was given as per_rank=: this rank's, or that of all ranks where there are others now.
            if len(by_rank := manifest["per_rank"]) == ranks.world_size:
                values |= decode(by_rank[ranks.rank], targets.full)
            else:
                each = [decode(one, targets.full) for one in by_rank]
                values |= {name: PerRank(one[name] for one in each) for name in each[0]}
            _check_objects(objects, values)
            extra = {name: one for name, one in extra.items() if name in own}
            return stored, left, targets, settings, extra, values

        stored, left, targets, settings, extra, values = ranks.each(match)

        def read() -> dict[str, dict[str, Any]]:
            optimizer_state = new_state(held, optimizers, manifest["plain"], targets)
            stored.read_into(targets, threads=ranks.threads())
            return optimizer_state

        def fill_objects() -> None:
            for name, value in objects.items():
                call(f"state {name!r}", value, "load_state_dict", values[name])

        ranks.consequence = "\nThe model may be partly loaded: do not go on with it."
        optimizer_state = ranks.each(read)
        put_back_model(model, held, extra)
        put_back_optimizers(held, model, optimizers, settings, optimizer_state)
        ranks.each(fill_objects)
    if text := warning_of(unwrapped(model), manifest["unsaved_buffers"]):
        warnings.warn(f"load_distributed: {text}", stacklevel=2)
    return LoadedState({"step": manifest["step"], **values}, *left)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read the state that was saved, without a model; the values of tensors in it are not read."""
    manifest = read_manifest(checkpoint)
    specs = open_tensors(checkpoint, manifest).specs
    return decode(manifest["plain"]["state"], lambda key, _: torch.empty_like(specs[key], device="cpu"))


def _check_objects(objects: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check before anything is loaded that each object can take a state, and that the checkpoint has it."""
    for name, value in objects.items():
        if not isinstance(value, Stateful):
            raise CheckpointError(
                f"state {name!r}: expected an object with state_dict() and load_state_dict(), found a "
                f"{type(value).__name__}. What is no such object comes back in the dict that is returned"
            )
        if name not in saved or isinstance(saved[name], PerRank):
            found = "one of each rank, which were not as many as now" if name in saved else "none"
            raise CheckpointError(
                f"state {name!r}: expected one state in the checkpoint, found {found}. Leave it out of "
                f"state=; the dict that is returned has {sorted(saved)[:10]}"
            )
