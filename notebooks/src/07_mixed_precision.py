# %% [markdown]
# # 7 · Mixed precision
#
# Which tensor has which dtype in a training step, and does bf16 lose anything? **Keep the model in float32,
# give `fully_shard` a `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`, and
# leave autocast off.** The matrix products, their activations and the all-gathers are then bf16, which takes
# half the bytes and is faster: 4.3 times on the H200 below. What adds up many small numbers stays in float32:
# the gradients' mean over the ranks, the weights, and AdamW's moments.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots, recorded
from fsdp_utils.lessons.tables import Table

MOMENTS = ("shards at rest", "all-gather", "forward matmul", "norm, softmax", "activation", "output",
           "backward matmul", "reduce-scatter", ".grad", "AdamW's moments", "state dict")
COLORS = {"fp32": plots.RANK_COLORS[4], "bf16": plots.RANK_COLORS[1], "fp16": plots.RANK_COLORS[3]}


def draw_dtypes(ways):
    """One row for each way to train, one column for each moment of a step, coloured by dtype."""
    fig, (axes,) = plots.figure(width=9.8, height=0.8 + 0.42 * len(ways))
    for y, found in enumerate(ways.values()):
        for x, moment in enumerate(MOMENTS):
            dtype = found[moment].replace("bfloat", "bf").replace("float", "fp")
            axes.barh(y, 0.94, left=x - 0.47, height=0.8, color=COLORS.get(dtype, plots.FAINT))
            axes.text(x, y, dtype, ha="center", va="center", fontsize=9, color=plots.INK)
    axes.set_yticks(range(len(ways)), list(ways))
    labels = [moment.replace(" ", "\n").replace("-", "-\n").replace("at\n", "at ") for moment in MOMENTS]
    axes.set_xticks(range(len(MOMENTS)), labels, fontsize=8)
    axes.xaxis.tick_top()
    axes.set(xlim=(-0.55, len(MOMENTS) - 0.45), ylim=(len(ways) - 0.4, -0.6))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return plots.show(fig, alt=f"Dtypes at each moment of a step, for {', '.join(ways)}.")


expected = {moment: "bfloat16" if moment in MOMENTS[1:7] else "float32" for moment in MOMENTS}
draw_dtypes({"one step": expected})

# %% [markdown]
# One training step under this policy, from left to right; fp32 is float32. A rank keeps its **shard**, its
# part of every parameter, in fp32. It casts the shard to bf16 before the all-gather, computes forward and
# backward in bf16, and goes back to fp32 for the reduce-scatter, which averages the gradients over the ranks.
# From there to the optimizer everything is fp32.
#
# **bf16** (bfloat16) is 16 bits wide. It has the range of fp32 but only 8 significant bits where fp32 has 24,
# fewer than three decimal digits. Matrix products get along with that. A long sum in bf16 does not: a small number
# added to a large one can vanish. This lesson measures two such sums.

# %% tags=["card"]
lesson.card(
    7,
    learn="set the dtypes of a step, notice a wrong one, and know where bf16 loses digits",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 17, 16),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains the same model under three
# policies. For each it prints the bytes of the last step's collectives and the last loss.
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
#     "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
#     "bf16, no reduce_dtype": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
# }
# for name, policy in policies.items():
#     torch.manual_seed(0)                                     # the same weights on every rank
#     model = nn.Sequential(*[nn.Linear(256, 256, device=device) for _ in range(8)])    # in float32
#     for part in [*model, model]:
#         fully_shard(part, mesh=mesh, mp_policy=policy)       # the same policy for each unit
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
# **4.0 and 2.0 in the first row.** The eight layers have 526,336 parameters, which take 2.0 MiB in float32. A
# step gathers each layer twice, for forward and again for backward, so it gathers 4.0 MiB. It reduces each
# gradient once, 2.0 MiB. (The numbers are the sizes of full tensors. Each of four ranks already has a quarter
# and receives the rest.)
#
# **The other rows.** `param_dtype=torch.bfloat16` halves what is gathered. `reduce_dtype=torch.float32` keeps
# the reduction at 2.0 MiB. Without it, FSDP reduces in the dtype of the gradients, which is bf16, and that
# number is halved too. So the fp32 reduction costs 4.0 instead of 3.0 MiB a step; what you get for this third
# more is measured below.
#
# **The loss** is the same in all rows. That is why a wrong dtype stays unnoticed: ten steps do not show it, and
# nothing raises an error. You have to look at the dtypes themselves.
#
# ## What you gain
#
# Fewer bytes are one gain. The larger one is arithmetic, because a GPU's tensor cores multiply bf16 matrices
# many times faster than its other cores multiply fp32 ones. The table shows one H200 that trains a Llama of 0.95
# billion parameters with two sequences of 2,048 tokens a step (FSDP2 with `param_dtype` alone, torch 2.11; fp32
# without TF32, PyTorch's default). It is the only rank, so nothing is sent: this is what computing in bf16 saves.

# %% tags=["on-a-gpu"]
of_fp32 = "1 ranks, 16 layers of width 2048, 2 samples of 2048 tokens, strategy full, fp32, checkpointing None"
runs = {row["setting"]: row for part in ("planner", "selective") for row in recorded.load(part)["results"]["rows"]}
seconds, gib = (runs[of_fp32][kind][1] for kind in ("step_s", "peak_allocated_gib"))     # [planned, measured]
low = runs["none, eager, batch of 2"]
table = [["fp32", seconds, gib], ["bf16, model in fp32", low["step_s"], low["peak_allocated_gib"]]]
assert (f"{seconds / low['step_s']:.1f}", f"{16 * 0.95e9 / 2**30:.1f}") == ("4.3", "14.2")
Table(["on one H200", "seconds a step", "GiB at the peak"], [[way, f"{s:.2f}", f"{g:.1f}"] for way, s, g in table])

# %% [markdown]
# The step is 4.3 times as fast. The memory falls by a fifth only: the policy halves most activations and the
# gathered copies, but each parameter still has 4 bytes of weight, 4 of gradient and 8 of AdamW's moments, 14.2 GiB here.
# FSDP divides these 16 bytes by the number of ranks, so on many GPUs they matter less, and activations more.
#
# ## Every moment of a step
#
# A policy acts at the borders of a **unit**, a module that you gave to `fully_shard`. Before the unit's
# forward, FSDP2 casts its shards and its inputs to `param_dtype`, then gathers. After the unit's backward it
# casts the gradients to `reduce_dtype`, reduces them, casts the result to the shard's own dtype and stores it
# as `.grad`. The shard's own dtype is the one in which you made the model: a policy never changes it.
#
# To see this instead of believing it, start four ranks.

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
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
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
# PyTorch can call an object of yours for each operation that it runs, in forward and in backward: a *dispatch
# mode*. `Probe` is one. While it is active, it notes the dtype that goes into each all-gather,
# reduce-scatter, matrix product, and norm or softmax.

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
# The next cell trains one step in each of five ways: with the script's two bf16 policies; with
# `torch.autocast` in place of a policy; with both; and with the right policy around a model that was made in
# bf16. Guess, before you look, where each row differs from the drawing at the top.

# %% tags=["dtypes"]
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
    with Probe() as backward:
        F.mse_loss(output.float(), x).backward()
    hook.remove()
    for phase, seen in {"forward": forward.seen, "backward": backward.seen}.items():
        found |= {f"{phase} matmul" if what == "matmul" else what: name(dtypes) for what, dtypes in seen.items()}
    found |= {"activation": name(activations), "output": name([output.dtype])}
    found[".grad"] = name(p.grad.dtype for p in model.parameters())
    optimizer.step()
    found["AdamW's moments"] = name(state["exp_avg"].dtype for state in optimizer.state.values())
    found["state dict"] = name(tensor.dtype for tensor in model.state_dict().values())
    return found


ways = {
    "bf16, reduced in fp32": probed(sharded(bf16, fp32)),
    "bf16, no reduce_dtype": probed(sharded(bf16)),
    "autocast, no policy": probed(sharded(), lambda: torch.autocast(device.type, bf16)),
    "autocast and policy": probed(sharded(bf16, fp32), lambda: torch.autocast(device.type, bf16)),
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
# - **autocast and policy** adds nothing to the policy here. (On CUDA, autocast runs `layer_norm` and
#   `softmax` in fp32, by [its list of operations](https://docs.pytorch.org/docs/stable/amp.html).)
# - **policy, model made in bf16**: weights, gradients and moments are bf16 for good. The policy casts for
#   computing only.
#
# Look at two defaults. Accelerate's `mixed_precision="bf16"` sets `reduce_dtype` to
# bf16 under FSDP2, unless you pass a policy of your own. From transformers 5 on, `from_pretrained` gives a
# model the dtype that its config names, which is often bf16: pass `dtype=torch.float32`.
#
# **A norm in fp32.** The policy gives norms bf16, too. Their kernels calculate in fp32 inside, and transformers'
# Llama casts in its norm, so most models need nothing more. If yours does, make the norm a unit of its own, before
# the block around it, with `MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)`: the
# next layer has bf16 weights, so what the norm returns must be bf16. Each such norm adds collectives.
#
# ## What adding up in bf16 costs
#
# What do you get for a third more bytes? An addition in bf16 rounds its result to 8 bits, and a reduction over
# many ranks is many additions. How far off is their sum?
#
# Here each of 2 to 64 simulated ranks has 65,536 gradients of about 1, cast to bf16, as backward would leave
# them. One process adds them up: in bf16 **one by one**, as a ring does; in bf16 **in pairs**, then pairs of
# pairs, as a tree does; and one by one in **fp32**. The error is relative to the exact sum before the cast.

# %% tags=["reduction"]
# %%ranks
def gradient(r):
    return 1 + 0.1 * torch.randn(2**16, generator=torch.Generator().manual_seed(r))


def error(total, n):
    """Percent, root mean square, against the sum in fp64 of the gradients before they became bf16."""
    exact = sum(gradient(r).double() for r in range(n))
    return 100 * float((total.double().cpu() / exact - 1).square().mean().sqrt())


def one_by_one(numbers):
    total = numbers[0].clone()
    for number in numbers[1:]:
        total += number
    return total


def in_pairs(numbers):
    while len(numbers) > 1:
        numbers = [a + b for a, b in zip(numbers[::2], numbers[1::2])]
    return numbers[0]


errors = {"bf16, one by one": [], "bf16, in pairs": [], "fp32": []}
for n in (2, 4, 8, 16, 32, 64):
    low16 = [gradient(r).to(bf16) for r in range(n)]
    sums = one_by_one(low16), in_pairs(low16), one_by_one([number.float() for number in low16])
    for found, total in zip(errors.values(), sums):
        found.append(error(total, n))
total = gradient(rank).to(bf16).to(device)
dist.all_reduce(total)
real = error(total, world)

# %%
errors, real, world = ranks.get("errors")[0], ranks.get("real")[0], len(ranks.get("real"))
fig, (axes,) = plots.figure(width=7.5, height=2.8)
for (how, by_ranks), color in zip(errors.items(), plots.RANK_COLORS):
    axes.plot([2, 4, 8, 16, 32, 64], by_ranks, "o-", color=color, label=how)
axes.plot(world, real, "k*", markersize=12, label=f"a real all-reduce in bf16 on {world} ranks")
axes.set_xscale("log", base=2)
axes.set(xticks=(ticks := [2, 4, 8, 16, 32, 64]), xticklabels=ticks, xlabel="ranks", ylabel="error of the sum, %", ylim=(0, 0.75))
axes.legend(frameon=False, loc="upper left")
assert [f"{found[-1]:.2f}" for found in errors.values()] == ["0.68", "0.28", "0.02"]
plots.show(fig, alt="The error of a sum in bf16 grows with the ranks; in fp32 it falls.")

# %% [markdown]
# The curves go in opposite directions. The casts of the gradients are independent errors, so in fp32 they
# average out: with 64 ranks 0.02% is left. In bf16 each addition rounds again. In pairs the error stays below
# 0.3%; one by one it grows to 0.68%, some 30 times that of fp32. The star is a real all-reduce of this group.
#
# Which of the two bf16 curves is yours depends on the algorithm that NCCL chooses. And these gradients all have
# one sign: where ranks cancel each other, the error relative to what is left can be far larger. So reduce in
# fp32, unless you've seen the reduction hold up your steps ([lesson 4](04_backward_prefetch.ipynb)).
#
# ## Why the model stays in fp32
#
# The second long sum is training itself: each step adds a small update to each weight. Under AdamW that update
# is about as large as the learning rate, or smaller. Neighbouring bf16 numbers just below 1 are 0.004 apart, and
# proportionally closer for smaller weights. An update of less than half that distance is rounded away.
#
# The next cell trains under the right policy, once with a model made in fp32 and once with one made in bf16. Then
# it counts the weights that differ from their beginning. Look at the last column.

# %%
# %%ranks
def moved(dtype, lr, steps):
    model = sharded(bf16, fp32, made_in=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    before = [p.full_tensor().clone() for p in model.parameters()]
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(steps):
        F.mse_loss(model(x).float(), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = sum((p.full_tensor() != old).sum().item() for p, old in zip(model.parameters(), before))
    return changed / sum(p.numel() for p in model.parameters())


runs = [(1e-6, 20), (1e-5, 20), (1e-5, 60), (1e-4, 20), (1e-3, 20)]
shares = [[f"{lr:g}", steps, *(f"{moved(dtype, lr, steps):.0%}" for dtype in (fp32, bf16))] for lr, steps in runs]

# %%
Table(["learning rate", "steps", "weights that moved, made in fp32", "made in bf16"], ranks.get("shares")[0])

# %% [markdown]
# In fp32 every weight moves. In bf16, at a learning rate of fine-tuning (1e-5), 19 of 20 weights stay exactly
# as they were. Three times as many steps move no more, because each step's update is rounded away on its own.
# (Half of the 5% are the norm's biases, which begin at 0, where bf16 numbers lie close together.) No error is
# raised; the loss only falls more slowly.
#
# So call `model.float()` before `fully_shard`. The price is 16 bytes for each parameter instead of 8, over all
# ranks together. Beware of loading, too: into a model in bf16, PyTorch's `dcp.load` casts fp32 weights silently.
#
# ## Check your own model
#
# Two calls find both mistakes in code that you didn't write. `check_sharding`, given the optimizer, names
# weights that are bf16. `record_collectives` gives bytes, and the bytes for each parameter tell the dtype. Here
# they look at a model with both.

# %%
# %%ranks
from fsdp_utils import check_sharding, record_collectives

model = build().to(bf16)
for part in (model.up, model.down, model):
    fully_shard(part, mp_policy=MixedPrecisionPolicy(bf16))
optimizer = torch.optim.AdamW(model.parameters())
with record_collectives(model) as trace:
    model(torch.randn(8, 16, device=device)).float().square().mean().backward()
parameters = sum(p.numel() for p in model.parameters())
if rank == 0:
    print(*check_sharding(model, optimizer), sep="\n")
    for kind, sent in trace.bytes_by_kind().items():
        print(f"{kind}: {sent / parameters:.0f} bytes for each parameter")

# %% [markdown]
# The sentence names the first mistake. In the numbers, 4 bytes of all-gather are right: two gathers of 2 bytes.
# The reduce-scatter shows the second mistake, for in fp32 it would be 4 bytes.
#
# ## Your turn 1 · What is bf16, and should not be?
#
# Write the check that a reviewer would run. `low(model, optimizer, step)` is called for five models; four of
# them have something in bf16 that should be fp32, perhaps in one layer only. Return a set of those of these
# three words that apply to the model:
#
# - `"parameters"`: a parameter is bf16 at rest
# - `"reduction"`: a reduce-scatter runs in bf16
# - `"moments"`: a moment of AdamW is bf16
#
# Calling `step()` runs one forward and one backward pass. `optimizer.state[p]["exp_avg"]` is a moment of the
# parameter `p`. `Probe` and `bf16` are defined above.
#
# <details><summary>Hint</summary>
#
# The reduction is over when `step()` returns, and `.grad` does not show its dtype. Watch it: call `step()`
# inside of `with Probe() as probe:`, and then look into `probe.seen["reduce-scatter"]`.
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


@turn(1, {
    "faults that were not found": exactly("none", lambda words: MISSED[words.split(", ")[0]]),
    "false alarms": exactly("none", lambda words: f"You reported {words} where it is fp32: gathered weights may be bf16."),
})
def score_low(low):
    missed, false = set(), set()
    for options, expected in MODELS.values():
        answer = low(*set_up(**options))
        if isinstance(answer, str) or not hasattr(answer, "__iter__"):
            raise NotYet("Return a set of words, which may be empty.")
        if unknown := set(answer) - set(MISSED):
            raise NotYet(f"Expected the words {', '.join(MISSED)}; found {unknown.pop()!r}.")
        missed |= expected - set(answer)
        false |= set(answer) - expected
    words = [", ".join(sorted(some)) or "none" for some in (missed, false)]
    return dict(zip(("faults that were not found", "false alarms"), words))

# %%
# %%turn 1
def low(model, optimizer, step):
    return None            # your lines here; return some of {"parameters", "reduction", "moments"}, or set()

# %% tags=["solution"] turn=1
def low(model, optimizer, step):
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
def low(model, optimizer, step):                     # a list
    with Probe() as probe:
        step()
    dtypes = {
        "parameters": {p.to_local().dtype for p in model.parameters()},
        "reduction": probe.seen["reduce-scatter"],
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
    return found | ({"reduction"} if bf16 in probe.seen["reduce-scatter"] else set())

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
    return words + ["reduction"] * (bf16 in probe.seen["reduce-scatter"])

# %% tags=["wrong"] turn=1 says="gathered weights may be bf16"
def low(model, optimizer, step):                     # what is gathered is meant to be bf16
    with Probe() as probe:
        step()
    words = ["parameters"] * (bf16 in probe.seen["all-gather"])
    words += ["moments"] * any(s["exp_avg"].dtype == bf16 for s in optimizer.state.values())
    return words + ["reduction"] * (bf16 in probe.seen["reduce-scatter"])

# %% tags=["wrong"] turn=1 says="look at all parameters, at rest"
def low(model, optimizer, step):
    with Probe() as probe:
        step()
    words = ["moments"] * any(s["exp_avg"].dtype == bf16 for s in optimizer.state.values())
    return words + ["reduction"] * (bf16 in probe.seen["reduce-scatter"])

# %% [markdown]
# ## Your turn 2 · Mixed precision by hand
#
# Do yourself what the policy does, without FSDP. Every rank has all of `master`, the model in fp32, and its own
# samples `x`. `my_backward(master, x)` has three things to do:
#
# 1. Compute `loss = F.mse_loss(output.float(), x)`, where `output` comes from a bf16 copy of `master`.
# 2. Set `.grad` of each parameter of `master`: the mean over the ranks of the copy's gradients, added up in
#    fp32.
# 3. Return the loss.
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
GRADIENTS = {}


@turn(2, {
    "dtype of the weights that are kept": exactly("float32", "The master is no longer fp32: `.to(bf16)` changes a module itself."),
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
# An A100, an L4, an H100 and anything newer computes in bf16; a V100 and a T4 don't. Don't ask
# `torch.cuda.is_bf16_supported()`: by default it also says True where bf16 is emulated, which is slow.
# `bf16_support` looks for the hardware, and tries a real all-reduce in bf16 on all ranks.

# %% tags=["checker", "nbval-ignore-output"]
# %%ranks
from fsdp_utils import bf16_support

support = bf16_support(device)
if rank == 0:
    print(support)

# %% [markdown]
# On a GPU without bf16, take `param_dtype=torch.float16`, and a **scaler**, because in fp16 a gradient below about
# 3e-8 becomes 0. It multiplies the loss before backward, divides the gradients before the optimizer's step, and
# skips a step with gradients that aren't finite. Under FSDP2 take `torch.amp.GradScaler`; under FSDP1
# `ShardedGradScaler`, for there the plain one decides on each rank alone, and the shards drift apart silently.
#
# FSDP1's policy is `MixedPrecision`, with the same two dtypes and a `buffer_dtype`, which FSDP2 lacks ([lesson
# 13](13_from_fsdp1_to_fsdp2.ipynb)).
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `mat1 and mat2 must have the same dtype`, `expected m1 and m2 to have the same dtype` | an fp32 tensor meets bf16 weights: a buffer, which FSDP2 does not cast; a tensor made in `forward`; an input with `cast_forward_inputs=False`; the output of a norm in fp32 | cast it to the dtype of the weights; for the norm, `output_dtype=torch.bfloat16` |
# | gradients differ from one process's more and more with more ranks | one cause: no `reduce_dtype`, so gradients are added up in bf16 | `reduce_dtype=torch.float32` |
# | the loss stops falling early, with a small learning rate | one cause: the model was made or loaded in bf16 | `model.float()` before sharding |
# | `Attempting to unscale FP16 gradients.` | the model itself is fp16, and a scaler is used | make the model fp32, and leave fp16 to the policy |
# | the all-gather is not faster than in fp32 | bf16 comes from `torch.autocast` | the policy |
#
# ## The rule
#
# The model in fp32, `param_dtype=torch.bfloat16`, `reduce_dtype=torch.float32` for each unit, no autocast, and
# the loss in fp32: `.float()` on the output, or `output_dtype=torch.float32` in the policy of the whole model.
#
# [← lesson 6](06_sharding_strategies.ipynb) · [lesson 8 →](08_local_state_dict_and_distributed_checkpoints.ipynb)
