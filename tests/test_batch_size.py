"""find_batch_size: best without retries, the same on all ranks, and the model trains on undisturbed."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from fsdp_utils import find_batch_size
from fsdp_utils.memory import BatchSizeSearch
from tests.imagined_device import ImaginedDevice
from tests.on_ranks import case, on_ranks


def outcomes(search: BatchSizeSearch) -> dict[int, str]:
    return {trial.batch_size: trial.outcome for trial in search.trials}


# ---- one process


@pytest.mark.parametrize(("speed", "best"), [(97.0, 8), (99.0, 16), (104.0, 16)])
def test_the_best_is_the_fastest_or_the_largest_of_those_that_are_as_fast(speed, best):
    device, seen = ImaginedDevice(total_gib=1000), []

    def step(batch_size: int) -> None:
        seen.append(batch_size)
        device.time += batch_size / {8: 100.0, 16: speed, 32: 10.0}[batch_size]
        device.time += 0.1 * (seen.count(batch_size) in (3, 5))  # something else takes time: one step counts

    search = find_batch_size(step, start=8, limit=32, device=device)
    assert search.best == best
    assert outcomes(search) == dict.fromkeys((8, 16, 32), "ok")


def test_a_size_whose_retries_settle_is_accepted():
    device, seen = ImaginedDevice(), []

    def step(batch_size: int) -> None:
        seen.append(batch_size)
        device.train(batch_size)
        # lesson 5 at the lower edge of the retries, and above it
        device.retries += (batch_size == 12 and seen.count(12) in (2, 3)) + (batch_size == 14)

    search = find_batch_size(step, start=12, limit=14, device=device)  # and nothing beyond the limit
    assert outcomes(search) == {12: "ok", 14: "retries", 13: "ok"}
    assert search.best == 13


def test_says_so_when_no_batch_size_does_well():
    device = ImaginedDevice(total_gib=5.5, sample_gib=1)
    search = find_batch_size(device.train, device=device)
    assert search.best is None
    assert outcomes(search) == {1: "OOM"}
    assert "Best: none" in str(search)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED in `cublasCreate`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=["python", "cpu", "cuda", "cublas", "cudnn"],
)
def test_runtime_errors_that_mean_out_of_memory_count_as_well(error):
    device, seen = ImaginedDevice(), []

    def step(batch_size: int) -> None:
        seen.append(batch_size)
        device.train(batch_size)
        if batch_size > 5 and seen.count(batch_size) == (4 if batch_size == 8 else 1):  # 4: a timed step
            raise error

    search = find_batch_size(step, device=device)
    assert search.best == 5
    assert outcomes(search)[8] == "OOM"


def test_arguments_that_make_no_sense_are_refused():
    for options in ({"start": 0}, {"start": 4, "limit": 3}):
        with pytest.raises(ValueError, match="expected 1 <= start <= limit"):
            find_batch_size(print, device=ImaginedDevice(), **options)
    with pytest.raises(ValueError, match="pass limit="):
        find_batch_size(print, device="cpu")
    assert find_batch_size(lambda size: torch.ones(size), limit=2, device="cpu").best in (1, 2)


def test_finds_the_largest_batch_size_without_retries_and_shows_a_table():
    device = ImaginedDevice()
    search = find_batch_size(device.train, device=device)
    expected = {**dict.fromkeys((1, 2, 4, 8, 16), "ok"), **dict.fromkeys((32, 24, 20, 18), "OOM")}
    assert outcomes(search) == {**expected, 17: "retries"}
    header, *lines = str(search).splitlines()
    assert header == "batch size  samples/s  s/step  reserved GiB  retries"
    assert lines[4:7] == [
        "        16       3.02  5.3000         20.52        0  best",
        "        17       2.24  7.6000         21.49        2  retries",
        "        18  OOM",
    ]
    assert lines[-1] == "Best: 16 per rank."


# ---- several ranks


def retries_and_time_of_the_slowest_rank_count_for_all():
    rank = dist.get_rank()
    device = ImaginedDevice(model_gib=5 + rank, sample_s=0.3 + 0.1 * rank)
    search = find_batch_size(device.train, device=device)
    assert search.best == 15  # rank 1 has 1 GiB less
    fifteen = next(trial for trial in search.trials if trial.batch_size == 15)
    assert fifteen.samples_per_s == pytest.approx(2 * 15 / (0.5 + 15 * 0.4))


class Fuse(nn.Module):
    """Runs out of memory in forward or backward, on one rank, from some batch size on."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.where, self.above = -1, "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == self.rank and len(x) > self.above:
            if self.where == "forward":
                raise torch.OutOfMemoryError("in forward")
            x.register_hook(self.blow)
        return x * 1

    def blow(self, grad: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("in backward")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.fuse, self.down = nn.Linear(8, 16), Fuse(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.fuse(torch.relu(self.up(x))))


def sharded_model(**options) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> None:
    torch.manual_seed(batch_size + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(batch_size, 8)).square().mean().backward()
    optimizer.step()


class EvenDevice(ImaginedDevice):
    """Each step takes a second."""

    def now(self) -> float:
        self.time += 1
        return self.time


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def fsdp2_trains_on_exactly_after_one_rank_ran_out_of_memory():
    def weights(sizes: tuple[int, ...] = (), where: str = "", block: int = 0, rank: int = 0):
        """After these steps, or a search in which a rank runs out of memory, and two steps more."""
        model = sharded_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        fuse = model[block].fuse
        fuse.rank, fuse.where, fuse.above = rank, where, 5
        for batch_size in sizes:
            train(model, optimizer, batch_size)
        if where:
            search = find_batch_size(partial(train, model, optimizer), limit=6, device=EvenDevice())
            assert outcomes(search) == {1: "ok", 2: "ok", 4: "ok", 6: "OOM", 5: "ok"}
        for _ in range(2):
            train(model, optimizer, 3)
        return whole(model)

    undisturbed = weights((1,) * 5 + (2,) * 5 + (4,) * 5 + (5,) * 5)  # 5 steps per trial
    for disturbed in (("forward", 2, 1), ("backward", 0, 0)):
        with case(disturbed):
            assert all(map(torch.equal, weights((), *disturbed), undisturbed))


def gradients_of_earlier_microbatches_are_dropped_too():
    """Under mixed precision FSDP2 keeps them in a place of its own, of the dtype that it reduces in."""

    def weights(fails: bool) -> list[torch.Tensor]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded_model(mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch_size: int) -> None:
            optimizer.zero_grad()
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                torch.manual_seed(dist.get_rank())
                model(torch.randn(batch_size, 8)).square().mean().backward()
                if batch_size > 1 and not last:
                    raise torch.OutOfMemoryError("between two microbatches")
            optimizer.step()

        if fails:
            search = find_batch_size(step, limit=8, device=EvenDevice())
            assert outcomes(search) == {1: "ok", 2: "OOM"}
        for _ in range(1 if fails else 6):
            step(1)
        return whole(model)

    assert all(map(torch.equal, weights(fails=True), weights(fails=False)))


def fsdp1_interrupted_is_not_trained_on():
    model = FullyShardedDataParallel(nn.Sequential(Block(), Block()), device_id=torch.device("cpu"))
    model[1].fuse.rank, model[1].fuse.where, model[1].fuse.above = 1, "backward", 3
    step = partial(train, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"(?s)FSDP1 model cannot be reset.*Best: "):
        find_batch_size(step, limit=8, device="cpu")


def what_goes_wrong_on_one_rank_ends_the_search_on_all_with_what_was_found():
    device, seen, rank = ImaginedDevice(), [], dist.get_rank()

    def bad_sample(batch_size: int) -> None:
        dist.all_reduce(torch.ones(1))
        if rank == 1 and batch_size == 4:
            raise ValueError("bad sample")
        dist.all_reduce(torch.ones(1))

    def fragmented(batch_size: int) -> None:
        seen.append(batch_size)
        if rank == 1 and batch_size == 8 and seen.count(8) == 4:  # a timed step
            raise torch.OutOfMemoryError("fragmented")
        device.train(batch_size)

    with pytest.raises(
        RuntimeError, match="expected the same limit on all ranks, found rank 0: 8; rank 1: 9"
    ):
        find_batch_size(device.train, limit=8 + rank, device=device)
    kind, words = (
        (ValueError, "^bad sample$") if rank else (RuntimeError, "step failed on rank 1. Found so far:")
    )
    with pytest.raises(kind, match=words) as failed:
        find_batch_size(bad_sample, limit=8, device="cpu")
    assert rank or "Best: " in str(failed.value)
    words = "out of memory at batch size 8 in a timed step" if rank else "heard nothing from another rank"
    with pytest.raises(RuntimeError, match=f"(?s){words}.*Best: 4 per rank"):
        find_batch_size(fragmented, device=device)


@on_ranks(timeout=100)
def test_on_several_ranks():
    for scene in (
        retries_and_time_of_the_slowest_rank_count_for_all,
        fsdp2_trains_on_exactly_after_one_rank_ran_out_of_memory,
        gradients_of_earlier_microbatches_are_dropped_too,
        what_goes_wrong_on_one_rank_ends_the_search_on_all_with_what_was_found,
        fsdp1_interrupted_is_not_trained_on,
    ):
        with case(scene.__name__):
            scene()
