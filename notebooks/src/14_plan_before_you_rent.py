# %% [markdown]
# # 14 · Plan before you rent
#
# Will it fit? How fast will it be? The usual way to find out is to rent the GPUs and see. In this lesson you
# ask a laptop. PyTorch's own FSDP runs as one rank of 8, or of 1024, on tensors that have a size and no
# memory. All memory and all times here are **simulated**, unless a cell says that it measures.

# %% [markdown] tags=["card"]
# learn:
# - to answer "how many GPUs for 7B?" with one call
# - 'to read the memory of a training step: what is alive when, and which part of it
#   is the peak'
# - what each knob buys, before you turn it on a machine that costs money
# - where such a prediction is right, where it is only a limit, and where it is wrong
# needs: lessons [1](01_transformer_wrapper.ipynb), [2](02_activation_checkpointing.ipynb),
#   [5](05_maximising_throughput.ipynb) and [6](06_sharding_strategies.ipynb) · no GPU
# ranks: '4 on this machine, in one cell. 2 or 3 work too: set `FSDP_RANKS=2` before
#   you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 20 minutes to read

# %%
from fsdp_utils.lessons import lesson
from fsdp_utils.notebook import ranks

# real ranks, for one measurement further down
ranks.start(preload=["transformers.models.llama.modeling_llama"])

# %%
from transformers import LlamaConfig

from fsdp_utils import plan

llama_7b = LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
)
on_8 = plan(llama_7b, world_size=8, batch_size=8, seq_len=4096, gpu="A100-80")
print(on_8)

# %% [markdown]
# Read it from the top. The model has 6.74 billion parameters. `batch_size` is that of all ranks together, so
# each has one sample of 4096 tokens. That fits. The peak is at the beginning of backward, and most of it is
# activations. `(root)` is the FSDP unit that holds what is in no block: the embedding and the head.
#
# What counts is what PyTorch reserves (lesson 5). Of an A100 "of 80 GB" CUDA offers 79.25 GiB, and `plan`
# sets 2 aside for the CUDA context and NCCL's buffers: 77 are left.
#
# The time is what the GPU's published rates and links allow, without the time to launch kernels. Uncompiled
# runs are slower; compiled ones have been seen somewhat faster, as they fuse kernels. MFU, model FLOPs
# utilization, is the share of the GPU's published rate that goes into operations which the model needs. And
# the note says how far off such predictions have been. As long as nothing is recorded, nobody knows.
#
# ## What happens in there
#
# 1. `plan` makes the model without memory, and joins a process group with 8 ranks of which 7 do not exist:
#    PyTorch's `fake` backend.
# 2. It runs two training steps through `fully_shard`, as in lesson 5, and notes each allocation, each kernel
#    and each collective.
# 3. All 32 blocks do the same. So it runs four, and writes out the recording for 32. It checks that the
#    second and the third block really did the same.
# 4. The allocations go through the simulated CUDA allocator of lesson 5. The collectives go through the
#    replay of lesson 4. A kernel takes as long as its operations or its bytes, whichever is longer, at rates
#    that others have published for this GPU. That is called a *roofline*.
#
# ## The memory of one step
#
# **Simulated:** each step of the curve is the highest point within one block's forward or backward.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import plots

fig, (axes,) = plots.figure(width=9.6, height=3.4)
on_8.plot(axes)
plots.show(fig, alt="Simulated memory of one rank through a step: activations grow, then shrink.")

# %% [markdown]
# Shards of parameters and optimizer state are at the bottom, always there. Activations grow with each block
# in forward and shrink in backward, while the shards of gradients grow; after the optimizer's step
# `zero_grad` gives these up. Gathered parameters, whole gradients and the buffers of collectives are thin:
# one or two blocks at a time, which is what FSDP is for.
#
# ## Predict
#
# Activations are most of the peak. What does activation checkpointing take off it: a tenth, half, or more?
# And what does it cost in time?
#
# <details><summary>Answer</summary>
#
# More than half: a block then keeps its input and nothing else. The price is one more forward, in total four
# instead of three, so at most a third more operations. The next cell says so.
#
# </details>
#
# ## What each knob buys

# %% tags=["knobs"]
knobs = {
    "checkpointing": {"checkpointing": "full"},
    "ZeRO-2": {"strategy": "grad_op"},
}
turned = {"as above": on_8}
for name, options in knobs.items():
    turned[name] = plan(llama_7b, world_size=8, batch_size=8, seq_len=4096, gpu="A100-80", **options)
for name, p in turned.items():
    print(f"{name:15} {p.peak_allocated_gib:6.2f} GiB allocated, {p.peak_reserved_gib:6.2f} reserved, "
          f"step {p.step_s:.2f} s by the GPU's rates")

checkpointed = turned["checkpointing"]
assert checkpointed.peak_allocated_gib < 0.5 * on_8.peak_allocated_gib
assert on_8.step_s < checkpointed.step_s < 4 / 3 * on_8.step_s
assert turned["ZeRO-2"].peak_allocated_gib > on_8.peak_allocated_gib

# %% [markdown]
# Checkpointing is the big knob here. ZeRO-2 (`SHARD_GRAD_OP`, lesson 6) keeps all blocks gathered until
# backward, and costs what they weigh.
# (`api="fsdp1"` simulates FSDP1. `offload=True` moves the shards to the host; the optimizer's time there is
# not predicted.)
#
# ## How many GPUs for 7B?
#
# It depends on the GPU. So ask for the fewest that fit, with checkpointing and one sample each.
# `search` tries the numbers of GPUs that you give, from the smallest on.

# %% tags=["gpus-for-7b"]
from fsdp_utils import search

found = search(llama_7b, world_sizes=[1, 2], gpu="A100-80", batch_per_rank=[1], strategies=["full"],
               checkpointing=["full"], seq_len=2048)
for p in found.tried:
    print(f"{p.setting.world_size} A100-80: {p.peak_reserved_gib:6.1f} GiB reserved "
          f"of {p.available_gib:.0f}:", "fits" if p.fits else "does not fit")
ranks_needed = found.best.setting.world_size
at_rest = sum(found.best.at_rest.values()) * ranks_needed * 2**30
print(f"at rest, all ranks together: {at_rest / found.best.parameters:.1f} bytes for each parameter")
assert ranks_needed > 1

# %% [markdown]
# A rule of thumb says 16 bytes for each parameter, shared by all ranks: weight and gradient in fp32, and two
# numbers of AdamW. On top of it each rank needs its activations, its logits and whole blocks, which more
# ranks do not make smaller.
#
# ## 70B on 64 to 1024
#
# `plan` takes as long for 1024 ranks as for 64, and for 80 blocks less than half as long again as for 8.

# %% tags=["seventy"]
llama_70b = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, vocab_size=128256,
)
by_ranks, shards = {}, {}
for world_size in (64, 1024):
    p = plan(llama_70b, world_size=world_size, batch_size=world_size, seq_len=8192, gpu="A100-80",
             checkpointing="full")
    by_ranks[world_size] = p
    shards[world_size] = p.breakdown["parameters"] + p.breakdown["optimizer state"]
    print(f"{world_size:4} ranks: {p.peak_allocated_gib:4.1f} GiB allocated, of which "
          f"{shards[world_size]:4.1f} shards; {p.tokens_per_s / world_size:3.0f} tokens/s and GPU by rates; "
          f"{p.timing.exposed_s / p.step_s:.0%} of the step only sends")
rest = [p.peak_allocated_gib - shards[world_size] for world_size, p in by_ranks.items()]
assert abs(rest[0] / rest[1] - 1) < 0.01
assert 15 < shards[64] / shards[1024] < 17

# %% [markdown]
# The shards shrink to a sixteenth. (Those of gradients are not there yet when the peak is reached.) The rest
# does not: activations, logits and two whole blocks are the same on each rank, however many there are. What
# is sent hides behind the computation on 1024 ranks as it does on 64, if the links give what was published
# for them.
#
# ## Held against real ranks
#
# A CPU has no CUDA allocator, but it has bytes. The ranks that were started at the beginning are real. They
# get a small Llama: two real steps, and the bytes of each kind counted by hand. **This is a measurement.**

# %%
# %%ranks
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import shard

SIZES = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4,
    "vocab_size": 100,
}
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
torch.manual_seed(0)
model = shard(LlamaForCausalLM(LlamaConfig(**SIZES)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.randint(100, (1, 16), device=device)
for _ in range(2):
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


counted = {
    "parameters": sum(local(p).nbytes for p in model.parameters()),
    "gradients": sum(local(p.grad).nbytes for p in model.parameters()),
    "optimizer state": sum(local(t).nbytes for s in optimizer.state.values() for t in s.values()),
}

# %% tags=["real-ranks"]
counted, sizes = ranks.get("counted")[0], ranks.get("SIZES")[0]
world = len(ranks.get("counted"))
ranks.stop()
small = plan(LlamaConfig(**sizes), world_size=world, batch_size=world, seq_len=16, precision="fp32")
for kind, nbytes in counted.items():
    predicted = small.at_rest[kind] * 2**30
    print(f"{kind:16} counted on rank 0: {nbytes:6,} bytes, simulated: {predicted:6,.0f}")
    assert abs(predicted / nbytes - 1) < 0.03

# %% [markdown]
# (`tests/test_planner.py` compares the other kinds on real ranks too: activations, gathered parameters, whole
# gradients. It leaves out the copies that gloo makes and NCCL does not.)
#
# ## Held against recordings
#
# Bytes on a CPU say nothing about seconds, or about what the CUDA allocator really reserves. For that, one
# rank of eight trains on a real GPU, in twelve settings; the other seven do not exist, so its times are those
# of computation alone.

# %% tags=["recordings"] jupyter={"source_hidden": true}
from IPython.display import Markdown

from fsdp_utils.lessons import recorded

recording = recorded.load("planner")
page = ""
if recording is not None:
    lines = ["| setting | allocated, predicted / measured | reserved | step |", "|:--" * 4 + "|"]
    for row in recording["results"]["rows"]:
        keys = ("peak_allocated_gib", "peak_reserved_gib", "step_s")
        cells = [f"{row[k][0]:.2f} / {row[k][1]:.2f}" for k in keys]
        lines.append(f"| {row['setting']} | " + " | ".join(cells) + " |")
    page = "\n".join(lines) + "\n\n"
    for name, limit in {"allocated": 0.05, "reserved": 0.10, "step time": 0.20}.items():
        error = recording["results"]["errors"][name]
        page += (f"- {name}: {error['median']:.0%} in the median (limit {limit:.0%}), "
                 f"{error['worst']:.0%} at worst\n")
        assert error["median"] <= limit, f"{name}: {error['median']:.1%} off in the median"
    page += "\n"
Markdown(page + recorded.caption("planner").data)

# %% [markdown]
# ## Held against what others have measured
#
# torchtitan's authors published what they reached on 64 A100 in 2024. Their models are their own code, ours
# are those of transformers. Same sizes, same number of GPUs, same batch, same checkpointing; 8192 tokens for
# Llama 3, 4096 for Llama 2.

# %% tags=["torchtitan"]
llama_13b = LlamaConfig(
    hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40, vocab_size=32000
)
peers = {
    "Llama 3 70B": (by_ranks[64], 331, 0.517),
    "Llama 2 13B": (plan(llama_13b, world_size=64, batch_size=128, seq_len=4096, gpu="A100-80"), 2162, 0.611),
}
speed_off = {}
for name, (p, tokens_per_s, mfu) in peers.items():
    ours = p.tokens_per_s / 64
    speed_off[name] = ours / tokens_per_s - 1
    print(f"{name}: {ours:4.0f} tokens/s and GPU by rates, measured {tokens_per_s}: {speed_off[name]:+.0%}")
    print(f"{'':13}MFU {p.mfu:.0%} by rates, measured {mfu:.0%}; {p.peak_reserved_gib:.0f} GiB reserved, "
          f"fits: {p.fits}")

# %% [markdown]
# Both predictions lie above the measurements, and not far. But look at the last word: the 13B
# is said not to fit, and theirs ran. Their code for the same model is not that of transformers, and a
# prediction holds for the code that was simulated.
#
# Memory next. The Distributed Training Guide reports 74 GB at the peak for 7B on 8 A100, 10 samples on each,
# all in bf16. Its units are other ones than a block (it wraps what has 100 million parameters), and we take
# 1024 tokens, the default of its program.

# %% tags=["guide"]
guide = plan(
    llama_7b, world_size=8, batch_size=80, seq_len=1024, gpu="A100-80", precision="pure_bf16", api="fsdp1"
)
guide_gb = guide.peak_allocated_gib * 2**30 / 1e9
print(f"simulated: {guide_gb:.1f} GB, theirs: 74 GB, difference {guide_gb / 74 - 1:+.0%}")
print("at the peak:", ", ".join(f"{k} {v:.1f} GiB" for k, v in guide.breakdown.items() if v > 1))

# %% [markdown]
# ## Where it is wrong
#
# - **Workspaces.** What a kernel allocates for itself is not seen: cuBLAS, flash attention's backward.
# - **Other kernels.** The simulation runs PyTorch's CPU kernels. Attention is traced as the CPU's flash
#   attention, without dropout.
# - **`torch.compile`** fuses kernels and keeps other activations. It is not simulated.
# - **FSDP1's `record_stream`** (lesson 11) frees later than the trace says.
# - **Time** is what the published rates allow: no launches, no data loading, no network that others use too.
#   It is no bound either: a compiled run, which fuses kernels, can be faster.
# - **Fragmentation over many steps,** or with batches of changing length: two equal steps are simulated.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    14,
    {
        "plan-guide-7b": f"Simulated {guide_gb:.1f} GB at the peak: {guide_gb / 74 - 1:+.0%}.",
        "plan-titan-70b": f"Simulated {by_ranks[64].tokens_per_s / 64:.0f} tokens/s and GPU: "
        f"{speed_off['Llama 3 70B']:+.0%}; MFU {by_ranks[64].mfu:.0%}.",
        "plan-titan-13b": f"Simulated {peers['Llama 2 13B'][0].tokens_per_s / 64:.0f} tokens/s and "
        f"GPU: {speed_off['Llama 2 13B']:+.0%}. By the simulation it would not fit.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. The floor.** How many GiB of shards does each rank hold, with fp32 parameters and gradients and AdamW?
# The model has so many `billions` of parameters, and there are so many `ranks`.

# %%
def floor_gib(billions, ranks):
    return None  # your line here


floors = {(7.0, 8): 13.038516, (70.0, 64): 16.298145, (70.0, 1024): 1.018634}
lesson.check(floor_gib, floors)

# %% [markdown]
# **2. Exposed or hidden?** A block's all-gather of `gb` gigabytes goes over a link of `gb_s`, and its
# computation takes `compute_s`. How many seconds does nothing hide?

# %%
def exposed_s(gb, gb_s, compute_s):
    return None  # your line here


exposures = {(1.7, 400, 0.01): 0.0, (1.7, 50, 0.01): 0.024}
lesson.check(exposed_s, exposures)

# %% [markdown]
# ## Summary
#
# - One rank of a thousand can be simulated on a laptop, by PyTorch's own FSDP on tensors without memory.
# - Blocks that repeat need to be run only a few times. That this is exact is tested.
# - Bytes at rest are exact. Seconds are a limit. An error is stated only where something was recorded.
# - More ranks make shards smaller, and nothing else.
#
# ## Next
#
# This was the last lesson. The program of [lesson 10](10_end_to_end.ipynb) is where your own model goes.
#
# [← lesson 13](13_from_fsdp1_to_fsdp2.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def floor_gib(billions, ranks):
    return billions * 1e9 * 16 / ranks / 2**30


lesson.check(floor_gib, floors, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def exposed_s(gb, gb_s, compute_s):
    return max(gb / gb_s - compute_s, 0.0)


lesson.check(exposed_s, exposures, strict=True)
