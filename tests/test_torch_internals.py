"""Torch's private names: a new torch that lacks one, or has it do something else, fails here, by its name."""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from fsdp_utils import run_on_ranks
from fsdp_utils.collectives import listen_to_calls
from fsdp_utils.torch_internals import fsdp, groups, names, runtime
from fsdp_utils.torch_internals.names import NAMES, place
from tests.on_ranks import fake_group, one_rank

PACKAGE = Path(names.__file__).parent.parent
LIBRARY = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
CPU = torch.device("cpu")


@contextmanager
def an_fsdp1_net(**options: Any) -> Iterator[FSDP1]:
    """A layer of 3 x 5 and its bias, of which a fake group's rank 0 holds a part."""
    with fake_group(2):
        yield FSDP1(nn.Linear(5, 3), device_id=CPU, **options)


@contextmanager
def an_fsdp2_net() -> Iterator[Any]:
    with fake_group(2):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (2,))
        for part in (*net, net):
            fully_shard(part, mesh=mesh)
        yield net


@contextmanager
def spied(owner: Any, attribute: str, seen: Callable[..., None]) -> Iterator[None]:
    """Call `seen` with the arguments of each call of the attribute, before it."""
    original = getattr(owner, attribute)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen(*args, **kwargs)
        return original(*args, **kwargs)

    with patch.object(owner, attribute, call):
        yield


# ---- no other file names one

EXEMPT = ("torch.utils._pytree", "torch.utils._python_dispatch")
# Not torch's: Python's, transformers', Accelerate's, Lightning's, and (torch.ops) those of saved programs.
OTHERS = {
    *["_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_replace"],
    *["_combined_loader", "_data_fetcher", "_load_from_checkpoint", "_load_optimizer_and_scheduler"],
    *["_load_rng_state", "_load_scaler", "_reset_state", "_save_checkpoint"],
    *["_attn_implementation", "_from_config", "_grouped_mm", "_init_weights", "_model_mapping"],
    "_no_split_modules",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
BY_TEXT = {"getattr", "hasattr", "setattr", "object", "import_module"}  # functions that take a name as text


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def own_names() -> set[str]:
    """What fsdp_utils itself calls by a private name."""
    nodes = [node for text in LIBRARY.values() for node in ast.walk(ast.parse(text))]
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    attributes = (node for node in nodes if isinstance(node, ast.Attribute))
    return found | {one.attr for one in attributes if ast.unparse(one.value) in ("self", "cls")}


def uses(text: str, own: set[str]) -> list[str]:
    """Private names of torch in a file's imports, attributes and calls of getattr and its like."""
    paths: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported = [start + alias.name for alias in node.names]
            paths += [path for path in imported if path.startswith("torch.")]
        elif isinstance(node, ast.Attribute) and private(node.attr):
            path = ast.unparse(node)
            paths += [path if path.startswith(("torch.", "dist.")) else node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_TEXT:
            paths += [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
    allowed = own | OTHERS  # but not as a part of a path of torch's
    return [
        path
        for path in paths
        if not path.startswith(EXEMPT) and any(map(private, path.split("."))) and path not in allowed
    ]


ROOM = PACKAGE / "torch_internals"


def test_no_other_file_names_a_private_name_of_torch() -> None:
    own = own_names()
    found = {path: uses(text, own) for path, text in LIBRARY.items() if ROOM not in path.parents}
    assert {path: one for path, one in found.items() if one} == {}


def test_every_name_is_used() -> None:
    functions = [
        node.name
        for module in (fsdp, groups, runtime)
        for node in ast.parse(LIBRARY[Path(module.__file__)]).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not private(node.name)
    ]
    library = "".join(text for path, text in LIBRARY.items() if ROOM not in path.parents)
    assert [name for name in (*functions, *NAMES) if name not in library] == []


# ---- names that are imported


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_it(name: str) -> None:
    assert getattr(names, name) is not None


def test_a_name_that_torch_has_no_more_is_told_with_its_purpose() -> None:
    gone = {"ShardedTensor": NAMES["ShardedTensor"]._replace(name="_GoneTensor")}
    with (
        patch.dict(NAMES, gone),
        pytest.raises(ImportError, match=r"_GoneTensor in torch.*FSDP1.*README"),
    ):
        from fsdp_utils.torch_internals.names import ShardedTensor  # noqa: F401


def test_wrapped_names_are_those_of_fsdp1_and_compile() -> None:
    with an_fsdp1_net() as net:
        assert [name for name, _ in net.named_parameters()] == [f"{names.WRAPPED[0]}.{names.FLAT_PARAM}"]
    compiled: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    assert [name for name, _ in compiled.named_children()] == [names.COMPILED]


# ---- FSDP


@pytest.mark.parametrize("views", [False, True])
def test_flat_says_where_each_parameter_is(views: bool) -> None:
    with an_fsdp1_net(use_orig_params=views) as net:
        handle = fsdp.fsdp1_handle(net)
        assert handle is not None
        assert isinstance(handle, names.FlatParamHandle)
        flat = fsdp.Flat(handle.flat_param)
        assert tuple(flat.names) == ("weight", "bias")
        assert tuple(flat.shapes) == (torch.Size([3, 5]), torch.Size([3]))
        assert tuple(flat.numels) == (15, 3)
        whole = flat.full_shape.numel()
        assert 18 <= whole < 18 + 16  # and what aligns them
        assert flat.shard_shape.numel() == whole // 2
        weight, bias = flat.shards
        assert (weight.in_shard, weight.offset_in_shard, weight.numel_in_shard) == (True, 0, whole // 2)
        assert weight.intra_param_start_idx == 0
        assert not bias.in_shard
        assert len(flat.params) == (2 if views else 0)
        assert list(flat.extensions) == [None, None]
        assert all(map(fsdp.is_fsdp1_parameter, net.parameters()))
        assert not fsdp.is_fsdp1_parameter(nn.Parameter(torch.ones(1)))
        assert fsdp.fsdp1_dtypes(handle) == (torch.float32, torch.float32)
        assert isinstance(fsdp.fsdp1_wrapped(net), nn.Linear)
        own = {name for several in names.get_param_to_fqns(net).values() for name in several}
        assert own == {"weight", "bias"}


def test_fsdp1_says_what_it_averages_over() -> None:
    with an_fsdp1_net() as net:
        assert fsdp.fsdp1_replicas(net) is None
        assert fsdp.fsdp1_syncs(net)
        with net.no_sync():
            assert not fsdp.fsdp1_syncs(net)
        mesh = init_device_mesh("cpu", (1, 2))
        options: Any = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        assert fsdp.fsdp1_replicas(FSDP1(nn.Linear(5, 3), device_id=CPU, **options)) is mesh.get_group(0)


def test_fsdp1_runs_through_its_hooks() -> None:
    """Each is looked up where it is replaced, and called: once for the one unit."""
    order: list[str] = []

    def seen(name: str, *args: Any, **_: Any) -> None:
        if name == "fsdp1_pre_backward":
            assert not fsdp.fsdp1_backward_has_begun(args[2])
        order.append(name)

    grad_op = ShardingStrategy.SHARD_GRAD_OP  # which looks whether its memory is allocated
    with ExitStack() as spies, an_fsdp1_net(use_orig_params=True, sharding_strategy=grad_op) as net:
        for name in NAMES:
            if name.startswith("fsdp1_"):
                spies.enter_context(spied(*place(name), partial(seen, name)))
        net(torch.ones(2, 5)).sum().backward()
        net.requires_grad_(False)
        net(torch.ones(2, 5, requires_grad=True)).sum().backward()
    hooks = ["fsdp1_pre_backward", "fsdp1_post_backward", "fsdp1_pre_backward", "fsdp1_post_backward_frozen"]
    assert [name for name in order if "backward" in name] == hooks
    assert {"fsdp1_is_allocated", "fsdp1_same_storage"} <= set(order)


def test_fsdp2_groups_hold_parameters_and_run_through_their_methods() -> None:
    order: set[str] = set()
    group = names.FSDPParamGroup
    methods = [(group, name) for name in ("unshard", "wait_for_unshard", "reshard", "post_backward")]
    with an_fsdp2_net() as net, ExitStack() as spies:
        for owner, method in (*methods, place("fsdp2_pre_backward")):
            spies.enter_context(spied(owner, method, lambda *_, name=method, **__: order.add(name)))
        (held,) = fsdp.fsdp2_groups(net[0])
        assert isinstance(held, group)
        assert fsdp.fsdp2_groups(net) == []
        assert held.modules == (net[0],)
        assert [type(param) for param in held.fsdp_params] == [names.FSDPParam] * 2
        assert [param.sharded_param.shape for param in held.fsdp_params] == [(4, 4), (4,)]
        assert fsdp.fsdp2_whole(held.fsdp_params[0]) is None
        assert fsdp.fsdp2_syncs(held)
        net[0].set_requires_all_reduce(False)  # which has no effect without replicas
        assert fsdp.fsdp2_syncs(held)
        net[0].set_requires_gradient_sync(False)
        assert not fsdp.fsdp2_syncs(held)
        net[0].set_requires_gradient_sync(True)
        assert not fsdp.fsdp2_is_root(net)  # nobody is, before the first forward
        net(torch.ones(2, 4)).sum().backward()
        assert {fsdp.fsdp2_is_root(module): module for module in net.modules()}[True] is net
        whole = fsdp.fsdp2_whole(held.fsdp_params[0])
        assert whole is not None
        assert whole.shape == (4, 4)
        assert fsdp.fsdp2_state(net[0]) is not fsdp.fsdp2_state(net[1])
    assert order == {"unshard", "wait_for_unshard", "reshard", "post_backward", "_pre_backward"}


# ---- process groups


def test_process_groups_are_those_alive_and_abort_takes_one_or_all_off_the_list() -> None:
    assert groups.process_groups() == []
    with one_rank() as world:
        other = dist.new_group()
        assert isinstance(other, dist.ProcessGroup)
        assert groups.process_groups() == [world, other]
        groups.abort_groups(other)
        assert groups.process_groups() == [world]
        backend = groups.group_backend(world, CPU)
        assert isinstance(backend, dist.ProcessGroupGloo)
        groups.set_group_timeout(world, 12.5)
        assert backend.options._timeout.total_seconds() == 12.5
        groups.abort_groups()
        assert groups.process_groups() == []
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def test_fake_store_serves_a_group_that_sends_fake_tensors() -> None:
    assert names.detect_fake_mode() is None
    dist.init_process_group("fake", rank=0, world_size=64, store=groups.fake_store())
    try:
        with names.FakeTensorMode() as mode:
            assert names.detect_fake_mode() is mode
            out = torch.empty(64 << 40)
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from 2.13 on
            gather(out, torch.empty(1 << 40))
            assert out.shape == (64 << 40,)
    finally:
        dist.destroy_process_group()


# ---- tensors, modules, autograd, the profiler, the compiler, devices


def test_what_takes_a_mean() -> None:
    x, y = torch.ones(2, 3, requires_grad=True), torch.zeros(2, dtype=torch.long)
    mean, total = (nn.functional.cross_entropy(x, y, reduction=how) for how in ("mean", "sum"))
    assert runtime.takes_mean(mean.grad_fn) == ("NllLossBackward0", [])
    assert runtime.takes_mean(nn.functional.mse_loss(x, x * 2).grad_fn) == ("MseLossBackward0", [])
    assert runtime.takes_mean((x.mean() / 2 / 4).grad_fn) == ("MeanBackward0", [4, 2])
    assert [*map(runtime.takes_mean, (total.grad_fn, (mean / mean).grad_fn, None))] == [("", [])] * 3


def test_when_backward_ends_all_of_it_is_over() -> None:
    order = []
    a = torch.ones(1, requires_grad=True)
    b = a * 2
    b.register_hook(lambda _: runtime.when_backward_ends(lambda: order.append("over")))
    a.register_hook(lambda _: order.append("last"))
    b.backward()
    assert order == ["last", "over"]


def on_a_mac() -> list[str]:
    """Imagined: this torch says that its accelerator is Apple's. Returns the device of a bare fully_shard."""
    torch._C._get_accelerator = lambda: torch.device("mps")  # for good, in this rank
    found = []
    for hidden in (False, True):
        with patch.object(sys, "platform", "darwin" if hidden else sys.platform):
            runtime.hide_apple_gpu()
        try:
            found.append(fully_shard(nn.Linear(2, 2)).weight.device_mesh.device_type)
        except AttributeError as error:
            found.append(str(error))
    return found


def test_a_bare_fully_shard_takes_the_cpu_on_a_mac() -> None:
    ((as_it_is, hidden),) = run_on_ranks(on_a_mac, world_size=1)
    assert "torch.mps" in as_it_is  # if this no longer fails, hide_apple_gpu can go
    assert hidden == "cpu"


def test_fsdp2_unit_of_frame_names_the_unit_that_a_collective_is_for() -> None:
    seen = []

    def listener(call: Any, issue: Any) -> Any:
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename.endswith("_fsdp_param_group.py"):
                seen.append((call.kind, fsdp.fsdp2_unit_of_frame(frame)))
                break
            frame = frame.f_back
        return issue()

    with an_fsdp2_net() as net, listen_to_calls(listener):
        net(torch.ones(1, 4)).sum().backward()
    assert seen[:2] == [("all_gather", "0"), ("all_gather", "1")]
    assert {unit for kind, unit in seen if kind == "reduce_scatter"} == {"0", "1"}
