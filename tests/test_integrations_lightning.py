"""The callbacks under the real Trainer of Lightning, with DDP and with FSDP2, on two ranks."""

import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="Lightning is not installed: `make test` installs it")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor

from fsdp_utils import sampler, shard
from fsdp_utils.integrations.lightning import CheckpointCallback, MemoryCallback
from tests.sharded import Block, TwoRanks


class Blocks(LightningModule):
    def __init__(self, *, sharded: bool) -> None:
        super().__init__()
        self.blocks, self.sharded = nn.Sequential(Block(), Block()), sharded

    def configure_model(self) -> None:
        if self.sharded and not any(isinstance(p, DTensor) for p in self.parameters()):
            shard(self.blocks, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=False)


def loader() -> Any:
    return DataLoader(torch.ones(24, 8), batch_size=3)  # type: ignore[arg-type]


def quiet_options() -> dict[str, Any]:
    """For a Trainer on two CPU ranks that are there already."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # or Lightning starts processes of its own
    return {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }


STRATEGIES = ("ddp", "fsdp2")


def measured(folder: Path, strategy: str) -> Any:
    memory, logger = MemoryCallback(verbose=False), CSVLogger(folder)
    model = Blocks(sharded=strategy == "fsdp2")
    options = {**quiet_options(), "logger": logger}
    trainer = Trainer(
        strategy=ModelParallelStrategy(2, 1) if strategy == "fsdp2" else "ddp",
        accumulate_grad_batches=2,
        callbacks=[memory],
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(model, loader())
    report = memory.report
    assert report is not None
    held = any(isinstance(p, DTensor) for p in model.parameters())
    return held, report, [step.samples for step in report.history]


def measured_by_both(folder: Path) -> Any:
    return [measured(folder / strategy, strategy) for strategy in STRATEGIES]


def test_memory_is_measured_in_a_trainer(two_ranks: TwoRanks, tmp_path: Path) -> None:
    for of_rank in two_ranks(measured_by_both, tmp_path, timeout=110):
        for strategy, (held, report, samples) in zip(STRATEGIES, of_rank, strict=True):
            assert held == (strategy == "fsdp2")
            assert [rank.rank for rank in report.ranks] == [0, 1]
            assert samples == [6, 6]
    for metrics in (next((tmp_path / strategy).rglob("metrics.csv")) for strategy in STRATEGIES):
        header, *_, last = metrics.read_text().splitlines()
        logged = dict(zip(header.split(","), last.split(","), strict=True))
        assert float(logged["memory_max_reserved_gib"]) > 0


class Position(LightningModule):
    """Notes (epoch, index, global_step, the batch) of each batch; raises after so many."""

    def __init__(self, stop: int) -> None:
        super().__init__()
        self.layer, self.stop = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)), stop
        self.seen: list[tuple[Any, ...]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if len(self.seen) == self.stop:
            raise KeyError("stopped")
        self.seen.append((self.current_epoch, batch_idx, self.global_step, *batch.flatten().tolist()))
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fitted(folder: Path, stop: int = -1, **more: Any) -> tuple[list[Any], float]:
    """Four batches in an epoch. What was seen, and the weight."""
    torch.manual_seed(0)
    model, rows = Position(stop), torch.arange(12.0)[:, None] / 12
    loader = DataLoader(rows, batch_size=3, sampler=sampler(rows))  # type: ignore[arg-type]
    options = {**quiet_options(), "devices": 1, "max_epochs": 3, **more}
    trainer = Trainer(callbacks=[CheckpointCallback(folder, every_n_steps=1)], **options)
    with suppress(KeyError):
        trainer.fit(model, loader, DataLoader(rows))  # type: ignore[arg-type]
    return model.seen, model.layer[0].weight.item()


@pytest.mark.filterwarnings("ignore")  # Lightning's: of torch's names, and of the data loader's state
@pytest.mark.parametrize("more", [{}, {"max_steps": 11, "max_epochs": -1}, {"accumulate_grad_batches": 2}])
def test_a_trainer_resumes_exactly_wherever_it_stops(more: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, weight = fitted(tmp_path / "whole", **more)
    for stop in (3, 4, 5):  # within an epoch, before its last batch, and after the first one of the next
        seen: set[tuple[Any, ...]] = set()
        found = 0.0
        for _ in range(9):
            part, found = fitted(tmp_path / str(stop), stop, **more)
            seen |= set(part)
            if len(part) < stop:
                break
        assert sorted(seen) == whole
        assert found == weight


@pytest.mark.filterwarnings("ignore")
def test_two_checkpoints_to_resume_from_are_refused(tmp_path: Path) -> None:
    rows = torch.arange(12.0)[:, None]
    for given in (None, tmp_path / "own.ckpt"):
        options = {**quiet_options(), "devices": 1, "max_steps": 1}
        trainer = Trainer(callbacks=[CheckpointCallback(tmp_path / "run", every_n_steps=1)], **options)
        expectation = pytest.raises(ValueError, match=r"expected fit\(\) without ckpt_path, .*own\.ckpt")
        with expectation if given else nullcontext():
            trainer.fit(Position(-1), DataLoader(rows), DataLoader(rows), ckpt_path=given)  # type: ignore[arg-type]
        trainer.save_checkpoint(tmp_path / "own.ckpt")
