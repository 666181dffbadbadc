"""What the tests of child tuning share: a small model with rows that do not divide, however it is wrapped."""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.blocks import Block

WRAPPERS = ("ddp", "fsdp2", "fsdp1, original parameters", "fsdp1, flat parameters")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(Block(6, 7), Block(6, 7))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


def batch(number: int) -> tuple[Tensor, Tensor]:
    """The same on all ranks, so that the mean over ranks is what one process computes."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(11, (12,), generator=generator), torch.randint(3, (12,), generator=generator)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def net(wrapper: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    match wrapper:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            return fully_shard(model, mesh=mesh)
        case "fsdp1, original parameters" | "fsdp1, flat parameters":
            return FSDP1(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.device("cpu"),
                use_orig_params="original" in wrapper,
            )
    return model


def some_masks() -> dict[str, Tensor]:
    """A mask for every parameter of the plain model: the same pattern wherever it is made."""
    generator = torch.Generator().manual_seed(1)
    return {n: torch.rand(p.shape, generator=generator) < 0.5 for n, p in Net().named_parameters()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        loss_of(model, batch(number)).backward()
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole, by the names of the plain model. A collective under FSDP."""
    if isinstance(model, FSDP1):
        with warnings.catch_warnings(), FSDP1.summon_full_params(model):
            warnings.simplefilter("ignore")
            return {_plain(name): p.detach().clone() for name, p in model.named_parameters()}
    return {
        _plain(name): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
