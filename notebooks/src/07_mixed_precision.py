# %% [markdown]
# # 7 · Mixed precision
#
# bf16, or bfloat16, is a number of 16 bits. It has the range of fp32 (float32), but fewer than three decimal
# digits. With bf16 the all-gather sends half the bytes, and hardware with bf16 units computes faster. But
# which tensor is bf16, and when? In this lesson a probe records the dtypes of a training step, for FSDP2 and
# FSDP1, and you write mixed precision yourself.

# %% [markdown] tags=["card"]
# learn:
# - which tensor has which dtype in forward, backward, reduction, optimizer and checkpoint
# - why 'gradients are always fp32' is half true
# - what adding up in bf16 costs, and when the cost grows with the number of ranks
# - what fp16 needs besides, and what a CPU cannot show of it
# - 'whether your machine can train in bf16: `bf16_support`'
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb) · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: half a minute to run on 2 cores (AMD EPYC) · 20 minutes to read
# video: '[Mixed precision](https://www.loom.com/share/e308e10907884356ac263d269263e0bd), 2022. Since then:
#   FSDP2''s policy has no buffer dtype, and can cast outputs.'

# %% [markdown]
# **The question of this lesson:** a model is trained "in bf16". Which of its tensors are bf16, and at which
# moments of a step?

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import plots

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
# Read the drawing from left to right, through one step. This is what most people want: a rank keeps fp32, it
# gathers and computes in bf16, and gradients are added up over the ranks (the reduce-scatter) in fp32. The
# drawing is a forecast. Below, the probe measures it, and you see three ways to get something else by
# accident.
#
# ## In your own code
#
# The dtype in which you build the model is the dtype of what each rank keeps. FSDP's *policy* sets the dtypes
# within a step. Save this as `train.py` and start it with `torchrun --nproc-per-node 4 train.py`. It runs on
# four GPUs, or on a machine without a GPU.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))
# torch.manual_seed(0)                                  # the same weights on every rank
# model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).float()      # fp32: this is kept
# policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# for part in [*model, model]:
#     fully_shard(part, mesh=mesh, mp_policy=policy)
# optimizer = torch.optim.AdamW(model.parameters())
# torch.manual_seed(dist.get_rank())                    # other samples on each rank
# for step in range(10):
#     x = torch.randn(32, 256, device=device)           # fp32; the model's input is cast to bf16
#     loss = model(x).float().square().mean()           # the model's output is bf16; the loss in fp32
#     loss.backward()
#     optimizer.step()
#     optimizer.zero_grad()
# dist.destroy_process_group()
# ```
#
# ## Four ranks

# %%
from fsdp_utils.lessons import lesson
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import exactly, run_solution, try_answers, turn, yours
from fsdp_utils.notebook import ranks

ranks.start()

# %% jupyter={"source_hidden": true}
# %%ranks
import contextlib
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils.lessons.meter import ALL_GATHERS, REDUCE_SCATTERS

warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1")    # of GradScaler
torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                  # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

# %% [markdown]
# ## The idea
#
# FSDP keeps each rank's shard of the parameters in the dtype in which the model was made, here fp32. Before
# a unit computes, the shards are cast to `param_dtype` and gathered. After its backward the gradients are
# reduced in `reduce_dtype`, and the result is cast to the shard's dtype and becomes its `.grad`. So the
# optimizer works in fp32, on gradients that were computed in bf16.
#
# ## A probe
#
# PyTorch calls a *dispatch mode* for each operation, with its tensors. The probe is one: it notes the dtypes
# of collectives and matmuls. All other dtypes can be read from the tensors themselves.

# %%
# %%ranks
class Probe(TorchDispatchMode):
    """Notes the dtypes of collectives and matmuls, by phase."""

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
        return func(*args, **(kwargs or {}))

    def note(self, what, dtype):
        self.seen.setdefault((what, self.phase), set()).add(dtype)

    def dtypes(self, what):
        """All dtypes of "all-gather", "matmul" or "reduce-scatter"."""
        return set().union(*(dtypes for (noted, _), dtypes in self.seen.items() if noted == what))


def first(tensors):
    """Some collectives take a tensor, others a list of them."""
    return first(tensors[0]) if isinstance(tensors, (list, tuple)) else tensors


# %% [markdown]
# The model has two layers, and between them a buffer, a tensor that is not trained. The functions `fsdp2` and
# `fsdp1` shard the model with a policy.

# %%
# %%ranks
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.register_buffer("gain", torch.full((64,), 0.5))
        self.down = nn.Linear(64, 16)

    def forward(self, x):                            # (batch, 16)
        return self.down(F.relu(self.up(x)) * self.gain.to(x.dtype))


def build():
    torch.manual_seed(0)
    return Net().to(device)


def fsdp2(dtype, reduce=None, **options):
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, **options)
    return fully_shard(build(), mp_policy=policy)


def fsdp1(dtype, reduce=None, buffers=None):
    policy = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce, buffer_dtype=buffers)
    return FullyShardedDataParallel(build(), mixed_precision=policy, use_orig_params=True, device_id=device)


# %% jupyter={"source_hidden": true}
# %%ranks
def name(dtype):
    return str(dtype).removeprefix("torch.")


def names(tensors):
    return ", ".join(sorted({name(t.dtype) for t in tensors}))


def probed(model, context=contextlib.nullcontext):
    """One training step, its forward in a context; each dtype, by moment."""
    found = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    up = next(module for path, module in model.named_modules() if path.endswith("up"))
    up.register_forward_hook(lambda module, args, output: found.update(activation=name(output.dtype)))
    x = torch.randn(8, 16, device=device)
    found["parameters, at rest"] = names(model.parameters())
    with Probe() as probe:
        with context():
            output = model(x)
        probe.phase = "backward"
        F.mse_loss(output.float(), x).backward()
    for (what, phase), seen in probe.seen.items():
        found[f"{what}, {phase}"] = ", ".join(sorted(name(dtype) for dtype in seen))
    found["output"] = name(output.dtype)
    found["buffers"] = names(b for b in model.buffers() if b.is_floating_point())
    found[".grad after backward"] = names(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    found["AdamW's moments"] = names(s["exp_avg"] for s in optimizer.state.values())
    state = {key: value for key, value in model.state_dict().items() if value.is_floating_point()}
    found["state dict"] = names(state.values())
    return found


# %% [markdown]
# `probed(model)`, folded above, trains one step and returns the dtype at each moment.
#
# ## FSDP2
#
# **Predict before you go on.** With `param_dtype=bfloat16`, in which dtype are the matmuls of the backward
# pass? In which dtype is the `.grad` that the optimizer sees? And in which dtype are gradients added up if
# you leave out `reduce_dtype`? The drawing below the next cell answers.

# %% tags=["dtypes"]
# %%ranks
by_fsdp2 = {
    "no policy": probed(fsdp2(None)),
    "bf16, reduce fp32": probed(fsdp2(bf16, fp32)),
    "bf16, no reduce_dtype": probed(fsdp2(bf16)),
}

# %% jupyter={"source_hidden": true}
by_fsdp2 = ranks.get("by_fsdp2")[0]
draw_dtypes(by_fsdp2)

# %% [markdown]
# Read the second row from left to right. The shards are fp32 at rest. The all-gather sends bf16, so it costs
# half. Both matmuls are bf16: **the gradients of the backward are computed in bf16**. The reduce-scatter
# adds up in fp32, and the sharded `.grad`, AdamW's moments (the two averages of lesson 0) and the state dict
# are fp32. In 2022 the code said in a comment that local gradients are always fp32. That is false for the
# gradients that the backward pass computes, and true for the shard in `.grad`.
#
# The third row differs in one place, and that is the first accident: without `reduce_dtype` the gradients are
# added up in `param_dtype`. Looking at `.grad` does not show it, because `.grad` is fp32 all the same.

# %% tags=["check"]
# %%ranks 0
mixed = by_fsdp2["bf16, reduce fp32"]
assert mixed["matmul, forward"] == mixed["matmul, backward"] == mixed["all-gather, forward"] == "bfloat16"
assert mixed["activation"] == mixed["output"] == "bfloat16"
assert mixed["reduce-scatter, backward"] == mixed[".grad after backward"] == "float32"
unsaid = by_fsdp2["bf16, no reduce_dtype"]
assert unsaid == {**mixed, "reduce-scatter, backward": "bfloat16"}
for found in by_fsdp2.values():
    for moment in ("parameters, at rest", "buffers", ".grad after backward", "AdamW's moments", "state dict"):
        assert found[moment] == "float32"
print("Checked: the forecast; without reduce_dtype only the reduce-scatter differs.")

# %% jupyter={"source_hidden": true} tags=["check"]
assert all(by_fsdp2["bf16, reduce fp32"][moment] == dtype for moment, dtype in expected.items())
print("Checked: the drawing at the top of this lesson.")

# %% [markdown]
# ## FSDP1
#
# Its policy has the same two dtypes and one for buffers.

# %%
# %%ranks
by_fsdp1 = {
    "no policy": probed(fsdp1(None)),
    "bf16, reduce fp32": probed(fsdp1(bf16, fp32)),
    "all three bf16": probed(fsdp1(bf16, bf16, bf16)),
}

# %% jupyter={"source_hidden": true}
by_fsdp1 = ranks.get("by_fsdp1")[0]
shown = ("matmul, forward", "reduce-scatter, backward", "buffers", ".grad after backward", "state dict")
Table(
    ["FSDP1", *shown],
    [[way, *(found[moment] for moment in shown)] for way, found in by_fsdp1.items()],
)

# %% tags=["check"]
# %%ranks 0
assert by_fsdp1["bf16, reduce fp32"] == mixed
assert by_fsdp1["all three bf16"]["buffers"] == "bfloat16"
for found in by_fsdp1.values():
    for moment in ("parameters, at rest", ".grad after backward", "AdamW's moments", "state dict"):
        assert found[moment] == "float32"
print("Checked: with the same two dtypes, FSDP1 has the dtypes of FSDP2 at each moment.")

# %% [markdown]
# With the same two dtypes FSDP1 has the same dtypes as FSDP2 at every moment. With `buffer_dtype` the buffers
# are bf16 too. In the state dict everything is fp32, buffers too: what is saved does not depend on the
# policy. FSDP2 has no dtype for buffers and leaves them as they are. That is why this model casts its buffer
# in `forward` (`self.gain.to(x.dtype)`); otherwise bf16 times fp32 would give fp32, and the next matmul an
# error.
#
# ## Inputs, outputs and autocast
#
# FSDP2's policy casts the floating-point inputs of a unit to `param_dtype`. `cast_forward_inputs=False` turns
# that off; then the input has to be bf16 already. And `output_dtype` casts what the unit returns.

# %%
# %%ranks
with_output = probed(fsdp2(bf16, fp32, output_dtype=fp32))
try:
    fsdp2(bf16, fp32, cast_forward_inputs=False)(torch.randn(8, 16, device=device))
except RuntimeError as error:
    print("without the cast:", error)

# %% [markdown]
# `torch.autocast` is another way to compute in bf16. It casts the inputs of single operations, such as
# matmul, and knows nothing of FSDP. Here it is around the forward pass of a model without a policy.

# %%
# %%ranks
by_autocast = probed(fsdp2(None), context=lambda: torch.autocast(device.type, bf16))

# %% jupyter={"source_hidden": true}
draw_dtypes(
    {
        "policy": by_fsdp2["bf16, reduce fp32"],
        "policy, output fp32": ranks.get("with_output")[0],
        "autocast": ranks.get("by_autocast")[0],
    }
)

# %% [markdown]
# With autocast the matmuls are bf16 as well. But the all-gather sends fp32, twice the bytes, because autocast
# casts each weight after the all-gather. That is the second accident. With FSDP, use the policy.

# %% tags=["check"]
# %%ranks 0
assert with_output == {**mixed, "output": "float32"}
assert by_autocast["matmul, forward"] == by_autocast["matmul, backward"] == "bfloat16"
assert by_autocast["all-gather, forward"] == by_autocast["reduce-scatter, backward"] == "float32"
print("Checked: output_dtype changes the output alone; autocast leaves both collectives in fp32.")

# %% [markdown]
# ## Your turn 1 · What is bf16, and should not be?
#
# Here are five models. Some of them were set up wrongly: their parameters are bf16 at rest, or the reduction
# is, or AdamW's moments are, even if only in one layer. Write a function that finds out. `low(model,
# optimizer, step)` returns a set with those of the words `"parameters"`, `"reduction"`, `"moments"` that
# apply. `step()` runs a forward and a backward pass. The optimizer has its state already; the moment of a
# parameter `p` is `optimizer.state[p]["exp_avg"]`. In the five models there are six faults. Every rank calls
# your function, and should return the same answer.
#
# Edit the next cell, then run it and the folded cells below it.
#
# <details><summary>Hint</summary>
#
# Parameters and moments are tensors that you can look at; look at all of them. The reduction is over when
# `step()` returns, and leaves no trace in `.grad`. So watch it: `with Probe() as probe:`, then
# `probe.dtypes("reduce-scatter")`.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def low(model, optimizer, step):
    return None                     # your lines here; return a set of words


# %% jupyter={"source_hidden": true}
# %%ranks
def set_up(made_in=fp32, down=None, down_reduce=fp32, moments=None):
    """A model whose layer `down` is a unit of its own, after one step: it, its optimizer, and a step."""
    model = build().to(made_in)
    model.gain = model.gain.float()
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


def score_low(low):
    missed = false = 0
    for options, expected in MODELS.values():
        answer = low(*set_up(**options))
        if answer is None:
            return None
        missed += len(expected - set(answer))
        false += len(set(answer) - expected)
    return {"faults found": 6 - missed, "false alarms": false}

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_low(low)",
    {
        "faults found": exactly(
            6,
            otherwise="Some faults were not found. One layer alone can be bf16, so look at all parameters "
            "and all moments; and .grad does not tell in which dtype it was added up.",
        ),
        "false alarms": exactly(
            0,
            otherwise="You reported something that is fp32, or should be bf16, such as a gathered parameter.",
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
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

# %% tags=["wrong"] turn=1
# %%ranks
def low(model, optimizer, step):                    # .grad does not tell how it was added up
    step()
    found = set()
    if any(p.dtype == bf16 for p in model.parameters()):
        found.add("parameters")
    if any(p.grad.dtype == bf16 for p in model.parameters()):
        found.add("reduction")
    if any(state["exp_avg"].dtype == bf16 for state in optimizer.state.values()):
        found.add("moments")
    return found

# %% tags=["wrong"] turn=1
# %%ranks
def low(model, optimizer, step):                    # the first parameter alone
    found = set()
    with Probe() as probe:
        step()
    p = next(model.parameters())
    if p.dtype == bf16:
        found.add("parameters")
    if bf16 in probe.dtypes("reduce-scatter"):
        found.add("reduction")
    if optimizer.state[p]["exp_avg"].dtype == bf16:
        found.add("moments")
    return found

# %% tags=["wrong"] turn=1
# %%ranks
def low(model, optimizer, step):                    # what is gathered is meant to be bf16
    found = set()
    with Probe() as probe:
        step()
    if bf16 in probe.dtypes("all-gather"):
        found.add("parameters")
    if bf16 in probe.dtypes("reduce-scatter"):
        found.add("reduction")
    if any(state["exp_avg"].dtype == bf16 for state in optimizer.state.values()):
        found.add("moments")
    return found

# %% tags=["wrong"] turn=1
# %%ranks
def low(model, optimizer, step):
    return {"parameters", "reduction", "moments"}

# %% tags=["wrong"] turn=1
# %%ranks
def low(model, optimizer, step):
    return set()

# %% [markdown]
# ## What adding up in bf16 costs
#
# bf16 has 8 significant bits. If you add many numbers of about the same size, each addition rounds. Here each
# rank has 65,536 gradients of about 1. A real all-reduce in bf16 adds them up, over 2 and over all ranks. For
# more ranks than this lesson starts, one process computes the sum, in two orders: in a **chain**, one rank
# after the other, and in **pairs**, then pairs of pairs, and so on.

# %% jupyter={"source_hidden": true}
# %%ranks
def gradient(r):
    return 1 + 0.1 * torch.randn(2**16, generator=torch.Generator().manual_seed(r))


def error(total, n):
    """Relative, root mean square, against the sum in fp64 of what the ranks have in bf16."""
    exact = sum(gradient(r).to(bf16).double() for r in range(n))
    return float((total.double().cpu() / exact - 1).square().mean().sqrt())


# %% tags=["reduction"]
# %%ranks
def chain(numbers):
    total = numbers[0].clone()
    for number in numbers[1:]:
        total += number
    return total


def in_pairs(numbers):
    while len(numbers) > 1:
        numbers = [a + b for a, b in zip(numbers[::2], numbers[1::2])]
    return numbers[0]


errors = {}
for n in (2, 4, 8, 16, 32, 64):
    low16 = [gradient(r).to(bf16) for r in range(n)]
    in_fp32 = chain([number.float() for number in low16])
    errors[n] = [error(total, n) for total in (chain(low16), in_pairs(low16), in_fp32)]

# %% jupyter={"source_hidden": true}
# %%ranks
measured = {}
pair = dist.new_group([0, 1])
for n, group in {2: pair, world: None}.items():
    if rank < n:
        total = gradient(rank).to(bf16).to(device)
        dist.all_reduce(total, group=group)
        measured[n] = error(total, n)

# %% jupyter={"source_hidden": true}
errors = ranks.get("errors")[0]
fig, (axes,) = plots.figure(width=7.0, height=2.8)
for index, label in enumerate(("bf16, in a chain", "bf16, in pairs", "fp32, in a chain")):
    values = [100 * error[index] for error in errors.values()]
    axes.plot(list(errors), values, "o-", color=plots.RANK_COLORS[(1, 2, 4)[index]], label=label)
axes.set_xscale("log", base=2)
axes.set_xticks(list(errors), list(errors))
axes.set_ylim(bottom=-0.02)
axes.set(xlabel="ranks (simulated)", ylabel="error of the sum, %")
axes.legend()
plots.show(fig, alt="The error of a sum in bf16 grows with the number of ranks in a chain, not in pairs.")

# %% jupyter={"source_hidden": true}
Table(
    ["a real all-reduce in bf16", "error of the sum"],
    [[f"over {n} ranks", f"{100 * error:.2f}%"] for n, error in ranks.get("measured")[0].items()],
)

# %% [markdown]
# In a chain the error grows with the number of ranks, from 0.25% for 4 to 0.68% for 64: the running sum gets
# large, and each addition rounds it to 8 bits. In pairs it hardly grows: a number passes through few
# additions, 6 for 64 ranks. The real all-reduce over four ranks has the error of the chain. A ring, the usual
# way of a reduce-scatter, is a chain: a piece travels from rank to rank, and each adds its own. In fp32 these
# sums are exact, because numbers of 8 bits leave 16 of its 24 bits to spare. That is why
# `reduce_dtype=torch.float32` is a common choice beside `param_dtype=torch.bfloat16`: the reduction sends
# twice the bytes, and in return loses next to nothing in rounding.

# %% tags=["check"]
# %%ranks 0
assert errors[64][0] > 2 * errors[4][0]
assert errors[64][1] < 1.3 * errors[4][1]
assert errors[64][2] == 0
print("Checked: in a chain the error of 64 is over twice that of 4, in pairs under 1.3 times; in fp32 none.")

# %% [markdown]
# ## fp16, and its scaler
#
# fp16 has 11 significant bits but a narrow range: a number smaller than about 3e-8 becomes 0, and one of
# 65,520 or more becomes infinite.

# %%
# %%ranks
small = torch.tensor(1e-8)
print(f"1e-8 in bf16: {small.to(bf16).item():.1e} · in fp16: {small.to(fp16).item():.1e}")

# %% [markdown]
# So the loss is multiplied by a large number before backward, the **scale**, and the gradients are divided by
# it before the step. A **gradient scaler** does both. If a gradient is infinite or NaN, the scaler skips the
# step and halves the scale.

# %%
# %%ranks
x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)).to(device)


def train_fp16(model, scaler, broken=None, steps=3):
    """Losses, and the steps that changed the weights. In step `broken`, rank 1 has an infinite gradient."""
    optimizer, losses, moved = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), x)
        scaler.scale(loss).backward()
        if step == broken and rank == 1:
            spoil(model)
        before = [local(p).detach().clone() for p in model.parameters()]
        scaler.step(optimizer)                       # divides by the scale, and looks for infinities
        scaler.update()
        moved.append(any(not torch.equal(a, local(b)) for a, b in zip(before, model.parameters())))
        losses.append(loss.item())
    return losses, moved, scaler.get_scale()


# %% jupyter={"source_hidden": true}
# %%ranks
from torch.distributed.tensor import DTensor


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spoil(model):
    """One infinity in this rank's shard of the gradients."""
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    next(grad for grad in grads if grad.numel()).view(-1)[0] = float("inf")


# %% [markdown]
# With FSDP one case needs care: **one** rank finds an infinity in its shard. All ranks have to skip that
# step, or their shards no longer belong to one model. Three combinations, three steps each, the infinity in
# step 2:

# %%
# %%ranks
ways = {
    "FSDP2, GradScaler": (fsdp2, torch.amp.GradScaler),
    "FSDP1, ShardedGradScaler": (fsdp1, ShardedGradScaler),
    "FSDP1, GradScaler": (fsdp1, torch.amp.GradScaler),
}
by_scaler = {
    way: train_fp16(shard(fp16, fp32), scaler(device.type, init_scale=2.0**10), broken=1)
    for way, (shard, scaler) in ways.items()
}

# %% jupyter={"source_hidden": true}
by_scaler = ranks.get("by_scaler")
rows = []
for way in by_scaler[0]:
    stepped = [rank for rank, found in enumerate(by_scaler) if found[way][1][1]]
    scales = [f"{found[way][2]:.0f}" for found in by_scaler]
    rows.append([way, ", ".join(map(str, stepped)) or "none", ", ".join(scales)])
HEAD = ["", "ranks that took step 2", "scale after step 3, by rank"]
Table(HEAD, rows, note="At the beginning the scale is 1024.")

# %% [markdown]
# With FSDP2, torch's own `GradScaler` does the right thing: the gradients are DTensors, and for a DTensor
# PyTorch combines what all ranks found (`found_inf_reduce_handler` in
# `torch/distributed/tensor/_dispatch.py`). FSDP1 needs `ShardedGradScaler` for that. In the last row the
# ranks did not ask each other: rank 1 skipped the step, the others took it, and from there on the shards
# belong to different models, without an error. (A CPU cannot show speed: it has no tensor cores.)

# %% tags=["check"]
# %%ranks 0
right = [by_scaler[way] for way in ("FSDP2, GradScaler", "FSDP1, ShardedGradScaler")]
for losses, moved, scale in right:
    assert moved == [True, False, True]
    assert scale == 2.0**9
    assert losses[-1] < losses[0]
torch.testing.assert_close(right[0][0], right[1][0], rtol=1e-2, atol=1e-3)
assert by_scaler["FSDP1, GradScaler"][1] == [True, True, True]
print("Checked: two of three leave out step 2 on all ranks, with losses alike; with the third they diverge.")

# %% [markdown]
# ## What is saved, and what it is loaded into
#
# The policy does not change what is saved; the model's own dtype does. A model that is loaded in bf16, as
# pretrained models often are, stays in bf16 at rest, and with it everything that the optimizer keeps. That is
# the third accident, because small steps do not change a weight in bf16:

# %%
# %%ranks
def fsdp2_of_bf16():
    return fully_shard(build().to(bf16), mp_policy=MixedPrecisionPolicy(bf16, fp32))


arrived = probed(fsdp2_of_bf16())
weight = torch.ones((), dtype=bf16)
for _ in range(1000):
    weight -= 0.001
print("a bf16 weight of 1, after a thousand steps of -0.001:", weight.item())

# %% jupyter={"source_hidden": true}
draw_dtypes({"made in fp32": by_fsdp2["bf16, reduce fp32"], "made in bf16": ranks.get("arrived")[0]})

# %% [markdown]
# Just below 1, two neighbouring numbers in bf16 are 0.004 apart: a step of less than half of that is rounded
# away, each time. So make the model fp32 before you shard it: `model.float()`. Accelerate does that for FSDP
# when its mixed precision is on, for what requires a gradient (not for DDP); what it then saves of these
# weights is fp32, twice the size of what was loaded.
#
# Now the other way round: a checkpoint in fp32, and a model in bf16 that is to load it. PyTorch's `dcp.load`
# casts and does not say so. `load_distributed` refuses, unless you pass `cast=True`.

# %% jupyter={"source_hidden": true}
# %%ranks
import shutil
import tempfile
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp_utils import CheckpointError, load_distributed, save_distributed

shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared, src=0)
folder = Path(shared[0])


def empty():
    """A model in bf16 whose weights are all 0."""
    model = fsdp2_of_bf16()
    for p in model.parameters():
        p.detach().zero_()
    return model


def loaded(model):
    """Does it hold what was saved, rounded to bf16?"""
    pairs = zip(model.parameters(), trained.parameters())
    return all(torch.equal(low.to_local(), high.to_local().to(bf16)) for low, high in pairs)


# %%
# %%ranks
trained = fsdp2(bf16, fp32)
save_distributed(folder / "ours", trained, step=1)
dcp.save(get_model_state_dict(trained), checkpoint_id=folder / "plain")

by_dcp, by_ours = empty(), empty()
dcp.load(get_model_state_dict(by_dcp), checkpoint_id=folder / "plain")     # fp32 into bf16: no word
try:
    load_distributed(folder / "ours", by_ours)
except CheckpointError as error:
    refusal = str(error).partition("\n")[2].strip()                        # the first line names the folder
    print(refusal)
untouched = not loaded(by_ours)
state = load_distributed(folder / "ours", by_ours, cast=True)

# %% tags=["check"]
# %%ranks
moments = ("parameters, at rest", ".grad after backward", "AdamW's moments", "state dict")
assert {arrived[moment] for moment in moments} == {"bfloat16"}
assert weight == 1.0
assert loaded(by_dcp)
assert untouched
assert loaded(by_ours)
assert "cast=True" in refusal
dist.barrier()
if rank == 0:
    shutil.rmtree(folder)
print("Checked: dcp.load casts, load_distributed refuses and loads nothing, with cast=True it casts.")

# %% [markdown]
# The refusal names the tensors, the model's dtype, the checkpoint's dtype, and what to do if you want the
# cast.
#
# ## Your turn 2 · Mixed precision by hand
#
# Write what FSDP2 does with `param_dtype=bf16` and `reduce_dtype=fp32`, for a model that every rank holds
# completely. `my_backward(master, x)` gets a model in fp32 and this rank's samples. It computes the loss
# `F.mse_loss(output.float(), x)` with a bf16 copy of the model, and gives each parameter of `master` its
# gradient: the mean over the ranks of the bf16 gradients, added up in fp32. It returns the loss. The
# optimizer's step is done for you.
#
# The target is strict: over 8 steps the same losses and the same gradients as FSDP2. Edit the next cell, then
# run it and the folded cells below it.
#
# <details><summary>Hint</summary>
#
# `copy.deepcopy(master).to(bf16)` is a copy in bf16, and so is `build().to(bf16)` with the values copied.
# (`master.to(bf16)` is not: it changes `master`.) The copy's parameters come in the same order as the
# master's. Cast each gradient before `dist.all_reduce`, which adds up, and divide by `world` afterwards.
#
# </details>

# %% tags=["exercise"]
# %%ranks
import copy


def my_backward(master, x):
    return None     # your lines here; set p.grad for p in master.parameters(), and return the loss


# %% jupyter={"source_hidden": true}
# %%ranks
def train_sharded(dtype, reduce, steps=8):
    """The losses, and the complete gradients, of training with FSDP2."""
    model = fsdp2(dtype, reduce)
    optimizer, losses, grads = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    for _ in range(steps):
        loss = F.mse_loss(model(x).float(), x)
        loss.backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, grads


by_policy, grads_of_policy = train_sharded(bf16, fp32)


def score_backward(my_backward):
    master, autocast = build(), []
    master.register_forward_pre_hook(lambda *_: autocast.append(torch.is_autocast_enabled(x.device.type)))
    optimizer, losses, other = torch.optim.AdamW(master.parameters(), lr=1e-2), [], 0
    for step in range(8):
        loss = my_backward(master, x)
        if loss is None:
            return None
        for p, wanted in zip(master.parameters(), grads_of_policy[step]):
            other += p.grad is None or not torch.allclose(p.grad.float(), wanted, rtol=1e-3, atol=2e-6)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.as_tensor(loss).item())
    return {
        "losses that differ": sum(not abs(a - b) <= 2e-5 for a, b in zip(losses, by_policy)),
        "gradients that differ": other,
        "dtype of the weights that are kept": names(master.parameters()),
        "forward passes under autocast": sum(autocast),
        "losses": losses,
    }

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_backward(my_backward)",
    {
        "losses that differ": exactly(
            0, otherwise="Some losses differ: is the copy in bf16, made anew in each step, and its input too?"
        ),
        "gradients that differ": exactly(
            0,
            otherwise="Some gradients differ: add up in fp32, over all ranks, and divide by the number of "
            "ranks.",
        ),
        "dtype of the weights that are kept": exactly(
            "float32", otherwise="The master is no longer fp32: `.to(bf16)` changes a module itself."
        ),
        "forward passes under autocast": exactly(
            0, otherwise="Autocast casts for each operation anew. Compute with a bf16 copy, without autocast."
        ),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def my_backward(master, x):
    low = copy.deepcopy(master).to(bf16)
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    loss.backward()
    for small, high in zip(low.parameters(), master.parameters()):
        high.grad = small.grad.float()              # fp32 first, then the sum
        dist.all_reduce(high.grad)
        high.grad /= world
    return loss

# %% tags=["wrong"] turn=2
# %%ranks
def my_backward(master, x):                         # all in fp32
    loss = F.mse_loss(master(x), x)
    loss.backward()
    for p in master.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    return loss

# %% tags=["wrong"] turn=2
# %%ranks
def my_backward(master, x):                         # adds up in bf16
    low = copy.deepcopy(master).to(bf16)
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    loss.backward()
    for small, high in zip(low.parameters(), master.parameters()):
        dist.all_reduce(small.grad)
        high.grad = small.grad.float() / world
    return loss

# %% tags=["wrong"] turn=2
# %%ranks
def my_backward(master, x):                         # the sum
    low = copy.deepcopy(master).to(bf16)
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    loss.backward()
    for small, high in zip(low.parameters(), master.parameters()):
        high.grad = small.grad.float()
        dist.all_reduce(high.grad)
    return loss

# %% tags=["wrong"] turn=2
# %%ranks
def my_backward(master, x):                         # of this rank alone
    low = copy.deepcopy(master).to(bf16)
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    loss.backward()
    for small, high in zip(low.parameters(), master.parameters()):
        high.grad = small.grad.float()
    return loss

# %% tags=["wrong"] turn=2
# %%ranks
def my_backward(master, x):                         # the master is bf16 from here on
    loss = F.mse_loss(master.to(bf16)(x.to(bf16)).float(), x)
    loss.backward()
    for p in master.parameters():
        total = p.grad.float()
        dist.all_reduce(total)
        p.grad = (total / world).to(bf16)
    return loss

# %% tags=["wrong"] turn=2
# %%ranks
def my_backward(master, x):                         # autocast, without a copy
    with torch.autocast(x.device.type, dtype=bf16):
        loss = F.mse_loss(master(x).float(), x)
    loss.backward()
    for p in master.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    return loss

# %% tags=["wrong"] turn=2
# %%ranks
def my_backward(master, x):                         # fp16
    low = copy.deepcopy(master).to(fp16)
    loss = F.mse_loss(low(x.to(fp16)).float(), x)
    loss.backward()
    for small, high in zip(low.parameters(), master.parameters()):
        high.grad = small.grad.float()
        dist.all_reduce(high.grad)
        high.grad /= world
    return loss

# %% tags=["check"]
try_answers(7)

# %% [markdown]
# How strict is the target? These are the losses of FSDP2 under three policies, of the solution, and yours:

# %%
# %%ranks
losses_of = {
    "FSDP2, bf16, reduce fp32": by_policy,
    "FSDP2, bf16, reduce bf16": train_sharded(bf16, bf16)[0],
    "FSDP2, no policy": train_sharded(None, None)[0],
}

# %% tags=["equality", "nbval-ignore-output"] jupyter={"source_hidden": true}
losses_of = ranks.get("losses_of")[0]
losses_of["by hand"] = run_solution(7, 2)[0]["losses"]
if mine := yours(2, "losses"):
    losses_of["yours"] = mine[0]
Table(
    ["loss of rank 0 at step", "1", "2", "4", "8"],
    [[way, *(f"{losses[step - 1]:.5f}" for step in (1, 2, 4, 8))] for way, losses in losses_of.items()],
)

# %% [markdown]
# By hand and by FSDP2 the losses are the same in all digits shown. The other policies differ in the third to
# the fifth decimal place. (At step 1 a reduction in bf16 makes no difference yet: the loss is computed before
# the first reduction.) Over a few steps such a difference hardly matters for training, but it fails the
# target.

# %% tags=["check"]
assert max(abs(a - b) for a, b in zip(losses_of["by hand"], losses_of["FSDP2, bf16, reduce fp32"])) < 2e-5
for way in ("FSDP2, bf16, reduce bf16", "FSDP2, no policy"):
    assert max(abs(a - b) for a, b in zip(losses_of[way], losses_of["FSDP2, bf16, reduce fp32"])) > 5e-5
print("Checked: by hand as FSDP2 to 0.00002; with another policy not to 0.00005.")

# %% [markdown]
# ## Can this machine train in bf16?
#
# `torch.cuda.is_bf16_supported()` is True also where bf16 is only emulated. `bf16_support` asks for the
# hardware, and tries a real all-reduce over all ranks. Its answer depends on your machine:

# %% tags=["nbval-ignore-output"]
# %%ranks
from fsdp_utils import bf16_support

support = bf16_support(device)
if rank == 0:
    print(support)
assert support.ready == (support.compute == "native" and support.network is not False)

# %% [markdown]
# What would it say on other machines? The next cell gives the same function the facts about some GPUs. **No
# GPU is measured here.**

# %% tags=["checker"]
from fsdp_utils.precision.facts import DeviceFacts, judge

gpus = {"Tesla V100": (7, 0), "Tesla T4": (7, 5), "A100": (8, 0), "L4": (8, 9), "H100": (9, 0)}
judged = {gpu: judge(DeviceFacts("cuda", gpu, capability=found)) for gpu, found in gpus.items()}

# %% jupyter={"source_hidden": true}
Table(
    ["device", "bf16", "why"],
    [[gpu, answer, reasons[0].split(" (")[0]] for gpu, (answer, reasons) in judged.items()],
)

# %% tags=["check"]
assert [gpu for gpu, (answer, _) in judged.items() if answer == "native"] == ["A100", "L4", "H100"]
print("Checked: native from compute capability 8.0 on.")

# %% [markdown]
# The two older GPUs can hold bf16 tensors, but have no units that compute with them.
#
# ## When it goes wrong
#
# - **`mat1 and mat2 must have the same dtype`.** The input is fp32 and the gathered weights are bf16, as with
#   `cast_forward_inputs=False` above, or `forward` made a tensor in fp32 itself, or used a buffer without a
#   cast. Cast the tensor to the dtype of the weights.
# - **The loss is worse with more ranks.** One cause: `reduce_dtype` is missing, so gradients are added up in
#   bf16, as in the third row of *FSDP2*. Set `reduce_dtype=torch.float32`.
# - **The loss stops falling early, with a small learning rate.** The model was made or loaded in bf16, and
#   small steps are rounded away, as in *What is saved*. Call `model.float()` before sharding.
# - **With fp16 and FSDP1 the ranks diverge.** `torch.amp.GradScaler` looks at its own rank only, as in *fp16,
#   and its scaler*. Use `ShardedGradScaler`, or FSDP2.
# - **The all-gather is not faster than in fp32.** bf16 comes from `torch.autocast`, not from the policy, as
#   in *Inputs, outputs and autocast*.
# - **`CheckpointError` that names dtypes.** The checkpoint has another dtype than the model. Pass `cast=True`
#   if you want the cast.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    7,
    {
        "precision-control": "Yes: the probe sees each of the three dtypes where it was asked for. FSDP2 has "
        "none for buffers.",
        "precision-speed": "Not measured: the speed of a CPU says nothing about that of a GPU.",
        "precision-4x": "Not measured: the speed of a CPU says nothing about that of a GPU.",
        "precision-fp16": "Not measured: see above.",
        "precision-gradients": "Half: the backward's matmuls are bf16; the sharded .grad is fp32.",
        "precision-checker": "`bf16_support` checks both, and says why not.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - At rest everything has the dtype in which the model was made: parameters, `.grad`, moments, state dict.
#   Make it fp32.
# - `param_dtype` is what is gathered and computed in, forward and backward.
# - `reduce_dtype` is what gradients are added up in. If you leave it out, it is `param_dtype`. In bf16 the
#   error of a sum around a ring grows with the number of ranks.
# - fp16 needs a scaler whose decision is the same on all ranks: `GradScaler` with FSDP2, `ShardedGradScaler`
#   with FSDP1.
# - Ask `bf16_support` before you rely on bf16.
#
# ## Next
#
# What a rank has trained has to be on a disk before the rank is lost. When no rank can hold the complete
# model, every rank writes its own part: [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb).
#
# [← lesson 6](06_sharding_strategies.ipynb) ·
# [lesson 8 →](08_local_state_dict_and_distributed_checkpoints.ipynb)
