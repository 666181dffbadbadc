# %% [markdown]
# # 7 · Mixed precision
#
# Which tensor has which dtype in a training step, and does bf16 lose anything? **Keep the model in float32,
# give `fully_shard` a `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`, and
# leave autocast off.**
#
# Matrix products, activations and all-gathers then run in bf16, at half the bytes. The weights, the optimizer's
# state and the sums of gradients stay in float32. On the H200 below a step is 4.3 times as fast as in PyTorch's
# default fp32, and this lesson's small model keeps the loss of its fp32 run to three decimals.
#
# Two mistakes raise no error: a model made in bf16, and a missing `reduce_dtype`. You measure what each costs.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots, recorded
from fsdp_utils.lessons.tables import Table

MOMENTS = ("shards at rest", "all-gather", "forward matmul", "norm, softmax", "activation", "output",
           "loss", "backward matmul", "reduce-scatter", ".grad", "AdamW's moments")
COLORS = {"fp32": plots.RANK_COLORS[4], "bf16": plots.RANK_COLORS[1], "fp16": plots.RANK_COLORS[3]}

def draw_dtypes(ways):
    """One row for each way to train, one column for each moment of a step; a frame: not as in the first row."""
    fig, (axes,) = plots.figure(width=9.8, height=max(1.6, 0.8 + 0.42 * len(ways)))
    first = next(iter(ways.values()))
    for y, found in enumerate(ways.values()):
        for x, moment in enumerate(MOMENTS):
            edge = "none" if found[moment] == first[moment] else plots.INK
            dtype = found[moment].replace("bfloat", "bf").replace("float", "fp")
            axes.barh(y, 0.94, left=x - 0.47, height=0.8, color=COLORS.get(dtype, plots.FAINT), edgecolor=edge, linewidth=2)
            axes.text(x, y, dtype, ha="center", va="center", fontsize=9, color=plots.INK)
    axes.set_yticks(range(len(ways)), list(ways))
    labels = [moment.replace(" ", "\n").replace("-", "-\n").replace("at\n", "at ") for moment in MOMENTS]
    axes.set_xticks(range(len(MOMENTS)), labels, fontsize=8)
    axes.xaxis.tick_top()
    if len(ways) == 1:                               # where FSDP casts
        for ends in ((0.5, 5.5), (6.5, 7.5)):
            axes.annotate("", *((x, 0.62) for x in ends), arrowprops={"arrowstyle": "|-|", "color": plots.INK})
        for x, words in ((0.5, "cast"), (3, "inside a unit of FSDP"), (6, ".float()"), (7.5, "cast")):
            axes.text(x, 0.95, words, ha="center", va="center", fontsize=9, color=plots.INK)
    axes.set(xlim=(-0.55, len(MOMENTS) - 0.45), ylim=(1.15 if len(ways) == 1 else len(ways) - 0.4, -0.6))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return plots.show(fig, alt=f"Dtypes at each moment of a step, for {', '.join(ways)}.")

in_bf16 = {*MOMENTS[1:6], "backward matmul"}
expected = {moment: "bfloat16" if moment in in_bf16 else "float32" for moment in MOMENTS}
draw_dtypes({"one step": expected})

# %% [markdown]
# This is one training step under that policy; fp32 is float32, and the square of an operation shows the dtype of its
# input. A rank keeps its **shard**, its part of every parameter, in fp32. FSDP casts the shard to bf16 before the
# all-gather, runs forward and backward in bf16, and casts the gradients back to fp32 before the reduce-scatter
# averages them over the ranks. From there to the optimizer everything is fp32. The loss is your script's part:
# `.float()` on the output keeps it from being rounded to bf16.
#
# **bf16** (bfloat16) has the range of fp32 in 16 bits, but only 8 significant bits where fp32 has 24. Matrix
# products, norms and softmax get along with that, because their kernels add up in fp32 before they round.
#
# A sum that is rounded to bf16 after each addition does not: a small number added to a large one can vanish.
# Training has three sums of that kind, and this lesson measures each: gradients over ranks, gradients over
# micro-batches, and updates onto a weight.

# %% tags=["card"]
lesson.card(
    7,
    learn="set the dtypes of a step, notice a wrong one, and know where bf16 loses digits",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 20, 18),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains the same model in four ways. For each
# it prints the bytes of the last step's collectives, the last loss, and how many of rank 0's weights have moved.
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
# fp32, bf16 = torch.float32, torch.bfloat16
# ways = {                                                     # the policy, and the dtype of the model
#     "float32": (MixedPrecisionPolicy(), fp32),
#     "bf16, reduced in fp32": (MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32), fp32),
#     "bf16, no reduce_dtype": (MixedPrecisionPolicy(param_dtype=bf16), fp32),
#     "model made in bf16": (MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32), bf16),
# }
# for name, (policy, made_in) in ways.items():
#     torch.manual_seed(0)                                     # the same weights on every rank
#     model = nn.Sequential(*[nn.Linear(256, 256, device=device, dtype=made_in) for _ in range(8)])
#     for part in [*model, model]:
#         fully_shard(part, mesh=mesh, mp_policy=policy)       # the same policy for each unit
#     before = [p.to_local().clone() for p in model.parameters()]
#     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
#     torch.manual_seed(1 + dist.get_rank())                   # other samples on each rank
#     for step in range(10):
#         x = torch.randn(32, 256, device=device)              # your data, in float32: the policy casts it
#         with record_collectives(model) as trace:             # notes each collective and its bytes
#             loss = (model(x).float() - x).square().mean()    # the loss in float32
#             loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     moved = torch.cat([(p.to_local() != old).flatten() for p, old in zip(model.parameters(), before)])
#     if dist.get_rank() == 0:
#         sent = trace.bytes_by_kind()
#         gathered, reduced = (sent[kind] / 2**20 for kind in ("all_gather", "reduce_scatter"))
#         print(f"{name:21} gathers {gathered:.1f} MiB, reduces {reduced:.1f} MiB, "
#               f"loss {loss.item():.2f}, {moved.float().mean():.0%} of the weights moved")
# dist.destroy_process_group()
# ```
# ```text
# float32               gathers 4.0 MiB, reduces 2.0 MiB, loss 1.00, 100% of the weights moved
# bf16, reduced in fp32 gathers 2.0 MiB, reduces 2.0 MiB, loss 1.00, 100% of the weights moved
# bf16, no reduce_dtype gathers 2.0 MiB, reduces 1.0 MiB, loss 1.00, 100% of the weights moved
# model made in bf16    gathers 2.0 MiB, reduces 2.0 MiB, loss 1.00, 6% of the weights moved
# ```
#
# **4.0 and 2.0 in the first row.** The eight layers have 526,336 parameters, which take 2.0 MiB in float32. A
# step gathers each layer twice, for forward and again for backward, and reduces each gradient once.
#
# **The next two rows.** `param_dtype=torch.bfloat16` halves what is gathered. `reduce_dtype=torch.float32` keeps
# the reduction at 2.0 MiB. Without it, FSDP reduces in the dtype of the gradients, which is bf16, and that
# number is halved too. So the fp32 reduction costs 4.0 instead of 3.0 MiB a step.
#
# **The last row** has the bytes and the loss of the right one, but 94 of 100 weights have not moved. A wrong dtype
# stays unnoticed until you look at the dtypes themselves.
#
# ## What you gain
#
# Fewer bytes are one gain. The larger one is arithmetic: a GPU's tensor cores multiply bf16 matrices many times
# faster than its other cores multiply fp32 ones. The table shows one H200, the only rank, that trains a Llama of 0.95
# billion parameters with two sequences of 2,048 tokens (FSDP2 with `param_dtype` alone, torch 2.11). The fp32 row is
# PyTorch's default, without TF32; if you train with TF32 today, you gain less.

# %% tags=["on-a-gpu"] jupyter={"source_hidden": true}
runs = {row["setting"]: row for part in ("planner", "selective") for row in recorded.load(part)["results"]["rows"]}
fp32, bf16 = runs["1 ranks, 16 layers of width 2048, 2 samples of 2048 tokens, strategy full, fp32, checkpointing None"], runs["none, eager, batch of 2"]
table = [["fp32", fp32["step_s"][1], fp32["peak_allocated_gib"][1]],                  # [planned, measured]
         ["bf16, model in fp32", bf16["step_s"], bf16["peak_allocated_gib"]]]
assert (f"{table[0][1] / table[1][1]:.1f}", f"{16 * 0.95e9 / 2**30:.1f}") == ("4.3", "14.2")
Table(["on one H200", "seconds a step", "GiB at the peak"], [[way, f"{s:.3f}", f"{g:.1f}"] for way, s, g in table])

# %% [markdown]
# The step is 4.3 times as fast. The memory falls by a fifth only: the policy halves most activations and the gathered
# copies, but not the 16 bytes that each parameter has in weight, gradient and AdamW's moments (4, 4 and 8), 14.2 GiB
# here. FSDP divides these by the number of ranks.
#
# ## Every moment of a step
#
# A policy acts at the borders of a **unit**, a module that you gave to `fully_shard`. Before the unit's
# forward, FSDP2 casts its shards and its inputs to `param_dtype`, then gathers. After the unit's backward it
# casts the gradients to `reduce_dtype`, reduces them, casts the result to the shard's own dtype and stores it
# as `.grad`. The shard's own dtype is the one in which you made the model: a policy never changes it.

# %%
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import contextlib
import copy
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
bf16, fp32 = torch.bfloat16, torch.float32

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x):                            # f32[batch, 16]
        return self.down(torch.softmax(self.norm(self.up(x)), -1))

def build():
    torch.manual_seed(0)
    return Net().to(device)

def sharded(param_dtype=None, reduce_dtype=None, made_in=fp32):
    return fully_shard(build().to(made_in), mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))

# %% [markdown]
# PyTorch can call an object of yours for each operation that it runs: a *dispatch mode*. `Probe` is one. While it is
# active, it notes the dtype that goes into each all-gather, reduce-scatter, matrix product, and norm or softmax.

# %%
# %%ranks
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils.lessons.meter import ALL_GATHERS, REDUCE_SCATTERS      # names of operations

class Probe(TorchDispatchMode):
    """Note in `seen` which dtypes go into each kind of operation."""

    def __init__(self):
        super().__init__()
        self.seen = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ALL_GATHERS:
            self.seen["all-gather"].add(args[1].dtype)                 # args: output, input, group, ...
        elif func.name() in REDUCE_SCATTERS:
            self.seen["reduce-scatter"].add(args[1].dtype)
        elif func.__name__.startswith(("mm.", "addmm.")):
            self.seen["matmul"].add(args[-1].dtype)
        elif func.__name__.startswith(("native_layer_norm.", "_softmax.")):
            self.seen["norm, softmax"].add(args[0].dtype)
        return func(*args, **(kwargs or {}))

# %% [markdown]
# The folded cell trains one step in each of four ways, and its `probed` returns the dtype at each moment: with two
# of the script's policies, with `torch.autocast` in place of a policy, and with a model that was made in bf16. In the
# figure, a frame marks what differs from the first row. A guess before you look: where does the second row,
# without `reduce_dtype`, differ?

# %% tags=["dtypes"] jupyter={"source_hidden": true}
# %%ranks
def name(dtypes):
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in set(dtypes)))

def probed(model, context=contextlib.nullcontext):
    """Train one step, its forward in a context; return the dtype at each moment."""
    x, found, activations = torch.randn(8, 16, device=device), {}, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hook = model.up.register_forward_hook(lambda module, args, output: activations.append(output.dtype))
    found["shards at rest"] = name(p.dtype for p in model.parameters())
    with Probe() as forward, context():
        output = model(x)
        loss = F.mse_loss(output.float(), x)
    with Probe() as backward:
        loss.backward()
    hook.remove()
    for phase, seen in {"forward": forward.seen, "backward": backward.seen}.items():
        found |= {f"{phase} matmul" if what == "matmul" else what: name(dtypes) for what, dtypes in seen.items()}
    found |= {"activation": name(activations), "output": name([output.dtype]), "loss": name([loss.dtype])}
    found[".grad"] = name(p.grad.dtype for p in model.parameters())
    optimizer.step()
    found["AdamW's moments"] = name(state["exp_avg"].dtype for state in optimizer.state.values())
    return found

ways = {
    "bf16, reduced in fp32": probed(sharded(bf16, fp32)),
    "bf16, no reduce_dtype": probed(sharded(bf16)),
    "autocast, no policy": probed(sharded(), lambda: torch.autocast(device.type, bf16)),
    "policy, model made in bf16": probed(sharded(bf16, fp32, made_in=bf16)),
}

# %%
ways = ranks.get("ways")[0]
assert ways["bf16, reduced in fp32"] == expected
draw_dtypes(ways)

# %% [markdown]
# - **bf16, reduced in fp32** is the drawing at the top, now measured.
# - **bf16, no reduce_dtype** differs in one square. `.grad` is fp32 all the same, because FSDP casts the sum
#   after it was rounded. So `.grad.dtype` cannot tell you how the gradients were added up.
# - **autocast, no policy** gathers fp32, twice the bytes. Autocast casts a weight when an operation needs it,
#   and by then the all-gather is over.
# - **policy, model made in bf16**: weights, gradients and moments are bf16 for good. The policy casts for
#   computing only.
#
# ## Accelerate, transformers, and a norm in fp32
#
# Accelerate's `mixed_precision="bf16"` sets `reduce_dtype` and `output_dtype` to bf16 under FSDP2, unless you pass
# a policy of your own. From transformers 5 on, `from_pretrained` gives a model the dtype that its config names,
# which is often bf16: pass `dtype=torch.float32`.
#
# PyTorch's and transformers' norms get bf16 from the policy but calculate in fp32 inside, so most models need
# nothing more. If yours has a norm written by hand without `.float()`, make it a unit of its own, before the block
# around it, with `MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)`.
#
# ## What adding up in bf16 costs
#
# In the script, `reduce_dtype=torch.float32` sent 4.0 instead of 3.0 MiB. What do you get for the third more bytes?
# It is the dtype of two sums, and both are measured here.
#
# - **Over the ranks.** Each of 1, 8 or 64 simulated ranks has 16,384 gradients of about 1, cast to bf16, as backward
#   would leave them. One process adds them up one by one, as NCCL's ring does.
# - **Over micro-batches.** If you accumulate gradients with `set_requires_gradient_sync(False)`, FSDP2 adds up those
#   of 1, 8 or 64 micro-batches on each rank. This is real FSDP2 on the four ranks, with 4 samples in a micro-batch.
#
# The table has the error of the result, in percent of the same in float64. Look from left to right: does it grow?

# %% tags=["reduction"]
# %%ranks
def percent(total, exact):
    return f"{100 * float((total.double() - exact).norm() / exact.norm()):.2f}"

def one_by_one(numbers):
    total = numbers[0].clone()
    for number in numbers[1:]:
        total += number
    return total

def over_ranks(n, dtype):
    exact = [1 + 0.1 * torch.randn(2**14, generator=torch.Generator().manual_seed(r)) for r in range(n)]
    total = one_by_one([gradient.to(bf16).to(dtype) for gradient in exact])
    return percent(total, sum(gradient.double() for gradient in exact))

def accumulated(n, model, dtype):
    for i in range(n):
        model.set_requires_gradient_sync(i == n - 1)             # reduce after the last one only
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(world * i + rank)).to(device, dtype)
        F.mse_loss(model(x).to(dtype), x).backward()
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])

def over_micro_batches(n, reduce_dtype):
    exact = accumulated(n, sharded(made_in=torch.float64), torch.float64)
    return percent(accumulated(n, sharded(bf16, reduce_dtype), fp32), exact)

table = [[what, label, *(error(n, dtype) for n in (1, 8, 64))]
         for what, error, of in (("ranks (simulated)", over_ranks, {"in bf16": bf16, "in fp32": fp32}),
                                 ("micro-batches", over_micro_batches,
                                  {"no reduce_dtype": None, "reduce_dtype=fp32": fp32}))
         for label, dtype in of.items()]

# %%
Table(["added up over", "how", "1, %", "8", "64"], ranks.get("table")[0])

# %% [markdown]
# In fp32 what is left is the error that each gradient has from bf16; in the mean of more ranks or micro-batches these
# errors cancel in part. In bf16 each addition rounds again: 0.7% off with 64 ranks, 0.8% with 64 micro-batches.
# (The lower two rows differ at one micro-batch already, because four ranks' gradients are added up there.) So
# `reduce_dtype` matters on one GPU, too, if you accumulate.
#
# ## Why the model stays in fp32
#
# Subtract 0.001 from 1.0 in bf16 a thousand times, and it is still 1.0. The next smaller bf16 number is 1/256 away,
# and a step of less than half that distance is rounded away. (Near a weight *w* the distance is *w*/256 to *w*/128.)
#
# The third sum is training itself: each step adds a small update to each weight. Under AdamW that update is at most
# about as large as the learning rate: as large here, where each step has the same samples, and smaller where
# gradients are noisy.
#
# Does the loss show one of these sums? The folded `trained(lr, made_in, param_dtype, reduce_dtype)` trains the small
# model for 250 steps. One process plays 64 ranks with a sample each and casts by hand, as you will in turn 2. Watch
# whether the curves part (the axis is narrow: even fp32 falls by 2% only); then, in the table, how many weights have
# moved.

# %% tags=["loss"] jupyter={"source_hidden": true}
# %%ranks
from torch.func import functional_call, grad_and_value, vmap

samples = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)       # one for each rank

def trained(lr, made_in=fp32, param_dtype=bf16, reduce_dtype=fp32):
    """Return the loss at each step, and the share of the weights that have moved by then."""
    model = build().to(made_in)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def loss_of(weights, x):
        return F.mse_loss(functional_call(model, weights, (x.to(param_dtype),)).float(), x)

    on_each_rank, losses, shares = vmap(grad_and_value(loss_of), in_dims=(None, 0)), [], []
    for _ in range(250):
        gathered = {n: p.detach().to(param_dtype) for n, p in model.named_parameters()}
        gradients, loss = on_each_rank(gathered, samples)
        for n, p in model.named_parameters():
            p.grad = (one_by_one(gradients[n].to(reduce_dtype)) / len(samples)).to(p.dtype)
        optimizer.step()
        losses.append(loss.mean().item())
        moved = torch.cat([(p != old).flatten() for p, old in zip(model.parameters(), before)])
        shares.append(moved.float().mean().item())
    return losses, shares

settings = {"fp32": {"param_dtype": fp32}, "the policy": {}, "no reduce_dtype": {"reduce_dtype": bf16},
            "made in bf16": {"made_in": bf16}}
jobs = [(lr, way) for lr in (1e-5, 1e-4, 1e-3) for way in settings]
mine = {(lr, way): trained(lr, **settings[way]) for lr, way in jobs[rank::world]}      # each rank takes its part

# %% jupyter={"source_hidden": true}
of_jobs = {job: found for some in ranks.get("mine") for job, found in some.items()}
ways = ("fp32", "the policy", "no reduce_dtype", "made in bf16")
fig, (axes,) = plots.figure(width=7.5, height=2.8)
for way, color, width, dashes in zip(ways, plots.RANK_COLORS, (7, 3, 1.5, 2), ("-", "-", "--", "-")):
    axes.plot(of_jobs[1e-4, way][0], dashes, color=color, linewidth=width, label=way)
axes.set(xlabel="step, at a learning rate of 1e-4", ylabel="loss")
axes.legend(frameon=False, loc="lower left")
start, right, *_, made = (of_jobs[1e-4, way][0][at] for way, at in (("fp32", 0), ("fp32", -1), ("made in bf16", -1)))
assert f"{start:.3f}" == "1.084"
assert 0.17 < (start - made) / (start - right) < 0.21
plots.show(fig, alt="Loss over 250 steps: three ways fall together, the model made in bf16 stays up.")

# %% jupyter={"source_hidden": true}
moved = {lr: of_jobs[lr, "made in bf16"][1] for lr in (1e-5, 1e-4, 1e-3)}
Table(["learning rate", *(f"loss, {way}" for way in ways), "made in bf16: moved after 50 steps", "after 250"],
      [[f"{lr:g}", *(f"{of_jobs[lr, way][0][-1]:.{3 if lr < 1e-3 else 2}f}" for way in ways),
       *(f"{share:.{1 if share < 0.5 else 0}%}" for share in (shares[49], shares[-1]))]
      for lr, shares in moved.items()])

# %% [markdown]
# All start at 1.084, and under the policy the loss stays that of fp32. **Without `reduce_dtype`** it is, too: 250
# steps of this small model show nothing of sums that were rounded 63 times. So you cannot wait for the loss to tell
# you: the gradients are off by the table above. Keep the fp32 reduction unless you've seen it hold up your steps
# ([lesson 4](04_backward_prefetch.ipynb)).
#
# **Made in bf16** is the mistake that stops training at a small learning rate. At 1e-5, a learning rate of
# fine-tuning, the loss stays where it was; at 1e-4 it falls a fifth as far as in fp32. At 1e-3 the weights move in
# coarse steps, and the loss stays behind.
#
# More time does not help, because each step's update is rounded away on its own. After 50 steps at 1e-5, 5.5% of the
# weights have moved, those near zero, where bf16 numbers lie close together; after 250 steps it is still 5.5%.
#
# So load the model with `dtype=torch.float32`, or call `model.float()` before `fully_shard` (digits that were
# rounded away in loading do not come back). The price is 16 bytes for each parameter instead of 8, over all ranks
# together.
#
# ## Check your own model
#
# Two mistakes are silent: weights in bf16, and a reduction in bf16. `python -m fsdp_utils doctor train.py` watches
# the first three optimizer steps of your script and names both. Where the script above has only the last of its `ways`,
# and there no `reduce_dtype=fp32`, it answers (two lines, shortened):
#
# ```text
# error: bf16_masters. Trained parameters are held in 16 bits
# warning: bf16_reduce. Gradients are reduced in 16 bits
# ```
#
# In your own code two calls do it. `check_sharding`, given the optimizer, names weights that are bf16.
# `record_collectives` around one backward with a reduction gives the bytes that are reduced; divided by the trained
# parameters, they tell the dtype. Here these two calls look at a model in bf16 in which one unit lacks `reduce_dtype`.

# %%
# %%ranks
from fsdp_utils import check_sharding, record_collectives

model = build().to(bf16)
for part, reduce_dtype in ((model.up, fp32), (model.down, None), (model, fp32)):
    fully_shard(part, mp_policy=MixedPrecisionPolicy(bf16, reduce_dtype))
optimizer = torch.optim.AdamW(model.parameters())
with record_collectives(model) as trace:
    model(torch.randn(8, 16, device=device)).float().square().mean().backward()
parameters = sum(p.numel() for p in model.parameters())
if rank == 0:
    print(*check_sharding(model, optimizer), sep="\n")
    print(f"reduced: {trace.bytes_by_kind()['reduce_scatter'] / parameters:.2f} bytes for each parameter")

# %% [markdown]
# The sentence names the first mistake. The bytes show the second: in one backward each trained parameter is reduced
# once, so 4 bytes are fp32 and 2 are bf16. Anything between is a mixture: some units lack `reduce_dtype`.
#
# ## Without bf16
#
# An A100, an L4, an H100 and anything newer computes in bf16; a V100 and a T4 don't. `bf16_support` looks for the
# hardware, and tries a real all-reduce in bf16. (`torch.cuda.is_bf16_supported()` is also True where it is emulated.)

# %% tags=["checker", "nbval-ignore-output"]
# %%ranks
from fsdp_utils import bf16_support

support = bf16_support(device)
if rank == 0:
    print(str(support).splitlines()[0])              # the rest says why

# %% [markdown]
# On a GPU without bf16, take `param_dtype=torch.float16` with the same `reduce_dtype=torch.float32`, and a
# **scaler**, because in fp16 a gradient below half of its smallest number, 2⁻²⁴, becomes 0. The scaler multiplies the loss before
# backward, divides the gradients before the optimizer's step, and skips a step with gradients that aren't finite:
# `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`, with
# `scaler = torch.amp.GradScaler("cuda")` (under FSDP1 `ShardedGradScaler`, or the shards drift apart).
#
# ## Your turn 1 · What is bf16, and should not be?
#
# `faults(model, optimizer, step)` is called for five models; four of them have something in bf16 that should be fp32,
# perhaps in one layer only. Return a set of those of these three words that apply to the model:
#
# - `"parameters"`: a parameter is bf16 at rest
# - `"reduction"`: a reduce-scatter runs in bf16
# - `"moments"`: a moment of AdamW is bf16
#
# Calling `step()` runs one forward and one backward pass. The optimizer has taken a step already, so its moments
# exist, and you don't call `optimizer.step()`. `optimizer.state[p]["exp_avg"]` is a moment of the parameter `p`.
#
# <details><summary>Hint</summary>
#
# The reduction is over when `step()` returns, and `.grad` does not show its dtype. Watch it: call `step()`
# inside of `with Probe() as probe:`, and then look into `probe.seen["reduce-scatter"]`.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from functools import partial

from fsdp_utils.lessons.your_turn import NotYet, exactly, turn

def named(model, optimizer, step, **instead):
    """The words that apply; instead: where else to look for the dtypes of a word."""
    with Probe() as probe:
        step()
    found = {
        "parameters": {p.to_local().dtype for p in model.parameters()},
        "reduction": probe.seen["reduce-scatter"],
        "moments": {state["exp_avg"].dtype for state in optimizer.state.values()},
    }
    found |= {word: look(model, optimizer, probe.seen) for word, look in instead.items()}
    return [word for word, dtypes in found.items() if bf16 in dtypes]

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
        for which in ("exp_avg", "exp_avg_sq"):
            state[which] = state[which].to(moments)
    return model, optimizer, step

MODELS = {
    "as it should be": ({}, set()),
    "made in bf16": ({"made_in": bf16}, {"parameters", "moments"}),
    "one layer in bf16": ({"down": bf16}, {"parameters", "moments"}),
    "no reduce_dtype for one unit": ({"down_reduce": None}, {"reduction"}),
    "bf16 moments": ({"moments": bf16}, {"moments"}),
}
MISSED = {
    "parameters": "A model with bf16 parameters passed. One layer alone may be bf16: look at all parameters, at rest.",
    "reduction": "A reduction in bf16 passed. `.grad` does not tell in which dtype it was added up: watch the reduce-scatter.",
    "moments": "A bf16 moment passed. One alone may be bf16: look at the moments of all parameters.",
}
ELSE = {"parameters": "gathered weights may be bf16", "reduction": "look at the reduce-scatter alone",
        "moments": "look at `optimizer.state` alone"}

@turn(1, {
    "faults that were not found": exactly("none", lambda words: MISSED[words.split(", ")[0]]),
    "false alarms": exactly("none", lambda words: f"You reported {words} where it is fp32: {ELSE[words.split(', ')[0]]}."),
})
def score_faults(faults):
    missed, false, called = set(), set(), []
    for options, expected in MODELS.values():
        model, optimizer, step = set_up(**options)
        answer = faults(model, optimizer, lambda step=step: called.append(step()))
        if isinstance(answer, str) or not hasattr(answer, "__iter__"):
            raise NotYet("Return a set of words, which may be empty.")
        if unknown := set(answer) - set(MISSED):
            raise NotYet(f"Expected the words {', '.join(MISSED)}; found {unknown.pop()!r}.")
        missed |= expected - set(answer)
        false |= set(answer) - expected
    if "reduction" in missed and not called:
        raise NotYet("Nothing was reduced while you watched: call `step()` inside of `with Probe() as probe:`.")
    words = [", ".join(sorted(some)) or "none" for some in (missed, false)]
    return dict(zip(("faults that were not found", "false alarms"), words))

# %%
# %%turn 1
def faults(model, optimizer, step):
    return None            # your lines here; return some of {"parameters", "reduction", "moments"}, or set()

# %% tags=["solution"] turn=1
def faults(model, optimizer, step):
    found = set()
    with Probe() as probe:
        step()
    if any(p.dtype == bf16 for p in model.parameters()):
        found.add("parameters")
    if bf16 in probe.seen["reduce-scatter"]:
        found.add("reduction")
    if any(state["exp_avg"].dtype == bf16 for state in optimizer.state.values()):
        found.add("moments")
    return found

# %% tags=["right"] turn=1
faults = named                                       # a list

# %% tags=["right"] turn=1
def policies(model, *_):                             # asks the policies of the units
    units = [m._get_fsdp_state()._mp_policy for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    return {policy.reduce_dtype or policy.param_dtype for policy in units}
faults = partial(named, reduction=policies)

# %% tags=["right"] turn=1
def faults(model, optimizer, step):                  # by the bytes
    with record_collectives(model) as trace:
        words = set(named(model, optimizer, step)) - {"reduction"}
    low = trace.bytes_by_kind()["reduce_scatter"] < 4 * sum(p.numel() for p in model.parameters())
    return words | {"reduction"} if low else words

# %% tags=["wrong"] turn=1 says="watch the reduce-scatter"
faults = partial(named, reduction=lambda model, *_: {p.grad.dtype for p in model.parameters()})
# %% tags=["wrong"] turn=1 says="call `step()` inside"
faults = lambda model, optimizer, step: named(model, optimizer, lambda: None)
# %% tags=["wrong"] turn=1 says="moments of all parameters"
faults = partial(named, moments=lambda model, optimizer, _: {optimizer.state[next(model.parameters())]["exp_avg"].dtype})
# %% tags=["wrong"] turn=1 says="look at the reduce-scatter alone"
faults = partial(named, reduction=lambda model, optimizer, seen: seen["reduce-scatter"] | seen["all-gather"])
# %% tags=["wrong"] turn=1 says="gathered weights may be bf16"
faults = partial(named, parameters=lambda model, optimizer, seen: seen["all-gather"])
# %% tags=["wrong"] turn=1 says="look at all parameters, at rest"
faults = partial(named, parameters=lambda *_: set())

# %% [markdown]
# ## Your turn 2 · Mixed precision by hand
#
# Do yourself what the policy does, without FSDP. Every rank has all of `master`, the model in fp32, and its own
# samples `x`. `my_backward(master, x)` has three things to do:
#
# 1. Compute `loss = F.mse_loss(output.float(), x)`, where `output` comes from a bf16 copy of `master`.
# 2. Set `.grad` of each parameter of `master`: the mean over the ranks of the copy's gradients, added up in
#    fp32.
# 3. Return this rank's loss.
#
# The optimizer's step on `master` is done for you. Your losses and gradients are compared with those of FSDP2
# over eight steps.
#
# <details><summary>Hint</summary>
#
# `copy.deepcopy(master).to(bf16)` is a copy in bf16; `master.to(bf16)` would change `master` itself. The copy
# needs `x.to(bf16)`. Its parameters come in the same order as those of `master`. `dist.all_reduce(tensor)` adds
# up over the ranks in place, in the tensor's dtype, and `world` is the number of ranks.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)).to(device)
wanted_losses, wanted, model = [], [], sharded(bf16, fp32)      # losses and full gradients of FSDP2
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(8):
    loss = F.mse_loss(model(batch).float(), batch)
    loss.backward()
    wanted.append([p.grad.full_tensor() for p in model.parameters()])
    wanted_losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()

def summed(grad):
    dist.all_reduce(grad)
    return grad

def by_hand(master, x, mean=lambda grad: summed(grad) / world, compute=bf16, of_loss=fp32):
    """Backward of a low copy whose gradients autograd casts to fp32; most known answers are this with a mistake."""
    low = {n: p.to(compute) for n, p in master.named_parameters()}
    loss = F.mse_loss(functional_call(master, low, (x.to(compute),)).to(of_loss), x.to(of_loss))
    loss.backward()
    for p in master.parameters():
        p.grad = mean(p.grad)
    return loss

def gradients(model):
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])

MISTAKES = {                                         # what is said of the first step's gradients
    "They are too large by the number of ranks: divide the sum.": {"mean": summed},
    "They are too small by the number of ranks: divide by it once.": {"mean": lambda grad: summed(grad) / world**2},
    "Each rank keeps its own: add up over all ranks, and divide by their number.": {"mean": lambda grad: grad},
    "They were added up in bf16: cast to fp32 before you add up.": {"mean": lambda grad: summed(grad.to(bf16)).float() / world},
    "They come from a model in fp32: compute with a bf16 copy.": {"compute": fp32},
    "The loss was taken in bf16, or against a rounded `x`: `.float()` on the output, and `x` as it is.": {"of_loss": bf16},
    "The mean was rounded to bf16: keep it in fp32.": {"mean": lambda grad: (summed(grad) / world).to(bf16).float()},
    (STALE := "The first step is right, later ones are not: make a new copy in each call."): {},
}
for why, mistake in MISTAKES.items():
    by_hand(model := build(), batch, **mistake)
    MISTAKES[why] = gradients(model)
SAID = {}

@turn(2, {
    "dtype of the weights that are kept": exactly("float32", "The master is no longer fp32: `.to(bf16)` changes a module itself."),
    "forward passes under autocast": exactly(0, "Compute with a bf16 copy: autocast casts for each operation anew."),
    "losses that differ": exactly(0, "Some losses differ, the gradients do not: is it this rank's own loss?"),
    "gradients that differ": exactly(0, lambda n: SAID["why"]),
})
def score_backward(my_backward):
    master, autocast = build(), []
    master.register_forward_pre_hook(lambda *_: autocast.append(torch.is_autocast_enabled(device.type)))
    optimizer, losses, other = torch.optim.AdamW(master.parameters(), lr=1e-2), [], 0
    for step in range(8):
        kept = copy.deepcopy(master.state_dict())
        try:
            losses.append(torch.as_tensor(my_backward(master, batch)).item())
        except RuntimeError as error:
            if "gradient with dtype" in str(error):
                raise NotYet("`.grad` of an fp32 parameter must be fp32: cast the gradient before you assign it.") from error
            if "same dtype" in str(error):
                raise NotYet("A bf16 layer was given fp32: cast the input of the copy, `x.to(bf16)`.") from error
            raise
        if any(p.dtype == fp32 and not torch.equal(p, kept[n]) for n, p in master.named_parameters()):
            raise NotYet("Your call changed the weights of `master`, perhaps by `master.to(bf16)` and back: make a copy.")
        for p, right in zip(master.parameters(), wanted[step]):
            if p.grad is None:
                raise NotYet("A parameter of `master` has no gradient: set `p.grad` for each of them.")
            other += not torch.allclose(p.grad.float(), right, rtol=1e-3, atol=2e-6)
        if step == 0:
            first = gradients(master)
        optimizer.step()
        optimizer.zero_grad()
    far = {why: ((first - grads).norm() / grads.norm()).item() for why, grads in MISTAKES.items()}
    SAID["why"] = min(far, key=far.get) if min(far.values()) < 1e-4 else "Some gradients differ: go through the three steps."
    dist.all_reduce(largest := first.clone(), op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest := first.clone(), op=dist.ReduceOp.MIN)
    if SAID["why"] == STALE and not torch.equal(largest, smallest):
        SAID["why"] = "This rank has the mean, others do not: give it to all of them, as `dist.all_reduce` does."
    return {
        "dtype of the weights that are kept": name(p.dtype for p in master.parameters()),
        "forward passes under autocast": sum(autocast),
        "losses that differ": sum(not abs(a - b) <= 2e-5 for a, b in zip(losses, wanted_losses)) if other == 0 else None,
        "gradients that differ": other,
    }

# %%
# %%turn 2
def my_backward(master, x):
    # 1. a bf16 copy and its loss   2. for each parameter: p.grad, the mean in fp32   3. return the loss
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
my_backward = lambda master, x: by_hand(master, x).item()

# %% tags=["right"] turn=2
from torch.distributed import _functional_collectives as functional
my_backward = partial(by_hand, mean=lambda grad: functional.all_reduce(grad / world, "sum", dist.group.WORLD).clone())

# %% tags=["right"] turn=2
def my_backward(master, x):                          # one collective for all gradients
    loss = by_hand(master, x, mean=lambda grad: grad)
    flat = summed(gradients(master)) / world
    for p, part in zip(master.parameters(), flat.split([p.numel() for p in master.parameters()])):
        p.grad = part.view_as(p)
    return loss.detach()

# %% tags=["wrong"] turn=2 says="cast to fp32 before you add up"
my_backward = partial(by_hand, mean=lambda grad: summed(grad.to(bf16)).float() / world)
# %% tags=["wrong"] turn=2 says="divide the sum"
my_backward = partial(by_hand, mean=summed)
# %% tags=["wrong"] turn=2 says="divide by it once"
my_backward = partial(by_hand, mean=lambda grad: summed(grad / world) / world)
# %% tags=["wrong"] turn=2 says="add up over all ranks"
my_backward = partial(by_hand, mean=lambda grad: grad)
# %% tags=["wrong"] turn=2 says="give it to all of them"
my_backward = partial(by_hand, mean=lambda grad: dist.reduce(grad.div_(world), 0) or grad)
# %% tags=["wrong"] turn=2 says="keep it in fp32"
my_backward = partial(by_hand, mean=lambda grad: (summed(grad) / world).to(bf16).float())
# %% tags=["wrong"] turn=2 says="compute with a bf16 copy"
my_backward = partial(by_hand, compute=fp32)
# %% tags=["wrong"] turn=2 says="The loss was taken in bf16"
my_backward = partial(by_hand, of_loss=bf16)
# %% tags=["wrong"] turn=2 says="is it this rank's own loss"
my_backward = lambda master, x: summed(by_hand(master, x).detach()) / world
# %% tags=["wrong"] turn=2 says="cast the gradient before you assign it"
my_backward = partial(by_hand, mean=lambda grad: summed(grad).to(bf16) / world)
# %% tags=["wrong"] turn=2 says="make a new copy in each call"
def my_backward(master, x):                          # one copy for all steps
    low = master.__dict__.setdefault("low", copy.deepcopy(master).to(bf16))
    loss = F.mse_loss(low(x.to(bf16)).float(), x)
    for p, grad in zip(master.parameters(), torch.autograd.grad(loss, list(low.parameters()))):
        p.grad = summed(grad.float()) / world
    return loss

# %% tags=["wrong"] turn=2 says="changed the weights of `master`"
my_backward = lambda master, x: by_hand(master.to(bf16).to(fp32), x)      # rounds them for good
# %% tags=["wrong"] turn=2 says="The master is no longer fp32"
my_backward = lambda master, x: by_hand(master.to(bf16), x)
# %% tags=["wrong"] turn=2 says="cast the input of the copy"
my_backward = lambda master, x: F.mse_loss(copy.deepcopy(master).to(bf16)(x).float(), x)
# %% tags=["wrong"] turn=2 says="autocast casts for each operation anew"
def my_backward(master, x):                          # autocast, without a copy
    with torch.autocast(x.device.type, dtype=bf16):
        return by_hand(master, x, compute=fp32)

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `mat1 and mat2 must have the same dtype`; for a layer without bias `expected mat1 and mat2 to have the same dtype` (on a CPU `m1 and m2`) | an fp32 tensor meets bf16 weights: a buffer, which FSDP2 does not cast; a tensor made in `forward`; an input with `cast_forward_inputs=False`; the output of a norm in fp32 | cast it to the dtype of the weights; for the norm, `output_dtype=torch.bfloat16` |
# | gradients differ from one process's more and more with more ranks, or more micro-batches | one cause: no `reduce_dtype`, so gradients are added up in bf16 | `reduce_dtype=torch.float32` |
# | the loss hardly falls, with a small learning rate | one cause: the model was made or loaded in bf16 | `model.float()` before sharding |
# | `Attempting to unscale FP16 gradients.` | the model itself is fp16, and a scaler is used | make the model fp32, and leave fp16 to the policy |
#
# ## The rule
#
# The model in fp32, `param_dtype=torch.bfloat16`, `reduce_dtype=torch.float32` for each unit, no autocast, and
# the loss in fp32: `.float()` on the output, or `output_dtype=torch.float32` in the policy of the whole model.
#
# [← lesson 6](06_sharding_strategies.ipynb) · [lesson 8 →](08_local_state_dict_and_distributed_checkpoints.ipynb)
