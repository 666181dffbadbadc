"""The dimension along which shard cuts each parameter, and activation checkpointing inside the units."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

from fsdp_utils import (
    check_sharding,
    export_safetensors,
    load_distributed,
    run_on_ranks,
    save_distributed,
    shard,
    verify_checkpoint,
)
from fsdp_utils.collectives import record_collectives
from tests.on_ranks import Together, fake_group, on_ranks
from tests.sharded import HandWritten, loss_of, whole

on_two = Together(2)

CHECKPOINTING = ["full", "selective", 2]


class Experts(nn.Module):
    """Three experts, their router with a bias, and dropout."""

    def __init__(self, shape: tuple[int, ...] = (3, 12, 24)) -> None:
        super().__init__()
        self.router = nn.Linear(shape[1], shape[0])
        self.up = nn.Parameter(torch.randn(shape) / 8)
        self.down = nn.Parameter(torch.randn(shape[0], shape[2], shape[1]) / 8)

    def forward(self, x: torch.Tensor, *, debug: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.router(x).softmax(-1)
        out = torch.einsum("be,bd,edh,ehk->bk", weights, x, self.up, self.down.tanh())
        return x + debug * nn.functional.dropout(out, 0.1, self.training), weights


class Mixture(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (3, 12, 24)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(shape) for _ in range(3))
        self.head = nn.Linear(shape[1], 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for block in self.blocks:
            x, weights = block(x, debug=0.5)  # a name that torch's checkpoint has, too
            x = x * weights.sum()
        return (self.head(x),)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_hidden_layers=2))


@pytest.mark.parametrize(("rank", "strategy"), [(0, "full"), (31, "full"), (20, "hybrid")])
def test_every_rank_holds_its_share_of_a_mixture_of_experts(rank: int, strategy: str) -> None:
    with fake_group(32, rank), torch.device("meta"):
        model = mixtral()
        total, shape = sum(p.numel() for p in model.parameters()), (2, 16) if strategy == "hybrid" else (32,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        shard(model, strategy=strategy, mesh=mesh)
        held = sum(p.to_local().numel() for p in model.parameters())
        assert held * shape[-1] == pytest.approx(total, rel=0.05)
        assert check_sharding(model) == []


def by_hand(model: Mixture) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def test_rows_that_the_ranks_cannot_share_are_named_where_they_matter() -> None:
    said = "14 parameters, such as blocks.0.up, are cut between rows"
    with fake_group(32), torch.device("meta"):
        (problem,) = check_sharding(shard(Mixture((8, 1025, 1027))))  # no dimension serves
        assert problem.startswith(said)
        assert "shard over fewer ranks" in problem
        (problem,) = check_sharding(by_hand(Mixture((40, 1024, 512))))
        assert problem.startswith(said)
        assert "each rank holds 60% more than its share of the model. Call shard(model)" in problem
        assert check_sharding(shard(Mixture((40, 1024, 512)))) == []
        small = shard(Mixture((3, 5, 7)))
        assert {p.placements for p in small.parameters()} == {(Shard(0),)}
        assert check_sharding(small) == check_sharding(by_hand(Mixture((3, 32, 64)))) == []


def stepped(model: nn.Module, seed: int, **adamw: Any) -> dict[str, torch.Tensor]:
    """The parameters after two clipped steps without dropout."""
    optimizer = torch.optim.AdamW(model.eval().parameters(), lr=0.01, **adamw)
    for step in range(2):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed + step))
        loss_of(model(x)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def assert_trained(parameters: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(0)
    expected = stepped(Mixture(), seed=1)
    torch.testing.assert_close(parameters, expected, rtol=1e-3, atol=1e-5)


def train_experts(folder: Path) -> None:
    for adamw in ({"foreach": True}, {"fused": True}):
        torch.manual_seed(0)
        assert_trained(stepped(model := shard(Mixture()), seed=1, **adamw))
    assert {p.placements[-1].dim for p in model.parameters()} == {0, 1}
    save_distributed(folder, model, step=1)


def load_experts(folder: Path) -> None:
    model = shard(Mixture(), checkpointing="full")
    load_distributed(folder, model)
    assert_trained({name: whole(p.detach()) for name, p in model.named_parameters()})


def test_experts_train_as_in_one_process_and_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_on_ranks(train_experts, tmp_path / "run", world_size=4)
    run_on_ranks(load_experts, tmp_path / "run", world_size=3)
    (checkpoint,) = (tmp_path / "run").iterdir()
    verify_checkpoint(checkpoint)
    export_safetensors(checkpoint, tmp_path / "out")
    from safetensors.torch import load_file

    assert_trained(load_file(tmp_path / "out" / "model.safetensors"))


def checkpointed(checkpointing: Any, *, compiled: bool = False) -> tuple[Any, ...]:
    """Loss, gradients, gathers of a step with dropout; bytes kept for backward; FLOPs of backward."""
    torch.manual_seed(0)
    model, kept = Mixture(), []
    names = list(model.state_dict())
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager")
    shard(model, checkpointing=checkpointing)
    assert [*model.state_dict()] == [name for name, _ in model.named_parameters()] == names
    assert check_sharding(model) == []
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(4, 12)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t)
    counter = FlopCounterMode(display=False)
    with warnings.catch_warnings(), record_collectives(model) as trace:
        warnings.simplefilter("ignore")
        with nullcontext() if compiled else hooks:
            loss = loss_of(model(x))
        with nullcontext() if compiled else counter:
            loss.backward()
    gathers = sum(event.kind == "all_gather" for event in trace.events)
    grads = {name: whole(p.grad) for name, p in model.named_parameters()}
    return loss.item(), grads, gathers, sum(kept), counter.get_total_flops()


@on_two
def test_a_checkpointed_model_trains_alike_and_keeps_less() -> None:
    loss, grads, gathers, kept, flops = checkpointed(None)
    found = {how: checkpointed(how) for how in CHECKPOINTING}
    for other_loss, other_grads, other_gathers, _, _ in found.values():
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert other_gathers == gathers > 0
        torch.testing.assert_close(other_grads, grads)
    assert found["full"][3] < found[2][3] < kept
    assert flops < found[2][4] < found["full"][4]
    assert flops < found["selective"][4] < found["full"][4]


@on_ranks(timeout=100)  # alone: it compiles
def test_compiled_blocks_may_be_checkpointed() -> None:
    loss, grads, gathers, _, _ = checkpointed(None)
    compiled = checkpointed("selective", compiled=True)
    assert compiled[0] == pytest.approx(loss, rel=1e-6)
    assert compiled[2] == gathers > 0
    torch.testing.assert_close(compiled[1], grads)


@on_two
def test_a_cache_of_keys_and_values_is_left_out() -> None:
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=2)
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    found = []
    for how in (None, *CHECKPOINTING):
        torch.manual_seed(0)
        model = shard(GPT2LMHeadModel(config).train(), checkpointing=how)
        torch.manual_seed(1)
        loss = model(**batch, use_cache=True).loss
        loss.backward()
        found.append((loss.detach(), whole(model.transformer.h[1].mlp.c_fc.weight.grad)))
    for each in found[1:]:
        assert each[0] == found[0][0]
        torch.testing.assert_close(each[1], found[0][1])
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(batch["input_ids"], past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 8  # nothing is computed again here
    with pytest.raises(ValueError, match="takes no past_key_values that hold tokens"):
        model(batch["input_ids"], past_key_values=cache)


@pytest.mark.parametrize("value", ["some", 0, True])
def test_checkpointing_that_cannot_be_is_refused(value: Any) -> None:
    with fake_group(2), torch.device("meta"):
        model = HandWritten()
        with pytest.raises(ValueError, match=f"expected checkpointing to be None, .* found {value!r}"):
            shard(model, checkpointing=value)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
