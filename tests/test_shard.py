"""shard: which modules become units, that a sharded model trains as one process does, what is refused."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.torch_version import TorchVersion

from fsdp_utils import check_sharding, load_distributed, run_on_ranks, save_distributed, shard
from tests.sharded import (
    Block,
    HandWritten,
    Outcome,
    TwoRanks,
    assert_same,
    compare,
    fsdp1,
    hand_written_batch,
    whole,
)


def hybrid_mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


# ---- equal to the unsharded model ----


def partly_frozen() -> nn.Module:
    model = HandWritten()
    for block in model.blocks[:2]:
        block.mlp[0].requires_grad_(False)  # a unit with both kinds
    return model


def checkpoint_wrapped() -> nn.Module:
    model = HandWritten()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def sharing() -> nn.Module:
    """Blocks 0 and 2 share a parameter, and 1, 4 and the root: units are [0, 2], 3 and the root."""
    model = HandWritten()
    model.blocks.extend([Block(), Block()])
    model.blocks[0].mlp[0].weight = model.blocks[2].mlp[0].weight
    model.blocks[1].mlp[0].weight = model.blocks[4].mlp[0].weight
    model.blocks[4].mlp[2].bias = model.head[0].bias
    return model


def of_torch() -> nn.Module:
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 32}
    return nn.Transformer(16, 2, batch_first=True, **layers)


def batch_of_torch() -> dict[str, Any]:
    x = torch.linspace(-1, 1, 2 * 4 * 16).reshape(2, 4, 16)
    return {"src": x, "tgt": x.flip(0)}


# The model, its batch, shard's options, how many modules are in units
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], dict[str, Any], int]] = {
    "hand-written": (HandWritten, hand_written_batch, {}, 4),
    "tied": (partial(HandWritten, tied=True), hand_written_batch, {}, 4),
    "grad_op": (HandWritten, hand_written_batch, {"strategy": "grad_op"}, 4),
    "tied, grad_op": (partial(HandWritten, tied=True), hand_written_batch, {"strategy": "grad_op"}, 4),
    "of torch": (of_torch, batch_of_torch, {}, 5),
    "partly frozen": (partly_frozen, hand_written_batch, {}, 4),
    "checkpoint wrappers": (checkpoint_wrapped, hand_written_batch, {}, 4),
    "sharing": (sharing, hand_written_batch, {}, 4),
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    def fn() -> dict[str, Outcome]:
        return {name: compare(make, batch, **options) for name, (make, batch, options, _) in MODELS.items()}

    return run_on_ranks(fn)


@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_model_has_the_loss_and_gradients_of_the_unsharded_one(outcomes: Any, name: str) -> None:
    for of_rank in outcomes:
        if name == "sharing":  # its root's unit has two of five blocks, which check_sharding says
            of_rank[name].problems.clear()
        assert_same(of_rank[name], units=MODELS[name][3])


def test_hybrid_shards_within_a_host_and_replicates_over_hosts() -> None:
    def fn() -> tuple[Outcome, list[str]]:
        options: dict[str, Any] = {"mesh": hybrid_mesh(2, 2), "strategy": "hybrid"}
        outcome = compare(HandWritten, hand_written_batch, **options)
        return outcome, [
            str(parameter.placements) for parameter in shard(HandWritten(), **options).parameters()
        ]

    for outcome, placements in run_on_ranks(fn, world_size=4):
        assert_same(outcome, units=4)
        assert set(placements) == {"(Replicate(), Shard(dim=0))"}


def test_which_modules_share_a_unit(two_ranks: TwoRanks) -> None:
    def units(model: nn.Module) -> list[list[str]]:
        by_state: dict[Any, list[str]] = {}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                by_state.setdefault(module._get_fsdp_state(), []).append(f"{type(module).__name__} {name}")
        return sorted(by_state.values())

    shared, wrapped = two_ranks(lambda: [units(shard(sharing())), units(shard(checkpoint_wrapped()))])[0]
    assert shared == [
        ["FSDPBlock blocks.0", "FSDPBlock blocks.2"],
        ["FSDPBlock blocks.3"],
        ["FSDPHandWritten "],
    ]
    assert wrapped == [*([f"FSDPCheckpointWrapper blocks.{i}"] for i in range(3)), ["FSDPHandWritten "]]


def test_the_strategy_decides_what_stays_gathered_after_forward(two_ranks: TwoRanks) -> None:
    def fn(strategy: str) -> tuple[set[bool], bool]:
        model = shard(HandWritten(), strategy=strategy)
        model(**hand_written_batch())
        inner = HandWritten()  # its root is none inside another one: torch's default would free it
        fully_shard(nn.Sequential(shard(inner, strategy=strategy)))(**{"input": hand_written_batch()["x"]})
        sharded = {isinstance(parameter, DTensor) for parameter in model.blocks.parameters()}
        return sharded, isinstance(inner.embedding.weight, DTensor)

    assert two_ranks(fn, "full") == [({True}, True)] * 2
    assert two_ranks(fn, "grad_op") == [({False}, False)] * 2


# ---- policies, meshes and devices ----


def test_policies_reach_every_unit(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[set[torch.dtype], set[torch.dtype], torch.dtype, list[str]]:
        model = shard(
            HandWritten(),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
            offload_policy=CPUOffloadPolicy(pin_memory=False),
        )
        seen: set[torch.dtype] = set()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda module, args, _: seen.update({module.weight.dtype, args[0].dtype})
                )
        (output,) = model(**hand_written_batch())
        output.sum().backward()
        offload = {
            type(unit._get_fsdp_state()._fsdp_param_group.offload_policy).__name__
            for unit in model.modules()
            if isinstance(unit, FSDPModule)
        }
        return seen, {parameter.dtype for parameter in model.parameters()}, output.dtype, sorted(offload)

    for compute, kept, output, offload in two_ranks(fn):
        assert compute == {torch.bfloat16}  # also in the head: output_dtype is of the model's output alone
        assert kept == {torch.float32}
        assert output == torch.float32
        assert offload == ["CPUOffloadPolicy"]


def sharded_in(version: str) -> str:
    """What shard says on this rank where torch is of that version; "" if nothing."""
    torch.__version__ = TorchVersion(version)
    try:
        shard(HandWritten())
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_torch_whose_gloo_adds_gradients_up_is_refused(two_ranks: TwoRanks) -> None:
    assert two_ranks(sharded_in, "2.9.0") == ["", ""]
    for refused in two_ranks(sharded_in, "2.8.0+cu128"):
        assert refused.startswith("shard: on ranks that talk through gloo, FSDP2 expects torch 2.9 or later")
        assert "found 2.8.0+cu128" in refused


# ---- replicas ----


def replicas_of_two_seeds() -> tuple[dict[str, torch.Tensor], list[str]]:
    torch.manual_seed(dist.get_rank() // 2)
    model = HandWritten()
    model.register_buffer("own", torch.full((2,), float(dist.get_rank() // 2), dtype=torch.bfloat16))
    shard(model, strategy="hybrid", mesh=hybrid_mesh(2, 2))
    return {name: whole(value) for name, value in model.state_dict().items()}, check_sharding(model)


def test_replicas_of_other_seeds_get_the_first_ones_values() -> None:
    torch.manual_seed(0)
    expected = HandWritten().state_dict() | {"own": torch.zeros(2, dtype=torch.bfloat16)}
    for values, problems in run_on_ranks(replicas_of_two_seeds, world_size=4):
        assert problems == []
        assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_replicas_that_cannot_be_made_equal_are_refused_on_every_rank(two_ranks: TwoRanks) -> None:
    def fn() -> list[str]:
        rank, found = dist.get_rank(), []
        for device, size in (("meta" if rank else "cpu", 0), ("cpu", 2 + rank)):
            with torch.device(device):
                model = HandWritten()
                model.register_buffer("own", torch.zeros(size))
            with pytest.raises(RuntimeError) as caught:
                shard(model, strategy="hybrid", mesh=hybrid_mesh(2, 1))
            found.append(str(caught.value))
        with torch.device("meta"):
            shard(HandWritten(), strategy="hybrid", mesh=hybrid_mesh(2, 1))  # none has values yet
        return found

    first, second = two_ranks(fn)
    assert first == second
    for error in first:
        assert error.startswith("shard: expected the same ")
        assert error.endswith("Build the model alike on all ranks, or on meta on all.")


# ---- scalars, as CLIP's logit_scale ----


class Scaled(nn.Module):
    """Scalars in the blocks and in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        for block in self.blocks:
            block.scale = nn.Parameter(torch.tensor(0.7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()  # AdamW divides by gradients, some of which are nearly 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * block.scale
        return x * self.scale


def samples() -> torch.Tensor:
    """f64[4 ranks, 2 micro-batches, 3 samples, 8]."""
    return torch.randn(4, 2, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trained(model: nn.Module, batches: torch.Tensor, steps: int = 2) -> tuple[list[float], dict[str, Any]]:
    """The gradient norms of some clipped steps with accumulation, and the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for _ in range(steps):
        for batch in batches:
            (model(batch).square().mean() / len(batches)).backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: whole(p).detach() for name, p in model.named_parameters()}


def trained_with_scalars(how: str) -> tuple[list[float], dict[str, Any], list[str]]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Scaled()
    if how == "on meta":
        values = model.state_dict()
        with torch.device("meta"):
            model = Scaled()
        shard(model).to_empty(device="cpu")
        for name, parameter in model.named_parameters():
            value = values[name]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(value)
    else:
        model.scale.data += rank  # the first rank's value is the one that counts
        options: Any = {"strategy": "hybrid", "mesh": hybrid_mesh(2, 2)} if how == "hybrid" else {}
        shard(model, **options)
    norms, after = trained(model, samples()[rank])
    return norms, after, check_sharding(model)


@pytest.mark.parametrize(("how", "ranks"), [("full", 2), ("on meta", 2), ("hybrid", 4)])
def test_scalars_train_as_in_one_process(how: str, ranks: int) -> None:
    torch.manual_seed(0)
    norms, parameters = trained(Scaled(), samples()[:ranks].transpose(0, 1).flatten(1, 2))
    for found_norms, found, problems in run_on_ranks(trained_with_scalars, how, world_size=ranks):
        assert found_norms == pytest.approx(norms, rel=1e-9)
        assert problems == []
        for name, expected in parameters.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9)


def test_a_scalar_may_be_unfrozen_saved_and_loaded(two_ranks: TwoRanks, tmp_path: Any) -> None:
    def fn() -> tuple[float, list[float]]:
        torch.manual_seed(0)
        model = Scaled()
        model.scale.requires_grad_(False)
        shard(model)
        model(samples()[dist.get_rank(), 0]).sum().backward()
        assert model.scale.grad is None
        model.scale.requires_grad_(True)
        model(samples()[dist.get_rank(), 0]).sum().backward()
        with torch.no_grad():
            model.scale.fill_(5.0)
        save_distributed(tmp_path / "saved", model, step=1)
        other = shard(Scaled())
        load_distributed(tmp_path / "saved", other)
        return model.scale.grad.item(), [p.item() for p in other.parameters() if not isinstance(p, DTensor)]

    first, second = two_ranks(fn)
    assert first == second
    assert first[1] == [5.0, *[pytest.approx(0.7)] * 3]


# ---- what is refused, and what is not ----


def one_block_sharded() -> nn.Module:
    model = HandWritten()
    fully_shard(model.blocks[1])
    return model


STRATEGIES = 'expected strategy "full", "grad_op" or "hybrid", found '
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "strategy": (HandWritten, {"strategy": "NO_SHARD"}, f"^shard: {STRATEGIES}'NO_SHARD'"),
    "not a name": (HandWritten, {"strategy": ["full"]}, STRATEGIES + r"\['full'\]"),
    "no mesh": (
        HandWritten,
        {"strategy": "hybrid"},
        'strategy "hybrid" expects a 2-D mesh, found a 1-D',
    ),
    "square": (HandWritten, {"mesh": (2, 1)}, r'strategy "full" expects a 1-D mesh, found a 2-D one\.'),
    "offload": (HandWritten, {"offload_policy": True}, "expected offload_policy to be a CPUOffloadPolicy"),
    "twice": (
        lambda: shard(HandWritten()),
        {},
        "the model is wrapped in FSDPHandWritten already.*shard once",
    ),
    "a block": (
        one_block_sharded,
        {},
        r"blocks\.1 is wrapped in FSDPBlock already.*other modules than blocks",
    ),
    "only the root": (lambda: fully_shard(HandWritten()), {}, "the model is wrapped in FSDPHandWritten"),
    "FSDP1": (lambda: fsdp1(HandWritten()), {}, "the model is wrapped in FullyShardedDataParallel already"),
    "no forward": (lambda: nn.ModuleList([HandWritten()]), {}, "expected a model with a forward"),
    "policy with checkpointing": (
        HandWritten,
        {"mp_policy": torch.bfloat16, "checkpointing": "full"},
        "dataclass instances",
    ),
    "DDP inside": (
        lambda: nn.ModuleDict({"net": nn.parallel.DistributedDataParallel(HandWritten())}),
        {},
        "net is wrapped in DistributedDataParallel already",
    ),
}


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, tuple[str, bool]]]:
    def fn() -> dict[str, tuple[str, bool]]:
        """What shard says of each, and whether it left the model as it was."""
        found = {}
        for name, (make, options, _) in REFUSED.items():
            if name == "square":
                options = {"mesh": hybrid_mesh(2, 1)}
            model = make()
            before = [[type(module), *module._parameters.values()] for module in model.modules()]
            with pytest.raises((ValueError, TypeError)) as caught:
                shard(model, **options)
            after = [[type(module), *module._parameters.values()] for module in model.modules()]
            same = all(
                a is b for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True)
            )
            found[name] = str(caught.value), same
        return found

    return run_on_ranks(fn)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused_before_anything_changes(refusals: Any, name: str) -> None:
    first, second = refusals
    assert first[name] == second[name]
    message, same = first[name]
    assert re.search(REFUSED[name][2], message), message
    assert same


class Listed(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


class Uncalled(nn.Module):
    """Has another method than forward, as register_fsdp_forward_method takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Listed([Block(), Block()])


def test_unusual_models_are_sharded(two_ranks: TwoRanks) -> None:
    def fn() -> list[list[str]]:
        model = HandWritten()
        fully_shard(model.embedding)  # other modules than blocks may be units already
        fully_shard(model.blocks[0].mlp)
        return [check_sharding(shard(one)) for one in (Listed([Block(), Block()]), Uncalled(), model)]

    assert two_ranks(fn) == [[[], [], []]] * 2
