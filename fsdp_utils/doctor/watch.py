"""Run a script unchanged on this rank, stop it before a later optimizer step, and collect what it did."""

from __future__ import annotations

import functools
import runpy
import sys
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from os import PathLike
from pathlib import Path
from socket import gethostname
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fsdp_utils.collectives import OutOfStep, check_in_step, listen_to_calls
from fsdp_utils.collectives.c10d_hooks import Call
from fsdp_utils.collectives.call_site import find_line, place_in_words
from fsdp_utils.collectives.fsdp_hooks import in_backward
from fsdp_utils.doctor.findings import Facts, judge_step
from fsdp_utils.doctor.models import Models, digest, norms
from fsdp_utils.doctor.planned import Planned
from fsdp_utils.sharding.checks import params
from fsdp_utils.sharding.local_part import local
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.sharding.units import ROOT, find_units
from fsdp_utils.torch_internals.names import COMPILED
from fsdp_utils.torch_internals.runtime import has_compiled, is_under_compile, takes_mean

_FEW = 4  # elements: smaller tensors that are communicated are counts and losses, not gradients
_HOLD = timedelta(seconds=4)  # for all ranks to come to a call
_CLIPPED = 8  # parameters whose gradients are looked at after backward and before the step


class _Stopped(BaseException):
    """Ends the script before its next step; no `except Exception` of the script catches it."""


class Watch:
    """Collects `facts` while a script runs; they are complete up to the present at any time."""

    def __init__(
        self, rank: int, world_size: int, steps: int, store: dist.Store, planned: Planned | None = None
    ) -> None:
        self.facts = Facts(rank, world_size)
        self.in_step: Any = None
        self._planned = planned
        self._store: Any = store.clone()  # pyright: ignore[reportAttributeAccessIssue] # this one may block
        self._calls: Counter[Any] = Counter()  # that were held, by size, line and direction
        self._line: Any = None  # of the last call
        self._holds = True
        self._steps, self._taken = steps, 0
        self._step: dict[str, list[Any]] = defaultdict(list)
        self._optimizers: list[Any] = []
        self._models = Models(self._optimizers)
        self._ties: list[list[str]] = []  # names of one parameter, before FSDP1 wrapped it
        self._reduced: dict[Any, bool] = {}  # whether a parameter that DDP wrapped required a gradient then
        self._whole: dict[Any, tuple[str, str]] = {}  # hashes of sharded parameters: before, and as they are
        self._epochs: dict[Any, int] = {}  # that were trained on, by sampler
        self._begun: Any = None  # a sampler that has begun an epoch, until the next backward
        self._gathered: list[Any] | None = []  # copies and what was sent, from a forward to its backward
        self._means: dict[str, list[Any]] = defaultdict(list)  # takes_mean() of each backward, by its line
        self._clipped: list[float] | None = None  # norms of gradients that were clipped, until the step
        self._scaler: Any = None  # that has scaled a loss, until the gradients are unscaled
        self._sampled: dict[str, list[Any]] = {}  # parameters: "scaled" for those of the first optimizer ...
        self._norms: dict[str, list[float]] = {}  # of their gradients, as backward left them
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
        for owner, name, hear in (
            (nn.functional, "cross_entropy", self._loss),
            (torch.utils.checkpoint, "checkpoint", self._checkpoint),
            (torch.autograd, "backward", self._before_backward),
            *((owner, "clip_grad_norm_", self._clip) for owner in (nn.utils, FSDP1)),
            (torch.amp.GradScaler, "scale", self._scale),
            (torch.amp.GradScaler, "unscale_", lambda *_, **__: setattr(self, "_scaler", None)),
            (torch, "save", self._save),
            (DataLoader, "__iter__", self._loader),
            (DistributedSampler, "__iter__", self._epoch),
            *((dist, name, self._gather) for name in ("all_gather", "all_gather_into_tensor")),
            (FSDP1, "__init__", self._wrap),
            (fsdp, "fully_shard", self._shard),
            *((fsdp, "fully_shard", one.shard) for one in [self._planned] if one),
            (DDP, "__init__", self._wrap_in_ddp),
            (DDP, "forward", lambda *_, **__: self._step["in_ddp"].extend([1] * torch.is_grad_enabled())),
        ):
            self._tell(owner, name, hear)

    def _tell(self, owner: Any, name: str, hear: Callable[..., Any]) -> None:
        """Have a function tell its arguments, then do what it did; what `hear` returns gets its result."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            after = self._quietly(hear, *args, **kwargs)
            result = original(*args, **kwargs)
            if after:
                self._quietly(after, result)
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
        try:
            self._store.wait([f"{key} all"], _HOLD)
        except RuntimeError:  # a rank has not come; no rank waits any more
            self._holds = False
            if self.in_step.report:
                raise OutOfStep(self.in_step.report) from None

    def _count(self, call: Call, unit: str | None) -> None:
        step = self._step
        step["calls"].append((call.kind, max(call.bytes_in, call.bytes_out)))
        tensors = [one for one in tree_leaves(call.given) if isinstance(one, Tensor)]
        is_few = sum(one.numel() for one in tensors) <= _FEW
        if call.kind == "all_gather" and not is_few and not in_backward():
            step["gathered" if self._trains else "outside"].append(unit if unit != "" else ROOT)
        elif call.kind == "reduce_scatter" or (call.kind == "all_reduce" and not is_few and in_backward()):
            for one in tensors:
                step["reduced"].append(one.numel())
                self._sums.append((unit or ROOT, one.detach().sum(dtype=torch.float32)))
                if one.dtype in (torch.bfloat16, torch.float16):
                    step["bf16_reduce"] += [str(one.dtype).removeprefix("torch."), one.numel()]
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
            self._step["dropout_rng"] = [1]

    def _wrap(self, _: FSDP1, module: nn.Module, *__: Any, **___: Any) -> None:
        self._note("wrap")
        names: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, p in module.named_parameters(remove_duplicate=False):
            names[p].append(plain_name(name))
        self._ties += [some for some in names.values() if len(some) > 1]

    def _wrap_in_ddp(self, _: DDP, module: nn.Module, *__: Any, **___: Any) -> None:
        self._note("wrap")
        self._reduced |= {p: p.requires_grad for p in module.parameters()}

    def _shard(self, modules: Any, *_: Any, **__: Any) -> Callable[[Any], None]:
        self._note("wrap")
        owners = [one for module in tree_leaves(modules) for one in module.modules()]
        named = [(owner, name, p) for owner in owners for name, p in owner.named_parameters(recurse=False)]
        whole = [one for one in named if not (one[2].is_meta or isinstance(one[2], DTensor))]
        told = [(owner, name, digest(p)) for owner, name, p in whole if p.requires_grad]

        def after(_: Any) -> None:
            cut = [(getattr(owner, name), said) for owner, name, said in told if said]
            self._whole |= {p: (said, digest(p)) for p, said in cut if isinstance(p, DTensor)}

        return after

    def _loader(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.dataset, IterableDataset):
            self._note("stream")
        elif not self._taken:
            self._note("loader")
            self.facts.loaders.append(len(loader))

    def _epoch(self, sampler: DistributedSampler[Any]) -> None:
        if sampler.shuffle and torch.is_grad_enabled():
            if self._epochs.get(sampler) == sampler.epoch:
                self._note("epoch")
                self._step["same_epoch"] = [1]
            self._begun = sampler

    def _gather(self, *args: Any, **named: Any) -> None:
        into, given = [*args, *named.values()][:2]
        if given.requires_grad and given.numel() > 1 and torch.is_grad_enabled():
            self._note("gather")
            if self._gathered is not None:  # else it is for a log
                self._gathered.append((into, given))

    def _forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        self._trains, self._gathered = torch.is_grad_enabled(), self._gathered or []
        if not self._trains:
            self._begun = None  # the samples are evaluated
        if tensors and not self._trains:
            self._step["tokens"].append(list(tensors[0].shape))
        elif tensors and model.training:
            self._note("forward")
            if self._planned and model is self._planned.root:
                self._planned.forward(args, kwargs)
            inputs = [(digest(one), list(one.shape)) for one in tensors]
            self._step["inputs"] += [inputs] * any(said for said, _ in inputs)
            if _is_ahead(kwargs.get("input_ids"), kwargs.get("labels")):
                shifts = [one for one in model.modules() if getattr(one, "loss_type", "") == "ForCausalLM"]
                self._step["shifted_twice"] += [1] * bool(shifts)

    def _before_backward(self, tensors: Any, *_: Any, **__: Any) -> Callable[..., None]:
        self._note("backward")
        self._step["backwards"].append(len(self._step["reduced"]))
        if self._begun is not None:
            self._epochs[self._begun], self._begun = self._begun.epoch, None
        self._means[self.facts.places["backward"]].append(takes_mean(tree_leaves(tensors)[0].grad_fn))
        if self._clipped is not None and self._clipped != norms(self._sampled.get("scaled", [])):
            self._clipped = None  # there are other gradients since, as after zero_grad
        for into, given in self._gathered or []:
            if not any(one.requires_grad for one in tree_leaves(into)):  # the rank's own was not put back
                self._step["copies_without_gradient"].append(list(given.shape))
        self._gathered = None
        return self._after_backward

    def _after_backward(self, _: Any) -> None:
        self._norms = {name: norms(some) for name, some in self._sampled.items()}
        if self._clipped is not None and self._clipped != self._norms.get("scaled", []):
            self._step["clipped_early"] = [1]

    def _save(self, obj: Any, f: Any, *_: Any, **__: Any) -> None:
        if isinstance(f, str | PathLike):
            self._note("save")
            self.facts.saved.append(f"{gethostname()}:{Path(f).absolute()}")

    def _scale(self, scaler: torch.amp.GradScaler, *_: Any, **__: Any) -> None:
        self._scaler = scaler if scaler.is_enabled() else None

    def _clip(self, *_: Any, **__: Any) -> Callable[[Any], None]:
        self._note("clip")
        if self._scaler is not None and (scale := self._scaler.get_scale()) != 1:
            self._step["clipped_scaled"] = [scale]

        def after(norm: Any) -> None:
            self._step["norm"] = [] if isinstance(norm, DTensor) else [float(norm)]  # not by a collective
            clipped = norms(self._sampled.get("scaled", []))
            self._clipped = clipped if any(clipped) else None  # else those of another model were

        return after

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        lines = [some for some in self._means.values() if len(some) > 1 and all(name for name, _ in some)]
        self._step["means"] += [(len(some), some[0][0]) for some in lines if not any(by for _, by in some)]
        self._step["divided_twice"] += [len(n) for n in lines if all(by.count(len(n)) > 1 for _, by in n)]
        self._means.clear()
        self._clipped = None
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
            self._quietly(judge_step, self._step, self.facts)
            self.facts.seen.append(dict(self._step))
            self._step, self._sums, self._norms = defaultdict(list), [], {}

    @torch.no_grad()  # outside of which local() is slow
    def _look_at_gradients(self) -> None:
        self._note("step")
        for name, before in self._norms.items():
            pairs = zip(before, norms(self._sampled[name]), strict=False)
            self._step[name] = [new / old for old, new in pairs if 0 < old < float("inf") and new > 0]
        blocks = self._models.trained_blocks
        idle = ((name, all(p.requires_grad and p.grad is None for p in some)) for name, some in blocks)
        self._step["idle"] = [name for name, is_idle in idle if is_idle]
        held = {p: local(p.grad) for one in self._optimizers for p in params(one) if p.grad is not None}
        # one pass; the largest element takes much longer
        if not bool(get_total_norm(held.values()).isfinite()):
            bad = {p for p, grad in held.items() if not bool(grad.isfinite().all())}
            self._step["bad"] = [*dict.fromkeys(unit for unit, one in self._sums if not one.isfinite())]
            self._step["bad_after"] = [
                plain_name(n) for root in self._models.roots for n, p in root.named_parameters() if p in bad
            ]

    def _find_models(self) -> None:
        """Find the models, and listen to them."""
        self._models.find()
        roots = self._models.roots
        if self._planned and len(roots) == 1:  # a plan would leave out the memory of the others
            self._planned.root, self._planned.optimizer = roots[0], self._optimizers[0]
        both = {"scaled": params(self._optimizers[0]), "bystanders": self._models.left_out}
        self._sampled = {
            kind: sorted(some, key=lambda p: -p.numel())[:_CLIPPED] for kind, some in both.items()
        }
        for name, p in (one for root in roots for one in root.named_parameters()):
            told, then = self._whole.get(p, ("", ""))
            if then and then == digest(p):
                self.facts.first[plain_name(name)] = told
        if has_compiled():  # hooks inside of what is compiled would compile it again
            self.facts.unseen.append("activations, and the order of units, of a compiled model")
        elif self._models.blocks:
            self._keep(self._models.blocks[0][1])
        for root in roots:
            if COMPILED in dict(root.named_children()) or not is_under_compile(root):
                self._hook(root, self._forward, with_kwargs=True)
            for unit in [] if has_compiled() else find_units(root):
                self._hook(unit.modules[0], functools.partial(self._used, unit.name))

    def _hook(self, module: nn.Module, hear: Callable[..., None], **options: bool) -> None:
        quietly = functools.partial(self._quietly, hear)
        self._stack.callback(module.register_forward_pre_hook(quietly, prepend=True, **options).remove)

    def _used(self, unit: str, *_: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self._step["used"].append(unit)

    def _keep(self, block: nn.Module) -> None:
        """Sum the bytes that autograd keeps of the block's next forward, without its weights."""
        forward, kept = block.forward, {}

        def keep(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        def measured(*args: Any, **kwargs: Any) -> Any:
            if self.facts.kept or not (block.training and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = forward(*args, **kwargs)
            for p in (p for p in block.parameters() if not isinstance(p, DTensor)):
                kept.pop(p.untyped_storage().data_ptr(), None)
            self.facts.kept = sum(kept.values())
            return result

        self._stack.enter_context(patch.object(block, "forward", measured))

    def _examine(self) -> None:
        self.facts.problems = self._models.problems()
        self.facts.model = self._models.describe(self.facts.world_size, self._ties, self._reduced)


def _is_ahead(inputs: Tensor | None, labels: Tensor | None) -> bool:
    """Say whether labels are the next tokens; transformers' losses of language models shift them."""
    if inputs is None or labels is None or inputs.shape != labels.shape or inputs.dim() != 2:
        return False
    kept = labels[:, :-1] != -100
    own, following, given = (one[kept] for one in (inputs[:, :-1], inputs[:, 1:], labels[:, :-1]))
    return torch.equal(given, following) and not torch.equal(given, own)
