"""Features of all ranks are gathered by a function that autograd does not know (SupContrast#26)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import WIDTH, counting, run, say, start
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
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(64, seed=rank).split(8)):
        left, right = model(tokens / 128)
        gather = gathered if faulty else lambda features: torch.cat(all_gather(features))
        labels = torch.arange(8) + 8 * rank
        loss = F.cross_entropy(left @ gather(right).T, labels) + F.cross_entropy(
            right @ gather(left).T, labels
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
