# %% [markdown]
# # 7 · Mixed precision
#
# bf16 halves what is gathered, and computes faster where the hardware can. But which tensor is bf16, and
# when? In this lesson a probe writes down the dtype of every tensor that matters, at the moment it matters,
# for FSDP2 and FSDP1. What the lesson says about dtypes, an output shows.

# %% [markdown] tags=["card"]
# learn:
# - which tensor has which dtype in forward, backward, reduction, optimizer and checkpoint
# - why 'gradients are always fp32' is half true
# - what adding up in bf16 costs, and why it grows with the number of ranks
# - what fp16 needs besides, and what a CPU cannot show of it
# - 'whether your machine can train in bf16: `bf16_support`'
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb) · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: half a minute to run on 2 cores (AMD EPYC) · 15 minutes to read
# video: '[Mixed precision](https://www.loom.com/share/e308e10907884356ac263d269263e0bd), 2022. Since then:
#   FSDP2''s policy has no buffer dtype, and can cast outputs.'

# %%
from fsdp_utils.lessons import lesson, plots
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils.lessons.meter import ALL_GATHERS, REDUCE_SCATTERS

torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                  # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

# %% [markdown]
# ## The idea
#
# FSDP keeps each rank's shard of the parameters in the dtype in which the model was made, here fp32. Before
# a unit computes, the shards are cast to `param_dtype` and gathered. After its backward the gradients are
# reduced in `reduce_dtype`, and the result is added to the fp32 shard's `.grad`. So the optimizer works in
# fp32, from gradients that were computed in bf16.
#
# ## A probe
#
# A *dispatch mode* sees each operation with its tensors. The probe is one: it notes the dtypes of
# collectives and matmuls. The other dtypes are read from the tensors themselves.

# %%
# %%ranks
def first(tensors):
    """Some collectives take a tensor, others a list of them."""
    return first(tensors[0]) if isinstance(tensors, (list, tuple)) else tensors


class Probe(TorchDispatchMode):
    """Notes the dtypes of collectives and matmuls, by phase."""

    def __init__(self):
        super().__init__()
        self.seen, self.phase = {}, "forward"

    def note(self, what, dtype):
        dtypes = self.seen.setdefault((self.phase, what), set())
        dtypes.add(str(dtype).removeprefix("torch."))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ALL_GATHERS:
            self.note("all-gather", first(args[1]).dtype)       # args: output, input, group, ...
        elif func.name() in REDUCE_SCATTERS:
            self.note("reduce-scatter", first(args[1]).dtype)
        elif func.__name__.startswith(("mm.", "addmm.")):
            self.note("matmul", args[-1].dtype)
        return func(*args, **(kwargs or {}))


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


def probed(model):
    """One training step; everything with a dtype that is worth knowing, by moment."""
    found = {}

    def name(dtype):
        return str(dtype).removeprefix("torch.")

    def dtypes(tensors):
        return ", ".join(sorted({name(t.dtype) for t in tensors}))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    up = next(module for path, module in model.named_modules() if path.endswith("up"))
    up.register_forward_hook(lambda module, args, output: found.update(activation=name(output.dtype)))
    x = torch.randn(8, 16, device=device)
    found["parameters, at rest"] = dtypes(model.parameters())
    with Probe() as probe:
        output = model(x)
        probe.phase = "backward"
        F.mse_loss(output.float(), x).backward()
    for (phase, what), seen in probe.seen.items():
        found[f"{what}, {phase}"] = ", ".join(sorted(seen))
    found["output"] = name(output.dtype)
    found["buffers"] = dtypes(b for b in model.buffers() if b.is_floating_point())
    found[".grad after backward"] = dtypes(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    found["AdamW's moments"] = dtypes(s["exp_avg"] for s in optimizer.state.values())
    state = {key: value for key, value in model.state_dict().items() if value.is_floating_point()}
    found["state dict"] = dtypes(state.values())
    return found


MOMENTS = (
    "parameters, at rest", "all-gather, forward", "matmul, forward", "activation", "output", "buffers",
    "matmul, backward", "reduce-scatter, backward", ".grad after backward", "AdamW's moments", "state dict",
)


def show(columns):
    if rank == 0:
        print(f"{'':26}" + "".join(f"{name:22}" for name in columns))
        for moment in MOMENTS:
            row = "".join(f"{found.get(moment, '-'):22}" for found in columns.values())
            print(f"{moment:26}{row}".rstrip())

# %% [markdown]
# ## FSDP2
#
# **Predict, then measure.** With `param_dtype=bfloat16`, in which dtype is the matmul of the backward? And
# the `.grad` that the optimizer sees?

# %% tags=["dtypes"]
# %%ranks
bf16, fp32 = torch.bfloat16, torch.float32
columns = {
    "no policy": probed(fsdp2(None)),
    "bf16, reduce fp32": probed(fsdp2(bf16, fp32)),
    "bf16, reduce bf16": probed(fsdp2(bf16, bf16)),
}
show(columns)
mixed = columns["bf16, reduce fp32"]
assert mixed["matmul, forward"] == mixed["matmul, backward"] == mixed["all-gather, forward"] == "bfloat16"
assert mixed["reduce-scatter, backward"] == mixed[".grad after backward"] == "float32"
assert columns["bf16, reduce bf16"]["reduce-scatter, backward"] == "bfloat16"
for found in columns.values():
    for moment in ("parameters, at rest", "buffers", ".grad after backward", "AdamW's moments", "state dict"):
        assert found[moment] == "float32"

# %% [markdown]
# Read the middle column from top to bottom. The shards are fp32 at rest. The all-gather sends bf16, so it
# costs half. Both matmuls are bf16: **the gradients of the backward are computed in bf16**. The
# reduce-scatter adds up in fp32, and the sharded `.grad`, AdamW's moments (the two averages of lesson 0) and
# the state dict are fp32.
#
# So "local gradients are always fp32" is false for the gradients that the backward computes, and true for the
# shard of `.grad`.
#
# ## FSDP1
#
# Its policy has the same two dtypes and one for buffers.

# %%
# %%ranks
by_fsdp2 = mixed
columns = {
    "no policy": probed(fsdp1(None)),
    "bf16, reduce fp32": probed(fsdp1(bf16, fp32)),
    "all bf16": probed(fsdp1(bf16, bf16, bf16)),
}
show(columns)
mixed = columns["bf16, reduce fp32"]
assert all(mixed[moment] == by_fsdp2[moment] for moment in MOMENTS)
assert columns["all bf16"]["buffers"] == "bfloat16"
for found in columns.values():
    for moment in ("parameters, at rest", ".grad after backward", "AdamW's moments", "state dict"):
        assert found[moment] == "float32"

# %% [markdown]
# The same dtypes at the same places. With `buffer_dtype` the buffers are bf16.
#
# And in the state dict everything is fp32, buffers too: what is saved does not depend on the policy.
#
# FSDP2 has no dtype for buffers: in its table they are fp32 throughout. It can cast outputs instead:

# %%
# %%ranks
cast = probed(fsdp2(bf16, fp32, output_dtype=fp32))
if rank == 0:
    print("output:", cast["output"], "· matmul:", cast["matmul, forward"])
assert cast["output"] == "float32"
assert cast["matmul, forward"] == "bfloat16"

# %% [markdown]
# ## What adding up in bf16 costs
#
# bf16 has 8 significant bits. Add many numbers of about the same size, and each addition rounds. Here each
# rank has 65536 gradients of about 1. They are added up by a real all-reduce in bf16 over 2 and over all
# ranks, and in a simulation, one addition after the other, over more ranks than this machine has.

# %% tags=["reduction"]
# %%ranks
def gradient(r):
    return 1 + 0.1 * torch.randn(2**16, generator=torch.Generator().manual_seed(r))


def error(total, n):
    """Relative, root mean square, against the sum in fp64 of what the ranks have in bf16."""
    exact = sum(gradient(r).to(bf16).double() for r in range(n))
    return float((total.double().cpu() / exact - 1).square().mean().sqrt())


pair = dist.new_group([0, 1])
for n, group in ((2, pair), (world, None)):
    if rank < n:
        total = gradient(rank).to(bf16).to(device)
        dist.all_reduce(total, group=group)
        if rank == 0:
            print(f"all-reduce over {n} ranks: error {error(total, n):.1e}")

errors = {}
for n in (2, 4, 8, 16, 32, 64):
    total = gradient(0).to(bf16)
    for r in range(1, n):
        total += gradient(r).to(bf16)
    errors[n] = error(total, n)
if rank == 0:
    print("simulated, in a chain:", "   ".join(f"{n}: {e:.1e}" for n, e in errors.items()))
assert errors[64] > 2 * errors[4]
in_fp32 = sum(gradient(r).to(bf16).float() for r in range(64))
assert error(in_fp32, 64) < 1e-5

# %% jupyter={"source_hidden": true}
errors = ranks.get("errors")[0]
fig, (axes,) = plots.figure(height=2.6)
axes.plot(list(errors), [100 * error for error in errors.values()], "o-")
axes.set_xscale("log", base=2)
axes.set_xticks(list(errors), list(errors))
axes.set_ylim(bottom=0)
axes.set_xlabel("ranks (simulated: one bf16 addition after the other)")
axes.set_ylabel("error of the sum, %")
plots.show(fig, alt="The error of a sum in bf16 grows with the number of ranks")

# %% [markdown]
# The error grows with the number of ranks. In fp32 the same 64 numbers have an error below 0.00001. That is
# why `reduce_dtype=torch.float32` is a common choice beside `param_dtype=torch.bfloat16`: it sends more, and
# adds up well.
#
# ## fp16, and its scaler
#
# fp16 has more significant bits than bf16 but a narrow range: what is smaller than about 3e-8 becomes 0. So
# the loss is multiplied by a large number before backward, and the gradients are divided by it before the
# step: a gradient scaler. If a gradient is infinite the step is left out, and the number halved.

# %%
# %%ranks
small = torch.tensor(1e-8)
as_dtype = {name: small.to(dtype).item() for name, dtype in {"bf16": bf16, "fp16": torch.float16}.items()}
if rank == 0:
    print(f"1e-8 in bf16: {as_dtype['bf16']:.1e} · in fp16: {as_dtype['fp16']:.1e}")
assert as_dtype["fp16"] == 0.0
assert as_dtype["bf16"] > 0

x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(device)


def train_fp16(model, scaler):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)                       # divides by the scale, and looks for infinities
        scaler.update()
        losses.append(loss.item())
    return losses


plain_scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
sharded_scaler = ShardedGradScaler(device.type, init_scale=2.0**10)
two = train_fp16(fsdp2(torch.float16, fp32), plain_scaler)
one = train_fp16(fsdp1(torch.float16, fp32), sharded_scaler)
if rank == 0:
    print(f"FSDP2, GradScaler:        loss {two[0]:.3f} -> {two[-1]:.3f}, scale", plain_scaler.get_scale())
    print(f"FSDP1, ShardedGradScaler: loss {one[0]:.3f} -> {one[-1]:.3f}, scale", sharded_scaler.get_scale())
assert two[-1] < two[0]
torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)

# %% [markdown]
# The two learn alike. If one rank finds an infinity in its shard, all ranks have to leave out the step.
# FSDP1 wants `ShardedGradScaler` for that. With FSDP2 torch's own `GradScaler` does it: the gradients are
# DTensors, and for those the question is put to all ranks (`found_inf_reduce_handler` in
# `torch/distributed/tensor/_dispatch.py`). What a CPU cannot show is speed: tensor cores, and whether fp16
# or bf16 is faster. That is for a GPU to say.
#
# ## What is saved, and what it is loaded into
#
# The policy changes nothing of what is saved. The model's own dtype does. A model that arrives in bf16, as
# pretrained ones often do, stays in bf16 at rest, and with it everything that the optimizer keeps:

# %%
# %%ranks
AT_REST = ("parameters, at rest", ".grad after backward", "AdamW's moments", "state dict")


def fsdp2_of_bf16():
    return fully_shard(build().to(bf16), mp_policy=MixedPrecisionPolicy(bf16, fp32))


arrived = probed(fsdp2_of_bf16())
weight = torch.ones((), dtype=bf16)
for _ in range(1000):
    weight -= 0.001
if rank == 0:
    for moment in AT_REST:
        print(f"{moment:22}{arrived[moment]}")
    print("a bf16 weight of 1, after a thousand steps of -0.001:", weight.item())
assert {arrived[moment] for moment in AT_REST} == {"bfloat16"}
assert weight == 1.0

# %% [markdown]
# Just below 1, neighbours in bf16 are 0.004 apart: a step of less than half of that is rounded away, each
# time. So make the model fp32 before you shard it: `model.float()`. Accelerate does that when its mixed
# precision is on, and says so; what it then saves is fp32, twice the size of what was loaded.
#
# Now the other way round: a checkpoint in fp32, and a model in bf16 that is to load it. PyTorch's `dcp.load`
# casts without a word. `load_distributed` wants you to say that you mean it.

# %%
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
trained = fsdp2(bf16, fp32)
save_distributed(folder / "ours", trained, step=1)
dcp.save(get_model_state_dict(trained), checkpoint_id=folder / "plain")


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


by_dcp, by_ours = empty(), empty()
dcp.load(get_model_state_dict(by_dcp), checkpoint_id=folder / "plain")     # fp32 into bf16: no word
assert loaded(by_dcp)
try:
    load_distributed(folder / "ours", by_ours)
    refusal = None
except CheckpointError as error:
    refusal = str(error).split(": ", 1)[1]
assert not loaded(by_ours)
load_distributed(folder / "ours", by_ours, cast=True)
assert loaded(by_ours)
dist.barrier()
if rank == 0:
    shutil.rmtree(folder)
    print(refusal)
assert "cast=True" in refusal

# %% [markdown]
# One line for each tensor: what the model has, what the checkpoint has, and what to do if you mean it.
#
# ## The same as unsharded
#
# Mixed precision by FSDP2 is the same as by hand: a bf16 copy computes, and fp32 weights are updated.

# %% tags=["equality"]
# %%ranks
def by_hand(steps):
    master = build()
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        copy = build().to(bf16)
        with torch.no_grad():
            for low, high in zip(copy.parameters(), master.parameters()):
                low.copy_(high)                      # cast
        loss = F.mse_loss(copy(x.to(bf16)).float(), x)
        loss.backward()
        for low, high in zip(copy.parameters(), master.parameters()):
            high.grad = low.grad.float()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sharded(steps):
    model = fsdp2(bf16, fp32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x).float(), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


hand, fsdp = by_hand(4), sharded(4)
if rank == 0:
    print("by hand:", "  ".join(f"{loss:.3f}" for loss in hand))
    print("FSDP2:  ", "  ".join(f"{loss:.3f}" for loss in fsdp))
torch.testing.assert_close(fsdp, hand, rtol=2e-2, atol=1e-3)

# %% [markdown]
# The same losses, step by step.
#
# ## Can this machine train in bf16?
#
# `torch.cuda.is_bf16_supported()` also says yes where bf16 is emulated. `bf16_support` asks for the
# hardware, and tries a real all-reduce over all ranks. Its answer depends on your machine:

# %% tags=["nbval-ignore-output"]
# %%ranks
from fsdp_utils import bf16_support

support = bf16_support(device)
if rank == 0:
    print(support)
assert support.ready == (support.compute == "native" and support.network is not False)

# %% [markdown]
# And what would it say elsewhere? These are **stand-ins**: facts about devices that are not here, given to
# the same judgement. NCCL needs version 2.10 for bf16.

# %% tags=["checker"]
from fsdp_utils.precision.facts import DeviceFacts, judge, judge_nccl

gpus = {"Tesla V100": (7, 0), "Tesla T4": (7, 5), "A100": (8, 0), "L4": (8, 9), "H100": (9, 0)}
answers = {}
for name, capability in gpus.items():
    facts = DeviceFacts("cuda", name, capability=capability, cuda=(12, 8), nccl=(2, 27, 5))
    answers[name], reasons = judge(facts)
    print(f"{name:11} {answers[name]:9} {reasons[0].split(' (')[0]}")
old = DeviceFacts("cuda", "A100", capability=(8, 0), cuda=(11, 1), nccl=(2, 8, 3))
print("old NCCL   ", judge_nccl(old).split(". ")[0])
assert [name for name, answer in answers.items() if answer == "native"] == ["A100", "L4", "H100"]

# %% [markdown]
# The two older GPUs hold bf16 tensors and have no units to compute with them. The last line is about the
# network: an A100 whose NCCL is too old.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    7,
    {
        "precision-control": "Yes: the probe sees each of the three dtypes where it was asked for. FSDP2 has "
        "none for buffers.",
        "precision-speed": "Not for a CPU without bf16 units to say.",
        "precision-4x": "Not for a CPU without bf16 units to say.",
        "precision-fp16": "Not for a CPU to say.",
        "precision-gradients": "Half: the backward's matmuls are bf16; the sharded .grad is fp32.",
        "precision-checker": "`bf16_support` checks both, and says why not.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. Bytes.** A unit has `n` parameters. How many bytes does its all-gather deliver in the given dtype?

# %%
def gathered_bytes(n, dtype):
    return None  # your line here


sizes = {(1000, "float32"): 4000, (1000, "bfloat16"): 2000}
lesson.check(gathered_bytes, sizes)

# %% [markdown]
# **2. Which dtype?** FSDP2 with `param_dtype=bfloat16` and `reduce_dtype=float32`: the dtype of the matmul
# in the backward, and of `.grad`.

# %%
two_dtypes = None  # your line here: a pair of names
lesson.check(two_dtypes, ("bfloat16", "float32"))

# %% [markdown]
# ## Summary
#
# - At rest everything has the dtype in which the model was made: parameters, `.grad`, moments, state dict.
#   Make it fp32.
# - `param_dtype` is what is gathered and computed in, forward and backward.
# - `reduce_dtype` is what gradients are added up in. In bf16 its error grows with the number of ranks.
# - fp16 needs a scaler; bf16 does not.
# - Ask `bf16_support` before you rely on bf16.
#
# ## Next
#
# What a rank has trained has to be on a disk before the rank is lost. When the model is too large for one
# file, every rank writes its own part: [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb).
#
# [← lesson 6](06_sharding_strategies.ipynb) ·
# [lesson 8 →](08_local_state_dict_and_distributed_checkpoints.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def gathered_bytes(n, dtype):
    return n * {"float32": 4, "bfloat16": 2}[dtype]


lesson.check(gathered_bytes, sizes, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
two_dtypes = ("bfloat16", "float32")
lesson.check(two_dtypes, ("bfloat16", "float32"), strict=True)
