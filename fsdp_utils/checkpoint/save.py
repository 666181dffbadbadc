"""save_distributed: every rank writes its part durably, then one rename commits all parts."""

import json
import os
from collections import ChainMap
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from fsdp_utils.checkpoint.asynchronous import Save, stage
from fsdp_utils.checkpoint.codec import encode, leaves
from fsdp_utils.checkpoint.collective import call, collective_call, named_values
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import local_path
from fsdp_utils.checkpoint.folder import Unfinished, check_shared
from fsdp_utils.checkpoint.state import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    PER_RANK,
    STATE,
    Held,
    Optimizers,
    listed,
    unwrapped,
)
from fsdp_utils.checkpoint.tensor_files import Part, own_parts, write_tensors
from fsdp_utils.distributed.agreement import WAIT_S, Ranks
from fsdp_utils.sharding.copies import broadcasts_buffers, copies_of, differing
from fsdp_utils.sharding.names import plain_name, some_names
from fsdp_utils.sharding.unsaved_buffers import sizes


def save_distributed(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    step: int,
    state: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    wait_s: float = WAIT_S,
) -> Save:
    """Save a sharded training state such that it is there completely, or not at all. Call it on every rank.

    Each rank writes its own part into a temporary folder; when all parts are durable, a manifest with their
    hashes is added and the folder gets its name, `<commit>-step-<step>`. Until then a crash leaves the
    checkpoints that were there before. Tensors are in safetensors files, all else in the manifest, as JSON.

    Args:
        directory: where the checkpoints of one training are, the same for all ranks. Made if it is not there.
        model: wrapped with FSDP2, FSDP1 or DDP, or not at all.
        optimizer: one, or several over different parameters, as a sequence or the values of a mapping; they
            are told apart by their parameters, not by order or name.
        step: number of the training step.
        state: what else training needs to go on, by name, equal on all ranks: plain values, tensors (DTensors
            are stored sharded), and objects with state_dict() and load_state_dict() (schedulers, scalers).
        per_rank: what differs between ranks, by name: the state of random number generators, the position in
            this rank's data. A buffer of the model that differs is to be given under its name, and copied
            back after loading; the model's part of the checkpoint has rank 0's.
        keep: delete all but the last `keep` checkpoints, after this one is durable. None keeps all.
        asynchronous: return when the state is copied to CPU memory, which is kept for the next save, and
            write in the background. The next save or load waits for it and raises its error.
        wait_s: seconds to wait for all ranks to enter. Then one may take an hour longer than the others to
            write its part.

    Returns:
        The save. `.wait()` gives the path of the checkpoint; it is done already unless asynchronous.

    Raises:
        CheckpointError: the same on every rank. The checkpoints that were there still are.

    Example::

        save_distributed(
            "run", model, optimizer, step=step, keep=3,
            state={"scheduler": scheduler, "epoch": epoch},
            per_rank={"rng": torch.get_rng_state()},
        )
    """
    wrapped, model, optimizers = model, unwrapped(model, sharded=False), listed(optimizer)
    of_all: dict[str, Any] = {}
    of_rank: dict[str, Any] = {}

    def facts() -> dict[str, Any]:
        if type(step) is not int or step < 0:
            raise CheckpointError(f"expected step to be a whole number of at least 0, found {step!r}")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise CheckpointError(
                f"expected keep to be a whole number of at least 1, or None, found {keep!r}"
            )
        of_all.update(_values(state, "state"))
        of_rank.update(_values(per_rank, "per_rank"))
        if twice := of_all.keys() & of_rank.keys():
            raise CheckpointError(f"expected each name once, found {sorted(twice)} in state and in per_rank")
        return {
            "directory": str(local_path(directory)),
            "step": step,
            "keep": keep,
            "asynchronous": asynchronous,
            "names in state": sorted(of_all),
            "names in per_rank": sorted(of_rank),
        }

    with collective_call("save_distributed", model, optimizers, facts, wait_s=wait_s) as ranks:

        def collect() -> tuple[Held, dict[str, Part], Any]:
            held = Held(model)
            held.add_optimizers(model, optimizers)
            held.plain["state"] = encode(of_all, STATE[:-1], held.tensors)
            own: dict[str, Tensor] = {}
            own_plain = encode(of_rank, f"{PER_RANK}{ranks.rank}", own)
            parts = own_parts(held.tensors | own, rank=ranks.rank, world_size=ranks.world_size, only_here=own)
            return held, parts, own_plain

        held, parts, own_plain = ranks.each(collect)
        left_out = of_rank.keys() - {name for names in held.names.values() for name in names}
        if broadcasts_buffers(wrapped):
            left_out |= {plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
        if ranks.distributed:
            _check_equal(held, ranks, left_out)
        classes = dict.fromkeys(one["classes"][0] for one in held.plain["param_groups"])
        about = {
            "step": step,
            "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "world_size": ranks.world_size,
            "torch": str(torch.__version__),
            "optimizer": ", ".join(classes) or None,
            "tied": held.tied,
            **describe(model),
            "plain": held.plain,
        }
        if asynchronous:
            ranks.in_background = True
            parts = stage(parts)

    def write() -> Path:
        with ranks.guard(), Unfinished(local_path(directory), step) as folder:
            unfinished, final = ranks.first(folder.begin)

            def write_part() -> tuple[dict[str, Any], Any]:
                """Write this rank's file; return the manifest's entry of it, and what is per_rank."""
                check_shared(unfinished)
                name = f"rank-{ranks.rank:05d}.safetensors"
                return {name: write_tensors(unfinished / name, parts)} if parts else {}, own_plain

            files, by_rank = zip(*ranks.all(write_part), strict=True)
            manifest = {**about, "per_rank": by_rank, "files": dict(ChainMap(*files))}
            ranks.each(lambda: ranks.rank or folder.commit(manifest, keep))
        return final

    return Save(write, asynchronous=asynchronous)


def _values(given: Any, argument: str) -> dict[str, Any]:
    """Return state= or per_rank= by name, with the state_dict() of objects that have one."""
    return {
        name: call(f"{argument} {name!r}", value, "state_dict") if isinstance(value, Stateful) else value
        for name, value in named_values(given, argument).items()
    }


# ---- what must be equal on all ranks -----------------------------------------------------------------


def _check_equal(held: Held, ranks: Ranks, left_out: Collection[str]) -> None:
    """Check that what one rank saves for all of them is equal on all.

    One rank's values are stored, so those of the others would be lost without an error: of replicas that have
    drifted apart, of experts that ranks hold under the same names, of running means.
    """
    in_extra = tuple(f"{EXTRA}{name}." for name in left_out)
    tensors = {key: one for key, one in held.tensors.items() if not key.startswith(in_extra)}
    extra = {name: one for name, one in held.plain["extra"].items() if name not in left_out}

    def outline() -> dict[str, str]:
        """Describe all but the values of tensors."""
        found = leaves({**held.plain, "extra": extra})
        return found | {f"kind of {key}": f"{one.dtype} {list(one.shape)}" for key, one in tensors.items()}

    ranks.same(
        "",
        ranks.each(outline),
        cure=". Only DTensors are saved by parts; what is to differ goes into per_rank=",
    )
    # To hash the states of optimizers would take long. That of a parameter that is sharded is a DTensor, too.
    full = (name for name, one in held.of_model().items() if not isinstance(one, DTensor))
    in_copies = tuple(f"{OPTIMIZER}{name}." for name in full)
    copies = copies_of(
        (key.removeprefix(MODEL), one)
        for key, one in tensors.items()
        if key.removeprefix(MODEL) not in left_out
        and not (key.startswith(OPTIMIZER) and isinstance(one, DTensor))
        and not (key.startswith(in_copies) and one.dim())
    )
    differ = [*differing(copies, ranks).values()]

    def refuse() -> None:
        if differ:
            raise CheckpointError(
                "expected the same values on all ranks that hold a copy of a parameter, a buffer or a tensor "
                f"in the state, found that {some_names(differ, '; ')}. What is to differ goes into "
                "per_rank=, as per_rank={name: buffer}. check_sharding(model, optimizer) looks for the "
                "cause; torch.distributed.broadcast makes them equal. If each rank has experts of its own, "
                "make them one DTensor over their mesh: DTensor.from_local(own, mesh, [Shard(0)])"
            )

    ranks.each(refuse)


# ---- about the model ---------------------------------------------------------------------------------


def describe(model: nn.Module) -> dict[str, Any]:
    """Describe the model for the manifest, or its "parts" where it has no configuration itself."""
    module = unwrapped(model)
    name = type(module).__name__.removeprefix("FSDP")  # which fully_shard adds
    about = {"model": name, "unsaved_buffers": sizes(module), **_configuration(module)}
    if "config" not in about:
        about["parts"] = {name: _configuration(unwrapped(one)) for name, one in module.named_children()}
    return about


def _configuration(module: Any) -> dict[str, Any]:
    about: dict[str, Any] = {}
    base = module.get_base_model() if hasattr(module, "get_base_model") else module  # peft's wrapper
    if isinstance(adapters := getattr(module, "peft_config", None), dict):
        for key, adapter in adapters.items():  # as peft's save_pretrained writes them
            name = adapter.base_model_name_or_path or getattr(base, "name_or_path", None)
            settings = {**adapter.to_dict(), "inference_mode": True, "base_model_name_or_path": name}
            plain = json.dumps(
                settings, default=lambda one: sorted(one) if isinstance(one, set) else str(one)
            )
            about.setdefault("adapters", {})[key] = json.loads(plain)
    config = getattr(base, "config", None)
    if config is not None and hasattr(config, "to_json_string"):
        architecture = type(base).__name__.removeprefix("FSDP")
        about["config"] = {**json.loads(config.to_json_string()), "architectures": [architecture]}
    return about
