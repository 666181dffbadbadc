"""save_distributed: every rank writes its part durably, then one rename commits all parts."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils.checkpoint.asynchronous import Save, stage
from fsdp_utils.checkpoint.codec import KIND, encode
from fsdp_utils.checkpoint.collective import enter, is_int, named_values
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import local_path, write_file
from fsdp_utils.checkpoint.folder import Unfinished, keep_last
from fsdp_utils.checkpoint.state import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    PER_RANK,
    Held,
    Optimizers,
    listed,
    parameter_names,
    specs,
    unwrapped,
)
from fsdp_utils.checkpoint.tensor_files import check_storable, write_tensors
from fsdp_utils.distributed.agreement import WAIT_S, fingerprint, has_peers
from fsdp_utils.sharding.copies import (
    Copy,
    buffer_copies,
    copies_of,
    differing,
    digest,
    in_words,
    parameter_copies,
)
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.sharding.unsaved_buffers import samples, unsaved

STATE_FILE = "state.json"


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
    """Save a sharded training state such that it is there completely, or not at all.

    Call it on every rank. Each writes its own part into a temporary folder; when all parts are durable, a
    manifest with their hashes is added and the folder gets its name, `<commit>-step-<step>`. Until then a
    crash leaves the checkpoints that were there before. Tensors are in safetensors files, all else in JSON.

    Args:
        directory: where the checkpoints of one training are, the same for all ranks. Made if it is not there.
        model: wrapped with FSDP2, FSDP1 or DDP, or not at all.
        optimizer: one, or several over different parameters, as a sequence or the values of a mapping; they
            are told apart by their parameters, not by order or name. Left out of the checkpoint when None.
        step: number of the training step.
        state: what else training needs to go on, by name, equal on all ranks: plain values and tensors
            (DTensors are stored sharded), and objects with state_dict() and load_state_dict() (schedulers,
            gradient scalers), of which the state_dict() is saved.
        per_rank: what differs between ranks, by name: the state of random number generators, the position in
            this rank's data. Each rank's value comes back to it. Give a buffer of the model that differs
            under its name, and copy it back after loading; the model's part of the checkpoint has rank 0's.
        keep: delete all but the last `keep` checkpoints, after this one is durable. None keeps all.
        asynchronous: return when the state is copied to CPU memory, and write in the background. One save is
            in flight at a time: the next save or load waits for it and raises its error. Takes memory for a
            second copy of this rank's shard, and keeps it for the next save.
        wait_s: seconds to wait for all ranks to enter. One rank may take an hour longer than the others to
            write its part.

    Returns:
        The save. `.wait()` gives the path of the checkpoint; it is done already unless asynchronous.

    Raises:
        CheckpointError: the same on every rank; of an asynchronous save's writing, from `.wait()`. The
            checkpoints that were there still are.

    Example::

        save_distributed(
            "run", model, optimizer, step=step, keep=3,
            state={"scheduler": scheduler, "epoch": epoch},
            per_rank={"rng": torch.get_rng_state()},
        )
    """
    wrapped, model, optimizers = model, unwrapped(model, of_fsdp=False), listed(optimizer)
    of_all: dict[str, Any] = {}
    of_rank: dict[str, Any] = {}

    def facts() -> dict[str, Any]:
        if not is_int(step) or step < 0:
            raise CheckpointError(f"expected step to be a whole number of at least 0, found {step!r}")
        if keep is not None and (not is_int(keep) or keep < 1):
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

    ranks = enter("save_distributed", model, optimizers, facts, wait_s=wait_s)

    def collect() -> tuple[Held, dict[str, Tensor], dict[str, bytes], dict[str, Copy], dict[str, str]]:
        held = Held.of(model)
        held.add_optimizers(model, optimizers)
        held.add_state(of_all)
        own: dict[str, Tensor] = {}
        own_plain = encode(of_rank, f"{PER_RANK}{ranks.rank}", own)
        for key, tensor in (held.tensors | own).items():
            if key in own and isinstance(tensor, DTensor):
                raise CheckpointError(
                    f"{key}: expected a tensor of this rank, found a DTensor: give it in state="
                )
            check_storable(key, tensor)
        texts = {STATE_FILE: json.dumps(held.plain).encode()} if ranks.rank == 0 else {}
        texts |= {rank_file(ranks.rank): json.dumps(own_plain).encode()} if of_rank else {}
        return held, own, texts, *_to_compare(held, model, of_rank.keys(), _of_ddp(wrapped, model))

    with ranks.guard():
        held, own, texts, copies, digests = ranks.each(collect)
        # One rank's values are stored, so those of the others would be lost without an error: of replicas
        # that have drifted apart, of experts that ranks hold under the same names, of running means.
        cure = ". Only DTensors are saved by parts; what is to differ goes into per_rank="
        ranks.same("", digests, cure=cure)
        if differ := differing(copies, ranks):
            ranks.each(lambda: _refuse(in_words(differ)))  # raises on every rank alike
        about = {
            "step": step,
            "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "world_size": ranks.world_size,
            "torch": str(torch.__version__),
            "optimizer": ", ".join(dict.fromkeys(one["classes"][0] for one in held.plain["optimizers"]))
            or None,
            "tied": held.tied,
            "tensors": specs(held.tensors),
            **_describe(model),
        }
        tensors = held.tensors | own
        if asynchronous:
            ranks.in_background = True
            tensors = stage(tensors)
    folder = Unfinished(local_path(directory), step)  # on rank 0 alone it is begun, committed or abandoned

    def write_part(unfinished: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write this rank's files; return the manifest's entries of them, and of this rank's tensors."""
        if not unfinished.is_dir():  # under a random name
            raise CheckpointError(
                f"{unfinished.parent}: expected the directory that rank 0 writes to, found another one: it "
                "is not shared between the hosts. Save to a file system that all of them mount."
            )
        files = {name: write_file(unfinished / name, text) for name, text in texts.items()}
        name = f"rank-{ranks.rank:05d}.safetensors"
        entry = write_tensors(
            unfinished / name, tensors, rank=ranks.rank, world_size=ranks.world_size, only_here=own
        )
        return files if entry is None else {**files, name: entry}, specs(own)

    def finish() -> None:
        folder.commit(about)
        if keep is not None:
            keep_last(local_path(directory), keep)

    def write() -> Path:
        try:
            with ranks.guard():
                unfinished, final = ranks.first(folder.begin)
                parts = ranks.all(lambda: write_part(unfinished))
                about["files"] = {name: entry for files, _ in parts for name, entry in files.items()}
                about["tensors"] |= {key: spec for _, own in parts for key, spec in own.items()}
                ranks.each(lambda: ranks.rank or finish())
                return final
        finally:
            folder.abandon()

    return Save(f"step {step} in {directory}", write, asynchronous=asynchronous)


def rank_file(rank: int) -> str:
    """The name of the file with what only this rank has saved."""
    return f"rank-{rank:05d}.json"


def _values(given: Any, argument: str) -> dict[str, Any]:
    """Return state= or per_rank= by name, with the state_dict() of objects that have one."""
    found = named_values(given, argument)
    for name, value in found.items():
        if isinstance(value, Stateful):
            try:
                found[name] = value.state_dict()
            except Exception as error:
                raise CheckpointError(
                    f"{argument} {name!r}: state_dict() of {type(value).__name__} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
    return found


# ---- what must be equal on all ranks -----------------------------------------------------------------


def _refuse(differences: str) -> None:
    raise CheckpointError(
        "expected the same values on all ranks that hold a copy of a parameter, a buffer or a DTensor's part "
        f"in the state, found that {differences}. check_sharding(model, optimizer) looks for the cause; "
        "torch.distributed.broadcast makes them equal. A buffer that is to differ can be given as "
        "per_rank={name: buffer}. If each rank has experts of its own, make them one DTensor over their "
        "mesh: DTensor.from_local(own, mesh, [Shard(0)])"
    )


def _of_ddp(wrapped: nn.Module, model: nn.Module) -> set[str]:
    """Name the buffers that DDP broadcasts from rank 0 before the next step."""
    units = (one for one in wrapped.modules() if isinstance(one, DistributedDataParallel))
    if any(one.broadcast_buffers for one in units):
        return {plain_name(name) for name, _ in model.named_buffers()}
    return set()


def _to_compare(
    held: Held, model: nn.Module, per_rank: Collection[str], of_ddp: Collection[str]
) -> tuple[dict[str, Copy], dict[str, str]]:
    """Return the copies to compare by value, and all else that is saved, or hashes of it, by name.

    DDP's copies of an optimizer's state are described by their shapes alone: to hash them would take long.
    """
    if not has_peers():
        return {}, {}
    params = {name for names in parameter_names(model).values() for name in names}
    buffers = {plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    ignored = {*(set(per_rank) - params), *of_ddp}
    copies = {**parameter_copies(model), **buffer_copies(model)}
    for name in {*ignored, *(name for name, _ in unsaved(model))}:
        copies.pop(name, None)
    in_state = ((key, held.tensors[key]) for key in held.plain["dims"])
    copies |= copies_of((key, one) for key, one in in_state if isinstance(one, DTensor))

    plain = {**held.plain, "extra": {"model": held.plain["extra"]}}
    found = {key: text if len(text) < 80 else fingerprint([text]) for key, text in _leaves("", plain)}
    whole = (name for name, one in held.of_model().items() if not isinstance(one, DTensor))
    unhashed = tuple(f"{OPTIMIZER}{name}." for name in whole)
    compared = {MODEL + name for name in params | buffers}
    for key, tensor in held.tensors.items():
        if key not in compared:
            found[key] = f"{type(tensor).__name__} {tensor.dtype} {list(tensor.shape)}"
            if isinstance(tensor, DTensor):
                found[key] += f" by {tensor.placements}"
            elif not tensor.dim() or not key.startswith(unhashed):
                found[key] += f" with hash {digest(tensor)}"
    may_differ = tuple(f"{EXTRA}{name}" for name in ignored)
    return copies, {key: text for key, text in found.items() if not key.startswith(may_differ)}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield what the dicts in an encoded value hold, by path, as text."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value and KIND not in value:
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}".removeprefix("."), part)
    else:
        yield name, json.dumps(value)


# ---- about the model ---------------------------------------------------------------------------------


def _describe(model: nn.Module) -> dict[str, Any]:
    """Describe the model for the manifest: of it and of its parts, by name, the configurations, if any."""
    module = unwrapped(model)
    parts = {"": module, **{name: unwrapped(one) for name, one in module.named_children()}}
    return {
        "model": _class(module),
        "unsaved_buffers": samples(module),
        "configurations": {name: found for name, one in parts.items() if (found := _configuration(one))},
    }


def _class(module: object) -> str:
    return type(module).__name__.removeprefix("FSDP")  # which fully_shard adds


def _configuration(module: Any) -> dict[str, Any]:
    """Return the "config" of a transformers model, and of peft's wrapper the "adapters"."""
    about: dict[str, Any] = {}
    base = module
    if isinstance(adapters := getattr(module, "peft_config", None), dict):
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        about["adapters"] = {key: _plain_adapter(adapter, base) for key, adapter in adapters.items()}
    config = getattr(base, "config", None)
    if config is not None and hasattr(config, "to_json_string"):
        about["config"] = {**json.loads(config.to_json_string()), "architectures": [_class(base)]}
    return about


def _plain_adapter(adapter: Any, base: nn.Module) -> dict[str, Any]:
    """The configuration of an adapter as peft's save_pretrained writes it."""
    name = adapter.base_model_name_or_path or getattr(base, "name_or_path", None)
    settings = {**adapter.to_dict(), "inference_mode": True, "base_model_name_or_path": name}
    plain = json.dumps(settings, default=lambda one: sorted(one) if isinstance(one, set) else str(one))
    return json.loads(plain)
