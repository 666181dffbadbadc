"""One step of the training program, and what surrounds a step, in one process and by its parts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_utils import run_on_ranks
from fsdp_utils.sharding import shard
from fsdp_utils.train import loop
from fsdp_utils.train.config import OptimConfig, TrainConfig
from fsdp_utils.train.data import Data, TensorRows
from fsdp_utils.train.watchdog import Heartbeat
from tests import tiny_training
from tests.sharded import TwoRanks
from tests.training_runs import configured, metrics, run


class Output(NamedTuple):
    loss: Tensor


class Line(nn.Module):
    """Its gradient is the sum of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        return Output((x @ self.weight).sum())


def step_of(clip: float | None, *, number: int = 0, seed: int = 0) -> tuple[Any, Tensor]:
    """What a step returns, and how far it went with the gradient (3, 0, 4, 0) and a rate of 0.5."""
    model = Line()
    config = TrainConfig("unused", configured(Path("unused")).data, optim=OptimConfig(clip=clip), seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=99.0)
    part = {"x": torch.tensor([[3.0, 0.0, 4.0, 0.0]]), "labels": torch.zeros(1, 1)}
    batch = loop.Batch([7], [part], [1])
    found = loop._step(config, model, optimizer, batch, 1, number, 0.5)
    assert model.weight.grad is None  # dropped
    return found, model.weight.detach()


def test_the_gradient_is_clipped_to_the_norm_and_its_own_norm_is_told() -> None:
    for clip, far in ((None, 5.0), (10.0, 5.0), (2.0, 2.0)):
        (_, norm), moved = step_of(clip)
        assert norm == pytest.approx(5.0)
        assert float(moved.norm()) == pytest.approx(0.5 * far, rel=1e-4)


def test_random_numbers_differ_between_ranks_steps_and_seeds_and_not_between_repetitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drawn(number: int, rank: int, seed: int) -> float:
        """The next random number after a step."""
        monkeypatch.setattr(loop, "get_rank", lambda: rank)
        torch.manual_seed(5)
        step_of(None, number=number, seed=seed)
        return torch.rand(()).item()

    places = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1)]
    first = [drawn(*place) for place in places]
    assert len(set(first)) == len(places)
    assert [drawn(*place) for place in places] == first


def whole_after_evaluation() -> tuple[dict[str, float], bool, list[bool]]:
    task = tiny_training.counting()
    model = shard(task.build())
    data = Data(TensorRows(task.train), TensorRows(task.test), predicts_next=True)
    heart: Any = SimpleNamespace(at=lambda *_: None)
    found = loop._evaluate(configured(Path("unused")), model, data, heart)
    return found, model.training, [isinstance(p, DTensor) for p in model.parameters()]


def test_after_an_evaluation_the_model_trains_on_and_its_parameters_are_shards(two_ranks: TwoRanks) -> None:
    first, second = two_ranks(whole_after_evaluation)
    assert first == second
    found, training, sharded = first
    assert found["eval_loss"] > 0
    assert training
    assert all(sharded)


def test_the_step_that_is_asked_for_is_profiled_on_rank_0_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, profile_step=3)
    for step, rank in ((2, 0), (3, 1), (3, 0), (4, 0)):
        monkeypatch.setattr(loop, "get_rank", lambda rank=rank: rank)
        with loop._profiled(config, step):
            torch.ones(3).sum()
        names = [path.name for path in tmp_path.iterdir()]
        assert names == (["trace-step-3.json"] if (step, rank) in ((3, 0), (4, 0)) else [])
    assert "traceEvents" in json.loads((tmp_path / "trace-step-3.json").read_text())


def logged(out: Path) -> tuple[list[float], dict[int, float]]:
    """The longest step of three starts, as their heartbeats know it, and what was logged."""
    hearts: list[Heartbeat] = []

    def remembered(*given: Any) -> Heartbeat:
        hearts.append(Heartbeat(*given))
        return hearts[-1]

    loop.Heartbeat = remembered  # type: ignore[assignment, misc]
    for steps in (2, 3, 6):
        run(out, steps=steps, log_every=2, save_every=9, eval_every=9)
    return [heart.longest_step_s for heart in hearts], metrics(out)


def test_every_second_step_and_the_last_are_logged_and_no_first_step_counts_as_the_longest(
    tmp_path: Path,
) -> None:
    ((begun, one_step, more), losses) = run_on_ranks(logged, tmp_path, world_size=1)[0]
    assert begun > 0
    assert one_step == 0.0
    assert more > 0
    assert sorted(losses) == [2, 3, 4, 6]
