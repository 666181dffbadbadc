"""Steps that are not the usual ones: what the recording says of them, and that it leaves them alone."""

import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils import record_collectives
from fsdp_utils.collectives import CollectiveTrace, StepEvent
from tests.recorded import LAYERS, Model, fsdp1, fsdp2, step

UNITS = LAYERS + 1  # with the root's, of the head


def phases(trace: CollectiveTrace, kind: str) -> Counter[str]:
    return Counter(event.phase for event in trace.events if event.kind == kind)


def frozen() -> list[tuple[Counter[str], Counter[str]]]:
    found = []
    for build in (fsdp1, fsdp2):
        model = Model()
        model.layers[1].requires_grad_(False)
        model = build(model)
        step(model)
        with record_collectives(model) as trace:
            for _ in range(3):
                step(model)
        found.append((phases(trace, "all_gather"), phases(trace, "reduce_scatter")))
    return found


def test_a_frozen_unit_ends_in_backward_too(two_ranks):
    for one, two in two_ranks(frozen):
        assert one == two
        assert one[0]["forward"] == 3 * UNITS
        assert one[1] == {"backward": 3 * (UNITS - 1)}


def closures() -> list[tuple[Counter[str], Counter[str]]]:
    found = []
    for build in (fsdp1, fsdp2):
        model = build(Model())
        step(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with record_collectives(model) as trace:
            optimizer.step(lambda model=model: step(model))  # pyright: ignore
        found.append((phases(trace, "all_gather"), phases(trace, "compute")))
    return found


def test_a_forward_inside_of_an_optimizer_is_a_forward(two_ranks):
    for found in two_ranks(closures):
        for gathered, computed in found:
            assert gathered["forward"] == UNITS
            assert computed["forward"] == UNITS
            assert set(gathered) == {"forward", "backward"}


def without_gradients() -> list[list[str]]:
    found = []
    for build in (fsdp1, fsdp2):
        model = build(Model())
        step(model)
        with record_collectives(model) as trace, torch.no_grad():
            model(torch.ones(3, 7))
        found.append([event.module for event in trace.events if event.kind == "compute"])
    return found


def test_without_gradients_the_root_computes_too(two_ranks):
    for found in two_ranks(without_gradients):
        for modules in found:
            assert set(modules) == {"(root)", *(f"layers.{i}" for i in range(LAYERS))}
            assert modules[-1] == "(root)"  # the head


def beside_a_thread() -> tuple[Counter[str], int]:
    model, group = fsdp2(Model()), dist.new_group()
    step(model)

    def gather() -> None:
        for _ in range(40):
            dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1), group=group)

    with record_collectives(model) as trace:
        step(model)
        thread = threading.Thread(target=gather)
        thread.start()
        for _ in range(10):
            step(model)
        thread.join(60)
    gathers = [event for event in trace.collectives if event.kind == "all_gather"]
    return Counter(event.module for event in gathers if event.bytes_in == 4), len(gathers)


def test_what_another_thread_sends_belongs_to_no_unit(two_ranks):
    for small, gathers in two_ranks(beside_a_thread):
        assert small == {"": 40}
        assert gathers == 40 + 11 * (2 * UNITS - 1)  # the root's is not gathered again


def moved_ddp() -> list[str]:
    messages = []
    for change in (
        lambda model: model.to("meta"),
        lambda model: setattr(model.module, "head", DistributedDataParallel(nn.Linear(7, 5))),
    ):
        model = DistributedDataParallel(Model())
        step(model)
        with pytest.raises(RuntimeError) as caught, record_collectives(model):
            change(model)
        messages.append(str(caught.value))
    return messages


def test_ddp_moved_or_wrapped_inside_the_block_is_refused(two_ranks):
    for moved, wrapped in two_ranks(moved_ddp):
        assert "the parameters were on cpu at its start, and are on meta at its end" in moved
        assert "1 modules under FSDP or DDP at its start, 2 at its end" in wrapped


def stumbled() -> list[tuple[int, int]]:
    """Computations in a step, and in one after a hook in front of a unit has raised."""
    found = []
    for build in (fsdp1, fsdp2, DistributedDataParallel):
        model = Model()
        raises = iter([False, True, False, False])
        model.layers[1].register_forward_pre_hook(lambda *_, raises=raises: 1 / 0 if next(raises) else None)
        model = build(model)
        step(model)
        with record_collectives(model) as trace:
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(3, 7))
            step(model)
            first = sum(event.kind == "compute" for event in trace.events)
            step(model)
        plain = sum(event.kind == "compute" for event in trace.events) - first
        found.append((plain, len(trace.collectives)))
    return found


def test_a_hook_that_raises_spoils_nothing_after_it(two_ranks):
    for found in two_ranks(stumbled):
        assert [computed >= n for (computed, _), n in zip(found, (2 * UNITS, 2 * UNITS, 2), strict=True)] == [
            True
        ] * 3


class Own(nn.Linear):
    """torch.compile leaves the layers of torch itself alone."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.linear(input, self.weight, self.bias))


def compiled() -> list[tuple[list[str], list[str], int]]:
    from torch._dynamo.testing import CompileCounter  # here: it takes a second, and only this test needs it

    torch._dynamo.reset()
    found = []
    for build in (fsdp2, lambda model: fsdp1(model, use_orig_params=True)):
        orders, counter, frames = [], CompileCounter(), 0
        for compiles in (False, True):
            torch.manual_seed(0)
            model = Model()
            model.layers = nn.ModuleList(Own(7, 7) for _ in range(LAYERS))
            model = build(model)
            if compiles:
                for layer in model.layers:
                    layer = layer._fsdp_wrapped_module if isinstance(layer, FSDP) else layer
                    layer.compile(backend=counter, fullgraph=True)
            step(model)
            frames = counter.frame_count
            with record_collectives(model) as trace:
                step(model)
            orders.append(trace.order())
            frames = counter.frame_count - frames
        found.append((*orders, frames))
    return found


def test_torch_compile_sees_nothing_of_a_recording(two_ranks):
    for found in two_ranks(compiled):
        for plain, with_compile, new_frames in found:
            assert with_compile == plain
            assert new_frames == 0


def test_a_gather_sends_as_much_as_a_scatter_on_every_rank():
    piece, whole = 12, 48
    sent = [
        StepEvent(0, kind, "", "other", given, got, (0, 1, 2, 3)).sent_bytes
        for kind, given, got in (
            ("gather", piece, whole),  # on the root
            ("gather", piece, 0),
            ("scatter", whole, piece),
            ("scatter", 0, piece),
        )
    ]
    assert sent == [9.0] * 4  # three ranks send a piece, the mean over four
