"""find_batch_size: best without retries, the same on all ranks, and the model trains on undisturbed."""

import random
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import find_executable_batch_size
from torch import nn

from fsdp_utils import find_batch_size
from fsdp_utils.memory.batch_size import BatchSizeSearch, Trial, _repeat
from fsdp_utils.torch_internals.groups import process_groups
from tests.imagined_device import ImaginedDevice

# On the imagined device 16 fits, 17 works with retries, 18 is out of memory.


def outcomes(search: BatchSizeSearch) -> dict[int, str]:
    return {trial.batch_size: trial.outcome for trial in search.trials}


# ---- one process


def test_finds_the_largest_batch_size_without_retries():
    device = ImaginedDevice()
    search = find_batch_size(device.train, device=device)
    assert search.best == 16
    assert outcomes(search) == {
        **dict.fromkeys((1, 2, 4, 8, 16), "ok"),
        **dict.fromkeys((32, 24, 20, 18), "OOM"),
        17: "retries",
    }


def test_a_trial_tells_what_the_device_measured():
    device = ImaginedDevice()
    trials = {
        trial.batch_size: trial for trial in find_batch_size(device.train, steps=4, device=device).trials
    }
    assert trials[16].seconds_per_step == pytest.approx(0.5 + 16 * 0.3)
    assert trials[16].samples_per_s == pytest.approx(16 / (0.5 + 16 * 0.3))
    assert trials[16].max_reserved_gib == pytest.approx(5 + 16 * 0.97)
    assert trials[16].num_alloc_retries == 0
    assert trials[17].num_alloc_retries == 1 + 4  # in the second untimed step and the timed ones
    assert trials[18] == Trial(18, "OOM")


def test_accelerate_knows_only_out_of_memory_and_takes_a_slower_batch_size():
    theirs, ours = ImaginedDevice(), ImaginedDevice()

    @find_executable_batch_size(starting_batch_size=19)  # 19 is out of memory; it goes on with 0.9 of it, 17
    def train(batch_size: int) -> int:
        theirs.train(batch_size)
        return batch_size

    def samples_per_s(device: ImaginedDevice, batch_size: int) -> float:
        begun = device.now()
        device.train(batch_size)
        return batch_size / (device.now() - begun)

    size = find_batch_size(ours.train, device=ours).best
    assert size is not None
    assert samples_per_s(ours, size) > 1.2 * samples_per_s(theirs, train())


def test_the_best_is_the_fastest_and_not_the_largest():
    device = ImaginedDevice()

    def step(batch_size: int) -> None:
        device.train(batch_size)
        device.time += 10 * (batch_size > 8)  # such as a kernel that is slow for large shapes

    search = find_batch_size(step, device=device)
    assert search.best == 8
    assert outcomes(search)[16] == "ok"


def test_the_time_of_the_timed_steps_alone_is_measured_on_a_device_that_the_host_runs_ahead_of():
    class Behind(ImaginedDevice):
        queued = 0.0

        def synchronize(self) -> None:
            self.time, self.queued = self.time + self.queued, 0.0

    device = Behind()

    def step(batch_size: int) -> None:
        device.queued += 0.5

    (trial,) = find_batch_size(step, limit=1, steps=4, device=device).trials
    assert trial.seconds_per_step == pytest.approx(0.5)


class NoisyDevice(ImaginedDevice):
    """In some trials something else takes time. By itself 16 is as fast as 8; 4 and 32 are slower."""

    def __init__(self, seed: int, speeds: dict[int, float] | None = None) -> None:
        super().__init__(total_gib=1000)
        self.draw = random.Random(seed)
        self.speeds = speeds or {1: 20, 2: 40, 4: 60, 8: 100, 16: 100, 32: 60}
        self.busy = 1.0
        self.tried: list[int] = []

    def empty_cache(self) -> None:  # before each trial
        super().empty_cache()
        self.busy = self.draw.choice([1.0, 1.0, 1.02, 1.1, 1.3])

    def train(self, batch_size: int) -> None:
        if batch_size not in self.tried[-1:]:
            self.tried.append(batch_size)
        self.time += batch_size / self.speeds[batch_size] * self.busy


def test_equal_searches_on_a_noisy_machine_give_the_same_answer():
    """Of batch sizes that are equally fast, the larger one, however their first trials came out."""
    devices = [NoisyDevice(seed) for seed in range(12)]
    assert {find_batch_size(device.train, limit=32, device=device).best for device in devices} == {16}
    # where the first trials had 16 far ahead of 8 by luck, or 32 behind both, nothing is repeated
    assert min(len(device.tried) for device in devices) == 6


@pytest.mark.parametrize(("speed", "best"), [(97.0, 8), (99.0, 16), (104.0, 16)])
def test_a_larger_batch_size_that_is_really_slower_is_not_the_best(speed, best):
    device = NoisyDevice(0, {8: 100, 16: speed, 32: 10})
    device.draw.choice = lambda values: values[0]  # a quiet machine
    assert find_batch_size(device.train, start=8, limit=32, device=device).best == best


def test_every_repetition_counts_for_how_much_speeds_vary():
    """By as much as half of the repetitions of the least steady one stay behind its fastest."""
    measured = {8: [90.0, 110.0, 99.0], 16: [100.0, 100.0, 100.0]}
    trials = [Trial(8, "ok", 88.0), Trial(16, "ok", 100.0)]
    variation = _repeat(trials, [8, 16], lambda size: Trial(size, "ok", measured[size].pop(0)))
    assert variation == pytest.approx(1 - (90 + 99) / 2 / 110)
    assert [trial.samples_per_s for trial in trials] == [110.0, 100.0]


def test_a_batch_size_that_has_retries_when_it_is_repeated_is_none_that_does_well():
    device, seen = ImaginedDevice(total_gib=1000), []

    def step(batch_size: int) -> None:
        seen.append(batch_size)
        device.time += batch_size / {8: 100, 16: 99}[batch_size]
        device.retries += batch_size == 16 and seen.count(16) > 5  # after its first trial
        assert seen.count(16) <= 10  # once is enough

    search = find_batch_size(step, start=8, limit=16, device=device)
    assert search.best == 8
    assert outcomes(search) == {8: "ok", 16: "retries"}


def test_a_trial_out_of_memory_leaves_the_gradients_of_other_models():
    device = ImaginedDevice()
    others = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for other in others:
        other(torch.ones(1, 2)).sum().backward()
    expected = [[p.grad.clone() for p in other.parameters()] for other in others]
    weight = nn.Parameter(torch.ones(3))
    left = []

    def step(batch_size: int) -> None:
        left.append(weight.grad)
        (weight * batch_size).sum().backward()
        device.train(batch_size)
        weight.grad = None

    weight.grad = torch.zeros(3)  # to which the first step adds: its own, too
    search = find_batch_size(step, start=32, limit=32, device=device)
    assert outcomes(search)[32] == "OOM"
    assert weight.grad is None
    for other, gradients in zip(others, expected, strict=True):
        for p, gradient in zip(other.parameters(), gradients, strict=True):
            assert torch.equal(p.grad, gradient)


@pytest.mark.parametrize(("limit", "tried"), [(8, [1, 2, 4, 8]), (6, [1, 2, 4, 6]), (1, [1])])
def test_tries_nothing_beyond_the_limit(limit, tried):
    device = ImaginedDevice()
    search = find_batch_size(device.train, limit=limit, device=device)
    assert [trial.batch_size for trial in search.trials] == tried


def test_goes_down_where_the_start_is_too_large():
    device = ImaginedDevice()
    assert find_batch_size(device.train, start=100, device=device).best == 16


def test_says_so_when_no_batch_size_does_well():
    device = ImaginedDevice(total_gib=5.5, sample_gib=1)
    search = find_batch_size(device.train, device=device)
    assert search.best is None
    assert outcomes(search) == {1: "OOM"}
    assert "Best: none" in str(search)


def test_a_memory_error_of_python_is_out_of_memory_too():
    device = ImaginedDevice()

    def step(batch_size: int) -> None:
        device.train(batch_size)
        if batch_size > 5:
            raise MemoryError

    assert find_batch_size(step, device=device).best == 5


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.empty(2**60, dtype=torch.uint8),  # the CPU's allocator
        lambda: raise_error(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")),
        lambda: raise_error(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED in `cublasCreate`")),
        lambda: raise_error(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    ],
    ids=["cpu", "cuda", "cublas", "cudnn"],
)
def test_runtime_errors_that_mean_out_of_memory_count_as_well(fail):
    device = ImaginedDevice()

    def step(batch_size: int) -> None:
        device.train(batch_size)
        if batch_size > 5:
            fail()

    assert find_batch_size(step, device=device).best == 5


def raise_error(error: Exception) -> None:
    raise error


def test_out_of_memory_in_a_timed_step_counts_as_well():
    device, seen = ImaginedDevice(), []

    def step(batch_size: int) -> None:
        seen.append(batch_size)
        if batch_size == 8 and seen.count(8) == 4:  # the second timed step
            raise torch.OutOfMemoryError("fragmented")
        device.train(batch_size)

    search = find_batch_size(step, device=device)
    assert search.best == 7
    assert outcomes(search)[8] == "OOM"


def test_what_the_failed_step_held_is_free_before_the_cache_is_emptied():
    alive = []
    weight = nn.Parameter(torch.ones(3))

    class Watched(ImaginedDevice):
        def empty_cache(self) -> None:
            assert all(activation() is None for activation in alive)
            assert weight.grad is None
            super().empty_cache()

    device = Watched()

    def step(batch_size: int) -> None:
        weight.grad = None
        activation = weight * batch_size
        alive.append(weakref.ref(activation))
        activation.sum().backward()
        device.train(batch_size)
        weight.grad = None

    assert find_batch_size(step, device=device).best == 16


def test_other_exceptions_of_the_step_are_raised_as_they_are():
    def step(batch_size: int) -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        find_batch_size(step, device=ImaginedDevice())


@pytest.mark.parametrize(
    "options",
    [{"start": 0}, {"start": 4, "limit": 3}, {"steps": 0}, {"start": 1.5}, {"start": "1"}, {"steps": 1.0}],
)
def test_arguments_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="expected whole numbers with 1 <= start <= limit"):
        find_batch_size(print, device=ImaginedDevice(), **options)


def test_on_the_cpu_a_limit_is_required():
    with pytest.raises(ValueError, match="pass limit="):
        find_batch_size(print, device="cpu")
    assert find_batch_size(lambda size: torch.ones(size), limit=2, device="cpu").best in (1, 2)


def test_the_table_reads_well():
    device = ImaginedDevice()
    search = find_batch_size(device.train, start=15, limit=20, device=device)
    assert str(search).splitlines() == [
        "batch size  samples/s  s/step  reserved GiB  retries         ",
        "        15       3.00  5.0000         19.55        0       ok",
        "        16       3.02  5.3000         20.52        0     best",
        "        17       2.24  7.6000         21.49        4  retries",
        "        20          -       -             -        -      OOM",
        "Best: 16 per rank.",
    ]
    assert '<tr style="font-weight:bold"><td>16</td>' in search._repr_html_()


# ---- several ranks


def test_the_answer_on_a_noisy_machine_is_the_same_on_every_rank(two_ranks):
    def search() -> list[BatchSizeSearch]:
        devices = [NoisyDevice(100 * dist.get_rank() + seed) for seed in range(4)]
        return [find_batch_size(device.train, limit=32, device=device) for device in devices]

    first, second = two_ranks(search)
    assert first == second  # though the ranks are slow at different times
    assert {found.best for found in first} <= {8, 16}


def test_retries_and_time_of_the_slowest_rank_count_for_all(two_ranks):
    def search() -> BatchSizeSearch:
        device = ImaginedDevice(model_gib=5 + dist.get_rank(), sample_s=0.3 + 0.1 * dist.get_rank())
        return find_batch_size(device.train, device=device)

    first, second = two_ranks(search)
    assert first == second
    assert first.best == 15  # rank 1 has 1 GiB less
    fifteen = next(trial for trial in first.trials if trial.batch_size == 15)
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
    from torch.distributed.fsdp import fully_shard

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
    """Each step takes a second, so that a larger batch size is far faster, and no trial is repeated."""

    def now(self) -> float:
        self.time += 1
        return self.time


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_fsdp2_trains_on_exactly_after_one_rank_ran_out_of_memory(two_ranks):
    def weights_undisturbed() -> list[torch.Tensor]:
        model = sharded_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for batch_size in (1, 1, 1, 2, 2, 2, 4, 4, 4, 5, 5, 5, 3, 3):  # three steps per trial, then two more
            train(model, optimizer, batch_size)
        return whole(model)

    def weights_disturbed(where: str, block: int, rank: int) -> list[torch.Tensor]:
        model = sharded_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        fuse = model[block].fuse
        fuse.rank, fuse.where, fuse.above = rank, where, 5
        step = partial(train, model, optimizer)
        search = find_batch_size(step, steps=1, limit=6, device=EvenDevice(), timeout=20)
        assert outcomes(search) == {1: "ok", 2: "ok", 4: "ok", 6: "OOM", 5: "ok"}
        for _ in range(2):
            train(model, optimizer, 3)
        return whole(model)

    def differing() -> list[tuple[str, int, int]]:
        expected = weights_undisturbed()
        cases = [("forward", 0, 0), ("forward", 2, 1), ("backward", 0, 1), ("backward", 2, 0)]
        return [case for case in cases if not all(map(torch.equal, weights_disturbed(*case), expected))]

    assert two_ranks(differing) == [[], []]


def test_gradients_of_earlier_microbatches_are_dropped_too(two_ranks):
    """Under mixed precision FSDP2 keeps them in a place of its own, of the dtype that it reduces in."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

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
            search = find_batch_size(step, steps=1, limit=8, device=EvenDevice())
            assert outcomes(search) == {1: "ok", 2: "OOM"}
        else:
            for _ in range(3):
                step(1)
        step(1)
        return whole(model)

    def same() -> bool:
        return all(map(torch.equal, weights(fails=True), weights(fails=False)))

    assert two_ranks(same) == [True, True]


def test_a_model_that_has_not_run_yet_is_left_alone(two_ranks):
    def search() -> int | None:
        unused = sharded_model()
        device = ImaginedDevice()
        best = find_batch_size(device.train, device=device).best
        unused(torch.ones(2, 8)).sum().backward()
        return best

    assert two_ranks(search) == [16, 16]


def message_of(fn) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        fn()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_fsdp1_interrupted_is_not_trained_on(two_ranks):
    def search() -> str:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(nn.Sequential(Block(), Block()), device_id=torch.device("cpu"))
        model[1].fuse.rank, model[1].fuse.where, model[1].fuse.above = 1, "backward", 3
        step = partial(train, model, torch.optim.SGD(model.parameters(), lr=0.1))
        return message_of(lambda: find_batch_size(step, limit=8, device="cpu", timeout=20))

    for message in two_ranks(search):
        assert "FSDP1 model cannot be reset" in message
        assert "Best: " in message


def test_an_error_of_one_rank_ends_the_search_on_all(two_ranks):
    def search() -> str:
        def step(batch_size: int) -> None:
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 1 and batch_size == 4:
                raise ValueError("bad sample")
            dist.all_reduce(torch.ones(1))

        return message_of(lambda: find_batch_size(step, limit=8, device="cpu", timeout=20))

    first, second = two_ranks(search)
    assert first == "RuntimeError: find_batch_size: step(4): rank 1 failed: its own error says how"
    assert second == "ValueError: bad sample"


def test_a_rank_that_does_not_take_part_is_noticed(two_ranks):
    def search() -> str:
        if dist.get_rank() == 1:
            dist.barrier()
            return ""
        device = ImaginedDevice()
        message = message_of(lambda: find_batch_size(device.train, device=device, timeout=1))
        dist.barrier()
        return message

    assert "found only rank 0 after 1 s; missing: rank 1. Call it on every rank" in two_ranks(search)[0]


def test_ranks_that_ask_for_different_things_are_refused(two_ranks):
    def search() -> str:
        device = ImaginedDevice()
        return message_of(lambda: find_batch_size(device.train, limit=8 + dist.get_rank(), device=device))

    for message in two_ranks(search):
        assert message.startswith("ValueError: find_batch_size: the ranks ask for different")


@pytest.mark.parametrize("fails", [False, True])
def test_the_search_leaves_no_process_group_behind(fails, two_ranks):
    def search() -> list[int]:
        device, before = ImaginedDevice(), len(process_groups())
        step = partial(raise_error, ValueError("bad sample")) if fails else None
        try:
            find_batch_size((lambda _: step()) if step else device.train, limit=8, device=device)
        except (ValueError, RuntimeError):
            assert fails
        return [before, len(process_groups())]

    assert two_ranks(search) == [[1, 1]] * 2


def test_out_of_memory_of_one_rank_in_a_timed_step_ends_the_search_with_what_was_found(two_ranks):
    def search() -> str:
        device, seen = ImaginedDevice(), []

        def step(batch_size: int) -> None:
            seen.append(batch_size)
            if dist.get_rank() == 1 and batch_size == 8 and seen.count(8) == 4:
                raise torch.OutOfMemoryError("fragmented")
            device.train(batch_size)

        return message_of(lambda: find_batch_size(step, device=device, timeout=5))

    first, second = two_ranks(search)
    assert "out of memory at batch size 8 in a timed step" in second
    assert "heard nothing from another rank" in first
    for message in (first, second):
        assert "Best: 4 per rank" in message
