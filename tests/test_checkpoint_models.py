"""Checkpoints of models: every wrapper, every placement, parts of models, frozen parameters and buffers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_utils import CheckpointError, load_distributed, run_on_ranks, save_distributed
from tests.checkpoints import (
    KINDS,
    WORDS,
    WRAPPERS,
    Block,
    Data,
    Net,
    Wrap,
    assert_told,
    build,
    by_blocks,
    fsdp1,
    fsdp2,
    outcome,
    rank,
    refusals,
    stored,
    train,
    wholes,
    world_size,
)

Losses = list[float]

# ---- every wrapper -----------------------------------------------------------------------------------------


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def checkpointed(model: Net) -> Net:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(compiled(block))
    return model


ALL: dict[str, Wrap] = {
    **{kind: WRAPPERS[kind] for kind in KINDS},
    "compile(FSDP1)": lambda model: compiled(fsdp1(model, use_orig_params=True)),
    "compile(checkpointing(DDP))": lambda model: compiled(checkpoint_wrapper(DDP(model))),
    "FSDP2(checkpointing(compile))": lambda model: fsdp2(checkpointed(model)),
    "FSDP1 without shards": lambda model: by_blocks(model, sharding_strategy=ShardingStrategy.NO_SHARD),
}


def save_all(folder: Path) -> dict[str, Losses]:
    """Train in each wrapper, save, train on: the losses after the save."""
    found = {}
    for kind, wrap in ALL.items():
        (model, optimizer), data = build(wrap), Data()
        train(model, optimizer, data, 2)
        state = {"place": data.generator.get_state()}
        save_distributed(folder / kind, model, optimizer, step=2, state=state, wait_s=5)
        found[kind] = train(model, optimizer, data, 2)
    return found


def load_all(folder: Path, ways: list[tuple[str, str]]) -> list[Losses]:
    """Load what one wrapper saved into another one and train on, as save_all does."""
    found = []
    for saver, kind in ways:
        model, optimizer = build(ALL[kind], seed=1)
        state = load_distributed(folder / saver, model, optimizer, wait_s=5)
        found.append(train(model, optimizer, Data(state["place"]), 2))
    return found


def save_and_load(folder: Path) -> tuple[dict[str, Losses], list[Losses]]:
    return save_all(folder), load_all(folder, [("fsdp2", kind) for kind in ALL])


def test_training_goes_on_from_every_wrapper_into_every_wrapper(tmp_path: Path) -> None:
    saved, loaded = run_on_ranks(save_and_load, tmp_path)[0]
    assert loaded == list(saved.values())
    names = stored(tmp_path / "fsdp2")
    for kind, losses in saved.items():
        assert losses == pytest.approx(saved["fsdp2"], rel=1e-6), kind
        assert stored(tmp_path / kind) == names, "a wrapper is part of a name"
    # other ranks sum the same gradients in another order: float32, over two steps
    expected = pytest.approx(saved["fsdp2"], rel=1e-5)
    ways = [("fsdp2", kind) for kind in KINDS] + [("ddp", "fsdp2"), ("fsdp1", "fsdp2")]
    for losses in run_on_ranks(load_all, tmp_path, ways, world_size=3)[0]:
        assert losses == expected
    for saver in ALL:
        model, optimizer = build("none", seed=1)
        state = load_distributed(tmp_path / saver, model, optimizer)
        assert state["step"] == 2
        assert model.seen in (2, 4)  # the model's own state that is no tensor; to recompute counts, too
        assert train(model, optimizer, Data(state["place"]), 2) == expected, saver


# ---- what is refused ---------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Layers of sizes that not all numbers of ranks divide, and experts, `own` ones of each rank."""

    def __init__(self, own: bool = False, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, width), nn.Linear(width, 5)
        self.experts = nn.Parameter(torch.rand(4, 3) + own * rank())


def mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (world_size() // 2, 2), mesh_dim_names=names)


def tensor_parallel(model: Mixture, wrap: Wrap = fully_shard) -> nn.Module:
    both = mesh("dp", "tp")
    parallelize_module(model, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return wrap(model, **{"mesh" if wrap is fully_shard else "device_mesh": both["dp"]})


def own_buffers(model: nn.Module) -> nn.Module:
    """With a saved and an unsaved buffer in each block that differ between the ranks."""
    for block in (module for module in model.modules() if isinstance(module, Block)):
        block.scale += rank()
        block.cache += rank()
    return model


def drifted(wrap: Wrap) -> nn.Module:
    """Copies of a parameter that are no longer equal."""
    model = wrap(Net())
    if rank():
        next(model.parameters()).data.neg_()
    return model


def hybrid(model: nn.Module) -> nn.Module:
    return fsdp2(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


DRIFTED = "found that 'embed.weight' on rank 1 differs from rank 0", "check_sharding(model, optimizer)"
EXPERTS = "found that 'experts' on rank 1 differs from rank 0", "make them one DTensor over their mesh"
# Names that torch's state dict does not clean were saved once, and nothing could be loaded from them.
HIDDEN = "expected one entry 'blocks.0.down.bias' in the model's state dict, found none"
BUFFERS = (
    "'blocks.0.scale' on rank 1 differs",
    "'blocks.1.scale' on rank 1 differs",
    "per_rank={name: buffer}",
)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str | tuple[str, ...]]] = {
    "FSDP2(experts)": (lambda: fully_shard(m := Mixture(own=True), ignored_params={m.experts}), EXPERTS),
    "FSDP1(experts)": (lambda: fsdp1(m := Mixture(own=True), ignored_states=[m.experts]), EXPERTS),
    "FSDP1(DDP)": (lambda: fsdp1(DDP(Net())), "found DDP inside of it"),
    "FSDP1(compile)": (lambda: fsdp1(compiled(Net())), (HIDDEN, "put FSDP1 inside of torch.compile")),
    "meta": (lambda: fsdp2(Net().to("meta")), "model.embed.weight: expected values in memory"),
    "buffers": (lambda: own_buffers(build("fsdp2")[0]), BUFFERS),
    "copies, hybrid": (lambda: drifted(hybrid), DRIFTED),
    "copies, DDP": (lambda: drifted(DDP), DRIFTED),
}


def refused(folder: Path) -> dict[str, str | None]:
    torch.manual_seed(0)
    models = {name: make() for name, (make, _) in REFUSED.items()}
    return refusals({name: partial(save_distributed, folder, one, step=1) for name, one in models.items()})


def test_models_that_cannot_be_saved_are_refused_on_all_ranks(tmp_path: Path) -> None:
    assert_told(run_on_ranks(refused, tmp_path), {name: words for name, (_, words) in REFUSED.items()})
    assert not list(tmp_path.glob("*-step-*"))


def fail_before_a_gather(folder: Path) -> tuple[str | None, float, bool]:
    """Rank 1 fails where FSDP1 would gather: rank 0 waits in a collective of the model's own group."""
    model, optimizer = build("fsdp1")
    train(model, optimizer, Data(), 1)
    options = model.process_group._get_backend(torch.device("cpu")).options
    before = options._timeout

    def hook(*_: Any) -> None:
        raise MemoryError("not enough for the state dict")

    if rank() == 1:
        model.register_state_dict_pre_hook(hook)
    dist.barrier()
    found = outcome(lambda: save_distributed(folder, model, optimizer, step=1, wait_s=3.0))
    return *found[:2], options._timeout == before


def test_a_rank_that_fails_before_a_gather_of_fsdp1_is_not_waited_for_long(tmp_path: Path) -> None:
    for error, seconds, restored in run_on_ranks(fail_before_a_gather, tmp_path, timeout=30):
        assert "rank 1: MemoryError: not enough for the state dict" in str(error)
        assert seconds < 10
        assert restored, "the group keeps another timeout"


# ---- every placement ---------------------------------------------------------------------------------------


def expert_parallel(model: Mixture) -> nn.Module:
    both = mesh("dp", "ep")
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), both["ep"], [Shard(0)]))
    return fully_shard(model, mesh=both["dp"], ignored_params={model.experts})


def columns(param: nn.Parameter) -> Shard:
    return Shard(1 if param.shape == (6, 12) else 0)


LAYOUTS: dict[str, Wrap] = {
    "rows": fully_shard,
    "columns": lambda model: fully_shard(model, shard_placement_fn=columns),
    "copies": lambda model: model,
    "replicas of shards": lambda model: fully_shard(model, mesh=mesh("replicate", "shard")),
    "rows of columns": tensor_parallel,
    "experts on a mesh of their own": expert_parallel,
}


def laid_out(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model after one step."""
    torch.manual_seed(seed)
    model = LAYOUTS[layout](Mixture())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for param in model.parameters():
        param.grad = param.detach() * 0.5
    optimizer.step()
    return model, optimizer


def placements(model: nn.Module) -> list[Any]:
    return [getattr(param, "placements", None) for param in model.parameters()]


def load_layouts(folder: Path, ways: list[tuple[str, str]], expected: dict[str, Tensor]) -> list[str]:
    """What did not come back as it was, from one layout into another."""
    wrong = []
    for saved, layout in ways:
        model, optimizer = laid_out(layout, 1)
        before = placements(model)
        load_distributed(folder / saved, model, optimizer)
        found = wholes(model, optimizer)
        names = [name for name, value in expected.items() if not torch.equal(found[name], value)]
        if names or placements(model) != before:
            wrong.append(f"{saved} -> {layout}: {names}")
    return wrong


def save_and_load_layouts(folder: Path, expected: dict[str, Tensor]) -> list[str]:
    for layout in LAYOUTS:
        save_distributed(folder / layout, *laid_out(layout, 0), step=1)
    return load_layouts(folder, [("columns", layout) for layout in LAYOUTS], expected)


def test_every_placement_loads_into_every_other_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = wholes(*laid_out("copies", 0))
    assert len(expected) == 5 * (1 + 3)  # parameters, and what AdamW holds of each
    assert run_on_ranks(save_and_load_layouts, tmp_path, expected, world_size=4) == [[]] * 4
    numbers = sum(value.nbytes for value in expected.values())
    for folder in tmp_path.iterdir():  # a part that several ranks hold is written once
        headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.rglob("rank-*"))
        assert sum(file.stat().st_size for file in folder.rglob("rank-*")) - headers == numbers
    ways = [(layout, "rows") for layout in LAYOUTS]
    assert run_on_ranks(load_layouts, tmp_path, ways, expected, world_size=3) == [[]] * 3
    assert load_layouts(tmp_path, [(layout, "copies") for layout in LAYOUTS], expected) == []


# ---- frozen parameters -------------------------------------------------------------------------------------

ADAPTED = ("fsdp2", "fsdp1 with use_orig_params")
FROZEN = [name for name, _ in Net().named_parameters() if "blocks.1" not in name]


def adapted(kind: str, factor: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same frozen base for any factor, another trained block."""
    model, optimizer = build(kind, trained="blocks.1")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(factor if param.requires_grad else 1)
    return model, optimizer


def save_adapters(folder: Path) -> Losses:
    losses = []
    for kind in ADAPTED:
        (model, optimizer), data = adapted(kind, 1), Data()
        train(model, optimizer, data, 2)
        save_distributed(folder / kind, model, optimizer, step=1, ignore_frozen_params=True)
        losses = train(model, optimizer, Data(), 2)
    return losses


def load_adapters(folder: Path, kinds: tuple[str, ...]) -> list[tuple[list[str], list[str], Losses]]:
    found = []
    for path in folder.iterdir():
        for kind in kinds:
            model, optimizer = adapted(kind, 2)
            loaded = load_distributed(path, model, optimizer, ignore_frozen_params=True)
            found.append((loaded.missing_keys, loaded.unexpected_keys, train(model, optimizer, Data(), 2)))
    return found


def test_adapters_go_on_over_the_base_that_is_there(tmp_path: Path) -> None:
    expected = pytest.approx(run_on_ranks(save_adapters, tmp_path)[0], rel=1e-4)
    assert not {f"model.{name}" for name in FROZEN} & stored(tmp_path / "fsdp2")
    alone = load_adapters(tmp_path, ("none",))
    for found in (alone, *run_on_ranks(load_adapters, tmp_path, ADAPTED, world_size=3)):
        assert found == [(FROZEN, [], expected)] * len(found)


# ---- another model -----------------------------------------------------------------------------------------


def with_score(model: Net) -> Any:
    """With one block less and a new part."""
    del model.blocks[1]
    model.score = nn.Linear(6, 2)
    return fsdp2(model)


def load_what_both_have(folder: Path) -> tuple[Any, ...]:
    model, _ = build(with_score, seed=1)
    before, expected = wholes(model), wholes(build("fsdp2")[0])
    wide, other = build("fsdp2", width=8)[0], nn.ModuleDict({"other": nn.Linear(2, 2)})
    half = fsdp2(Net().bfloat16())
    told = refusals(
        {
            "strict": lambda: load_distributed(folder, model),
            "shape": lambda: load_distributed(folder, wide, strict=False),
            "nothing": lambda: load_distributed(folder, other, strict=False),
            "differs": lambda: load_distributed(folder, model, strict=bool(rank())),
            "dtype": lambda: load_distributed(folder, half),
        }
    )
    load_distributed(folder, half, cast=True)
    right = [torch.equal(value, expected[name].bfloat16()) for name, value in wholes(half).items()]
    kept = all(torch.equal(value, before[name]) for name, value in wholes(model).items())
    loaded = load_distributed(folder, model, strict=False)
    right += [torch.equal(value, {**before, **expected}[name]) for name, value in wholes(model).items()]
    return told, kept, all(right), dict(loaded), loaded.missing_keys, sorted(loaded.unexpected_keys)


def test_a_model_takes_what_fits_and_is_told_the_rest(tmp_path: Path) -> None:
    run_on_ranks(lambda: save_distributed(tmp_path, build("fsdp2")[0], step=1).wait())
    by_rank = run_on_ranks(load_what_both_have, tmp_path, world_size=3)
    gone = sorted(name for name in Net().state_dict() if name.startswith("blocks.1"))
    for _, *found in by_rank:
        assert found == [True, True, {"step": 1}, ["score.weight", "score.bias"], gone]
    expected = {
        "strict": (
            "score.weight, score.bias: expected by the model, found nothing",
            "blocks.1.up.bias and 4 more: expected by nothing in the model, found",
            "strict=False loads what both have, and returns the names of the rest",
        ),
        "shape": "embed.weight, head.weight: expected shape [11, 8] (the model's), found [11, 6]",
        "nothing": "other.weight, other.bias: expected by the model, found nothing",
        "differs": "expected the same strict on all ranks",
        "dtype": " and 13 more: expected torch.bfloat16 (the model's), found torch.float32",
    }
    assert_told([told for told, *_ in by_rank], expected)
    error = by_rank[0][0]["dtype"]
    assert error.count("cast=True") == error.count("torch.float32") == 1  # told in one sentence


def test_tied_weights_take_one_tensor_and_give_it_to_untied_ones(tmp_path: Path) -> None:
    untied = Net()
    untied.head.weight = nn.Parameter(torch.rand(WORDS, 6))
    save_distributed(tmp_path, untied, step=1)
    with pytest.raises(CheckpointError, match=r"embed\.weight: expected one tensor under all of its names"):
        load_distributed(tmp_path, Net())
    save_distributed(tmp_path, tied := Net(), step=2)
    load_distributed(tmp_path, untied)
    assert torch.equal(untied.head.weight, tied.embed.weight)
    assert torch.equal(untied.embed.weight, tied.embed.weight)


# ---- buffers and copies ------------------------------------------------------------------------------------


def with_frequencies() -> Any:
    model = nn.Linear(4, 4)
    model.register_buffer("inv_freq", 10000 ** (-torch.arange(0, 8, 2) / 8), persistent=False)
    return model


def test_a_load_names_the_buffers_that_were_never_computed(tmp_path: Path) -> None:
    save_distributed(tmp_path, with_frequencies(), step=1)
    load_distributed(tmp_path, with_frequencies().bfloat16(), cast=True)  # a warning would be an error here
    emptied = with_frequencies().to("meta").to_empty(device="cpu")
    emptied.inv_freq.zero_()  # what was in that memory is chance
    with pytest.warns(UserWarning, match="load_distributed: inv_freq: expected the values that"):
        load_distributed(tmp_path, emptied)


def buffers_of_ranks(folder: Path) -> bool:
    """DDP broadcasts rank 0's buffers before the next step; nobody saves the others."""
    save_distributed(folder / "ddp", own_buffers(build("ddp")[0]), step=1)
    into, _ = build("fsdp2")
    expected = wholes(into)
    for block in into.blocks:
        block.cache += rank()
    save_distributed(folder / "unsaved", into, step=1)
    load_distributed(folder / "ddp", into)
    return all(torch.equal(value, expected[name]) for name, value in wholes(into).items())


def test_buffers_that_ddp_broadcasts_or_nobody_saves_may_differ(tmp_path: Path) -> None:
    assert run_on_ranks(buffers_of_ranks, tmp_path) == [True, True]


# ---- plain readers -----------------------------------------------------------------------------------------


def load_with_plain_dcp(path: Path) -> bool:
    """Read with torch's own reader of safetensors, into the shards of any number of ranks."""
    kind = "fsdp2" if dist.is_initialized() else "none"
    expected, (model, _) = wholes(build(kind)[0]), build(kind, seed=1)
    tensors = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    del tensors["head.weight"]  # tied
    state = {f"model.{name}": value for name, value in tensors.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)))
    return all(torch.equal(value, expected[name]) for name, value in wholes(model).items())


@pytest.mark.filterwarnings("ignore::UserWarning")  # that there is no process group
def test_torchs_own_reader_reads_the_model_of_a_checkpoint(tmp_path: Path) -> None:
    run_on_ranks(lambda: save_distributed(tmp_path, *build("fsdp2"), step=1).wait())
    (path,) = tmp_path.glob("*-step-1")
    assert all(run_on_ranks(load_with_plain_dcp, path, world_size=3))
    assert load_with_plain_dcp(path)

    expected = {f"model.{name}" for name in wholes(build("none")[0])} - {"model.head.weight"}  # tied
    assert {key for key in stored(path) if key.startswith("model.")} == expected
