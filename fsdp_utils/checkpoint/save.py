"""save_distributed: every rank writes its part durably, then one rename commits all parts."""

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils.checkpoint.asynchronous import Save, stage
from fsdp_utils.checkpoint.codec import encode_named
from fsdp_utils.checkpoint.collective import collective_call, is_int, named_values
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import local_path, write_file
from fsdp_utils.checkpoint.folder import abandon, begin, commit, keep_last
from fsdp_utils.checkpoint.state import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    PER_RANK,
    STATE,
    Held,
    Optimizers,
    frozen_names,
    listed,
    parameter_names,
    specs,
    unwrapped,
    without_unsharded_wrappers,
)
from fsdp_utils.checkpoint.tensor_files import write_tensors
from fsdp_utils.distributed.agreement import WAIT_S, Ranks, fingerprint, rank_names
from fsdp_utils.sharding.copies import (
    broadcast,
    buffer_copies,
    differing,
    digest,
    dtensor_copies,
    in_words,
    inventory,
    parameter_copies,
    state_copies,
)
from fsdp_utils.sharding.local_part import is_readable
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.sharding.unsaved_buffers import samples, unsaved

STATE_FILE = "state.json"
# A shared directory may show another host's new file a little late.
_SHARED_WAIT_S = 3.0


def save_distributed(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    step: int,
    state: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    keep: int | None = None,
    ignore_frozen_params: bool = False,
    asynchronous: bool = False,
    sync_replicas: bool = False,
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
        state: what else training needs to go on, by name, equal on all ranks: plain values and tensors, such
            as an average of the weights, and objects with state_dict() and load_state_dict() (schedulers,
            gradient scalers), of which the state_dict() is saved. DTensors in it are stored sharded (see
            load_distributed).
        per_rank: what differs between ranks, by name: the state of random number generators, the position in
            this rank's data. Each rank's value comes back to it. A buffer of the model that differs is to be
            given under its name, and copied back after loading; the model's part of the checkpoint has rank
            0's.
        keep: delete all but the last `keep` checkpoints, after this one is durable. None keeps all.
        ignore_frozen_params: leave out parameters that need no gradient: of a model with adapters over a
            frozen base, save the adapters. Such a checkpoint is loaded with the same option.
        asynchronous: return when the state is copied to CPU memory, and write in the background. One save is
            in flight at a time: the next save or load waits for it and raises its error. Takes memory for a
            second copy of this rank's shard, and keeps it for the next save.
        sync_replicas: where ranks hold copies of a parameter (hybrid sharding, DDP, ignored parameters) or of
            a buffer, give them all the first one's values and optimizer state, also in the model. Without it,
            copies that differ are an error.
        wait_s: seconds to wait for all ranks to enter, and then for another rank in each gloo collective of
            the model's own groups. (NCCL's have the timeout of their group.) One rank may take an hour longer
            than the others to read or write its part.

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
    wrapped, model, optimizers = model, without_unsharded_wrappers(model), listed(optimizer)
    ignored: list[str] = []
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
        ignored.extend(frozen_names(model) if ignore_frozen_params else [])
        return {
            "directory": str(local_path(directory)),
            "step": step,
            "keep": keep,
            "asynchronous": asynchronous,
            "sync_replicas": sync_replicas,
            "ignore_frozen_params": ignore_frozen_params,
            "frozen parameters": fingerprint(ignored),
            "names in state": sorted(of_all),
            "names in per_rank": sorted(of_rank),
        }

    with collective_call("save_distributed", model, optimizers, facts, wait_s=wait_s) as ranks:
        params = {name for names in parameter_names(model).values() for name in names}
        without = {*ignored, *(of_rank.keys() - params), *_broadcast_by_ddp(wrapped, model)}
        check_copies(model, ranks, ignored=without, sync=optimizers if sync_replicas else None)
        stateful = [any(ranks.numbers(int(bool(one.state)))) for one in optimizers]
        held = ranks.each(lambda: Held.of(model, optimizers, stateful))
        held.leave_out(ignored)

        def take_state() -> tuple[bytes | None, dict[str, Tensor], dict[str, str]]:
            held.add_state(of_all)
            digests = _digests(held) | _digests_of_extra(held, model, ignored=of_rank)
            return (*_of_this_rank(of_rank, ranks.rank), digests)

        own_text, own_tensors, digests = ranks.each(take_state)
        ranks.same(
            "", digests, cure=". Only DTensors are saved by parts; what is to differ goes into per_rank="
        )
        if held.plain["dims"]:
            state_tensors = {key: held.tensors[key] for key in held.plain["dims"]}
            if differ := differing(dtensor_copies(state_tensors), ranks):
                ranks.each(lambda: _refuse_state(differ))
        texts = {STATE_FILE: json.dumps(held.plain).encode()} if ranks.rank == 0 else {}
        if own_text is not None:
            texts[f"rank-{ranks.rank:05d}.json"] = own_text
        about = {
            "step": step,
            "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "world_size": ranks.world_size,
            "torch": str(torch.__version__),
            "optimizer": ", ".join(one["classes"][0] for one in held.plain["optimizers"]) or None,
            "tied": held.tied,
            "tensors": specs(held.tensors),
            **describe(model),
        }
        tensors = held.tensors | own_tensors
        if asynchronous:
            ranks.in_background = True
            tensors = stage(tensors)
        home = local_path(directory)
        there = _small_meshes(tensors, ranks)
        unfinished, final, meshes = ranks.first(lambda: (*begin(home, step), there))
        tensors = {key: one for key, one in tensors.items() if there.get(key) == meshes.get(key)}

    def finish() -> None:
        commit(unfinished, final, about)
        if keep is not None:
            keep_last(final.parent, keep)

    def write() -> None:
        try:
            with ranks.guard():
                parts = ranks.all(
                    lambda: (
                        _write_part(unfinished, tensors, texts, own_tensors.keys(), ranks),
                        specs(own_tensors),
                    )
                )
                about["files"] = {name: entry for files, _ in parts for name, entry in files.items()}
                about["tensors"] |= {key: spec for _, own in parts for key, spec in own.items()}
                ranks.each(lambda: ranks.rank or finish())
        except BaseException:
            if ranks.rank == 0:
                abandon(unfinished)
            raise

    return Save(final, write, asynchronous=asynchronous)


def _of_this_rank(values: Mapping[str, Any], rank: int) -> tuple[bytes | None, dict[str, Tensor]]:
    """Return what only this rank saves, its values of per_rank=: as JSON, and the tensors in it by key.

    Raises:
        CheckpointError: a value cannot be saved; names it.
    """
    tensors: dict[str, Tensor] = {}
    plain = encode_named(values, f"{PER_RANK}{rank}.", tensors)
    if sharded := [key for key, one in tensors.items() if isinstance(one, DTensor)]:
        raise CheckpointError(
            f"{sharded[0]}: expected a tensor of this rank, found a DTensor: give it in state="
        )
    return json.dumps(plain).encode() if values else None, tensors


def _small_meshes(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, list[int]]:
    """Return the ranks that share each DTensor that not all ranks share, by key.

    Ranks outside of them may hold a copy, as of experts that are sharded over one dimension of a mesh.
    """
    meshes = {key: one.device_mesh for key, one in tensors.items() if isinstance(one, DTensor)}
    return {
        key: mesh.mesh.flatten().tolist() for key, mesh in meshes.items() if mesh.size() < ranks.world_size
    }


def _write_part(
    unfinished: Path,
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, bytes],
    only_here: Collection[str],
    ranks: Ranks,
) -> dict[str, Any]:
    """Write this rank's files; return the manifest's entries of them."""
    _must_see(unfinished)
    files = {name: write_file(unfinished / name, text) for name, text in texts.items()}
    name = f"rank-{ranks.rank:05d}.safetensors"
    entry = write_tensors(
        unfinished / name, tensors, rank=ranks.rank, world_size=ranks.world_size, only_here=only_here
    )
    return files if entry is None else {**files, name: entry}


def _values(given: Any, argument: str) -> dict[str, Any]:
    """Return state= or per_rank=, the argument, by name, with the state_dict() of objects that have one."""
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


def check_copies(
    model: nn.Module, ranks: Ranks, *, ignored: Collection[str], sync: Sequence[Optimizer] | None
) -> None:
    """Check that parameters and buffers of which several ranks hold a copy are equal on all of them.

    One rank's values are stored, so those of the others would be lost without an error: of replicas that have
    drifted apart, of experts that ranks hold under the same names, of running means.

    Args:
        ignored: names of those that are not saved.
        sync: broadcast them, and what these optimizers hold of them, from the first holder before.

    Raises:
        CheckpointError: they are not; names a few. Or the first holder cannot replace the others' state. The
            same on every rank.
    """
    names = {*ignored, *(name for name, _ in unsaved(model))}
    found = {**parameter_copies(model), **buffer_copies(model)}
    copies = {name: copy for name, copy in found.items() if name not in names}

    def have_values() -> None:
        meta = [name for param, (name, *_) in parameter_names(model).items() if param.is_meta]
        if meta := [name for name in meta if name not in ignored]:
            raise CheckpointError(
                f"expected parameters with values, found {len(meta)} on the meta device, such as "
                f"{meta[0]!r}. load_pretrained(folder, model) fills them"
            )

    ranks.each(have_values)
    if sync is not None and ranks.distributed:
        states = state_copies(copies, sync)
        places = sorted({copy.place for copy in copies.values()})
        held = {at: inventory({key: one for key, one in states.items() if one.place == at}) for at in places}
        by_rank = ranks.all(lambda: held)
        first = {place: found for one in reversed(by_rank) for place, found in one.items()}
        odd = [rank for rank, one in enumerate(by_rank) if not one.items() <= first.items()]
        if odd:
            ranks.each(lambda: _refuse_to_sync(odd))
        broadcast(copies)
        broadcast(states)
    if differ := differing(copies, ranks):
        ranks.each(lambda: _refuse_copies(differ))


def _broadcast_by_ddp(wrapped: nn.Module, model: nn.Module) -> set[str]:
    """Name the buffers that DDP broadcasts from rank 0 before the next step."""
    units = [one for one in wrapped.modules() if isinstance(one, DistributedDataParallel)]
    known = {id(buffer) for one in units if one.broadcast_buffers for buffer in one.buffers()}
    return {plain_name(name) for name, buffer in model.named_buffers() if id(buffer) in known}


def _refuse_to_sync(odd: list[int]) -> None:
    raise CheckpointError(
        "sync_replicas expected the same entries of the optimizer's state on all ranks that hold a copy of a "
        f"parameter, found others on {rank_names(odd)}. Load the optimizer's state on all ranks, or save "
        "without the optimizer"
    )


def _refuse_copies(differ: Mapping[str, str]) -> None:
    raise CheckpointError(
        "expected the same values on all ranks that hold a copy of a parameter or buffer, found that "
        f"{in_words(differ)}. check_sharding(model, optimizer) looks for the cause; "
        "save_distributed(..., sync_replicas=True) saves the first copy, and goes on with it. A buffer that "
        "is to differ, such as a running mean, can be given as per_rank={name: buffer}. If each rank has "
        "experts of its own, make them one DTensor over their mesh: DTensor.from_local(own, mesh, [Shard(0)])"
    )


def _refuse_state(differ: Mapping[str, str]) -> None:
    raise CheckpointError(
        "expected the same values on all ranks that hold a copy of a part of a DTensor in the state, found "
        f"that {in_words(differ)}. Broadcast it from the first of them, or save its to_local() in per_rank="
    )


def _digests(held: Held) -> dict[str, str]:
    """What must be equal on all ranks: the state of the optimizers and the user's, but the parts of DTensors.

    DDP's copies of an optimizer's state are not compared either, which would take long.
    """
    found: dict[str, str] = {}
    copies: set[str] = set()
    for number, one in enumerate(held.plain["optimizers"]):
        for index, group in enumerate(one["groups"]):
            for name, value in group.items():
                found[f"optimizer {number}, param_groups[{index}][{name!r}]"] = _shown(value)
        for name, values in one["state"].items():
            of_param = {f"{OPTIMIZER}{name}.{what}": _shown(value) for what, value in values.items()}
            found |= of_param
            if not isinstance(held.tensors.get(MODEL + name), DTensor):
                copies |= of_param.keys()
    found |= {f"state {name!r}": _shown(value) for name, value in held.plain["state"].items()}
    for key, tensor in held.tensors.items():
        if key.startswith((OPTIMIZER, STATE)):
            found[key] = f"{type(tensor).__name__} {tensor.dtype} {list(tensor.shape)}"
            if isinstance(tensor, DTensor):
                found[key] += f" by {tensor.placements}"
            elif key not in copies or not tensor.dim():
                found[key] += f" with hash {digest(tensor)}"
    return found


def _digests_of_extra(held: Held, model: nn.Module, *, ignored: Collection[str]) -> dict[str, str]:
    """What must be equal on all ranks of what the model has besides parameters and buffers."""
    known = {*ignored, *(name for names in parameter_names(model).values() for name in names)}
    known |= {plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    of_model = {name: one for name, one in held.of_model().items() if not isinstance(one, DTensor)}
    found = {name: digest(one) for name, one in of_model.items() if name not in known and is_readable(one)}
    for name, value in held.plain["extra"].items():
        if name not in known:
            inner = [digest(one) for key, one in held.tensors.items() if key.startswith(f"{EXTRA}{name}")]
            found[name] = " ".join([_shown(value), *inner])
    return found


def _shown(value: Any) -> str:
    """A JSON value, or its hash where it is long."""
    text = json.dumps(value)
    return text if len(text) < 80 else fingerprint([text])


# ---- the folder --------------------------------------------------------------------------------------


def _must_see(unfinished: Path) -> None:
    """Check that this rank sees the folder that rank 0 has just made, under a random name."""
    limit = time.monotonic() + _SHARED_WAIT_S
    while not unfinished.is_dir():
        if time.monotonic() > limit:
            raise CheckpointError(
                f"{unfinished.parent}: expected the directory that rank 0 writes to, found another one: it "
                "is not shared between the hosts. Save to a file system that all of them mount."
            )
        time.sleep(0.1)


# ---- about the model ---------------------------------------------------------------------------------


def describe(model: nn.Module) -> dict[str, Any]:
    """Describe the model for the manifest: its class, its configuration, the buffers that are not saved.

    Where the model has no configuration, "parts" has those of its children, such as the transformers model
    of a LightningModule, by their names.
    """
    module: Any = unwrapped(model)
    name = type(module).__name__.removeprefix("FSDP")  # which fully_shard adds
    about = {"model": name, "unsaved_buffers": samples(module), **_configuration(module)}
    if about["config"] is None:
        parts = {name: _configuration(unwrapped(child)) for name, child in module.named_children()}
        if found := {name: part for name, part in parts.items() if part["config"] is not None}:
            about["parts"] = found
    return about


def _configuration(module: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"config": None}
    base = module
    if isinstance(adapters := getattr(module, "peft_config", None), dict):  # peft's wrapper
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        about["adapters"] = {key: _plain_adapter(adapter, base) for key, adapter in adapters.items()}
    config = getattr(base, "config", None)
    if config is not None and hasattr(config, "to_json_string"):
        architecture = type(base).__name__.removeprefix("FSDP")
        about["config"] = {**json.loads(config.to_json_string()), "architectures": [architecture]}
    return about


def _plain_adapter(adapter: Any, base: nn.Module) -> dict[str, Any]:
    """The configuration of an adapter as peft's save_pretrained writes it."""
    name = adapter.base_model_name_or_path or getattr(base, "name_or_path", None)
    settings = {**adapter.to_dict(), "inference_mode": True, "base_model_name_or_path": name}
    plain = json.dumps(settings, default=lambda one: sorted(one) if isinstance(one, set) else str(one))
    return json.loads(plain)
