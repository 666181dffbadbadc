"""shard: which modules become units, that a sharded model trains as one process does, what is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
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
from tests.on_ranks import case, on_ranks
from tests.sharded import Block, HandWritten, assert_trains_alike, fsdp1, hand_written_batch, whole


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
    """Blocks 0 and 2 share a parameter, and 1, 4 and the root: units are 3 and the root."""
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


# by what is particular: the model, its batch, and shard's options
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "hand-written": (HandWritten, hand_written_batch, {}),
    "tied": (partial(HandWritten, tied=True), hand_written_batch, {}),
    "tied, grad_op": (partial(HandWritten, tied=True), hand_written_batch, {"strategy": "grad_op"}),
    "of torch": (of_torch, batch_of_torch, {}),
    "partly frozen": (partly_frozen, hand_written_batch, {}),
    "checkpoint wrappers": (checkpoint_wrapped, hand_written_batch, {}),
    "sharing": (
        sharing,
        hand_written_batch,
        {"problems": 1, "units": 2},
    ),  # the root's has four of five blocks
}


@on_ranks()
def test_a_sharded_model_has_the_loss_and_gradients_of_the_unsharded_one() -> None:
    for name, (make, batch, options) in MODELS.items():
        with case(name):
            assert_trains_alike(make, batch, **{"units": 5 if name == "of torch" else 4, **options})


@on_ranks(4)
def test_hybrid_shards_within_a_host_and_replicates_over_hosts() -> None:
    options: dict[str, Any] = {"mesh": hybrid_mesh(2, 2), "strategy": "hybrid"}
    assert_trains_alike(HandWritten, hand_written_batch, 4, **options)
    placements = {str(parameter.placements) for parameter in shard(HandWritten(), **options).parameters()}
    assert placements == {"(Replicate(), Shard(dim=0))"}


@on_ranks()
def test_which_modules_share_a_unit() -> None:
    def units(model: nn.Module) -> list[list[str]]:
        by_state: dict[Any, list[str]] = {}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                by_state.setdefault(module._get_fsdp_state(), []).append(f"{type(module).__name__} {name}")
        return sorted(by_state.values())

    assert units(shard(sharing())) == [["FSDPBlock blocks.3"], ["FSDPHandWritten "]]
    blocks = ([f"FSDPCheckpointWrapper blocks.{i}"] for i in range(3))
    assert units(shard(checkpoint_wrapped())) == [*blocks, ["FSDPHandWritten "]]


@on_ranks()
def test_the_strategy_decides_what_stays_gathered_after_forward() -> None:
    for strategy, is_freed in (("full", True), ("grad_op", False)):
        model = shard(HandWritten(), strategy=strategy)
        model(**hand_written_batch())
        assert {isinstance(parameter, DTensor) for parameter in model.blocks.parameters()} == {is_freed}
        inner = HandWritten()  # its root is none inside another one: torch's default would free it
        fully_shard(nn.Sequential(shard(inner, strategy=strategy)))(**{"input": hand_written_batch()["x"]})
        assert isinstance(inner.embedding.weight, DTensor) is is_freed


# ---- policies, meshes and devices ----


@on_ranks()
def test_policies_reach_every_unit() -> None:
    model = shard(
        HandWritten(),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
    )
    computed: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, args, _: computed.update({module.weight.dtype, args[0].dtype})
            )
        if isinstance(module, FSDPModule):
            policy = module._get_fsdp_state()._fsdp_param_group.offload_policy
            assert isinstance(policy, CPUOffloadPolicy)
    (output,) = model(**hand_written_batch())
    output.sum().backward()
    assert computed == {torch.bfloat16}  # also in the head: output_dtype is of the model's output alone
    assert {parameter.dtype for parameter in model.parameters()} == {output.dtype} == {torch.float32}


@on_ranks()
def test_a_torch_whose_gloo_adds_gradients_up_is_refused() -> None:
    torch.__version__ = TorchVersion("2.9.0")
    shard(HandWritten())
    torch.__version__ = TorchVersion("2.8.0+cu128")
    expected = "^shard: on ranks that talk through gloo, FSDP2 expects torch 2.9 or later"
    with pytest.raises(RuntimeError, match=expected + r".*found 2\.8\.0\+cu128"):
        shard(HandWritten())


# ---- replicas ----


@on_ranks(4)
def test_replicas_of_other_seeds_get_the_first_ones_values() -> None:
    torch.manual_seed(0)
    expected = HandWritten().state_dict() | {"own": torch.zeros(2, dtype=torch.bfloat16)}
    replica = dist.get_rank() // 2
    torch.manual_seed(replica)
    model = HandWritten()
    model.register_buffer("own", torch.full((2,), float(replica), dtype=torch.bfloat16))
    shard(model, strategy="hybrid", mesh=hybrid_mesh(2, 2))
    values = model.state_dict()
    assert [n for n, value in expected.items() if not torch.equal(whole(values[n]), value)] == []
    assert check_sharding(model) == []


@on_ranks()
def test_replicas_that_cannot_be_made_equal_are_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    for device, size in (("meta" if rank else "cpu", 0), ("cpu", 2 + rank)):
        with torch.device(device):
            model = HandWritten()
            model.register_buffer("own", torch.zeros(size))
        with pytest.raises(
            RuntimeError,
            match=r"(?s)^shard: expected the same .*Build the model alike on all ranks, or on meta on all\.$",
        ):
            shard(model, strategy="hybrid", mesh=hybrid_mesh(2, 1))
    with torch.device("meta"):
        shard(HandWritten(), strategy="hybrid", mesh=hybrid_mesh(2, 1))  # none has values yet


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


def scalars_train_as_in_one_process(how: str) -> None:
    torch.manual_seed(0)
    expected = trained(Scaled(), samples()[: dist.get_world_size()].transpose(0, 1).flatten(1, 2))
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
        model.scale.data += dist.get_rank()  # the first rank's value is the one that counts
        options: Any = {"strategy": "hybrid", "mesh": hybrid_mesh(2, 2)} if how == "hybrid" else {}
        shard(model, **options)
    norms, parameters = trained(model, samples()[dist.get_rank()])
    assert norms == pytest.approx(expected[0], rel=1e-9)
    torch.testing.assert_close(parameters, expected[1], rtol=1e-9, atol=1e-9)
    assert check_sharding(model) == []


@pytest.mark.parametrize(("how", "ranks"), [("full", 2), ("on meta", 2), ("hybrid", 4)])
def test_scalars_train_as_in_one_process(how: str, ranks: int) -> None:
    run_on_ranks(scalars_train_as_in_one_process, how, world_size=ranks)


@on_ranks()
def test_a_scalar_may_be_unfrozen_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Scaled()
    model.scale.requires_grad_(False)
    shard(model)
    x = samples()[dist.get_rank(), 0]
    model(x).sum().backward()
    assert model.scale.grad is None
    model.scale.requires_grad_(True)
    model(x).sum().backward()
    gradients = [None] * 2
    dist.all_gather_object(gradients, model.scale.grad.item())
    assert len(set(gradients)) == 1
    with torch.no_grad():
        model.scale.fill_(5.0)
    save_distributed(tmp_path / "saved", model, step=1)
    other = shard(Scaled())
    load_distributed(tmp_path / "saved", other)
    scalars = [p.item() for p in other.parameters() if not isinstance(p, DTensor)]
    assert scalars == [5.0, *[pytest.approx(0.7)] * 3]


# ---- what is refused, and what is not ----


STRATEGIES = 'expected strategy "full", "grad_op" or "hybrid", found '
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "strategy": (HandWritten, {"strategy": "NO_SHARD"}, f"^shard: {STRATEGIES}'NO_SHARD'"),
    "not a name": (HandWritten, {"strategy": ["full"]}, STRATEGIES + r"\['full'\]"),
    "no mesh": (
        HandWritten,
        {"strategy": "hybrid"},
        'strategy "hybrid" expects a 2-D mesh, found a 1-D',
    ),
    "square": (HandWritten, {}, r'strategy "full" expects a 1-D mesh, found a 2-D one\.'),
    "offload": (HandWritten, {"offload_policy": True}, "expected offload_policy to be a CPUOffloadPolicy"),
    "FSDP1": (lambda: fsdp1(HandWritten()), {}, "expected a model without FSDP1 and DDP"),
    "policy with checkpointing": (
        HandWritten,
        {"mp_policy": torch.bfloat16, "checkpointing": "full"},
        "dataclass instances",
    ),
    "DDP inside": (
        lambda: nn.ModuleDict({"net": nn.parallel.DistributedDataParallel(HandWritten())}),
        {},
        "expected a model without FSDP1 and DDP",
    ),
}


@on_ranks()
def test_what_cannot_be_sharded_is_refused_before_anything_changes() -> None:
    def parts(model: nn.Module) -> list[Any]:
        return [part for module in model.modules() for part in (type(module), *module._parameters.values())]

    for name, (make, options, words) in REFUSED.items():
        model = make()
        before = parts(model)
        with case(name):
            with pytest.raises((ValueError, TypeError), match=words):
                shard(model, **options, **({"mesh": hybrid_mesh(2, 1)} if name == "square" else {}))
            assert all(new is old for new, old in zip(parts(model), before, strict=True))


@on_ranks()
def test_torch_says_what_was_sharded_before() -> None:
    for change in (shard, lambda model: fully_shard(model.blocks[1])):
        change(model := HandWritten())
        with pytest.raises(AssertionError, match="fully_shard has already been applied to the following"):
            shard(model)


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


@on_ranks()
def test_unusual_models_are_sharded() -> None:
    model = HandWritten()
    fully_shard(model.embedding)  # other modules than blocks may be units already
    fully_shard(model.blocks[0].mlp)
    for unusual in (Listed([Block(), Block()]), Uncalled(), model):
        assert check_sharding(shard(unusual)) == []
