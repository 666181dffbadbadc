"""What all tests share: seeds, and two real ranks."""

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_utils import run_on_ranks
from fsdp_utils.distributed.launch import PRELOAD

# What is computed here is small: two threads that wait for each other take longer, tenfold on busy cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nearly all ranks of the tests import these: their server does it once.
PRELOAD += ["pytest", "tests.sharded", "tests.checkpoints"]
# Ranks of these files import transformers, a second or more on each.
WITH_TRANSFORMERS = {"test_between_steps", "test_series", "test_shard_placements", "test_transformer_blocks"}

# Files that take long, or mostly wait, and would be among the last: a worker would end alone with one.
LONG = (
    "test_train_launched",
    "test_series",
    "test_ranks",
    "test_two_hosts",
    "test_train_stop",
    "test_your_turn",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long, so that other files fill the time (with --no-loadscope-reorder)."""
    items.sort(key=lambda item: item.path.stem not in LONG)
    if WITH_TRANSFORMERS & {item.path.stem for item in items}:
        PRELOAD.append("transformers.models.llama.modeling_llama")


def pytest_collection_finish() -> None:
    """What has been imported is no garbage; what is tested here collects garbage often."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def two_ranks() -> Callable[..., list[Any]]:
    """`two_ranks(fn, *args, timeout=60)` -> what fn(*args) returned on rank 0 and on rank 1."""

    def call(fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        return run_on_ranks(fn, *args, world_size=2, timeout=timeout)

    return call
