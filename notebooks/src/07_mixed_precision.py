# %% [markdown]
# # 7 · Mixed precision
#
# Which tensor has which dtype in a training step, and does bf16 lose anything? **Keep the model in float32,
# give `fully_shard` a `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`, and
# leave autocast off**: gathers, matmuls and activations are bf16 then; the shards, the sum of gradients over
# the ranks and AdamW's moments are float32.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

MOMENTS = {
    "parameters, at rest": "shards\nat rest",
    "all-gather, forward": "all-\ngather",
    "matmul, forward": "matmul,\nforward",
    "activation": "activation",
    "output": "output",
    "matmul, backward": "matmul,\nbackward",
    "reduce-scatter, backward": "reduce-\nscatter",
    ".grad after backward": ".grad",
    "AdamW's moments": "AdamW's\nmoments",
    "state dict": "state\ndict",
}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
COLORS = {"fp32": plots.RANK_COLORS[4], "bf16": plots.RANK_COLORS[1], "fp16": plots.RANK_COLORS[3]}


def draw_dtypes(ways):
    """One row for each way to train, one column for each moment of a step, coloured by dtype."""
    fig, (axes,) = plots.figure(width=9.4, height=0.8 + 0.42 * len(ways))
    for y, found in enumerate(ways.values()):
        for x, moment in enumerate(MOMENTS):
            dtype = SHORT.get(found.get(moment, ""), "")
            if dtype:
                axes.barh(y, 0.94, left=x - 0.47, height=0.8, color=COLORS[dtype])
                axes.text(x, y, dtype, ha="center", va="center", fontsize=9, color=plots.INK)
    axes.set_yticks(range(len(ways)), list(ways))
    axes.set_xticks(range(len(MOMENTS)), list(MOMENTS.values()), fontsize=8)
    axes.xaxis.tick_top()
    axes.set(xlim=(-0.55, len(MOMENTS) - 0.45), ylim=(len(ways) - 0.4, -0.6))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return plots.show(fig, alt=f"Dtypes at each moment of a step, for {', '.join(ways)}.")


IN_BF16 = ("all-gather, forward", "matmul, forward", "activation", "output", "matmul, backward")
expected = {moment: "bfloat16" if moment in IN_BF16 else "float32" for moment in MOMENTS}
draw_dtypes({"one step": expected})

# %% [markdown]
# One step from left to right under this policy. fp32 is float32. bf16, or bfloat16, has the range of fp32 and
# fewer than three decimal digits.

# %% tags=["card"]
lesson.card(
    7,
    learn="set the dtypes of a step, notice a wrong one, and know where bf16 loses digits",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 16, 16),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains the same model with three
# policies, and counts the bytes of a step.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
# policies = {
#     "float32": MixedPrecisionPolicy(),
#     "bf16, reduced in fp32": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32),
#     "bf16, no reduce_dtype": MixedPrecisionPolicy(torch.bfloat16),
# }
# for name, policy in policies.items():
#     torch.manual_seed(0)                                     # the same weights on every rank
#     model = nn.Sequential(*[nn.Linear(256, 256, device=device) for _ in range(8)])   # float32: this is kept
#     for part in [*model, model]:
#         fully_shard(part, mesh=mesh, mp_policy=policy)
#     optimizer = torch.optim.AdamW(model.parameters())
#     torch.manual_seed(1 + dist.get_rank())                   # other samples on each rank
#     for step in range(10):
#         x = torch.randn(32, 256, device=device)              # your data, in float32: the policy casts it
#         with record_collectives(model) as trace:
#             loss = (model(x).float() - x).square().mean()    # the loss in float32
#             loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     if dist.get_rank() == 0:
#         sent = trace.bytes_by_kind()
#         gathered, reduced = (sent[kind] / 2**20 for kind in ("all_gather", "reduce_scatter"))
#         print(f"{name:21} gathers {gathered:.1f} MiB, reduces {reduced:.1f} MiB, loss {loss.item():.2f}")
# dist.destroy_process_group()
# ```
# ```text
# float32               gathers 4.0 MiB, reduces 2.0 MiB, loss 0.96
# bf16, reduced in fp32 gathers 2.0 MiB, reduces 2.0 MiB, loss 0.96
# bf16, no reduce_dtype gathers 2.0 MiB, reduces 1.0 MiB, loss 0.96
# ```
#
# The policy halves the bytes of the all-gathers. Without `reduce_dtype` the reduction is halved, too, and
# gradients are added up in bf16. The rest of the lesson is about what happens in between, and what that
# loses.
#
# ## Every moment of a step
#
# FSDP keeps each rank's shard in the dtype in which the model was made. Before a unit computes, its shards
# are cast to `param_dtype` and gathered. After its backward, gradients are reduced in `reduce_dtype`; the
# result is cast to the shard's dtype and becomes `.grad`. PyTorch calls a *dispatch mode* for each operation:
# `Probe` notes the dtypes of collectives, and of `mm`, `addmm`, LayerNorm and softmax.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import contextlib
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils.lessons.meter import ALL_GATHERS, REDUCE_SCATTERS

torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
bf16, fp32 = torch.bfloat16, torch.float32


class Probe(TorchDispatchMode):
    """Notes the dtypes of operations, by phase."""

    def __init__(self):
        super().__init__()
        self.seen, self.phase = {}, "forward"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ALL_GATHERS:
            self.note("all-gather", first(args[1]).dtype)       # args: output, input, group, ...
        elif func.name() in REDUCE_SCATTERS:
            self.note("reduce-scatter", first(args[1]).dtype)
        elif func.__name__.startswith(("mm.", "addmm.")):
            self.note("matmul", args[-1].dtype)
        elif func.__name__.startswith(("native_layer_norm.", "_softmax.")):
            self.note("norm and softmax", args[0].dtype)
        return func(*args, **(kwargs or {}))

    def note(self, what, dtype):
        self.seen.setdefault((what, self.phase), set()).add(dtype)

    def dtypes(self, what):
        """All dtypes of "all-gather", "matmul" or "reduce-scatter"."""
        return set().union(*(dtypes for (noted, _), dtypes in self.seen.items() if noted == what))


def first(tensors):
    """Some collectives take a tensor, others a list of them."""
    return first(tensors[0]) if isinstance(tensors, (list, tuple)) else tensors


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x):                            # f32[batch, 16]
        return self.down(torch.softmax(self.norm(self.up(x)), -1))


def build():
    torch.manual_seed(0)
    return Net().to(device)


def sharded(dtype, reduce=None, **options):
    return fully_shard(build(), mp_policy=MixedPrecisionPolicy(dtype, reduce, **options))


# %% tags=["dtypes"]
# %%ranks
def name(tensors):
    return ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))


def probed(model, context=contextlib.nullcontext):
    """Train one step, its forward in a context; return the dtype at each moment."""
    found, x = {}, torch.randn(8, 16, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hook = model.up.register_forward_hook(lambda module, args, output: found.update(activation=name([output])))
    found["parameters, at rest"] = name(model.parameters())
    with Probe() as probe:
        with context():
            output = model(x)
        probe.phase = "backward"
        F.mse_loss(output.float(), x).backward()
    hook.remove()
    for (what, phase), seen in probe.seen.items():
        found[f"{what}, {phase}"] = ", ".join(sorted(str(d).removeprefix("torch.") for d in seen))
    found["output"] = name([output])
    found["clipped norm"] = name([nn.utils.clip_grad_norm_(model.parameters(), 1.0)])
    found[".grad after backward"] = name(p.grad for p in model.parameters())
    optimizer.step()
    found["AdamW's moments"] = name(state["exp_avg"] for state in optimizer.state.values())
    found["state dict"] = name(model.state_dict().values())
    return found


ways = {
    "policy": probed(sharded(bf16, fp32)),
    "policy, no reduce_dtype": probed(sharded(bf16)),
    "autocast alone": probed(sharded(None), lambda: torch.autocast(device.type, bf16)),
    "policy and autocast": probed(sharded(bf16, fp32), lambda: torch.autocast(device.type, bf16)),
    "policy, made in bf16": probed(fully_shard(build().to(bf16), mp_policy=MixedPrecisionPolicy(bf16, fp32))),
}

# %%
ways = ranks.get("ways")[0]
assert all(ways["policy"][moment] == dtype for moment, dtype in expected.items())
draw_dtypes(ways)

# %% [markdown]
# - **policy**: as in the drawing at the top. Each rank's own gradients are bf16 until they are reduced; only the shard in `.grad` is fp32.
# - **no reduce_dtype**: gradients are added up in bf16, and `.grad` does not show it.
# - **autocast alone**: matmuls are bf16, and the all-gather sends fp32, twice the bytes, because autocast casts each weight after the all-gather.
# - **policy and autocast**: the collectives are the policy's. Accelerate with `mixed_precision="bf16"` runs both, too, but sets `reduce_dtype` to bf16 unless you give it a policy of your own, and casts the output to fp32.
# - **made in bf16**: a model that was loaded in bf16 stays in bf16 at rest, and so do gradients and moments.
#
# On a CPU LayerNorm and softmax get bf16 in all five ways (their kernels calculate in fp32 and round the
# result):

# %%
moments = ["norm and softmax, forward", "clipped norm"]
Table(["", *moments], [[way, *(found[moment] for moment in moments)] for way, found in ways.items()])

# %% [markdown]
# Under a policy a norm's parameters and inputs are bf16; buffers keep their dtype. (Autocast on CUDA runs
# `layer_norm` and `softmax` in fp32, by [its list of
# operations](https://docs.pytorch.org/docs/stable/amp.html); autocast on a CPU, as here, does not. The RMS
# norm of transformers' Llama casts to fp32 itself.) Where a norm has to be fp32, make it a unit of its own
# with `MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)`: without `output_dtype`
# a next layer that is no unit itself gets fp32 and raises. Each such norm adds collectives. `clip_grad_norm_`
# works on `.grad`, so its norm has the dtype of the shards.
#
# ## What adding up in bf16 costs
#
# bf16 has 8 significant bits, so an addition of two numbers of about the same size often rounds. Each rank
# has 65,536 gradients of about 1. One process computes their sum for up to 64 ranks, in a **chain**, one rank
# after the other, and in **pairs**, then pairs of pairs. A ring is a chain; NCCL may choose another
# algorithm.

# %% tags=["reduction"]
# %%ranks
def gradient(r):
    return 1 + 0.1 * torch.randn(2**16, generator=torch.Generator().manual_seed(r))


def error(total, n):
    """Relative, root mean square, against the sum in fp64 of what the ranks have in bf16."""
    exact = sum(gradient(r).to(bf16).double() for r in range(n))
    return float((total.double().cpu() / exact - 1).square().mean().sqrt())


def chain(numbers):
    total = numbers[0].clone()
    for number in numbers[1:]:
        total += number
    return total


def in_pairs(numbers):
    while len(numbers) > 1:
        numbers = [a + b for a, b in zip(numbers[::2], numbers[1::2])]
    return numbers[0]


rows = []
for n in (2, 4, 8, 16, 32, 64):
    low16 = [gradient(r).to(bf16) for r in range(n)]
    in_fp32 = chain([number.float() for number in low16])
    rows.append([n, *(f"{100 * error(total, n):.2f}%" for total in (chain(low16), in_pairs(low16), in_fp32))])
total = gradient(rank).to(bf16).to(device)
dist.all_reduce(total)
print(f"a real all_reduce in bf16, {world} ranks: {100 * error(total, world):.2f}%")

# %%
Table(["ranks (simulated)", "bf16, in a chain", "bf16, in pairs", "fp32"], ranks.get("rows")[0])

# %% [markdown]
# In a chain the error grows with the number of ranks; in pairs it hardly does. The table leaves out what each
# rank lost before, when its gradient became bf16. For these numbers, all about
# 1, fp32 is exact; real gradients differ in size and sign, so fp32 rounds too, 65,536 times finer, and where
# the ranks cancel one sum in bf16 may be off by far more than a percent. `reduce_dtype=torch.float32` costs
# twice the bytes of the reduction.
#
# ## Why the model stays in fp32
#
# Just below 1, neighbouring numbers in bf16 are 0.004 apart, and an optimizer's step of less than half of
# that is rounded away. How many of a model's weights change at all in 20 steps of AdamW?

# %%
# %%ranks
def moved(dtype, lr):
    model = fully_shard(build().to(dtype), mp_policy=MixedPrecisionPolicy(bf16, fp32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    before = [p.full_tensor().clone() for p in model.parameters()]
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(20):
        F.mse_loss(model(x).float(), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = sum((p.full_tensor() != old).sum().item() for p, old in zip(model.parameters(), before))
    return changed / sum(p.numel() for p in model.parameters())


rates = (1e-6, 1e-5, 1e-4, 1e-3)
shares = [[f"{lr:g}", *(f"{moved(dtype, lr):.0%}" for dtype in (fp32, bf16))] for lr in rates]

# %%
Table(["learning rate", "weights that moved, made in fp32", "made in bf16"], ranks.get("shares")[0])

# %% [markdown]
# Nothing raises an error. Call `model.float()` before you shard, or pass `dtype=torch.float32` to
# `from_pretrained`. A checkpoint in fp32 loaded into a model in bf16 ends the same way: PyTorch's `dcp.load`
# casts without a word; this project's `load_distributed` refuses unless you pass `cast=True`.
#
# ## Your turn 1 · What is bf16, and should not be?
#
# Five models, some set up wrongly: their parameters are bf16 at rest, or the reduction is, or AdamW's moments
# are, even if only in one layer. `low(model, optimizer, step)` returns a set with those of the words
# `"parameters"`, `"reduction"`, `"moments"` that apply. `step()` runs a forward and a backward pass; the
# moment of a parameter `p` is `optimizer.state[p]["exp_avg"]`. There are six faults in the five models.
#
# <details><summary>Hint</summary>
#
# The reduction is over when `step()` returns, and leaves no trace in `.grad`. Watch it: `with Probe() as
# probe:`, then `probe.dtypes("reduce-scatter")`.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, exactly, turn


def set_up(made_in=fp32, down=None, down_reduce=fp32, moments=None):
    """A model whose layer `down` is a unit of its own, after one step: it, its optimizer, and a step."""
    model = build().to(made_in)
    if down is not None:
        model.down.to(down)
    fully_shard(model.down, mp_policy=MixedPrecisionPolicy(bf16, down_reduce))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(bf16, fp32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        y = torch.ones(8, 16, device=device)
        model(y).float().square().mean().backward()

    step()
    optimizer.step()
    optimizer.zero_grad()
    for state in list(optimizer.state.values())[-1:] if moments else []:
        state["exp_avg"] = state["exp_avg"].to(moments)
    return model, optimizer, step


MODELS = {
    "as it should be": ({}, set()),
    "made in bf16": ({"made_in": bf16}, {"parameters", "moments"}),
    "one layer in bf16": ({"down": bf16}, {"parameters", "moments"}),
    "no reduce_dtype for one unit": ({"down_reduce": None}, {"reduction"}),
    "bf16 moments": ({"moments": bf16}, {"moments"}),
}


MISSED = {
    "parameters": "One layer alone may be bf16: look at all parameters, at rest.",
    "reduction": "`.grad` does not tell in which dtype it was added up: watch the reduce-scatter.",
    "moments": "Look at the moments of all parameters.",
}


@turn(1, {
    "faults that were not found": exactly("none", lambda words: MISSED[words.split(", ")[0]]),
    "false alarms": exactly(
        "none", lambda words: f"You reported {words} of a model where all of it is fp32; gathered weights may be bf16."
    ),
})
def score_low(low):
    missed, false = set(), set()
    for options, expected in MODELS.values():
        answer = low(*set_up(**options))
        if isinstance(answer, str) or not hasattr(answer, "__iter__"):
            raise NotYet("Return a set of words, which may be empty.")
        missed |= expected - set(answer)
        false |= set(answer) - expected
    words = [", ".join(sorted(some)) or "none" for some in (missed, false)]
    return dict(zip(("faults that were not found", "false alarms"), words))


# %%
# %%turn 1
def low(model, optimizer, step):
    return None                                      # your lines here


# %% tags=["solution"] turn=1
def low(model, optimizer, step):
    found = set()
    with Probe() as probe:
        step()
    if any(p.dtype == bf16 for p in model.parameters()):
        found.add("parameters")
    if bf16 in probe.dtypes("reduce-scatter"):
        found.add("reduction")
    if any(state["exp_avg"].dtype == bf16 for state in optimizer.state.values()):
        found.add("moments")
    return found

# %% tags=["right"] turn=1
def low(model, optimizer, step):                     # a list
    with Probe() as probe:
        step()
    dtypes = {
        "parameters": {p.to_local().dtype for p in model.parameters()},
        "reduction": probe.dtypes("reduce-scatter"),
        "moments": {state["exp_avg"].dtype for state in optimizer.state.values()},
    }
    return [word for word, some in dtypes.items() if bf16 in some]

# %% tags=["right"] turn=1
def low(model, optimizer, step):                     # asks the policies of the units
    units = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    policies = [m._get_fsdp_state()._mp_policy for m in units]
    words = ["reduction"] * any((p.reduce_dtype or p.param_dtype) == bf16 for p in policies)
    words += ["parameters"] * any(p.dtype == bf16 for p in model.parameters())
    return words + ["moments"] * any(s["exp_avg"].dtype == bf16 for s in optimizer.state_dict()["state"].values())

# %% tags=["right"] turn=1
def low(model, optimizer, step):                     # one unit after the other
    found = frozenset()
    for p in model.parameters():
        found |= {"parameters"} if p.dtype == bf16 else set()
        found |= {"moments"} if optimizer.state[p]["exp_avg"].dtype == bf16 else set()
    with Probe() as probe:
        step()
    return found | ({"reduction"} if bf16 in probe.dtypes("reduce-scatter") else set())

# %% tags=["wrong"] turn=1 says="watch the reduce-scatter"
def low(model, optimizer, step):                     # .grad does not tell how it was added up
    step()
    found = set()
    if any(p.dtype == bf16 for p in model.parameters()):
        found.add("parameters")
    if any(p.grad.dtype == bf16 for p in model.parameters()):
        found.add("reduction")
    if any(state["exp_avg"].dtype == bf16 for state in optimizer.state.values()):
        found.add("moments")
    return found

# %% tags=["wrong"] turn=1 says="moments of all parameters"
def low(model, optimizer, step):                     # the first moment alone
    with Probe() as probe:
        step()
    p = next(model.parameters())
    words = ["parameters"] * any(q.dtype == bf16 for q in model.parameters())
    words += ["moments"] * (optimizer.state[p]["exp_avg"].dtype == bf16)
    return words + ["reduction"] * (bf16 in probe.dtypes("reduce-scatter"))

# %% tags=["wrong"] turn=1 says="gathered weights may be bf16"
def low(model, optimizer, step):                     # what is gathered is meant to be bf16
    with Probe() as probe:
        step()
    words = ["parameters"] * (bf16 in probe.dtypes("all-gather"))
    words += ["moments"] * any(s["exp_avg"].dtype == bf16 for s in optimizer.state.values())
    return words + ["reduction"] * (bf16 in probe.dtypes("reduce-scatter"))

# %% tags=["wrong"] turn=1 says="look at all parameters, at rest"
def low(model, optimizer, step):
    with Probe() as probe:
        step()
    words = ["moments"] * any(s["exp_avg"].dtype == bf16 for s in optimizer.state.values())
    return words + ["reduction"] * (bf16 in probe.dtypes("reduce-scatter"))

# %% [markdown]
# ## Your turn 2 · Mixed precision by hand
#
# Write what FSDP2 does with `param_dtype=bf16` and `reduce_dtype=fp32`, for a model that every rank holds
# completely. `my_backward(master, x)` gets a model in fp32 and this rank's samples. It computes
# `F.mse_loss(output.float(), x)` with a bf16 copy of the model, gives each parameter of `master` its gradient
# (the mean over the ranks of the bf16 gradients, added up in fp32), and returns the loss. The optimizer's
# step is done for you. Over 8 steps losses and gradients have to be those of FSDP2.
#
# <details><summary>Hint</summary>
#
# `copy.deepcopy(master).to(bf16)` is a copy in bf16; `master.to(bf16)` changes `master` itself. The
# parameters of the copy come in the same order. `dist.all_reduce` adds up.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)).to(device)


def by_policy(reduce, steps=8):
    """The losses and the full gradients of training with FSDP2."""
    model, losses, grads = sharded(bf16, reduce), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = F.mse_loss(model(batch).float(), batch)
        loss.backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, grads


wanted_losses, wanted = by_policy(fp32)


@turn(2, {
    "dtype of the weights that are kept": exactly(
        "float32", "The master is no longer fp32: `.to(bf16)` changes a module itself."
    ),
    "forward passes under autocast": exactly(0, "Compute with a bf16 copy: autocast casts for each operation anew."),
    "losses that differ": exactly(0, "Some losses differ: is the copy bf16, its input too, and made anew each step?"),
    "gradients that differ": exactly(0, lambda n: GRADIENTS.get("why", "Some gradients differ.")),
})
def score_backward(my_backward):
    master, autocast = build(), []
    master.register_forward_pre_hook(lambda *_: autocast.append(torch.is_autocast_enabled(device.type)))
    optimizer, losses, other, factors = torch.optim.AdamW(master.parameters(), lr=1e-2), [], 0, []
    for step in range(8):
        losses.append(torch.as_tensor(my_backward(master, batch)).item())
        for p, right in zip(master.parameters(), wanted[step]):
            if p.grad is None:
                raise NotYet("A parameter of `master` has no gradient: set `p.grad` for each of them.")
            other += not torch.allclose(p.grad.float(), right, rtol=1e-3, atol=2e-6)
            factors.append((p.grad.float().norm() / right.norm()).item())
        optimizer.step()
        optimizer.zero_grad()
    GRADIENTS["why"] = (
        "They are too large by the number of ranks: divide the sum." if abs(factors[0] / world - 1) < 0.02
        else "They are too small by the number of ranks: divide by it once." if abs(factors[0] * world - 1) < 0.02
        else "They differ a little: cast to fp32 before you add up." if abs(factors[0] - 1) < 0.01
        else "Each rank keeps its own: add up over all ranks, and divide by their number."
    )
    return {
        "dtype of the weights that are kept": name(master.parameters()),
        "forward passes under autocast": sum(autocast),
        "losses that differ": sum(not abs(a - b) <= 2e-5 for a, b in zip(losses, wanted_losses)) if other == 0 else None,
        "gradients that differ": other,
    }


GRADIENTS = {}


# %%
# %%turn 2
def my_backward(master, x):
    return None                                      # your lines here


# %% tags=["solution"] turn=2
def my_backward(master, x):
    low = copy.deepcopy(master).to(bf16)
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    loss.backward()
    for small, high in zip(low.parameters(), master.parameters()):
        high.grad = small.grad.float()               # fp32 first, then the sum
        dist.all_reduce(high.grad)
        high.grad /= world
    return loss

# %% tags=["right"] turn=2
from torch.func import functional_call

def my_backward(master, x):                          # autograd casts the gradients back
    low = {n: p.to(bf16) for n, p in master.named_parameters()}
    loss = F.mse_loss(functional_call(master, low, (x.to(bf16),)).float(), x)
    loss.backward()
    for p in master.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad.div_(world)
    return loss.item()

# %% tags=["right"] turn=2
from torch.distributed import _functional_collectives as functional

def my_backward(master, x):
    low = build().to(bf16)
    low.load_state_dict(master.state_dict())
    loss = F.mse_loss(low(x.bfloat16()).float(), x)
    grads = torch.autograd.grad(loss, list(low.parameters()))
    for p, grad in zip(master.parameters(), grads):
        p.grad = functional.all_reduce(grad.float() / world, "sum", dist.group.WORLD).clone()
    return loss

# %% tags=["right"] turn=2
def my_backward(master, x):                          # one collective for all gradients
    low = copy.deepcopy(master).to(bf16)
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    loss.backward()
    flat = torch.cat([p.grad.float().flatten() for p in low.parameters()])
    dist.all_reduce(flat)
    for p, part in zip(master.parameters(), flat.split([p.numel() for p in master.parameters()])):
        p.grad = part.view_as(p) / world
    return loss.detach()

# %% tags=["wrong"] turn=2 says="cast to fp32 before you add up"
def my_backward(master, x):                          # adds up in bf16
    low = copy.deepcopy(master).to(bf16)
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    loss.backward()
    for small, high in zip(low.parameters(), master.parameters()):
        dist.all_reduce(small.grad)
        high.grad = small.grad.float() / world
    return loss

# %% tags=["wrong"] turn=2 says="divide by it once"
def my_backward(master, x):                          # divides twice
    low = copy.deepcopy(master).to(bf16)
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    (loss / world).backward()
    for small, high in zip(low.parameters(), master.parameters()):
        high.grad = small.grad.float()
        dist.all_reduce(high.grad)
        high.grad /= world
    return loss

# %% tags=["wrong"] turn=2 says="divide the sum"
def my_backward(master, x):
    low = copy.deepcopy(master).to(bf16)
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    loss.backward()
    for small, high in zip(low.parameters(), master.parameters()):
        high.grad = small.grad.float()
        dist.all_reduce(high.grad)
    return loss

# %% tags=["wrong"] turn=2 says="add up over all ranks"
def my_backward(master, x):                          # of this rank alone
    low = copy.deepcopy(master).to(bf16)
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    loss.backward()
    for small, high in zip(low.parameters(), master.parameters()):
        high.grad = small.grad.float()
    return loss

# %% tags=["wrong"] turn=2 says="The master is no longer fp32"
def my_backward(master, x):
    loss = F.mse_loss(master.to(bf16)(x.to(bf16)).float(), x)
    loss.backward()
    for p in master.parameters():
        total = p.grad.float()
        dist.all_reduce(total)
        p.grad = (total / world).to(bf16)
    return loss

# %% tags=["wrong"] turn=2 says="autocast casts for each operation anew"
def my_backward(master, x):                          # autocast, without a copy
    with torch.autocast(x.device.type, dtype=bf16):
        loss = F.mse_loss(master(x).float(), x)
    loss.backward()
    for p in master.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    return loss

# %% [markdown]
# ## Can this machine train in bf16?
#
# `torch.cuda.is_bf16_supported()` is True also where bf16 is only emulated. `bf16_support` asks for the
# hardware, and tries a real all-reduce over all ranks.

# %% tags=["checker", "nbval-ignore-output"]
# %%ranks
from fsdp_utils import bf16_support

support = bf16_support(device)
if rank == 0:
    print(support)

# %% [markdown]
# By compute capability, a V100 (7.0) and a T4 (7.5) have no units for bf16; an A100 (8.0), an L4 (8.9) and an
# H100 (9.0) have. On a GPU without them, fp16 needs a **scaler** that multiplies the loss, because fp16 turns
# a number below about 3e-8 into 0. With FSDP2 use `torch.amp.GradScaler`, which asks all ranks for infinite
# gradients (the gradients are DTensors); with FSDP1 use `ShardedGradScaler`, because the plain one decides on
# each rank alone and the shards drift apart without an error.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `mat1 and mat2 must have the same dtype` | `cast_forward_inputs=False`, or `forward` made a tensor or used a buffer in fp32: FSDP2 has no dtype for buffers; or a norm in an fp32 unit has no `output_dtype` | cast it to the dtype of the weights; set `output_dtype` |
# | gradients differ from one process's more and more with more ranks | one cause: no `reduce_dtype`, so gradients are added up in bf16 | `reduce_dtype=torch.float32` |
# | the loss stops falling early, with a small learning rate | the model was made or loaded in bf16 | `model.float()` before sharding |
# | `Attempting to unscale FP16 gradients.` | the model itself is fp16, and a scaler is used | make the model fp32, and leave fp16 to the policy |
# | the all-gather is not faster than in fp32 | bf16 comes from `torch.autocast` | the policy |
#
# ## The rule
#
# The model in fp32, `param_dtype=torch.bfloat16`, `reduce_dtype=torch.float32`, no autocast, and `.float()`
# on the output before the loss.
#
# [← lesson 6](06_sharding_strategies.ipynb) · [lesson 8 →](08_local_state_dict_and_distributed_checkpoints.ipynb)
