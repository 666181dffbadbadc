"""load_distributed: all ranks check everything before the first byte goes into the model."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from fsdp_utils.checkpoint.collective import collective_call
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
from fsdp_utils.checkpoint.restore import (
    fsdp1_optimizer_state,
    optimizer_buffers,
    restore_model,
    restore_optimizer,
    state_by_parameter,
    units_of,
)
from fsdp_utils.checkpoint.save import is_int
from fsdp_utils.checkpoint.state import (
    MODEL,
    PLAIN,
    OptimizerPlan,
    Snapshot,
    class_names,
    whole,
    without_unsharded_wrappers,
)
from fsdp_utils.checkpoint.user_state import PerRank, Places, buffers_for, insert_sharded
from fsdp_utils.checkpoint.validate import check_model, check_optimizer, read_state
from fsdp_utils.distributed.agreement import WAIT_S, Ranks


def load_distributed(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | str = "latest",
    cast: bool = False,
    verify: bool = True,
    wait_s: float = WAIT_S,
) -> dict[str, Any]:
    """Load what save_distributed saved, on any number of ranks, into any wrapper of the same model.

    Call it on every rank.

    Args:
        directory: as for save_distributed.
        model: with parameters on their devices (not on meta); their values are replaced.
        optimizer: of a related class, such as Adam and AdamW, over the same parameters in the same groups.
            Its settings (lr, betas, weight_decay and all else in param_groups) become those that were saved,
            as with Optimizer.load_state_dict(): change a setting after loading. None leaves the saved one
            aside.
        step: of which step; "latest" is the checkpoint that was saved last.
        cast: convert to the model's dtypes where they differ from the saved ones.
        verify: False puts the comparison of the files with their hashes off (for `verify_checkpoint`). Their
            sizes, and all names, shapes and dtypes, are compared in any case.
        wait_s: seconds to wait for all ranks to enter, and then for another rank in each gloo collective of
            the model's own groups. (NCCL's have the timeout of their group.) One rank may take an hour longer
            than the others to read or write its part.

    Returns:
        The state that was saved, and "step". A value that differed between ranks comes back to the rank that
        saved it, when there are as many ranks as then; otherwise as a PerRank, the list of all values by the
        rank that saved them. A DTensor comes back as a DTensor over the model's mesh, which shards the same
        dimensions, or as a whole tensor where the model is not sharded by FSDP2.

    Raises:
        CheckpointError: the same on every rank. Model and optimizer are as they were, unless it says
            otherwise.

    Example::

        state = load_distributed("run", model, optimizer)
        torch.set_rng_state(state["rng"])
        print(state["step"], state["epoch"])  # 7 3
    """
    home, model = Path(directory).absolute(), without_unsharded_wrappers(model)

    def facts() -> dict[str, Any]:
        if step != "latest" and not is_int(step):
            raise CheckpointError(f'expected step to be a whole number or "latest", found {step!r}')
        return {"directory": str(home), "step": step, "cast": cast, "verify": verify}

    with collective_call("load_distributed", model, optimizer, facts, wait_s=wait_s) as ranks:
        checkpoint = ranks.first(lambda: find(home, step))
        manifest: dict[str, Any] = {}

        def read() -> str:
            manifest.update(_read_manifest(checkpoint))
            return hash_file(checkpoint / MANIFEST)

        hashes = ranks.all(read)
        wanted = Snapshot.take(model)
        found = tensor_specs(manifest)

        def check_files() -> Metadata | None:
            """Rank 0 reads the description for all, while others still hash their share of the files."""
            _must_be_same(checkpoint, hashes)
            in_model = {key: spec for key, spec in found.items() if key.startswith(MODEL)}
            check_model(wanted, in_model, manifest["tied"], cast=cast)
            if verify:
                mine = share(manifest["files"], ranks.rank, ranks.world_size)
                check_hashes(checkpoint, manifest, mine, threads=ranks.threads())
            return reduced(read_described(checkpoint, manifest)) if ranks.rank == 0 else None

        described = ranks.each(check_files)
        metadata = ranks.first(lambda: described)
        assert metadata is not None
        tensors = dict(wanted.tensors)
        places: Places = {}  # of the sharded tensors in the state

        def prepare() -> tuple[dict[str, Any], OptimizerPlan | None, TensorReads]:
            plain = read_state(checkpoint, metadata, manifest["tensors"])
            wanted.extra = plain["extra"]
            state = _state(checkpoint, metadata, plain, manifest, ranks)
            places.update(plain.get("sharded", {}))
            tensors.update(buffers_for(places, found, model))
            insert_sharded(state, tensors, places)  # to know before anything is loaded that it can be
            saved = None
            if optimizer is not None:
                saved = plain["optimizer"] and OptimizerPlan(**plain["optimizer"])
                saved = check_optimizer(wanted, model, optimizer, saved, _optimizer_classes(manifest))
                tensors.update(optimizer_buffers(wanted, model, optimizer, saved, found))
            reads = TensorReads(checkpoint, metadata, tensors)
            reads.check()
            return state, saved, reads

        state, saved, reads = ranks.each(prepare)
        ranks.consequence = "\nThe model may be partly loaded: do not go on with it."
        ranks.each(lambda: reads.read(ranks.threads()))
        restore_model(model, wanted)
        if optimizer is not None and saved is not None:
            units = units_of(model)
            restore_optimizer(
                wanted,
                model,
                optimizer,
                saved,
                fsdp1_optimizer_state(model, units, optimizer, saved, lambda key: whole(tensors[key]))
                if units
                else state_by_parameter(wanted, model, saved, tensors),
            )
        ranks.each(lambda: None)  # nobody goes on with what another rank failed to load
    return {**insert_sharded(state, tensors, places), "step": manifest["step"]}


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint}: expected the directory that rank 0 sees, found none: it is not shared between "
            "the hosts"
        )
    manifest = read_manifest(checkpoint)
    check_sizes(checkpoint, manifest)
    return manifest


def _optimizer_classes(manifest: dict[str, Any]) -> list[str]:
    """optimizer_classes() of the saved optimizer; empty if an old checkpoint names an unknown class."""
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
