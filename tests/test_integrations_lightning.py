"""MemoryCallback under the real Trainer of Lightning, with DDP and with FSDP2, on two ranks."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="Lightning is not installed: `make test` installs it")

from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricsFSDP2
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor

from fsdp_utils import Memory_Maximizer, shard
from fsdp_utils.integrations.lightning import MemoryCallback
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
    as_torchrun_sets_it()
    return {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }


def as_torchrun_sets_it() -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # or Lightning starts processes of its own


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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_memory_is_measured_in_a_trainer(strategy: str, two_ranks: TwoRanks, tmp_path: Path) -> None:
    for held, report, samples in two_ranks(measured, tmp_path, strategy):
        assert held == (strategy == "fsdp2")
        assert [rank.rank for rank in report.ranks] == [0, 1]
        assert samples == [6, 6]
    (metrics,) = tmp_path.rglob("metrics.csv")
    header, *_, last = metrics.read_text().splitlines()
    logged = dict(zip(header.split(","), last.split(","), strict=True))
    assert float(logged["memory_max_reserved_gib"]) > 0


def measured_in_a_loop_of_fabric(strategy: str) -> Any:
    as_torchrun_sets_it()
    fsdp2 = FabricsFSDP2(lambda model, mesh: shard(model, mesh=mesh["data_parallel"]), 2, 1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=fsdp2 if strategy == "fsdp2" else "ddp")
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(Block(), Block()))
    assert any(isinstance(p, DTensor) for p in model.parameters()) == (strategy == "fsdp2")
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), foreach=False))
    with Memory_Maximizer(verbose=False) as memory:
        for batch in fabric.setup_dataloaders(loader()):
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            memory.update(samples=len(batch))
    return memory.report


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_lines_measure_a_loop_of_fabric(strategy: str, two_ranks: TwoRanks) -> None:
    for report in two_ranks(measured_in_a_loop_of_fabric, strategy):
        assert [rank.rank for rank in report.ranks] == [0, 1]
        assert [step.samples for step in report.history] == [3] * 4


PAGE = (Path(__file__).resolve().parent.parent / "book" / "trainers.md").read_text()


def followed(folder: Path) -> None:
    os.chdir(folder)
    (recipe,) = (code for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if ".fit(" in code)
    exec(recipe, {"options": quiet_options(), "model": Blocks(sharded=False), "loader": loader()})


def test_the_recipe_runs(two_ranks: TwoRanks, tmp_path: Path) -> None:
    two_ranks(followed, tmp_path)
