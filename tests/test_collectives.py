"""Recorded orders and bytes, held against FSDP's documentation, theory and torch's profiler, to the byte."""

import json
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from fsdp_utils import record_collectives
from fsdp_utils.collectives import CollectiveTrace, StepEvent
from tests.on_ranks import case, on_ranks
from tests.recorded import LAYERS, Model, by_unit, fsdp1, fsdp2, record, step

LAYER, HEAD = [(7, 7), (7,)], [(5, 7), (5,)]
MODEL_BYTES = 4 * (LAYERS * (7 * 7 + 7) + 5 * 7 + 5)


def short(trace: CollectiveTrace, phase: str) -> str:
    """The order in letters: AG, RS, AR, and mm for the computation of a unit."""
    letters = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "compute": "mm"}
    return " ".join(
        letters[event.kind]
        for event in trace.events
        if event.phase == phase and event.kind in letters and event.module != "(root)"
    )


# ---- in which order --------------------------------------------------------------------------------------


@on_ranks()
def test_the_order_is_the_one_that_each_prefetch_setting_promises() -> None:
    prefetch = {"none": None, "post": BackwardPrefetch.BACKWARD_POST, "pre": BackwardPrefetch.BACKWARD_PRE}
    models: dict[str, nn.Module] = {
        f"FSDP1 {name}": fsdp1(Model(head=False), backward_prefetch=way) for name, way in prefetch.items()
    }
    models["forward_prefetch"] = fsdp1(Model(head=False), forward_prefetch=True, backward_prefetch=None)
    models["FSDP2"] = fsdp2(Model(head=False))
    models["FSDP2 without resharding"] = fsdp2(Model(head=False), reshard_after_forward=False)
    models["FSDP2 explicit"] = explicit = fsdp2(Model(head=False))
    for i, layer in enumerate(explicit.layers):
        layer.set_modules_to_forward_prefetch(list(explicit.layers[i + 1 : i + 3]))
        layer.set_modules_to_backward_prefetch(list(explicit.layers[max(0, i - 2) : i])[::-1])
    traces = {name: record(model) for name, model in models.items()}
    plain = "AG mm AG mm AG mm AG mm"
    pre = "AG AG mm RS AG mm RS AG mm RS mm RS"
    assert {
        name: (short(trace, "forward"), short(trace, "backward"), trace.peak_units)
        for name, trace in traces.items()
    } == {
        "FSDP1 none": (plain, "AG mm RS AG mm RS AG mm RS AG mm RS", 1),
        "FSDP1 post": (plain, "AG mm AG RS mm AG RS mm AG RS mm RS", 1),
        "FSDP1 pre": (plain, pre, 2),
        # Its views of a gathered parameter are older than the computation before it. Autograd runs what
        # is younger first: in backward that computation comes before the gradient is reduced.
        "forward_prefetch": ("AG AG mm AG mm AG mm mm", "AG mm AG mm RS AG mm RS AG mm RS mm RS", 2),
        "FSDP2": (plain, pre, 2),
        "FSDP2 without resharding": (plain, "mm RS mm RS mm RS mm RS", 4),
        "FSDP2 explicit": ("AG AG AG mm AG mm mm mm", "AG AG AG mm RS AG mm RS mm RS mm RS", 3),
    }


# ---- how many bytes --------------------------------------------------------------------------------------


def padded_fsdp1(shapes: list[tuple[int, ...]], ranks: int, itemsize: int) -> int:
    """A unit's parameters in one flat tensor, padded to a multiple of the ranks."""
    numel = sum(math.prod(shape) for shape in shapes)
    return math.ceil(numel / ranks) * ranks * itemsize


def padded_fsdp2(shapes: list[tuple[int, ...]], ranks: int, itemsize: int) -> int:
    """Each parameter padded to a multiple of the ranks in its first dimension."""
    rows = [math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:]) for shape in shapes]
    return sum(rows) * itemsize


def in_theory(padded: Any, *, ranks: int, itemsize: int, reshard: bool) -> dict[str, Any]:
    """Compute the collectives of one step of Model from theory, as `by_unit`."""
    units = {f"layers.{i}": (LAYER, reshard) for i in range(LAYERS)} | {"(root)": (HEAD, False)}
    seen = {}
    for name, (shapes, gathered_twice) in units.items():
        whole = padded(shapes, ranks, itemsize)
        gather = (whole // ranks, whole)
        calls = [("all_gather", "forward", *gather), ("reduce_scatter", "backward", whole, whole // ranks)]
        if gathered_twice:
            calls.append(("all_gather", "backward", *gather))
        seen[name] = sorted(calls)
    return seen


# By torch's operator: the kind, and the place among its arguments of a tensor of which `bytes` is a multiple.
OPERATORS = {
    "c10d::allgather_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 0),
    "c10d::allreduce_": ("all_reduce", 0),
}


def in_the_profiler(model: nn.Module, itemsize: int) -> list[tuple[str, int]]:
    """Kind and bytes of a step's collectives, by the shapes in the record of torch's profiler."""
    with profile(record_shapes=True) as profiler:
        step(model)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        records = json.loads(Path(file.name).read_text())["traceEvents"]
    seen = []
    for call in sorted((one for one in records if one.get("name") in OPERATORS), key=lambda one: one["ts"]):
        kind, place = OPERATORS[call["name"]]
        (numel,) = torch.tensor(call["args"]["Input Dims"][place]).flatten().tolist()
        seen.append((kind, numel * itemsize * (1 if kind == "all_reduce" else dist.get_world_size())))
    return seen


def assert_profiled(model: nn.Module, trace: CollectiveTrace, itemsize: int) -> None:
    assert [(event.kind, event.bytes) for event in trace.collectives] == in_the_profiler(model, itemsize)


@on_ranks(3)
def test_bytes_of_every_strategy_are_what_theory_and_the_profiler_say() -> None:
    for reshard, strategy in ((True, ShardingStrategy.FULL_SHARD), (False, ShardingStrategy.SHARD_GRAD_OP)):
        for bf16 in (False, True):
            theory: Any = {"ranks": 3, "itemsize": 2 if bf16 else 4, "reshard": reshard}
            one = fsdp1(Model(), bf16=bf16, sharding_strategy=strategy)
            # The root frees nothing after forward by default; told to, it would.
            two = fsdp2(Model(), bf16=bf16, reshard_root=False, reshard_after_forward=reshard)
            for model, padded in ((one, padded_fsdp1), (two, padded_fsdp2)):
                with case(f"{padded.__name__}, reshard {reshard}, bf16 {bf16}"):
                    trace = record(model)
                    assert by_unit(trace) == in_theory(padded, **theory)
                    assert_profiled(model, trace, theory["itemsize"])
    model = DistributedDataParallel(Model())
    step(model)  # it makes its buckets anew
    assert_profiled(model, record(model), 4)


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


@on_ranks(4)
def test_hybrid_shards_within_a_host_and_reduces_shards_between_hosts() -> None:
    rank = dist.get_rank()
    one = fsdp1(Model(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh(2, 2))
    for model, padded in ((one, padded_fsdp1), (fsdp2(Model(), mesh=mesh(2, 2)), padded_fsdp2)):
        trace = record(model, ranks_per_host=2)
        seen, whole = by_unit(trace), padded(LAYER, 2, 4)
        for unit in (f"layers.{i}" for i in range(LAYERS)):
            assert seen[unit] == [
                ("all_gather", "backward", whole // 2, whole),
                ("all_gather", "forward", whole // 2, whole),
                ("all_reduce", "backward", whole // 2, whole // 2),
                ("reduce_scatter", "backward", whole, whole // 2),
            ]
        assert len(seen["(root)"]) == 3
        mine = (0, 1) if rank < 2 else (2, 3)
        assert {(event.kind, event.ranks, event.link) for event in trace.collectives} == {
            ("all_gather", mine, "within a host"),
            ("reduce_scatter", mine, "within a host"),
            ("all_reduce", (rank % 2, rank % 2 + 2), "between hosts"),
        }
    assert sorted(trace.sent_bytes_by_dimension()) == ["replicate", "shard"]


@on_ranks(4)
def test_each_collective_says_its_mesh_dimension_and_bytes_are_counted_by_it() -> None:
    """One step of FSDP over one dimension and tensor parallelism over the other, on two hosts of two."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)))
    for block in model:
        parallelize_module(block, square["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(block, mesh=square["fsdp"])
    fully_shard(model, mesh=square["fsdp"])
    x = torch.ones(3, 8, requires_grad=True)
    with record_collectives(model, ranks_per_host=2) as trace:
        model(x).sum().backward()
    rank, unit, activations = dist.get_rank(), 4 * 2 * 8 * 16, 4 * 3 * 8
    row, column = (0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2)
    assert {(event.dimension, event.kind, event.ranks, event.link) for event in trace.collectives} == {
        ("fsdp", "all_gather", column, "between hosts"),
        ("fsdp", "reduce_scatter", column, "between hosts"),
        ("tp", "all_reduce", row, "within a host"),
    }
    sent = trace.sent_bytes_by_dimension()
    # half of the unit, of which a rank has one half: gathered twice, reduced once
    assert sent["fsdp"] == 3 * unit / 2 / 2
    # the output in forward, the gradient of the input in backward; twice (2 - 1) / 2 of its bytes
    assert sent["tp"] == 2 * activations
    assert [event.bytes for event in trace.events if event.is_of_the_model] == [activations, activations]
    assert "dimension" in trace.summary()
    assert "  tp " in trace.summary()


@on_ranks()
def test_ddp_reduces_every_gradient_once() -> None:
    def reduced(model: nn.Module) -> list[tuple[str, int]]:
        events = [event for event in record(model).collectives if event.kind == "all_reduce"]
        assert all(event.bytes_in == event.bytes_out == event.sent_bytes for event in events)
        return [(event.module, event.bytes) for event in events]

    model = DistributedDataParallel(Model())
    assert reduced(model) == [("bucket 0", MODEL_BYTES)]
    with record_collectives(model) as silent, model.no_sync():
        step(model)
    assert silent.collectives == []
    small = DistributedDataParallel(Model(), bucket_cap_mb=1e-4)
    step(small)
    buckets = reduced(small)
    assert len(buckets) > 1  # a limit so low that there are several
    assert [name for name, _ in buckets] == [f"bucket {i}" for i in range(len(buckets))]
    assert reduced(small) == buckets  # counted from 0 again
    assert sum(size for _, size in buckets) == MODEL_BYTES


@pytest.mark.parametrize(
    ("kind", "given", "got", "sent"),
    [
        ("all_gather", 100, 400, 300),
        ("reduce_scatter", 400, 100, 300),
        ("all_reduce", 400, 400, 600),
        # three ranks send a piece, the mean over four
        ("gather", 12, 48, 9),  # on the root
        ("gather", 12, 0, 9),
        ("scatter", 48, 12, 9),
        ("scatter", 0, 12, 9),
        ("send", 400, 0, 400),
        ("recv", 0, 400, 0),
    ],
)
def test_what_a_ring_of_four_sends(kind: str, given: int, got: int, sent: float):
    event = StepEvent(0, kind, "", "other", given, got, (0, 1, 2, 3), "within a host")
    assert (event.bytes, event.sent_bytes) == (max(given, got), sent)
    assert StepEvent(0, "all_reduce", "", "other", 400, 400, (0,), "within a host").sent_bytes == 0


# ---- every call ------------------------------------------------------------------------------------------


def call_as_compiled_code_does(small: torch.Tensor, large: torch.Tensor) -> None:
    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    functional.wait_tensor(functional.all_gather_into_tensor_out(small, 2, group, out=large))
    functional.wait_tensor(functional.reduce_scatter_tensor_out(large, "sum", 2, group, out=small))


@on_ranks()
def test_every_call_is_seen_once_whoever_issues_it() -> None:
    """torch.distributed in Python, DTensor and compiled graphs in C++."""
    model = fsdp2(Model())
    small, large = torch.ones(3), torch.ones(6)
    is_first = dist.get_rank() == 0
    calls = {
        "Python": [
            lambda: dist.all_gather([small, small.clone()], small),
            lambda: dist.all_gather_into_tensor(large, small),
            lambda: dist.group.WORLD._allgather_base(output=large, input=small).wait(),
            lambda: dist.reduce_scatter(small, [small, small]),
            lambda: dist.reduce_scatter_tensor(small, large),
            lambda: dist.all_reduce(small),
            lambda: dist.broadcast(small, 0),
            lambda: dist.reduce(small, 0),
            lambda: dist.gather(small, [small, small.clone()] if is_first else None),
            lambda: dist.scatter(small, [small, small] if is_first else None),
            lambda: dist.all_to_all([small, small.clone()], [small, small]),
            lambda: dist.all_to_all_single(large, large.clone()),
            lambda: dist.send(small, 1) if is_first else dist.recv(small),
            lambda: dist.barrier(),
        ],
        "DTensor": [
            lambda: DTensor.from_local(small, mesh(2), [Shard(0)]).full_tensor(),
            lambda: DTensor.from_local(large, mesh(2), [Partial()]).redistribute(placements=[Shard(0)]),
            lambda: DTensor.from_local(large, mesh(2), [Partial()]).full_tensor(),
        ],
        "compiled": [lambda: call_as_compiled_code_does(small, large)],
    }
    with record_collectives(model) as trace, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # names that this torch calls old
        seen = {}
        for turn in ("Python", "DTensor", "compiled", "Python again"):
            before = len(trace.events)
            for call in calls[turn.split()[0]]:
                call()
            seen[turn] = [(event.kind, event.bytes_in, event.bytes_out) for event in trace.events[before:]]
        before = len(trace.events)
        step(model)
    after = [f"{event.kind} {event.module}" for event in trace.events[before:] if event.is_collective]
    assert after == [f"{event.kind} {event.module}" for event in record(model).collectives]
    dtensor = [("all_gather", 12, 24), ("reduce_scatter", 24, 12), ("all_reduce", 24, 24)]
    python = [
        *[("all_gather", 12, 24)] * 3,
        *[("reduce_scatter", 24, 12)] * 2,
        ("all_reduce", 12, 12),
        ("broadcast", 12, 12),
        ("reduce", 12, 12),
        ("gather", 12, 24 if is_first else 0),
        ("scatter", 24 if is_first else 0, 12),
        *[("all_to_all", 24, 24)] * 2,
        ("send", 12, 0) if is_first else ("recv", 0, 12),
        ("barrier", 0, 0),
    ]
    assert seen["Python"] == seen["Python again"] == python
    assert seen["DTensor"] == dtensor
    assert seen["compiled"] == dtensor[:2]
