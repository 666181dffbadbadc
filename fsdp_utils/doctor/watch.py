"""Run a script unchanged on this rank, stop it before a later optimizer step, and collect what it did."""

from __future__ import annotations

import functools
import gc
import hashlib
import math
import runpy
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from fsdp_utils.collectives import OutOfStep, check_in_step, listen_to_calls
from fsdp_utils.collectives.c10d_hooks import Call
from fsdp_utils.collectives.call_site import find_line, place_in_words
from fsdp_utils.collectives.fsdp_hooks import in_backward
from fsdp_utils.doctor.findings import Facts
from fsdp_utils.sharding.blocks import outermost, transformer_block_classes
from fsdp_utils.sharding.checks import check_sharding
from fsdp_utils.sharding.local_part import local
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.sharding.units import ROOT, Unit, find_units, parameter_sizes
from fsdp_utils.sharding.wrapping import UNEVEN, padding
from fsdp_utils.torch_internals.fsdp import fsdp1_dtypes, fsdp1_replicas, fsdp2_is_root
from fsdp_utils.torch_internals.names import COMPILED, WRAPPED
from fsdp_utils.torch_internals.runtime import has_compiled, is_under_compile

_SAMPLE = 4096  # elements of a tensor that are hashed, or whose norm is taken
_FEW = 4  # elements: smaller tensors that are communicated are counts and losses, not gradients
_HOLD_S, _LOOK_S = 4.0, timedelta(seconds=0.25)  # for all ranks to come to a call; between looks at a report
_CLIPPED = 8  # parameters whose gradients are looked at after backward and before the step


class _Stopped(BaseException):
    """Ends the script before its next step; no `except Exception` of the script catches it."""


class Watch:
    """Collects `facts` while a script runs; they are complete up to the present at any time."""

    def __init__(self, rank: int, world_size: int, steps: int, store: dist.Store) -> None:
        self.facts = Facts(rank, world_size)
        self._store: Any = store.clone()  # pyright: ignore[reportAttributeAccessIssue] # this one may block
        self._calls: Counter[Any] = Counter()  # that were held, by size, line and direction
        self._line: Any = None  # of the last call
        self._holds = True
        self.in_step: Any = None
        self._steps, self._taken = steps, 0
        self._step: dict[str, list[Any]] = defaultdict(list)
        self._optimizers: list[Any] = []
        self._roots: list[nn.Module] = []
        self._block: nn.Module | None = None  # whose activations are to be measured
        self._ties: list[list[str]] = []  # names of one parameter, before FSDP1 wrapped it
        self._sampled: dict[str, list[Any]] = {}  # parameters: "scaled" for those of the first optimizer ...
        self._norms: dict[str, list[float]] = {}  # of their gradients, as backward left them
        self._left_out: dict[Any, str] = {}  # trainable parameters that no optimizer has
        self._block_names: list[str] = []
        self._blocks: list[tuple[str, list[Any]]] = []  # the parameters of each block that are trained
        self._whole: dict[Any, tuple[str, str]] = {}  # hashes of parameters before and after fully_shard
        self._sums: list[tuple[str, Tensor]] = []  # of gradients before their reduction, by unit
        self._trains = True  # whether the last forward was for training
        self._is_own = False  # whether the library works, and not the script
        self._stack = ExitStack()

    def run(self, script: str, arguments: list[str]) -> None:
        """Run the script as __main__; `facts.ended` says how it ended."""
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
        try:
            with self._stack:
                self._listen()
                with suppress(_Stopped):
                    runpy.run_path(script, run_name="__main__")
                ended = "stopped" if self._taken == self._steps else "finished"
            self.facts.ended = ended
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                self.facts.ended = "finished"
                return
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            self.facts.places["stood"] = place_in_words(*find_line(frame)[:2])
            self.facts.ended = "".join(traceback.format_exception(type(error), error, error.__traceback__))

    def stands(self) -> str:
        """Name the line on which the script stands, from another thread."""
        code, line, _ = find_line(sys._current_frames().get(threading.main_thread().ident or 0))
        return place_in_words(code, line) if code else "outside of the script"

    def _listen(self) -> None:
        self._stack.enter_context(listen_to_calls(self._begin))
        self._stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._tell(nn.functional, "cross_entropy", self._loss)
        self._tell(torch.utils.checkpoint, "checkpoint", self._checkpoint)
        self._tell(torch.autograd, "backward", lambda *_, **__: self._after_backward)
        self._tell(DataLoader, "__iter__", self._loader)
        self._tell(FSDP1, "__init__", self._wrap)
        self._tell(fsdp, "fully_shard", self._shard)
        self._tell(DDP, "__init__", lambda *_, **__: self._note("wrap"))

    def _tell(self, owner: Any, name: str, hear: Callable[..., Any]) -> None:
        """Have a function tell its arguments, then do what it did; what `hear` returns is called after it."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            after = self._quietly(hear, *args, **kwargs)
            result = original(*args, **kwargs)
            if after:
                self._quietly(after)
            return result

        self._stack.enter_context(patch.object(owner, name, call))

    def _quietly(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the doctor; its error does not reach the script."""
        if self._is_own:
            return None
        self._is_own = True
        try:
            return function(*args, **kwargs)
        except Exception as error:
            told = f"what {function.__qualname__} looks at ({type(error).__name__}: {error})"
            self.facts.unseen += [told] * (told not in self.facts.unseen)
        finally:
            self._is_own = False
        return None

    def _note(self, what: str) -> None:
        self.facts.places[what] = place_in_words(*find_line(sys._getframe(1))[:2])

    def _begin(self, call: Call, issue: Callable[[], Any]) -> Any:
        if self.in_step is None and threading.current_thread() is threading.main_thread():
            self.in_step = self._stack.enter_context(check_in_step())
            self._stack.enter_context(listen_to_calls(self._call))
        return issue()

    def _call(self, call: Call, issue: Callable[[], Any]) -> Any:
        if not self._is_own:
            line = (*find_line(sys._getframe(1)), in_backward())
            self._quietly(self._count, call, line[2])
            if self._holds and call.kind not in ("send", "recv"):
                self._hold(call, line[:2] + line[3:])
        return issue()

    def _hold(self, call: Call, line: Any) -> None:
        """Wait for the others at a new line, or a new size: gloo ends processes whose sizes differ.

        A rank that begins a forward again need not wait: those that go backward or further wait for it.
        """
        at = (call.kind, call.bytes_in, call.bytes_out, call.group.group_name, line)
        is_same, self._line = line == self._line or (call.kind == "all_gather" and not line[2]), line
        if is_same and self._calls[at]:
            return
        self._calls[at] += 1
        ranks = dist.get_process_group_ranks(call.group)
        key = f"{self._calls[at]} {at[:3]} {ranks} {place_in_words(*line[:2])} {line[2]}"
        if self._store.add(key, 1) == len(ranks):
            self._store.set(f"{key} all", "")
        end = time.monotonic() + _HOLD_S
        while self._holds and not self._is_set(f"{key} all"):
            if self.in_step.report:
                raise OutOfStep(self.in_step.report)
            self._holds = time.monotonic() < end  # else no rank waits any more

    def _is_set(self, key: str) -> bool:
        with suppress(RuntimeError):  # not yet
            self._store.wait([key], _LOOK_S)
            return True
        return False

    def _count(self, call: Call, unit: str | None) -> None:
        step = self._step
        step["calls"].append((call.kind, max(call.bytes_in, call.bytes_out)))
        tensors = [one for one in tree_leaves(call.given) if isinstance(one, Tensor)]
        is_few = sum(one.numel() for one in tensors) <= _FEW
        if call.kind == "all_gather" and not is_few and not in_backward():
            step["gathered" if self._trains else "outside"].append(unit if unit != "" else ROOT)
        elif call.kind == "reduce_scatter" or (call.kind == "all_reduce" and not is_few):
            for one in tensors:
                step["reduced"].append((str(one.dtype).removeprefix("torch."), one.numel()))
                self._sums.append((unit or ROOT, one.detach().sum(dtype=torch.float32)))
        elif is_few:
            step["told"] += [float(x) for one in tensors for x in one.detach().flatten().tolist()]

    def _loss(self, _: Tensor, target: Tensor, *rest: Any, ignore_index: int = -100, **options: Any) -> None:
        is_mean = not rest and options.get("reduction", "mean") == "mean"
        if is_mean and torch.is_grad_enabled() and not target.is_floating_point():
            self._note("loss")
            self._step["labels"].append(int((target != ignore_index).sum()))

    def _checkpoint(self, *_: Any, preserve_rng_state: bool = True, **__: Any) -> None:
        if not preserve_rng_state:
            self._note("without_rng")

    def _wrap(self, _: FSDP1, module: nn.Module, *__: Any, **___: Any) -> None:
        self._note("wrap")
        names: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, p in module.named_parameters(remove_duplicate=False):
            names[p].append(plain_name(name))
        self._ties += [some for some in names.values() if len(some) > 1]

    def _shard(self, modules: Any, *_: Any, **__: Any) -> Callable[[], None]:
        self._note("wrap")
        owners = [one for module in tree_leaves(modules) for one in module.modules()]
        named = [(owner, name, p) for owner in owners for name, p in owner.named_parameters(recurse=False)]
        whole = [one for one in named if not (one[2].is_meta or isinstance(one[2], DTensor))]
        told = {(owner, name): _digest([p]) for owner, name, p in whole if p.requires_grad}

        def after() -> None:
            cut = [(at, said, getattr(*at)) for at, said in told.items() if said]
            self._whole |= {at: (said, _digest([p])) for at, said, p in cut if isinstance(p, DTensor)}

        return after

    def _loader(self, loader: DataLoader) -> None:
        if not self._taken and not isinstance(loader.dataset, IterableDataset):
            self._note("loader")
            self.facts.loaders.append(len(loader))

    def _forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        self._trains = torch.is_grad_enabled()
        if tensors and not self._trains:
            self._step["tokens"].append(list(tensors[0].shape))
        elif tensors and model.training:
            self._note("forward")
            self._step["inputs"] += filter(None, [_digest(tensors)])

    def _after_backward(self, *_: Any, **__: Any) -> None:
        self._note("backward")
        self._step["backwards"].append(1)
        self._norms = {name: _norms(some) for name, some in self._sampled.items()}

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        if optimizer is self._optimizers[0]:
            if self._taken == self._steps:
                raise _Stopped
            if not self._taken:
                self._quietly(self._find_models)
            self._quietly(self._look_at_gradients)
            if self._taken in (0, self._steps - 1):  # a script may end before the last of these steps
                self._quietly(self._examine)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._optimizers[0]:
            self._taken += 1
            self.facts.seen.append(dict(self._step))
            self._step, self._sums, self._norms = defaultdict(list), [], {}

    @torch.no_grad()  # outside of which local() is slow
    def _look_at_gradients(self) -> None:
        self._note("step")
        for name, norms in self._norms.items():
            pairs = zip(norms, _norms(self._sampled[name]), strict=False)
            self._step[name] = [new / old for old, new in pairs if 0 < old < math.inf and new > 0]
        idle = ((name, all(p.requires_grad and p.grad is None for p in some)) for name, some in self._blocks)
        self._step["idle"] = [name for name, is_idle in idle if is_idle]
        held = {p: local(p.grad) for one in self._optimizers for p in _params(one) if p.grad is not None}
        norm = get_total_norm(held.values())  # one pass; the largest element takes much longer
        if not bool(norm.isfinite()):
            bad = {p for p, grad in held.items() if not bool(grad.isfinite().all())}
            self._step["bad"] = [*dict.fromkeys(unit for unit, one in self._sums if not one.isfinite())]
            self._step["bad_after"] = [
                plain_name(n) for root in self._roots for n, p in root.named_parameters() if p in bad
            ]

    def _find_models(self) -> None:
        """Find the outermost modules that hold FSDP or DDP modules, and listen to them."""
        found = [one for one in gc.get_objects() if issubclass(type(one), (nn.Module, Optimizer))]
        modules = [one for one in found if not issubclass(type(one), Optimizer)]
        held = {p for one in found if issubclass(type(one), Optimizer) for p in _params(one)}
        inner = {child for one in modules for child in one.children()}
        outer = sorted((one for one in modules if one not in inner), key=lambda one: type(one).__name__)
        wrapped = (FSDPModule, FSDP1, DDP)
        self._roots = [root for root in outer if any(isinstance(one, wrapped) for one in root.modules())]
        names = {module: name for root in self._roots for name, module in root.named_modules()}
        named = ((p, name) for root in self._roots for name, p in root.named_parameters())
        self._left_out = {p: plain_name(name) for p, name in named if p.requires_grad and p not in held}
        for kind, some in (("scaled", _params(self._optimizers[0])), ("bystanders", [*self._left_out])):
            self._sampled[kind] = sorted(some, key=lambda p: -p.numel())[:_CLIPPED]
        for (owner, own), (told, then) in self._whole.items():
            if owner in names and then and then == _digest([getattr(owner, own)]):
                self.facts.first[plain_name(names[owner], own)] = told
        for root in self._roots:
            with suppress(ValueError):  # no block is repeated
                blocks = list(outermost(root, tuple(transformer_block_classes(root))))
                trained = [(n, [p for p in one.parameters() if p in held and p.numel()]) for n, one in blocks]
                self._blocks += [(name, some) for name, some in trained if some]
                self._block = blocks[0][1]
                self._block_names += [name for name, _ in blocks]
                if not has_compiled():
                    self._hook(self._block, self._keep)
            if COMPILED in dict(root.named_children()) or not is_under_compile(root):
                self._hook(root, self._forward, with_kwargs=True)
            if has_compiled():  # hooks inside of what is compiled would compile it again
                self.facts.unseen.append("activations, and the order of units, of a compiled model")
                continue
            for unit in find_units(root):
                self._hook(unit.modules[0], functools.partial(self._used, unit.name))

    def _hook(self, module: nn.Module, hear: Callable[..., None], **options: bool) -> None:
        def hook(*args: Any) -> None:
            self._quietly(hear, *args)

        self._stack.callback(module.register_forward_pre_hook(hook, prepend=True, **options).remove)

    def _used(self, unit: str, *_: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self._step["used"].append(unit)

    def _keep(self, block: nn.Module, _: Any) -> None:
        """Sum the bytes that autograd keeps of the block's next forward."""
        if self._block is None or not (block.training and torch.is_grad_enabled()):
            return
        self._block, kept = None, {}

        def keep(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        def end(*_: Any) -> None:
            handle.remove()
            context.__exit__(None, None, None)
            whole = (p for p in block.parameters() if not isinstance(p, DTensor))
            weights = {p.untyped_storage().data_ptr() for p in whole}
            self.facts.kept = sum(size for at, size in kept.items() if at not in weights)

        context = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        handle = block.register_forward_hook(end, prepend=True, always_call=True)
        context.__enter__()

    def _examine(self) -> None:
        """Collect what does not change from step to step."""
        self.facts.problems = []
        for root in self._roots:
            own = [one for one in self._optimizers if not {*root.parameters()}.isdisjoint(_params(one))]
            if own or len(self._roots) == 1:
                self.facts.problems += check_sharding(root, (own or self._optimizers)[0])
        modules = [(name, one) for root in self._roots for name, one in root.named_modules()]
        named = {p: plain_name(name) for root in self._roots for name, p in root.named_parameters()}
        sharded = [p for p in named if isinstance(p, DTensor)]
        in_ddp = {p for _, one in modules if isinstance(one, DDP) for p in one.parameters()}
        by_root = [parameter_sizes(root, find_units(root, also_empty=True)) for root in self._roots]
        units = {unit: own for of_root in by_root for unit, own in of_root.items() if unit}
        sizes = [sum(own.values()) for own in units.values()]
        unit_of = {name: unit.name for unit, own in units.items() for name in own}
        fsdp1: dict[Any, int] = {one.modules[0]: sum(own.values()) for one, own in units.items() if one.fsdp1}
        meshes = [p.device_mesh.size() for p in sharded]
        replicas = {one: fsdp1_replicas(one) for one in fsdp1}
        meshes += [one.process_group.size() * (of.size() if of else 1) for one, of in replicas.items()]
        states = [value for one in self._optimizers for value in tree_leaves([*one.state.values()])]
        tensors = {
            "parameters": named,
            "gradients": [p.grad for p in named],
            "optimizer states": [one for one in states if isinstance(one, Tensor)],
        }
        wrapped = [(name, dict(one.named_children()).get(WRAPPED[1])) for name, one in modules]
        inside = tuple(f"{name}." for name in self._block_names)
        trained = [p.numel() for p in (*sharded, *in_ddp) if p.requires_grad]
        trained += [size for one, size in fsdp1.items() if any(p.requires_grad for p in one.parameters())]
        self.facts.model = {
            "units": [(unit.name, unit.nbytes, _in_words(unit)) for unit in units],
            "elements": sum(sizes) + sum(p.numel() for p in in_ddp),
            "trained": sum(trained),
            "left_out": [*self._left_out.values()],
            "optimizers": [type(one).__name__ for one in self._optimizers],
            "bytes": {name: sum(map(_nbytes, some)) for name, some in tensors.items()},
            "blocks": len(self._block_names),
            "parts": [unit.nbytes for unit in units if unit.name.startswith(inside)],
            # whether all ranks share all parameters, cut along one dimension
            "by_data": {*meshes} <= {self.facts.world_size}
            and all(sum(one.is_shard() for one in p.placements) < 2 for p in sharded),
            "hybrid_fsdp1": any(replicas.values()),
            "tied": [names for names in self._ties if len({unit_of.get(name, ROOT) for name in names}) > 1],
            "uneven": [
                (named[p], list(p.shape), ranks, padding(p.shape, ranks) * p.itemsize // ranks)
                for p in sharded
                if p.dim() > 1 and p.placements[-1].is_shard(0)
                for ranks in [p.device_mesh.size(p.device_mesh.ndim - 1)]
                if padding(p.shape, ranks) > UNEVEN * p.numel()
            ],
            "checkpoint_around": [
                plain_name(name) or ROOT for name, one in wrapped if isinstance(one, FSDPModule | FSDP1)
            ],
            "called_alone": [
                plain_name(name)
                for root in self._roots
                if isinstance(root, FSDPModule)
                for name, one in root.named_modules()
                if one is not root and isinstance(one, FSDPModule) and fsdp2_is_root(one)
            ],
            "drops": any(isinstance(one, nn.Dropout) and one.p and one.training for _, one in modules),
        }


def _params(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def _norms(params: list[Any]) -> list[float]:
    """Return the norms of the beginnings of the gradients on this rank."""
    parts = [local(p.grad).flatten()[:_SAMPLE] for p in params if p.grad is not None]
    return torch.stack([part.float().norm() for part in parts]).tolist() if parts else []


@torch.no_grad()
def _digest(tensors: list[Any]) -> str:
    """Hash the beginnings of tensors on this rank; "" if each has one value all over."""
    parts = [local(one.detach()).flatten()[:_SAMPLE].cpu() for one in tensors]
    if not any(bool((part != part[:1]).any()) for part in parts):
        return ""
    text = b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)
    return hashlib.sha256(text).hexdigest()[:16]


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else local(tensor).nbytes


def _in_words(unit: Unit) -> str:
    """The dtypes at rest and in the computation, and how the parameters lie on the ranks."""
    if unit.fsdp1:
        return " ".join({"FSDP1, {} computed in {}".format(*fsdp1_dtypes(part)) for part in unit.parts})
    held = [p.sharded_param for part in unit.parts for p in part.fsdp_params]
    kinds = {f"{p.dtype} {p.placements}{'' if p.requires_grad else ' frozen'}" for p in held}
    return ", ".join(["FSDP2", *sorted(kinds)])
