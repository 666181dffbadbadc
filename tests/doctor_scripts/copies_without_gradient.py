"""Features of all ranks are gathered by a function that autograd does not know (SupContrast#26)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import WIDTH, counting, run, start, train
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x), dim=-1), F.normalize(self.right(x), dim=-1)


def gathered(features: Tensor) -> Tensor:
    copies = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, features)
    return torch.cat(copies)


def main(faulty: bool) -> None:
    rank, _ = start()
    model = DDP(TwoTowers())
    gather = gathered if faulty else lambda features: torch.cat(all_gather(features))
    labels = torch.arange(8) + 8 * rank

    def loss_of(tokens: Tensor) -> Tensor:
        left, right = model(tokens / 128)
        to_right, to_left = left @ gather(right).T, right @ gather(left).T
        return F.cross_entropy(to_right, labels) + F.cross_entropy(to_left, labels)

    train(model, batches=counting(64, seed=rank).split(8), loss_of=loss_of)


run(main)
