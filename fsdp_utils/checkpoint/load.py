"""load_distributed: all ranks check everything before the first byte goes into the model."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_utils.checkpoint.collective import IgnoredParams, collective_call
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.manifest import (
    MANIFEST,
    check_hashes,
    check_sizes,
    find,
    hash_file,
    read_manifest,
    share,
    tensor_specs,
)
from fsdp_utils.checkpoint.metadata import read_described, reduced
from fsdp_utils.checkpoint.reader import TensorReads, read_plain
from fsdp_utils.checkpoint.remote import located, refreshed
from fsdp_utils.checkpoint.restore import (
    optimizer_buffers,
    restore_model,
    restore_optimizers,
    state_buffers,
)
from fsdp_utils.checkpoint.save import is_int
from fsdp_utils.checkpoint.state import (
    MODEL,
    PLAIN,
    OptimizerPlan,
    Optimizers,
    Snapshot,
    class_names,
    listed,
    whole,
    without_unsharded_wrappers,
)
from fsdp_utils.checkpoint.user_state import LoadedState, PerRank, Places, StateToLoad, insert_sharded
from fsdp_utils.checkpoint.validate import NotLoaded, check_model, match_optimizers, read_state
from fsdp_utils.distributed.agreement import WAIT_S, Ranks


def load_distributed(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    step: int | str = "latest",
    state: Mapping[str, Any] | None = None,
    strict: bool = True,
    ignore_frozen_params: bool = False,
    cast: bool = False,
    verify: bool = True,
    wait_s: float = WAIT_S,
) -> LoadedState:
    """Load what save_distributed saved, on any number of ranks, into any wrapper of the same model.

    Call it on every rank.

    Args:
        directory: as for save_distributed.
        model: with parameters on their devices (not on meta); their values are replaced.
        optimizer: as many as were saved, each of a related class, such as Adam and AdamW, over the same
            parameters in the same groups; their order and names may be others. Their settings (lr, betas,
            weight_decay and all else in param_groups) become those that were saved, as with
            Optimizer.load_state_dict(): change a setting after loading. None leaves what was saved aside.
        step: of which step; "latest" is the checkpoint that was saved last.
        state: objects by the name under which they were saved, to be loaded in place by load_state_dict(),
            after the model and the optimizer. The dict that is returned holds what they were given, too.
        strict: False loads what the model and the checkpoint both have, and leaves the rest of the model as
            it is; the result says what that was. What both have must have the same shape, and an optimizer
            has to match all the same.
        ignore_frozen_params: leave parameters of the model that need no gradient as they are, whether or not
            they are in the checkpoint.
        cast: convert to the model's dtypes where they differ from the saved ones.
        verify: False puts the comparison of the files with their hashes off (for `verify_checkpoint`). Their
            sizes, and all names, shapes and dtypes, are compared in any case.
        wait_s: seconds to wait for all ranks to enter, and then for another rank in each gloo collective of
            the model's own groups. (NCCL's have the timeout of their group.) One rank may take an hour longer
            than the others to read or write its part.

    Returns:
        The state that was saved, and "step", in a LoadedState, which also names what of the model was not
        loaded. A value that differed between ranks comes back to the rank that saved it, when there are as
        many ranks as then; otherwise as a PerRank, the list of all values by the rank that saved them. A
        DTensor comes back as this rank's part of a DTensor over the model's mesh: sharded as the parameter of
        the same name and shape is (an average of the weights), else along the same dimensions as before; or
        as a whole tensor where the model is not sharded by FSDP2.

    Raises:
        CheckpointError: the same on every rank. Model and optimizer are as they were, unless it says
            otherwise.

    Example::

        state = load_distributed("run", model, optimizer, state={"scheduler": scheduler})
        torch.set_rng_state(state["rng"])
        print(state["step"], state["epoch"])  # 7 3
    """
    home, model = located(directory).absolute(), without_unsharded_wrappers(model)
    objects, optimizers = StateToLoad(state), listed(optimizer)
    ignored = IgnoredParams(model, ignore_frozen_params)

    def facts() -> dict[str, Any]:
        if step != "latest" and not is_int(step):
            raise CheckpointError(f'expected step to be a whole number or "latest", found {step!r}')
        return {
            "directory": str(home),
            "step": step,
            "strict": strict,
            **ignored.facts(),
            "cast": cast,
            "verify": verify,
            "state": objects.names(),
        }

    with collective_call("load_distributed", model, optimizers, facts, wait_s=wait_s) as ranks:
        checkpoint = ranks.first(lambda: find(home, step))
        manifest: dict[str, Any] = {}

        def read() -> str:
            manifest.update(_read_manifest(checkpoint))
            return hash_file(checkpoint / MANIFEST)

        hashes = ranks.all(read)
        wanted = Snapshot.take(model)
        found = tensor_specs(manifest)

        def check_files() -> tuple[Metadata | None, NotLoaded]:
            """Rank 0 reads the description for all, while others still hash their share of the files."""
            _must_be_same(checkpoint, hashes)
            in_model = {key: spec for key, spec in found.items() if key.startswith(MODEL)}
            left = check_model(
                wanted, in_model, manifest["tied"], cast=cast, strict=strict, ignored=ignored.names
            )
            if verify:
                mine = share(manifest["files"], ranks.rank, ranks.world_size)
                check_hashes(checkpoint, manifest, mine, threads=ranks.threads())
            return reduced(read_described(checkpoint, manifest)) if ranks.rank == 0 else None, left

        described, left = ranks.each(check_files)
        metadata = ranks.first(lambda: described)
        assert metadata is not None
        tensors = wanted.without(left.missing_keys)
        places: Places = {}  # of the sharded tensors in the state

        def prepare() -> tuple[dict[str, Any], list[OptimizerPlan], TensorReads]:
            plain = read_state(checkpoint, metadata, manifest["tensors"])
            wanted.take_extra(plain["extra"], strict=strict)
            others = _state(checkpoint, metadata, plain, manifest, ranks)
            places.update(plain.get("sharded", {}))
            tensors.update(state_buffers(places, found, model))
            # To know before anything is loaded that it can be.
            objects.check(insert_sharded(others, tensors, places))
            saved = []
            if optimizers:
                plan = plain["optimizer"] and OptimizerPlan(**plain["optimizer"])
                saved = match_optimizers(wanted, model, optimizers, plan, _optimizer_classes(manifest))
                tensors.update(optimizer_buffers(wanted, model, optimizers, saved, found))
            reads = TensorReads(checkpoint, metadata, tensors)
            reads.check()
            return others, saved, reads

        others, saved, reads = ranks.each(prepare)
        ranks.consequence = "\nThe model may be partly loaded: do not go on with it."
        ranks.each(lambda: reads.read(ranks.threads()))
        restore_model(model, wanted)
        restore_optimizers(wanted, model, optimizers, saved, tensors, lambda key: whole(tensors[key]))
        others = insert_sharded(others, tensors, places)
        ranks.each(lambda: objects.load(others))  # nobody goes on with what another rank failed to load
    return LoadedState({**others, "step": others.get("step", manifest["step"])}, *left)


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    if not refreshed(checkpoint).is_dir():
        raise CheckpointError(
            f"{checkpoint}: expected the directory that rank 0 sees, found none: it is not shared between "
            "the hosts"
        )
    manifest = read_manifest(checkpoint)
    check_sizes(checkpoint, manifest)
    return manifest


def _optimizer_classes(manifest: dict[str, Any]) -> list[Any]:
    """recorded_classes() of the saved optimizers; empty if an old checkpoint names an unknown class."""
    known = getattr(torch.optim, str(manifest["optimizer"]), None)
    return manifest.get("optimizer_classes", class_names(known) if isinstance(known, type) else [])


def _must_be_same(checkpoint: Path, hashes: list[str]) -> None:
    if len(set(hashes)) > 1:
        raise CheckpointError(
            f"{checkpoint / MANIFEST}: expected the same file on all ranks, found others on ranks "
            f"{[rank for rank, one in enumerate(hashes) if one != hashes[0]]}: the directory is not shared"
        )


def _state(
    checkpoint: Path, metadata: Metadata, plain: dict[str, Any], manifest: dict[str, Any], ranks: Ranks
) -> dict[str, Any]:
    state = dict(plain["state"])
    if plain["per_rank"]:
        if manifest["world_size"] == ranks.world_size:
            state |= read_plain(checkpoint, metadata, f"{PLAIN}.rank{ranks.rank}")
        else:
            by_rank = [
                read_plain(checkpoint, metadata, f"{PLAIN}.rank{rank}")
                for rank in range(manifest["world_size"])
            ]
            state |= {name: PerRank(part[name] for part in by_rank) for name in plain["per_rank"]}
    return state
