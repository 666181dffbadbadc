"""What record_collectives says of a block that it cannot record, and what is left of the trace."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils import record_collectives
from fsdp_utils.collectives import CollectiveTrace
from tests.recorded import Model, fsdp1, fsdp2, step


def refused(model: nn.Module, **options: Any) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught, record_collectives(model, **options):
        pass
    return str(caught.value)


def test_a_model_that_is_not_distributed_is_refused():
    assert "found a Linear without any of them" in refused(nn.Linear(2, 2))


def nested() -> tuple[str, str, int]:
    model = fsdp2(Model())
    with record_collectives(model) as outer:
        message = refused(model)
        step(model)
    impossible = refused(model, ranks_per_host=0)
    with record_collectives(model) as again:  # neither refusal is left behind
        step(model)
    assert len(again.collectives) == len(outer.collectives)
    return message, impossible, len(outer.collectives)


def test_nested_recordings_are_refused_and_the_outer_one_goes_on(two_ranks):
    for message, impossible, recorded in two_ranks(nested):
        assert "expected no other recording in this process" in message
        assert "ranks_per_host of at least 1, found 0" in impossible
        assert recorded == 14


class BrokenError(Exception):
    """Raised in the middle of a step."""


def interrupted() -> list[tuple[list[str], list[str], int]]:
    results = []
    for build in (fsdp1, fsdp2, DistributedDataParallel):
        model = build(Model())
        step(model)
        with pytest.raises(BrokenError, match="in the middle"):  # noqa: PT012, SIM117
            with record_collectives(model) as trace:
                step(model)
                raise BrokenError("in the middle")
        before = len(trace.events)
        step(model)  # and no longer recorded
        assert len(trace.events) == before
        results.append((trace.notes, trace.summary().splitlines()[-1:], len(trace.collectives)))
    return results


def test_an_exception_leaves_what_was_recorded_until_then(two_ranks):
    for results in two_ranks(interrupted):
        for notes, last_line, recorded in results:
            assert notes == ["the block ended early, by BrokenError: in the middle"]
            assert last_line == [f"note: {notes[0]}"]
            assert recorded >= 1


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def broken_forward() -> tuple[bool, bool, list[str]]:
    """An exception inside a unit's forward, and nothing of the recording left in the model."""
    import torch.distributed.fsdp._runtime_utils as runtime

    before_hook = runtime._post_backward_hook
    model = fsdp1(Model())
    step(model)
    before = hooks(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), record_collectives(model) as trace:
        model(torch.ones(3, 6))
    same = runtime._post_backward_hook is before_hook and hooks(model) == before
    handle = model.layers[0]._handle
    return same, "unshard" in vars(handle), trace.order()


def test_a_failed_forward_leaves_no_hooks_behind(two_ranks):
    for same, patched, order in two_ranks(broken_forward):
        assert same
        assert not patched
        assert [call for call in order if "compute" not in call] == [
            "all_gather (root)",
            "all_gather layers.0",
        ]


def changed(change: Any) -> tuple[str, CollectiveTrace]:
    model = Model()
    for layer in list(model.layers)[:2]:
        fully_shard(layer)
    fully_shard(model)
    step(model)
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012, SIM117
        with record_collectives(model) as trace:
            step(model)
            change(model)
    return str(caught.value), trace


def wrap_more(model: Any) -> None:
    for layer in list(model.layers)[2:]:
        if not isinstance(layer, FSDPModule):
            model.layers[3] = fully_shard(nn.Linear(7, 7))
            return


def test_a_model_wrapped_again_inside_the_block_is_refused(two_ranks):
    for message, trace in two_ranks(lambda: changed(wrap_more)):
        assert "wrapped again inside the block: 3 units with parameters at its start, 4 at its end" in message
        assert len(trace.collectives) == 3 + 3 + 2
        assert trace.notes[0] in message


def test_a_model_moved_inside_the_block_is_refused(two_ranks):
    for message, trace in two_ranks(lambda: changed(lambda model: model.to("meta"))):
        assert "the shards of (root) were on cpu at its start, and are on meta at its end" in message
        assert len(trace.collectives) == 3 + 3 + 2


def moved_fsdp1() -> str:
    model = fsdp1(Model())
    step(model)
    with pytest.raises(RuntimeError) as caught, record_collectives(model):
        model.to("meta")
    return str(caught.value)


def test_a_moved_fsdp1_model_is_refused_too(two_ranks):
    for message in two_ranks(moved_fsdp1):
        assert "are on meta at its end" in message
