"""The numbers of meter and probe, held against what can be worked out by hand for small models."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fsdp_utils.lessons.meter import Meter
from fsdp_utils.lessons.probe import Probe
from tests.on_ranks import case, on_ranks

WIDTH = 8
LAYER_BYTES = WIDTH * WIDTH * 4
LAYERS = 3


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def measure(model: nn.Module) -> tuple[int, int, int, int, int]:
    with Meter(model.parameters()) as meter:
        model(torch.ones(2, WIDTH)).sum().backward()
    calls = meter.all_gathers, meter.reduce_scatters
    return (*calls, meter.gathered_bytes, meter.peak_whole_bytes, meter.whole_bytes[-1])


def fsdp2_by_layer() -> nn.Module:
    model = layers()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def fsdp1_by_layer() -> nn.Module:
    return FSDP(layers(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"))


def units_are_counted_and_at_most_two_are_whole() -> None:
    whole = LAYERS * LAYER_BYTES
    assert measure(fully_shard(layers())) == (1, 1, whole, whole, 0)  # until the end of backward
    # the backward pass of both gathers the next layer while it works on this one
    for build in (fsdp2_by_layer, fsdp1_by_layer):
        assert measure(build())[:4] == (2 * LAYERS, LAYERS, 2 * whole, 2 * LAYER_BYTES)
    model = fsdp2_by_layer()
    with torch.no_grad(), Meter(model.parameters()) as meter:
        for _ in range(2):
            model(torch.ones(2, WIDTH))
    assert meter.peak_whole_bytes == LAYER_BYTES  # a unit that is gathered again counts once


def calls_of_torch_distributed_count_and_freed_tensors_do_not() -> None:
    shard = torch.full((4,), float(dist.get_rank()))
    with Meter([shard]) as meter:
        whole = torch.empty(8)
        dist.all_gather(list(whole.chunk(2)), shard)
        whole.untyped_storage().resize_(0)  # del would do, but only once gloo's thread has let go of it too
        other = torch.zeros(100)
        mine = torch.empty(50)
        dist.reduce_scatter(mine, list(other.chunk(2)))
    assert (meter.all_gathers, meter.reduce_scatters) == (1, 1)
    assert set(meter.whole_bytes) == {0, 32}
    assert meter.peak_tensor_bytes == 4 * (4 + 100 + 50)  # the shard and what came after the whole was freed


def test_with_a_device_only_its_tensors_count():
    held = [torch.ones(5), torch.ones(7, device="meta")]
    peaks = {}
    for device in (None, "cpu", torch.device("meta", 0)):
        with Meter(held, device=device) as meter:
            offloaded = torch.ones(1000)
            kept = torch.empty(10, device="meta")
        peaks[str(device)] = (meter.held_bytes, meter.peak_tensor_bytes)
        del offloaded, kept
    assert peaks == {"None": (48, 4 * 1022), "cpu": (20, 4 * 1005), "meta:0": (28, 4 * 17)}


def functional_collectives_of_dtensor_count_as_well() -> None:
    mesh, piece = init_device_mesh("cpu", (2,)), torch.ones(WIDTH)
    with Meter() as meter:
        DTensor.from_local(piece, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
        DTensor.from_local(piece, mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()
    assert (meter.all_gathers, meter.reduce_scatters, meter.gathered_bytes) == (1, 1, 2 * WIDTH * 4)


# ---- the probe -------------------------------------------------------------------------------------------


def probed(steps: int, sharded: bool) -> tuple[list[int], bool]:
    model = layers()
    model[0].requires_grad_(False)
    with Probe(model) as probe:
        if sharded:
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        other = torch.optim.SGD(nn.Linear(2, 2).parameters())
        for _ in range(steps):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            other.step()
    optimizer.step()  # outside: not seen
    return probe.row(), probe.optimizer is optimizer


def the_probe_sees_what_is_held_sent_and_full_at_once() -> None:
    half = LAYER_BYTES // 2
    # a frozen layer has no gradient and no averages; its weight is not needed in backward, but is gathered
    expected = [3 * half, 2 * half, 4 * half, 6 * LAYER_BYTES, 2 * LAYER_BYTES, 2 * LAYER_BYTES]
    assert probed(4, True) == (expected, True)


@on_ranks()
def test_on_two_ranks() -> None:
    for check in (
        units_are_counted_and_at_most_two_are_whole,
        calls_of_torch_distributed_count_and_freed_tensors_do_not,
        functional_collectives_of_dtensor_count_as_well,
        the_probe_sees_what_is_held_sent_and_full_at_once,
    ):
        with case(check.__name__):
            check()


def test_without_fsdp_and_without_enough_steps() -> None:
    held = [3 * LAYER_BYTES, 2 * LAYER_BYTES, 4 * LAYER_BYTES]
    assert probed(4, False) == ([*held, 0, 0, 0], True)
    assert probed(1, False) == ([0] * 6, True)
