"""save_full and load_full: the whole training state in one file that plain torch.load reads."""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_utils.checkpoint.collective import (
    IgnoredParams,
    WholeParams,
    check_same_optimizer,
    collective_call,
    differing,
    has_state,
)
from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from fsdp_utils.checkpoint.files import NewFile, open_regular, size_of, sync_directory
from fsdp_utils.checkpoint.manifest import (
    FORMAT,
    KNOWN,
    Progress,
    algorithm_of,
    hash_file,
)
from fsdp_utils.checkpoint.remote import located_file
from fsdp_utils.checkpoint.restore import (
    optimizer_buffers,
    restore_model,
    restore_optimizers,
    state_buffers,
)
from fsdp_utils.checkpoint.safe_pickle import check_archive
from fsdp_utils.checkpoint.save import describe
from fsdp_utils.checkpoint.state import (
    MODEL,
    OptimizerPlan,
    Optimizers,
    Snapshot,
    has_fsdp1,
    listed,
    recorded_classes,
    without_unsharded_wrappers,
)
from fsdp_utils.checkpoint.user_state import (
    LoadedState,
    PerRank,
    StateToLoad,
    StateToSave,
    insert_sharded,
    pack,
    reason,
    unpack,
)
from fsdp_utils.checkpoint.validate import NotLoaded, check_full, check_model, match_optimizers
from fsdp_utils.checkpoint.writer import HashingFile
from fsdp_utils.distributed.agreement import WAIT_S, Ranks
from fsdp_utils.sharding.local_part import local, local_chunk

_CPU = torch.device("cpu")
_END_OF_ZIP = b"PK\x05\x06"
_END_BYTES = 22  # of the record that ends a zip file, without the comment that may follow


def save_full(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    ignore_frozen_params: bool = False,
    wait_s: float = WAIT_S,
    **more_state: Any,
) -> Path:
    """Save the whole training state in one file, gathered in the CPU memory of rank 0.

    Call it on every rank. The file replaces an older one at once, when it is durable. It carries its own
    hash, and is read by plain `torch.load(path)["model"]` too.

    Args:
        path: of the file, on a disk of rank 0.
        model: wrapped with FSDP2, FSDP1 or DDP, or not at all.
        optimizer: one, or several over different parameters, as a sequence or the values of a mapping; they
            are told apart by their parameters, not by order or name. Left out of the file when None.
        state: what else training needs to go on, such as the step, as for save_distributed. DTensors in it
            are gathered, and stored under "sharded" (see load_full).
        ignore_frozen_params: leave out parameters that need no gradient: of a model with adapters over a
            frozen base, save the adapters. Such a checkpoint is loaded with the same option.
        wait_s: seconds to wait for all ranks to enter, and then for another rank in each gloo collective of
            the model's own groups. (NCCL's have the timeout of their group.) One rank may take an hour longer
            than the others to read or write its part.
        **more_state: more of the state by keyword, for names that are no argument.

    Returns:
        The path.

    Raises:
        CheckpointError: the same on every rank. A file that was there before still is.

    Example::

        save_full("model.pt", model, optimizer, state={"scheduler": scheduler, "step": step})
    """
    path = located_file(path, "save_full").absolute()
    copies, model = WholeParams(model), without_unsharded_wrappers(model)

    taken, optimizers = StateToSave(state, more_state), listed(optimizer)
    created: list[NewFile] = []  # on rank 0
    ignored = IgnoredParams(model, ignore_frozen_params)

    def facts() -> dict[str, Any]:
        return {"path": str(path), **ignored.facts(), **copies.facts()}

    with collective_call("save_full", model, optimizers, facts, state=taken, wait_s=wait_s) as ranks:
        try:
            ranks.each(lambda: copies.check(ranks))
            # Before anything is gathered, because that takes long.
            ranks.each(lambda: created.append(_create(path)) if ranks.rank == 0 else None)
            snapshot = Snapshot.take(model, optimizers, stateful=has_state(ranks))
            check_same_optimizer(snapshot, ranks)
            snapshot.leave_out(ignored.names)
            snapshot.tensors |= taken.tensors
            snapshot = snapshot.gathered(ranks.rank)
            apart = differing(ranks)
            by_rank = ranks.all(lambda: pack({name: taken.plain[name] for name in apart}, "state"))

            def write() -> None:
                (unfinished,) = created
                parts = [unpack(part) for part in by_rank]
                plan = snapshot.optimizer
                pack((snapshot.extra, plan and (plan.groups, plan.plain)), "model or optimizer")
                tensors = {key.removeprefix(MODEL): t for key, t in snapshot.tensors.items()}
                content = {
                    "format": FORMAT,
                    "world_size": ranks.world_size,
                    "torch": str(torch.__version__),
                    "about": describe(model),
                    "tied": snapshot.tied,
                    "model": {
                        **snapshot.nested()["model"],
                        **{alias: tensors[name] for alias, name in snapshot.tied.items()},
                        **snapshot.extra,
                    },
                    "optimizer": plan and plan.whole(snapshot.tensors),
                    "optimizer_classes": recorded_classes(optimizers),
                    "state": {name: value for name, value in taken.plain.items() if name not in apart},
                    "sharded": {key: (place, snapshot.tensors[key]) for key, place in taken.places.items()},
                    "per_rank": {name: [part[name] for part in parts] for name in apart},
                }
                with HashingFile(unfinished.path, unfinished.descriptor()) as file:
                    torch.save(content, file)  # type: ignore[arg-type]
                    written = file.finish()
                _seal(unfinished.path, written)
                unfinished.commit()
                sync_directory(path.parent)

            ranks.first(write)
        finally:
            for unfinished in created:
                unfinished.discard()
    return path


def load_full(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    strict: bool = True,
    ignore_frozen_params: bool = False,
    cast: bool = False,
    verify: bool = True,
    wait_s: float = WAIT_S,
) -> LoadedState:
    """Load what save_full saved, on any number of ranks, into any wrapper of the same model.

    Call it on every rank. Rank 0 alone reads the file, and sends one tensor after the other; the others keep
    their shard of each.

    Args:
        path: of the file, on a disk of rank 0.
        model: with parameters on their devices (not on meta); their values are replaced.
        optimizer: as for load_distributed, which says what becomes of its settings.
        state: objects by the name under which they were saved, to be loaded in place by load_state_dict(),
            after the model and the optimizer. The dict that is returned holds what they were given, too.
        strict: False loads what the model and the checkpoint both have, and leaves the rest of the model as
            it is; the result says what that was. What both have must have the same shape, and an optimizer
            has to match all the same.
        ignore_frozen_params: leave parameters of the model that need no gradient as they are, whether or not
            they are in the file.
        cast: convert to the model's dtypes where they differ from the saved ones.
        verify: False puts the comparison of the file with its hash off (for `verify_checkpoint`).
        wait_s: seconds to wait for all ranks to enter, and then for another rank in each gloo collective of
            the model's own groups. (NCCL's have the timeout of their group.) One rank may take an hour longer
            than the others to read or write its part.

    Returns:
        The state that was saved, in a LoadedState, which also names what of the model was not loaded. A value
        that differed between ranks comes back to the rank that saved it, when there are as many ranks as
        then; otherwise as a PerRank, the list of all values by the rank that saved them. A DTensor comes back
        as from load_distributed.

    Raises:
        CheckpointError: the same on every rank. Model and optimizer are as they were, unless it says
            otherwise.

    Example::

        state = load_full("model.pt", model, optimizer, state={"scheduler": scheduler})
        print(state["step"])  # 7
    """
    path = located_file(path, "load_full").absolute()
    model, objects = without_unsharded_wrappers(model), StateToLoad(state)
    optimizers, ignored = listed(optimizer), IgnoredParams(model, ignore_frozen_params)

    def facts() -> dict[str, Any]:
        settings = {"path": str(path), "strict": strict, "cast": cast, "verify": verify}
        return {**settings, **ignored.facts(), "state": objects.names()}

    with collective_call("load_full", model, optimizers, facts, wait_s=wait_s) as ranks:
        tensors: dict[str, Tensor] = {}  # on rank 0, in the mapped file

        def read() -> dict[str, Any]:
            if verify:
                verify_file(path)
            content = read_full(path)
            plan, state = None, {}
            if content["optimizer"] is not None:
                plan, state = OptimizerPlan.of(content["optimizer"])
            extra = {}
            for name, value in content["model"].items():
                if isinstance(value, Tensor):
                    tensors[MODEL + name] = value
                else:
                    extra[name] = value
            tensors.update(state)
            sharded = content.get("sharded", {})
            tensors.update({key: tensor for key, (_, tensor) in sharded.items()})
            return {
                **{key: content[key] for key in ("world_size", "tied", "state", "per_rank")},
                "specs": {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()},
                "extra": extra,
                "optimizer": plan,
                "sharded": {key: place for key, (place, _) in sharded.items()},
                "optimizer_classes": content.get("optimizer_classes", []),
            }

        head = ranks.first(read)
        specs, wanted = head["specs"], Snapshot.take(model)
        buffers: dict[str, Tensor] = {}
        saved: list[OptimizerPlan] = []

        def prepare() -> tuple[dict[str, Any], dict[str, Tensor], NotLoaded]:
            in_model = {key: spec for key, spec in specs.items() if key.startswith(MODEL)}
            left = check_model(
                wanted, in_model, head["tied"], cast=cast, strict=strict, ignored=ignored.names
            )
            if optimizers:
                classes = head["optimizer_classes"]
                saved.extend(match_optimizers(wanted, model, optimizers, head["optimizer"], classes))
                if not has_fsdp1(model):
                    buffers.update(optimizer_buffers(wanted, model, optimizers, saved, specs))
            same = head["world_size"] == ranks.world_size
            per_rank = {
                name: values[ranks.rank] if same else PerRank(values)
                for name, values in head["per_rank"].items()
            }
            found, in_state = head["state"] | per_rank, state_buffers(head["sharded"], specs, model)
            # To know before anything is loaded that it can be.
            objects.check(insert_sharded(found, in_state, head["sharded"]))
            return found, in_state, left

        found, in_state, left = ranks.each(prepare)
        ranks.consequence = "\nThe model may be partly loaded: do not go on with it."
        broadcast = _Broadcast(ranks, tensors, specs)
        for key, target in {**wanted.without(left.missing_keys), **buffers}.items():
            _copy_part(broadcast.tensor(key, target.device), target)
        wanted.take_extra(head["extra"], strict=strict)
        restore_model(model, wanted)
        restore_optimizers(wanted, model, optimizers, saved, buffers, broadcast.tensor)
        for key, target in in_state.items():
            _copy_part(broadcast.tensor(key, target.device), target)
        found = insert_sharded(found, in_state, head["sharded"])
        ranks.each(lambda: objects.load(found))  # nobody goes on with what another rank failed to load
    return LoadedState(found, *left)


class _Broadcast:
    """Broadcasts rank 0's tensors, one after the other, into one receive buffer on the other ranks."""

    def __init__(
        self,
        ranks: Ranks,
        tensors: dict[str, Tensor],  # on rank 0
        specs: dict[str, tuple[torch.dtype, torch.Size]],
    ) -> None:
        self._ranks, self._tensors, self._specs = ranks, tensors, specs
        self._bytes = max((dtype.itemsize * shape.numel() for dtype, shape in specs.values()), default=0)
        self._places: dict[torch.device, Tensor] = {}

    def tensor(self, key: str, device: torch.device = _CPU) -> Tensor:
        """Broadcast a full tensor; it is valid until the next call."""
        if self._ranks.rank == 0:
            tensor = self._tensors[key].to(device).contiguous()
        else:
            dtype, shape = self._specs[key]
            # A new tensor each time would leave gaps in the heap that add up.
            if device not in self._places:
                self._places[device] = torch.empty(self._bytes, dtype=torch.uint8, device=device)
            tensor = self._places[device][: dtype.itemsize * shape.numel()].view(dtype).view(shape)
        if self._ranks.distributed and tensor.numel():
            # As bytes: gloo does not know every dtype. GPUs send through the training's own group.
            data = tensor.reshape(-1).view(torch.uint8)
            dist.broadcast(data, src=0, group=self._ranks.group if device.type == "cpu" else None)
        return tensor


@torch.no_grad()
def _copy_part(tensor: Tensor, target: Tensor) -> None:
    """Copy this rank's part of a full tensor into target."""
    if isinstance(target, DTensor):
        for dim, (start, length) in enumerate(zip(*local_chunk(target), strict=True)):
            tensor = tensor.narrow(dim, min(start, tensor.shape[dim] - length), length)
    local(target).copy_(tensor)


# ---- the file --------------------------------------------------------------------------------------


def _create(path: Path) -> NewFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    return NewFile(path)


def _seal(path: Path, written: dict[str, Any]) -> None:
    """Append the hash as the comment of the zip archive that torch.save wrote."""
    comment = json.dumps({"format": FORMAT, **written}).encode()
    with path.open("r+b") as file:
        file.seek(-_END_BYTES, os.SEEK_END)
        end = file.read()
        assert end.startswith(_END_OF_ZIP)
        assert end.endswith(b"\0\0")
        file.seek(-2, os.SEEK_END)  # the length of the comment
        file.write(struct.pack("<H", len(comment)) + comment)
        file.flush()
        os.fsync(file.fileno())


def verify_file(path: Path, *, progress: Progress = lambda count: None) -> None:
    """Compare a file of save_full with the hash at its end.

    Raises:
        CheckpointError: it is not, or there is no such file.
    """
    try:
        with open_regular(path) as file:
            size = size_of(file)
            file.seek(max(0, size - 1024))
            tail = file.read(1024)
    except OSError as error:
        none = isinstance(error, FileNotFoundError)
        raise (CheckpointNotFoundError if none else CheckpointError)(
            f"{path}: expected a file that save_full wrote, found none: {error.strerror}"
        ) from error
    start = tail.rfind(_END_OF_ZIP)
    try:
        seal = json.loads(tail[start + _END_BYTES :])
        if (algorithm := algorithm_of(seal)) is None:
            raise KeyError(KNOWN)
        expected, length = seal[algorithm], seal["bytes"]
        if seal != {"format": FORMAT, "bytes": length, algorithm: expected}:
            raise KeyError("format")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamagedError(
            f"{path}: expected a file that ends with its hash, by {KNOWN}, found none in its {size} bytes: "
            "it was cut short, or not written by save_full of this version or an earlier one"
        ) from error
    if length != size - len(tail) + start + _END_BYTES:
        raise CheckpointDamagedError(
            f"{path}: expected {length} bytes before the hash, found {size - len(tail) + start + _END_BYTES}"
        )
    # As it was without the comment.
    found = hash_file(path, algorithm, length=length - 2, end=b"\0\0", progress=progress)
    if found != expected:
        raise CheckpointDamagedError(
            f"{path}: expected {algorithm} {expected}, found {found}: it is not what was saved"
        )


def read_full(path: Path) -> dict[str, Any]:
    """Read a file of save_full without running what is in it. Tensors are mapped, and read when used."""
    try:
        with open_regular(path) as file:
            check_archive(file)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: expected a file that save_full wrote, found none") from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointDamagedError(
            f"{path}: expected tensors and plain data, found what cannot be read safely and was not run: "
            f"{reason(error)}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointDamagedError(
            f"{path}: expected a file that save_full wrote (format {FORMAT}), found "
            + (f"the entries {list(content)[:5]}" if isinstance(content, dict) else type(content).__name__)
        )
    check_full(path, content)
    return content
