"""Recorded orders and bytes, held against FSDP's documentation and against theory, to the byte."""

import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils import record_collectives, run_on_ranks
from fsdp_utils.collectives import listen_to_calls
from tests.recorded import (
    HEAD,
    LAYER,
    LAYERS,
    PREFETCH,
    Model,
    all_strategies,
    by_unit,
    fsdp1,
    fsdp2,
    mesh,
    padded_fsdp1,
    padded_fsdp2,
    record,
    short,
    step,
)

MODEL_BYTES = 4 * (LAYERS * (7 * 7 + 7) + 5 * 7 + 5)


def orders() -> dict[str, tuple[str, str, int]]:
    models = {
        f"FSDP1 {name}": fsdp1(Model(head=False), backward_prefetch=PREFETCH[name]) for name in PREFETCH
    }
    models["forward_prefetch"] = fsdp1(Model(head=False), forward_prefetch=True, backward_prefetch=None)
    models["FSDP2"] = fsdp2(Model(head=False))
    models["FSDP2 without resharding"] = fsdp2(Model(head=False), reshard_after_forward=False)
    explicit = fsdp2(Model(head=False))
    for i, layer in enumerate(explicit.layers):
        layer.set_modules_to_forward_prefetch(list(explicit.layers[i + 1 : i + 3]))
        layer.set_modules_to_backward_prefetch(list(explicit.layers[max(0, i - 2) : i])[::-1])
    models["FSDP2 explicit"] = explicit
    traces = {name: record(model) for name, model in models.items()}
    return {
        name: (short(trace, "forward"), short(trace, "backward"), trace.peak_units)
        for name, trace in traces.items()
    }


def test_the_order_is_the_one_that_each_prefetch_setting_promises(two_ranks):
    plain = "AG mm AG mm AG mm AG mm"
    pre = "AG AG mm RS AG mm RS AG mm RS mm RS"
    for seen in two_ranks(orders):
        assert seen == {
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


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_of_every_strategy_are_what_theory_says(ranks):
    for results in run_on_ranks(all_strategies, world_size=ranks, timeout=100):
        assert len(results) == 8
        for name, seen, wanted in results:
            assert seen == wanted, name


def hybrid() -> list[tuple[dict, dict, dict]]:
    one = record(
        fsdp1(Model(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh(2, 2)),
        ranks_per_host=2,
    )
    two = record(fsdp2(Model(), mesh=mesh(2, 2)), ranks_per_host=2)
    return [
        (by_unit(trace), {(event.kind, event.ranks, event.link) for event in trace.collectives})
        for trace in (one, two)
    ]


def test_hybrid_shards_within_a_host_and_reduces_shards_between_hosts():
    for rank, traces in enumerate(run_on_ranks(hybrid, world_size=4)):
        for padded, (seen, groups) in zip((padded_fsdp1, padded_fsdp2), traces, strict=True):
            for unit in (f"layers.{i}" for i in range(LAYERS)):
                whole = padded(LAYER, 2, 4)
                assert seen[unit] == [
                    ("all_gather", "backward", whole // 2, whole),
                    ("all_gather", "forward", whole // 2, whole),
                    ("all_reduce", "backward", whole // 2, whole // 2),
                    ("reduce_scatter", "backward", whole, whole // 2),
                ]
            assert len(seen["(root)"]) == 3
            mine = (0, 1) if rank < 2 else (2, 3)
            partners = (rank % 2, rank % 2 + 2)
            assert groups == {
                ("all_gather", mine, "within a host"),
                ("reduce_scatter", mine, "within a host"),
                ("all_reduce", partners, "between hosts"),
            }


def int_reshard() -> tuple[list[tuple[str, tuple[int, ...]]], int]:
    model = Model()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=2)
    trace = record(fully_shard(model), ranks_per_host=2)
    return [
        (event.phase, event.ranks) for event in trace.collectives if event.module == "layers.0"
    ], trace.rank


def test_resharding_to_a_host_gathers_within_it_in_backward():
    for events, rank in run_on_ranks(int_reshard, world_size=4):
        host = (0, 1) if rank < 2 else (2, 3)
        assert events == [("forward", (0, 1, 2, 3)), ("backward", host), ("backward", (0, 1, 2, 3))]


def ddp() -> tuple[list, list, dict]:
    model = DistributedDataParallel(Model())
    trace = record(model)
    reduced = [event for event in trace.collectives if event.kind == "all_reduce"]
    with record_collectives(model) as silent, model.no_sync():
        step(model)
    small = DistributedDataParallel(Model(), bucket_cap_mb=1e-4)
    step(small)
    buckets = [
        (e.module, e.bytes) for _ in range(2) for e in record(small).collectives if e.kind == "all_reduce"
    ]
    return [(e.module, e.bytes_in, e.bytes_out, e.sent_bytes) for e in reduced], silent.collectives, buckets


def test_ddp_reduces_every_gradient_once(two_ranks):
    for reduced, silent, buckets in two_ranks(ddp):
        assert reduced == [("bucket 0", MODEL_BYTES, MODEL_BYTES, MODEL_BYTES)]
        assert silent == []
        half = len(buckets) // 2
        assert half > 1  # a limit so low that there are several
        assert [name for name, _ in buckets[:half]] == [f"bucket {i}" for i in range(half)]
        assert buckets[half:] == buckets[:half]  # counted from 0 again
        assert sum(size for _, size in buckets) == 2 * MODEL_BYTES


def accumulation() -> dict[str, list[str]]:
    one, two = fsdp1(Model(head=False)), fsdp2(Model(head=False))
    step(one)
    step(two)
    with record_collectives(one) as trace_one, one.no_sync():
        step(one)
    two.set_requires_gradient_sync(False)
    with record_collectives(two) as trace_two:
        step(two)
    return {"FSDP1": list(trace_one.bytes_by_kind()), "FSDP2": list(trace_two.bytes_by_kind())}


def test_without_sync_nothing_is_reduced(two_ranks):
    for seen in two_ranks(accumulation):
        assert seen == {"FSDP1": ["all_gather"], "FSDP2": ["all_gather"]}


def around_the_step() -> tuple[list, list, dict]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.distributed.optim scripts functions
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = DistributedDataParallel(Model())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    step(model, zero)
    with record_collectives(model) as trace:
        step(model, zero)
    sharded = fsdp2(Model())
    step(sharded)
    with record_collectives(sharded) as clipped:
        nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    (norm,) = clipped.collectives
    sent = [(event.kind, event.phase) for event in trace.collectives]
    return sent, [norm.kind, norm.phase, norm.module, norm.seconds is not None], trace.unit_bytes


def test_what_the_optimizer_and_clipping_send_is_seen_too(two_ranks):
    for sent, norm, units in two_ranks(around_the_step):
        assert ("all_reduce", "backward") in sent
        assert ("broadcast", "optimizer") in sent
        assert norm == ["all_reduce", "other", "", True]
        assert units == {}


def called_directly() -> dict[str, list[tuple[str, int, int]]]:
    """What torch.distributed sends, in Python, and what DTensor and compiled graphs send, from C++."""
    model = fsdp2(Model())
    small, large = torch.ones(3), torch.ones(6)
    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    wait, is_first = functional.wait_tensor, dist.get_rank() == 0
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
        "compiled": [
            lambda: wait(functional.all_gather_into_tensor_out(small, 2, group, out=large)),
            lambda: wait(functional.reduce_scatter_tensor_out(large, "sum", 2, group, out=small)),
        ],
    }
    methods = dict(vars(dist.ProcessGroup))
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
    assert dict(vars(dist.ProcessGroup)) == methods
    after = [f"{event.kind} {event.module}" for event in trace.events[before:] if event.is_collective]
    assert after == [f"{event.kind} {event.module}" for event in record(model).collectives]
    return seen


def test_every_call_is_seen_once_whoever_issues_it(two_ranks):
    dtensor = [("all_gather", 12, 24), ("reduce_scatter", 24, 12), ("all_reduce", 24, 24)]
    for rank, seen in enumerate(two_ranks(called_directly)):
        python = [
            ("all_gather", 12, 24),
            ("all_gather", 12, 24),
            ("all_gather", 12, 24),
            ("reduce_scatter", 24, 12),
            ("reduce_scatter", 24, 12),
            ("all_reduce", 12, 12),
            ("broadcast", 12, 12),
            ("reduce", 12, 12),
            ("gather", 12, 24 if rank == 0 else 0),
            ("scatter", 24 if rank == 0 else 0, 12),
            ("all_to_all", 24, 24),
            ("all_to_all", 24, 24),
            ("send", 12, 0) if rank == 0 else ("recv", 0, 12),
            ("barrier", 0, 0),
        ]
        assert seen["Python"] == seen["Python again"] == python
        assert seen["DTensor"] == dtensor
        assert seen["compiled"] == dtensor[:2]


def two_threads() -> list[tuple[str, bool]]:
    """One thread issues a collective while another one issues one."""
    other = dist.new_group()
    seen = []

    def around(call, issue):
        is_main = threading.current_thread() is threading.main_thread()
        seen.append((call.kind, is_main))
        if is_main:
            thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),), kwargs={"group": other})
            thread.start()
            thread.join(60)
        return issue()

    with listen_to_calls(around):
        dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1))
    return seen


def test_a_call_is_seen_while_another_thread_issues_one(two_ranks):
    for seen in two_ranks(two_threads):
        assert seen == [("all_gather", True), ("all_reduce", False)]


def names() -> dict[str, tuple[str, ...]]:
    found = {}
    for name, build in (("FSDP1", fsdp1), ("FSDP2", fsdp2)):
        model = Model()
        model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
        trace = record(build(model))
        units = tuple(trace.unit_bytes)
        assert {event.module for event in trace.collectives} == set(units)
        # activation checkpointing computes each layer again in backward
        assert {e.module for e in trace.events if (e.kind, e.phase) == ("compute", "backward")} == set(units)
        found[name] = units
    shared = Model()
    fully_shard([shared.layers[0], shared.layers[1]])
    trace = record(fully_shard(shared))
    found["shared"] = tuple(trace.unit_bytes)
    assert trace.unit_bytes["layers.0, layers.1"] == 2 * 4 * 56
    return found


def test_units_are_called_as_in_the_model_however_they_are_wrapped(two_ranks):
    for found in two_ranks(names):
        assert (
            set(found["FSDP1"]) == set(found["FSDP2"]) == {"(root)", *(f"layers.{i}" for i in range(LAYERS))}
        )
        assert found["shared"] == ("(root)", "layers.0, layers.1")


class Outside(TorchDispatchMode):
    """Each operation that reaches the dispatcher, whoever else watches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def train(build, recorded: bool) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model = build(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = [step(model, optimizer)]
    with Outside() as outside:  # the outer mode: it sees what the recording passes on
        if recorded:
            with record_collectives(model):
                losses += [step(model, optimizer) for _ in range(2)]
        else:
            losses += [step(model, optimizer) for _ in range(2)]
    losses.append(step(model, optimizer))  # and after it, all is as before
    return losses, outside.names


def test_recording_changes_neither_losses_nor_operations(two_ranks):
    for build in (fsdp1, fsdp2, DistributedDataParallel):
        for recorded, plain in two_ranks(lambda build=build: (train(build, True), train(build, False))):
            assert recorded[0] == plain[0]
            assert recorded[1] == plain[1]
            assert any(name.startswith("c10d::") for name in plain[1])


def times() -> list[tuple[bool, float, float]]:
    trace = record(fsdp2(Model()))
    assert all(event.seconds is not None for event in trace.events)
    return [(event.is_collective, event.start, event.start + event.seconds) for event in trace.events]


def test_on_cpu_nothing_overlaps_and_everything_ends(two_ranks):
    for events in two_ranks(times):
        assert all(end >= start for _, start, end in events)
        assert [start for _, start, _ in events] == sorted(start for _, start, _ in events)
        # What is computed ends where the next event begins. That a collective has ended is told by a callback
        # in gloo's thread, which may be a little late, but never so late as the next collective.
        for position, (is_collective, _, end) in enumerate(events):
            following = [e for e in events[position + 1 :] if e[0] or not is_collective]
            if following:
                assert end <= following[0][1], position


def test_the_fake_group_records_one_rank_of_many():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=64, store=FakeStore())
    try:
        trace = record(fsdp2(Model(width=7)), ranks_per_host=8)
        whole = padded_fsdp2(LAYER, 64, 4)
        assert by_unit(trace)["layers.2"] == [
            ("all_gather", "backward", whole // 64, whole),
            ("all_gather", "forward", whole // 64, whole),
            ("reduce_scatter", "backward", whole, whole // 64),
        ]
        assert trace.sent_bytes_by_link() == {
            "between hosts": (3 * LAYERS * whole + 2 * padded_fsdp2(HEAD, 64, 4)) * 63 / 64
        }
        assert (trace.rank, trace.world_size) == (3, 64)
    finally:
        dist.destroy_process_group()


def whole_model_in_one() -> str:
    return str(record(FSDP(Model(), device_id=torch.device("cpu"))))


def test_the_summary_is_a_table(two_ranks):
    whole = padded_fsdp1([*LAYER * LAYERS, *HEAD], 2, 4)
    assert two_ranks(whole_model_in_one)[0].splitlines() == [
        "rank 0 of 2: 2 collectives",
        "collective      phase     ranks  link           count    MiB  MiB sent",
        f"all_gather      forward       2  within a host      1  {whole / 2**20:.3f}     {whole / 2**21:.3f}",
        f"reduce_scatter  backward      2  within a host      1  {whole / 2**20:.3f}     {whole / 2**21:.3f}",
    ]


# ---- meshes of two dimensions ----------------------------------------------------------------------------


def two_dimensions() -> tuple[dict[str, set], dict[str, float], int, list[int]]:
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
    groups: dict[str, set] = {}
    for event in trace.collectives:
        groups.setdefault(event.dimension, set()).add((event.kind, event.ranks, event.link))
    of_the_model = [event.bytes for event in trace.events if event.is_of_the_model]
    assert "dimension" in trace.summary()
    assert "  tp " in trace.summary()
    return groups, trace.sent_bytes_by_dimension(), trace.rank, of_the_model


def test_each_collective_says_its_mesh_dimension_and_bytes_are_counted_by_it():
    unit, activations = 4 * 2 * 8 * 16, 4 * 3 * 8
    for groups, sent, rank, of_the_model in run_on_ranks(two_dimensions, world_size=4):
        row, column = (0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2)
        assert groups == {
            "fsdp": {
                ("all_gather", column, "between hosts"),
                ("reduce_scatter", column, "between hosts"),
            },
            "tp": {("all_reduce", row, "within a host")},
        }
        # half of the unit, of which a rank has one half: gathered twice, reduced once
        assert sent["fsdp"] == 3 * unit / 2 / 2
        # the output in forward, the gradient of the input in backward; twice (2 - 1) / 2 of its bytes
        assert sent["tp"] == 2 * activations
        assert of_the_model == [activations, activations]


def other_names() -> list[list[str]]:
    hybrid_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    hybrid1 = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": hybrid_mesh}
    traces = [
        record(fsdp2(Model(), mesh=hybrid_mesh)),
        record(fsdp1(Model(), **hybrid1)),
        record(fsdp2(Model(), mesh=flat)),
        record(fsdp1(Model(), **{**hybrid1, "device_mesh": init_device_mesh("cpu", (2, 2))})),
        record(fsdp2(Model())),
    ]
    assert "dimension" not in traces[-1].summary()
    return [sorted(trace.sent_bytes_by_dimension()) for trace in traces]


def test_dimensions_of_hybrid_sharding_have_their_names_and_those_without_a_name_none():
    for names in run_on_ranks(other_names, world_size=4):
        assert names == [["dp_replicate", "dp_shard"], ["dp_replicate", "dp_shard"], ["all"], [""], [""]]
