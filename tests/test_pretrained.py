"""load_pretrained: safetensors into shards, on ranks that never hold more than theirs."""

import ctypes
import gc
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_utils import CheckpointError, load_pretrained, run_on_ranks
from tests.checkpoints import WORDS, Block, Net, assert_told, outcome

WIDTH, LAYERS = 1024, 16  # 64 MiB of parameters, 32 MiB for each of two ranks
TENSOR = 4 * WIDTH**2  # bytes of one


# ---- the models, and their folders ------------------------------------------------------------------


class Resets(Block):
    """Says how its unsaved buffer comes about, as torch's own modules do."""

    def reset_parameters(self) -> None:
        assert self.up.weight.numel() == 7 * 6
        self.cache.copy_(torch.arange(2.0))


def net(block: type[Block] = Resets) -> Net:
    model = Net()
    model.blocks = nn.Sequential(block(6), block(6))
    for one in model.blocks:
        one.cache = torch.arange(2.0)
    return model


def net_with_seed() -> Net:
    torch.manual_seed(0)
    return net()


def on_meta(block: type[Block] = Resets) -> Net:
    with torch.device("meta"):
        return net(block)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


def write_net(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any] = lambda state: None) -> Path:
    """In two files with an index; the tied head under its first name alone."""
    state = state_of(net_with_seed())
    del state["head.weight"]
    change(state)
    folder.mkdir()
    halves = {"a.safetensors": list(state)[:5], "b.safetensors": list(state)[5:]}
    for file, names in halves.items():
        save_file({name: state[name].contiguous() for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_wide(folder: Path, layers: int, dtype: torch.dtype) -> Path:
    folder.mkdir()
    rows = torch.arange(WIDTH).unsqueeze(1) % 64 + torch.arange(WIDTH) % 64
    save_file({f"{i}.weight": (rows + i).to(dtype) for i in range(layers)}, folder / "model.safetensors")
    return folder


# ---- on two ranks, started once ---------------------------------------------------------------------


class Peak(NamedTuple):
    peak: int
    shard: int
    right: bool


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def wide(layers: int, dim: int) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer, shard_placement_fn=lambda param: Shard(dim))
    return fully_shard(model)


def peak_of(folder: Path, *, dim: int, cast: bool) -> Peak:
    """Of the process, above what it was before the model was made."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # else the load takes what was freed here, and its peak is read too low
    before = status("VmRSS")
    model = wide(LAYERS, dim)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew: proc(5)
    load_pretrained(folder, model, cast=cast)
    peak = status("VmHWM") - before
    shards = [param.to_local() for param in model.parameters()]
    half = slice(WIDTH // 2 * dist.get_rank(), WIDTH // 2 * (dist.get_rank() + 1))
    rows = torch.arange(WIDTH).unsqueeze(1) % 64 + torch.arange(WIDTH) % 64
    expected = rows[half] if dim == 0 else rows[:, half]
    right = all(torch.equal(shard, (expected + i).float()) for i, shard in enumerate(shards))
    return Peak(peak, sum(shard.nbytes for shard in shards), right)


def loaded(folder: Path, **options: Any) -> tuple[list[str], bool]:
    """What differs from the unsharded model, and whether the tied weights still are one."""
    plain, model = net_with_seed(), on_meta()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    load_pretrained(folder, model)
    found = {
        name: t.full_tensor() if isinstance(t, DTensor) else t
        for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    }
    wanted = {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers())}
    assert found.keys() == wanted.keys()
    words = torch.arange(WORDS)
    found["output"], wanted["output"] = model(words), plain(words)
    differing = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    return differing, model.head.weight is model.embed.weight


def columns_if_they_divide(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 and param.shape[1] % 2 == 0 else None


def run_all(folders: dict[str, Path], enough: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    result: dict[str, Any] = {}
    load_pretrained(folders["one layer"], wide(1, 1), cast=True)  # what is imported and connected once
    if enough:
        result["rows"] = peak_of(folders["fp32"], dim=0, cast=False)
        result["columns"] = peak_of(folders["bf16"], dim=1, cast=True)
    result["uneven"] = loaded(folders["net"])
    result["rows and columns"] = loaded(folders["net"], shard_placement_fn=columns_if_they_divide)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    result["hybrid"] = loaded(folders["net"], mesh=mesh)

    real = fully_shard(net())
    before = [param.to_local().clone() for param in real.parameters()]

    def error(name: str, model: nn.Module) -> None:
        result[name] = outcome(lambda: load_pretrained(folders[name], model)).error

    for name in ("another model", "cut short"):
        error(name, real)
    folders["another folder"] = folders["net"] if rank == 0 else folders["another model"]
    error("another folder", real)
    result["untouched"] = all(
        torch.equal(a, b.to_local()) for a, b in zip(before, real.parameters(), strict=True)
    )
    folders["trap"] = folders["net"]
    error("trap", trap := fully_shard(on_meta(Block)))
    result["still on meta"] = {t.device.type for t in (*trap.parameters(), *trap.buffers())} == {"meta"}
    return result


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    tmp = tmp_path_factory.mktemp("folders")

    def change(state: dict[str, torch.Tensor]) -> None:
        state["strange"] = torch.ones(2)
        del state["blocks.1.up.bias"]
        state["blocks.0.up.bias"] = torch.ones(8)
        state["blocks.0.down.bias"] = state["blocks.0.down.bias"].bfloat16()

    folders = {
        "net": write_net(tmp / "net"),
        "another model": write_net(tmp / "another", change),
        "cut short": write_net(tmp / "cut"),
        "one layer": write_wide(tmp / "one", 1, torch.bfloat16),
    }
    os.truncate(folders["cut short"] / "b.safetensors", 400)
    if enough := Path("/proc/self/clear_refs").exists():
        folders["fp32"] = write_wide(tmp / "fp32", LAYERS, torch.float32)
        folders["bf16"] = write_wide(tmp / "bf16", LAYERS, torch.bfloat16)
    return run_on_ranks(run_all, folders, enough, world_size=2, timeout=60)


def test_loading_takes_the_shard_and_one_tensor(by_rank: list[dict[str, Any]]) -> None:
    if "rows" not in by_rank[0]:
        pytest.skip("the peak is read from Linux's /proc")
    for peak, shard, right in (rank[way] for rank in by_rank for way in ("rows", "columns")):
        assert right
        assert shard == LAYERS * TENSOR // 2
        assert peak > shard, "the peak is not that of the load"
        # The whole model, or a second copy of the shard, would be 2.0 of it.
        assert peak <= 1.3 * shard + TENSOR, f"{peak / 2**20:.0f} MiB, the shard has {shard / 2**20:.0f} MiB"


def test_every_shard_is_the_file_s_and_ties_hold(by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        assert {way: rank[way] for way in ("uneven", "rows and columns", "hybrid")} == dict.fromkeys(
            ("uneven", "rows and columns", "hybrid"), ([], True)
        )


ERRORS: dict[str, tuple[str, ...]] = {
    "another model": (
        "blocks.1.up.bias: expected by the model, found nothing",
        "blocks.0.up.bias: expected shape [7] (the model's), found [8]",
        "blocks.0.down.bias: expected torch.float32 (the model's), found torch.bfloat16",
        "strange: expected by nothing in the model, found; build the model",
    ),
    "cut short": ("b.safetensors: expected a safetensors file, found 400 bytes", "cut short"),
    "another folder": ("expected the same content of the folder on all ranks",),
    "trap": ("blocks.0.cache of Block", "reset_parameters()"),
}


def test_all_ranks_tell_the_same_error_and_nothing_has_changed(by_rank: list[dict[str, Any]]) -> None:
    assert_told([{name: rank[name] for name in ERRORS} for rank in by_rank], ERRORS)
    assert not [name for name in ERRORS if "partly" in by_rank[0][name]]
    assert [(rank["untouched"], rank["still on meta"]) for rank in by_rank] == [(True, True)] * 2


# ---- in one process ---------------------------------------------------------------------------------


def test_buffers_that_to_empty_has_left_uninitialised_are_told(tmp_path: Path) -> None:
    folder, built = write_net(tmp_path / "net"), net()
    load_pretrained(folder, built)  # a warning would be an error here
    model = on_meta().to_empty(device="cpu")
    model.head.weight = model.embed.weight  # to_empty unties them
    for block in model.blocks:
        block.cache.fill_(1e9)  # new memory may happen to be right
    with pytest.warns(UserWarning, match=r"blocks\.0\.cache, blocks\.1\.cache: expected the values"):
        load_pretrained(folder, model)
    assert [block.cache.tolist() for block in model.blocks] == [[1e9] * 2] * 2  # told, and not changed
    for name, one in state_of(net_with_seed()).items():
        assert torch.equal(state_of(model)[name], one)
        assert torch.equal(state_of(built)[name], one)


def test_tied_weights_may_be_there_twice_if_they_are_equal(tmp_path: Path) -> None:
    def twice(state: dict[str, torch.Tensor], more: int) -> None:
        state["head.weight"] = state["embed.weight"] + more

    model = net()
    load_pretrained(write_net(tmp_path / "equal", partial(twice, more=0)), model)
    before = {name: one.clone() for name, one in state_of(model).items()}
    with pytest.raises(CheckpointError, match=r"expected head\.weight to equal embed\.weight"):
        load_pretrained(write_net(tmp_path / "other", partial(twice, more=1)), model)
    assert all(torch.equal(one, before[name]) for name, one in state_of(model).items())


INDEX, FILES = "model.safetensors.index.json", r"expected the files by tensor under 'weight_map'"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (None, r"expected a folder with model\.safetensors.*found no folder"),
        ({"pytorch_model.bin": b"x"}, r"found \['pytorch_model\.bin'\]"),
        ({"model.safetensors": b"version https://git-lfs"}, r"found 23 bytes .*git-lfs"),
        ({"model.safetensors": b"\2\0\0\0\0\0\0\0{}more"}, r"10 bytes, where the file has 14"),
        ({INDEX: b'{"weight_map": {"weight": "gone"}}'}, r"gone: expected .* read it, found No such file"),
        ({INDEX: b"{}"}, FILES),
        ({INDEX: b'{"weight_map": {"weight": "../model.safetensors"}}'}, FILES),  # it is in the folder
    ],
)
def test_a_folder_that_is_none_is_told(tmp_path: Path, files: dict[str, bytes] | None, told: str) -> None:
    save_file({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, tmp_path / "model.safetensors")
    folder = tmp_path / "folder"
    for name, content in (files or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=told):
        load_pretrained(folder, nn.Linear(1, 1))


def test_models_of_transformers_are_what_was_saved(tmp_path: Path) -> None:
    from tests.tiny_transformers import TINY  # here, as the ranks import this module too

    wrong = []
    for family, tiny in TINY.items():
        saved: Any = tiny.make()
        saved.save_pretrained(tmp_path / family, save_original_format=False, max_shard_size="20KB")
        assert (tmp_path / family / "model.safetensors.index.json").exists()
        with torch.device("meta"):
            model = tiny.make()
        load_pretrained(tmp_path / family, model)
        expected = {**dict(saved.named_parameters()), **dict(saved.named_buffers())}
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert found.keys() == expected.keys()
        wrong += [f"{family}: {name}" for name in expected if not torch.equal(found[name], expected[name])]
    assert wrong == []
