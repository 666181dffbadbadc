"""Checkpoints of models: every wrapper, every placement, parts of models, frozen parameters and buffers."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_utils import CheckpointError, load_distributed, save_distributed
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
    played,
    rank,
    refusals,
    stored,
    train,
    whole,
    wholes,
    world_size,
)

pytestmark = pytest.mark.timeout(300)
Losses = list[float]
Happened = tuple[Path, dict[str, list[Any]]]  # a folder, and what each scene returned by rank

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


def load_into(folder: Path, ways: list[tuple[str, str]]) -> list[Losses]:
    """Load what one wrapper saved into another one and train on, as save_all does."""
    found = []
    for saver, kind in ways:
        model, optimizer = build(ALL[kind], seed=1)
        state = load_distributed(folder / saver, model, optimizer, wait_s=5)
        found.append(train(model, optimizer, Data(state["place"]), 2))
    return found


def load_into_all(folder: Path) -> list[Losses]:
    return load_into(folder, [("fsdp2", kind) for kind in ALL])


def load_on_others(folder: Path) -> list[Losses]:
    return load_into(folder, [*(("fsdp2", kind) for kind in KINDS), ("ddp", "fsdp2"), ("fsdp1", "fsdp2")])


def test_training_goes_on_from_every_wrapper_into_every_wrapper(happened: Happened) -> None:
    folder, found = happened
    saved = found["save_all"][0]
    assert found["load_into_all"][0] == list(saved.values())
    names = stored(folder / "fsdp2")
    for kind, losses in saved.items():
        assert losses == pytest.approx(saved["fsdp2"], rel=1e-6), kind
        assert stored(folder / kind) == names, "a wrapper is part of a name"
    # other ranks sum the same gradients in another order: float32, over two steps
    expected = pytest.approx(saved["fsdp2"], rel=1e-5)
    for losses in found["load_on_others"][0]:
        assert losses == expected
    for saver in ALL:
        model, optimizer = build("none", seed=1)
        state = load_distributed(folder / saver, model, optimizer)
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
    "FSDP1(DDP)": (lambda: fsdp1(DDP(Net())), "found DDP or tensor parallelism inside of it"),
    "FSDP1(compile)": (lambda: fsdp1(compiled(Net())), (HIDDEN, "put FSDP1 inside of torch.compile")),
    "meta": (lambda: fsdp2(Net().to("meta")), "model.embed.weight: expected values in memory"),
    "buffers": (lambda: own_buffers(build("fsdp2")[0]), BUFFERS),
    "copies, hybrid": (lambda: drifted(hybrid), DRIFTED),
    "copies, DDP": (lambda: drifted(DDP), DRIFTED),
}


def refused(folder: Path) -> dict[str, str | None]:
    torch.manual_seed(0)
    models, place = {name: make() for name, (make, _) in REFUSED.items()}, folder / "refused"
    return refusals({name: partial(save_distributed, place, one, step=1) for name, one in models.items()})


def test_models_that_cannot_be_saved_are_refused_on_all_ranks(happened: Happened) -> None:
    folder, found = happened
    assert_told(found["refused"], {name: words for name, (_, words) in REFUSED.items()})
    assert not list((folder / "refused").glob("*-step-*"))


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


# of a tensor in the state, over a mesh of 2 x 2 ranks; 5 rows do not divide among 2, 3 or 4
PLACEMENTS: list[list[Any]] = [
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(1)],
    [Shard(-1), Replicate()],
    [Replicate(), Replicate()],
]
NUMBERS = torch.arange(20.0).reshape(5, 4)


def placements(tensors: Iterable[Any]) -> list[Any]:
    return [getattr(one, "placements", None) for one in tensors]


def load_layouts(folder: Path, ways: list[tuple[str, str]]) -> list[str]:
    """What did not come back as it was, or not sharded as the model is, from one layout into another."""
    wrong, expected = [], wholes(*laid_out("copies", 0))
    for saved, layout in ways:
        model, optimizer = laid_out(layout, 1)
        before = placements(model.parameters())
        state = load_distributed(folder / "layouts" / saved, model, optimizer)
        average, (tensors, number) = state["average"], state["by place"]
        found = wholes(model, optimizer)
        names = [name for name, value in expected.items() if not torch.equal(found[name], value)]
        names += [
            name for name, one in average.items() if not torch.equal(whole(one), 2 * expected[name[7:]])
        ]
        names += [f"{n}" for n, one in enumerate(tensors) if not torch.equal(whole(one), NUMBERS)]
        names += [f"{n} is whole" for n, one in enumerate(tensors) if isinstance(one, DTensor) != any(before)]
        if names or [placements(model.parameters()), number] != [before, 7]:
            wrong.append(f"{saved} -> {layout}: {names}")
        if saved == layout and placements(average.values()) != before:
            wrong.append(f"{saved}: the average is not sharded as the model: {average}")
    return wrong


def save_and_load_layouts(folder: Path) -> list[str]:
    square = init_device_mesh("cpu", (2, 2))
    tensors = [distribute_tensor(NUMBERS, square, one) for one in PLACEMENTS]
    for layout in LAYOUTS:
        model, optimizer = laid_out(layout, 0)
        average = {f"module.{name}": 2 * param.detach() for name, param in model.named_parameters()}
        state: dict[str, Any] = {"average": average, "by place": (tensors, 7)}
        save = save_distributed(
            folder / "layouts" / layout, model, optimizer, step=1, state=state, asynchronous=True
        )
        for one in average.values():
            one.zero_()  # what was given may change
        save.wait()
    return load_layouts(folder, [(saved, layout) for layout in LAYOUTS for saved in {"columns", layout}])


def load_layouts_on_others(folder: Path) -> list[str]:
    return load_layouts(folder, [(layout, "rows") for layout in LAYOUTS])


def test_every_placement_loads_into_every_other_on_any_number_of_ranks(happened: Happened) -> None:
    folder, found = happened
    expected = wholes(*laid_out("copies", 0))
    assert len(expected) == 5 * (1 + 3)  # parameters, and what AdamW holds of each
    assert found["save_and_load_layouts"] == [[]] * 4
    assert found["load_layouts_on_others"] == [[]] * 3
    averages = sum(param.nbytes for param in Mixture().parameters())
    numbers = sum(value.nbytes for value in expected.values()) + averages + len(PLACEMENTS) * NUMBERS.nbytes
    for layout in LAYOUTS:  # a part that several ranks hold is written once
        files = [file.read_bytes() for file in (folder / "layouts" / layout).rglob("*.safetensors")]
        assert sum(len(file) - 8 - int.from_bytes(file[:8], "little") for file in files) == numbers
    assert load_layouts(folder, [(layout, "copies") for layout in LAYOUTS]) == []


# ---- another model -----------------------------------------------------------------------------------------


def with_score(model: Net) -> Any:
    """With one block less and a new part."""
    del model.blocks[1]
    model.score = nn.Linear(6, 2)
    return fsdp2(model)


def save_step_1(folder: Path) -> Path:
    return save_distributed(folder / "one", build("fsdp2")[0], step=1).wait()


def load_what_both_have(folder: Path) -> tuple[Any, ...]:
    folder, (model, _) = folder / "one", build(with_score, seed=1)
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


def test_a_model_takes_what_fits_and_is_told_the_rest(happened: Happened) -> None:
    by_rank = happened[1]["load_what_both_have"]
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
    save_distributed(folder / "of ddp", own_buffers(build("ddp")[0]), step=1)
    into, _ = build("fsdp2")
    expected = wholes(into)
    for block in into.blocks:
        block.cache += rank()
    save_distributed(folder / "unsaved", into, step=1)
    load_distributed(folder / "of ddp", into)
    return all(torch.equal(value, expected[name]) for name, value in wholes(into).items())


def test_buffers_that_ddp_broadcasts_or_nobody_saves_may_differ(happened: Happened) -> None:
    assert happened[1]["buffers_of_ranks"] == [True, True]


# ---- plain readers -----------------------------------------------------------------------------------------


def load_with_plain_dcp(folder: Path) -> bool:
    """Read with torch's own reader of safetensors, into the shards of any number of ranks."""
    kind, (path,) = "fsdp2" if dist.is_initialized() else "none", (folder / "one").glob("*-step-1")
    expected, (model, _) = wholes(build(kind)[0]), build(kind, seed=1)
    tensors = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    del tensors["head.weight"]  # tied
    state = {f"model.{name}": value for name, value in tensors.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)))
    return all(torch.equal(value, expected[name]) for name, value in wholes(model).items())


@pytest.mark.filterwarnings("ignore::UserWarning")  # that there is no process group
def test_torchs_own_reader_reads_the_model_of_a_checkpoint(happened: Happened) -> None:
    folder, found = happened
    assert all([*found["load_with_plain_dcp"], load_with_plain_dcp(folder)])
    expected = {f"model.{name}" for name in wholes(build("none")[0])} - {"model.head.weight"}  # tied
    assert {key for key in stored(folder / "one") if key.startswith("model.")} == expected


# ---- all that happens on ranks -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> Happened:
    folder = tmp_path_factory.mktemp("models")
    return folder, {
        **played([save_and_load_layouts], folder, world_size=4),
        **played([save_all, load_into_all, save_step_1, refused, buffers_of_ranks], folder),
        **played(
            [load_on_others, load_layouts_on_others, load_what_both_have, load_with_plain_dcp],
            folder,
            world_size=3,
        ),
    }
