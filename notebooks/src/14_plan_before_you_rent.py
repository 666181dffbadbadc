# %% [markdown]
# # 14 · Plan before you rent
#
# Will it fit, and how sure is that? Rented GPUs cost the same when the run dies in its first step. **Call `plan` of
# `fsdp_utils` on your laptop first. It runs two training steps of one rank on tensors that take no memory, and prints
# GiB, seconds and a verdict. Rent where the verdict is "fits". Where it is "tight", measure one step first.** How
# sure? We held plans against published eager runs to which nothing was fitted. The step took 0.88 to 1.12 times as
# long as planned in 24 runs, and the peak was 0.97 to 1.04 times the planned one in 10 runs, once the plan knew what
# each training loop keeps in memory.

# %% jupyter={"source_hidden": true}
import json

from fsdp_utils.lessons import lesson, plots

fig, (axes,) = plots.figure(width=9.6, height=2.2)
boxes = [
    (0.10, 0.5, "model without memory,\nrank 0 of 8: the other\n7 do not exist"),
    (0.37, 0.5, "two training steps\nthrough fully_shard,\nwith 4 blocks"),
    (0.64, 0.5, "each allocation, kernel\nand collective,\nrepeated for 32 blocks"),
    (0.91, 0.8, "simulated CUDA\nallocator: GiB"),
    (0.91, 0.2, "replay at the GPU's\nrates: seconds"),
]
style = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": plots.INK}
texts = [axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=style) for x, y, text in boxes]
for one, other in ((0, 1), (1, 2), (2, 3), (2, 4)):
    ends = {"patchA": texts[one].get_bbox_patch(), "patchB": texts[other].get_bbox_patch()}
    arrow = {"arrowstyle": "->", "color": plots.INK, **ends}
    axes.annotate("", xy=boxes[other][:2], xytext=boxes[one][:2], arrowprops=arrow)
axes.set(xlim=(0, 1), ylim=(0, 1))
axes.axis("off")
plots.show(fig, alt="From the model to a recording of one rank, and from there to memory and to time.")

# %% [markdown]
# What `plan` does, from left to right. It builds the model from *fake tensors*, which have a shape and a dtype but
# no memory, so a 70B model fits on a laptop. PyTorch's own `fully_shard` (FSDP2) shards it, and the backend `fake`
# stands in for the ranks that do not exist: its collectives send nothing. Blocks repeat, so four are enough: `plan`
# checks that the second and the third recorded the same, and repeats what they recorded. Then a simulated CUDA
# allocator ([lesson 5](05_maximising_throughput.ipynb)) turns allocations into memory, and a replay ([lesson
# 4](04_backward_prefetch.ipynb)) turns kernels and collectives into seconds.

# %% tags=["card"]
lesson.card(
    14,
    learn="plan a job of your own, read the plan, and know which of its numbers are exact",
    needs="lessons [2](02_activation_checkpointing.ipynb), [5](05_maximising_throughput.ipynb) and "
    "[6](06_sharding_strategies.ipynb)",
    minutes=(1, 17, 25),
)

# %% [markdown]
# ## The script
#
# Can a plan be right about memory that nobody has allocated yet? Save this as `train.py`, then `torchrun
# --nproc-per-node 4 train.py`. Rank 0 plans a small Llama before there is a process group. Then all ranks train it,
# without activation checkpointing and with it, and `Meter` of lesson 0 counts the bytes of all living tensors. (`plan`
# assumes bf16; with `mp_policy=None` it keeps the model's float32, as this training does.)
#
# ```python
# import os
#
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from transformers import LlamaConfig, LlamaForCausalLM
#
# from fsdp_utils import plan, shard
# from fsdp_utils.lessons.meter import Meter
#
# config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
#                      num_attention_heads=4)
# rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])      # set by torchrun
# ways = {"no checkpointing": None, "each block": "full"}
# if rank == 0:                                                # before there is a process group
#     job = {"world_size": world, "batch_size": 4 * world, "seq_len": 256, "mp_policy": None}
#     planned = {name: plan(config, checkpointing=way, **job) for name, way in ways.items()}
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (world,))                    # without it a Mac would take its GPU
# for name, way in ways.items():
#     torch.manual_seed(0)                                     # the same weights on every rank
#     model = shard(LlamaForCausalLM(config).to(device), mesh=mesh, checkpointing=way)
#     optimizer = torch.optim.AdamW(model.parameters(), fused=True)
#     torch.manual_seed(1 + rank)                              # other samples on each rank
#     for step in range(2):
#         ids = torch.randint(512, (4, 256), device=device)    # your data
#         states = [tensor for state in optimizer.state.values() for tensor in state.values()]
#         with Meter([*model.parameters(), *states]) as meter:
#             model(input_ids=ids, labels=ids).loss.backward()
#             optimizer.step()
#         optimizer.zero_grad()
#     if rank == 0:
#         rule = 16 * planned[name].parameters / world / 2**20
#         peak = planned[name].peak_allocated_gib * 1024
#         print(f"{name}: rule of thumb {rule:.0f} MiB, planned {peak:.0f}, measured {meter.peak_tensor_bytes / 2**20:.0f}")
# dist.destroy_process_group()
# ```
# ```text
# no checkpointing: rule of thumb 4 MiB, planned 56, measured 56
# each block: rule of thumb 4 MiB, planned 22, measured 22
# ```
#
# Each line has three numbers, all for one rank. The **rule of thumb** is 16 bytes per parameter, for the parameter,
# its gradient and AdamW's two moments in float32, divided by the number of ranks. It says 4 MiB both times, because
# it knows nothing of activations. **Measured** is the peak on a real rank: 56 MiB, and 22 when each block is
# checkpointed. **Planned** was computed before that rank existed, and says the same to the MiB.
#
# That was a tiny model on CPUs. How far off can a plan be on a GPU? First, read one of real size.
#
# ## One plan
#
# A Llama of 7 billion parameters on eight A100, with one sample of 4,096 tokens on each. `batch_size` counts the
# samples of all ranks together, so it is 8. Everything about GPUs in this lesson is **simulated**, unless a sentence
# names a run. In the output, compare "reserved" with the GiB after it, then find the largest part of the peak.

# %%
from fsdp_utils.notebook import ranks

ranks.start(preload=["transformers.models.llama.modeling_llama"])        # real ranks, for "What is exact"

# %% tags=["a-plan"]
from transformers import LlamaConfig

from fsdp_utils import plan

llama_7b = LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
)
on_8 = plan(llama_7b, world_size=8, batch_size=8, seq_len=4096, gpu="A100-80")
print(on_8)

# %% [markdown]
# - **Memory.** At the peak, tensors take 34.64 GiB (*allocated*). PyTorch's allocator holds 41.01 GiB to serve them,
#   because it keeps pieces that were freed (*reserved*). This should stay within the room, 77 GiB: what CUDA offers on
#   this GPU, less 2 GiB for the CUDA context and NCCL's buffers, which is a cautious guess.
# - **Verdict.** Real runs take more or less than planned, so the verdict has a margin, which the last note gives: 0.83
#   to 1.12 times. "fits" means that even 1.12 times the reserved memory is within the room, "does not fit" that even
#   0.83 times the allocated memory is not, "tight" anything between.
# - **Step.** 1.09 s is the estimate, and published runs make 0.961 to 1.24 s likely. With each kernel and collective
#   at the best rate known for the GPU and its links, the *roofline*, it would be 0.843 s. For 0.0047 s a rank only
#   sends: this is *exposed communication*, which no computation hides.
# - **MFU.** The model's own matrix products get 55% of the GPU's published rate.
#
# When in the step is the peak? In the figure, follow the orange part; the dashed line is the room.

# %%
fig, (axes,) = plots.figure(width=9.6, height=3.2)
on_8.plot(axes)
plots.show(fig, alt="Simulated memory of one rank through a step: activations grow, then shrink.")

# %% [markdown]
# Each block adds its activations in forward, and backward frees them. So the peak comes when backward begins, and two
# thirds of it are activations. The shards below them are 12 bytes per parameter, not 16, because no parameter has a
# gradient yet.
#
# ## Which setting?
#
# 36 GiB are free. Should you use them for a larger batch, and do you need checkpointing? A plan takes seconds, so make
# several. In the table, look at the verdicts first, then at the last column.

# %% tags=["sweep"]
from fsdp_utils.lessons.tables import Table

plans = {(None, 1): on_8}
for checkpointing, samples in ((None, 2), (None, 3), (None, 4), ("full", 4)):
    options = {"batch_size": 8 * samples, "checkpointing": checkpointing}
    plans[checkpointing, samples] = plan(llama_7b, world_size=8, seq_len=4096, gpu="A100-80", **options)
print(*plans[None, 4].advice[:2], sep="\n")
Table(
    ["checkpointing", "samples of a rank", "allocated, GiB", "reserved, GiB", "verdict", "tokens/s of a GPU"],
    [
        [str(how), samples, f"{p.peak_allocated_gib:.1f}", f"{p.peak_reserved_gib:.1f}", p.verdict, round(p.tokens_per_s / 8)]
        for (how, samples), p in plans.items()
    ],
)

# %% tags=["check"]
assert [p.verdict for p in plans.values()] == ["fits", "fits", "tight", "does not fit", "fits"]
assert [round(p.tokens_per_s / on_8.tokens_per_s, 2) for p in plans.values()] == [1, 1.04, 1.05, 1.05, 0.83]
assert round(100 * (1 - on_8.available_gib / plans[None, 3].peak_allocated_gib)) == 7

# %% [markdown]
# Two samples without checkpointing are the fastest of these settings that fits. A third would gain 1% and is "tight": its
# tensors have room only if the run takes over 7% less than planned. Checkpointing makes four samples fit, at 83% of the
# first row's speed, because forward runs twice. The `advice` above the table is that of the fourth row: what is missing,
# and how to shrink the largest part.
#
# ## Your own model and your own loop
#
# `plan` also takes a folder with a `config.json`, or your own `nn.Module` with transformer blocks. Then hand it three
# functions: how you shard, what a batch is, and how your loop gets the loss. The first loss below keeps a name for the
# logits, as `outputs = model(**batch)` does in many loops; the second does not.

# %% tags=["own-model"]
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def my_model():                                         # called where parameters take no memory
    block = nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True)
    return nn.Sequential(nn.Embedding(50_000, 2048), nn.TransformerEncoder(block, 24), nn.Linear(2048, 50_000))


def my_shard(model, mesh):                              # with FSDP2 or FSDP1
    for block in model[1].layers:
        fully_shard(block, mesh=mesh, mp_policy=bf16)
    return fully_shard(model, mesh=mesh, mp_policy=bf16)


def my_batch(samples, tokens):                          # of one rank; only the shape matters
    return torch.zeros(samples, tokens, dtype=torch.long)


def keeps(model, batch):
    my_loop["logits"] = model(batch)                    # alive until the next step's logits replace them
    return F.cross_entropy(my_loop["logits"].flatten(0, 1), batch.flatten())


def lets_go(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


my_loop = {}
for my_loss in (keeps, lets_go):
    own = plan(my_model, world_size=8, batch_size=64, seq_len=2048, shard=my_shard, inputs=my_batch, loss=my_loss)
    print(f"{my_loss.__name__}: {own.verdict}, {own.peak_allocated_gib:.2f} GiB allocated on each {own.gpu.name}")
print(*own.notes)

# %% [markdown]
# The logits that the first loop keeps are 1.5 GiB, so write `loss=` as your loop does it. And read the note: this
# model's attention is not causal, as it was in all the runs that tell a plan's error, so here the error is unknown.
#
# Where your job differs from the defaults, say so:
#
# | your job | tell `plan` |
# |:--|:--|
# | computes in float32 | `mp_policy=None` |
# | recomputes activations | `checkpointing="full"` or `"selective"` |
# | accumulates gradients over 4 micro-batches | `micro_batches=4` |
# | has another optimizer than fused AdamW | `optimizer=`, a function of the list of parameters |
# | compiles each block | `compiled=True` |
#
# ## What more GPUs do not shrink
#
# By the rule of thumb, twice the GPUs halve a rank's memory. Do they? See which column shrinks for a Llama of 70B, with
# full checkpointing and one sample of 8,192 tokens on each A100. `stored_point`, in the folded cell, looks up one of
# 4,374 settings: some were simulated by `plan`, the others follow by formulas, within 3% where a test compares them.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.lesson import NOTEBOOKS
from fsdp_utils.lessons.sliders import Axis, Point, Stack, explore
from fsdp_utils.planner import COLORS

GRID = json.loads((NOTEBOOKS / "plan_grid.json").read_text(encoding="utf-8"))
MODELS = list(dict.fromkeys(name.split(", ")[0] for name in GRID))
AXES = ([8, 16, 32, 64, 256, 1024], [1, 2, 4], [2048, 4096, 8192], [1, 2, 8])     # in the order of the file
STRATEGIES = {"FULL_SHARD": "full", "ZeRO-2": "grad_op", "HYBRID_SHARD": "hybrid"}


def stored_point(model, strategy, checkpointing, *setting):
    index = 0
    for axis, value in zip(AXES, setting):
        index = index * len(axis) + axis.index(value)
    found = GRID[f"{model}, {STRATEGIES[strategy]}, {checkpointing}"][index]
    if found is None:
        return "HYBRID_SHARD holds a copy on each host, and expects two or more hosts of 8 GPUs."
    gpus, per_rank, length, micro_batches = setting
    few, many = (16, 128) if strategy == "HYBRID_SHARD" else (8, 64)
    corners = ((few, 1, 2048), (many, 1, 2048), (few, 4, 2048), (few, 1, 8192))
    planned_itself = (gpus, per_rank, length) in corners and micro_batches <= 2
    note = "this point: simulated by plan()" if planned_itself else "this point: by the formulas"
    step_s = found[-2]
    return Point(found[:6], [step_s, found[-1], micro_batches * per_rank * length / step_s], note)


# %% tags=["seventy"]
rows = []
for gpus in (64, 256, 1024):
    parts = stored_point("Llama 3 70B", "FULL_SHARD", "full", gpus, 1, 8192, 1).parts
    parts = [sum(parts[:3]), parts[3], sum(parts[4:])]
    rows.append([gpus, *(f"{gib:.1f}" for gib in parts), f"{sum(parts):.1f}"])
Table(["GPUs", "shards", "gathered, with buffers", "activations and the rest", "GiB allocated"], rows)

# %% [markdown]
# Only the shards shrink. The other 28 GiB stay on every rank, and the rule of thumb leaves them out:
#
# - **Gathered**: 3.9 GiB are the root, with embedding and head in bf16, and 1.6 GiB the buffer of the next block.
# - **Activations**: 10 GiB are the inputs of 80 blocks, which checkpointing keeps. The loss keeps a float32 number for
#   each token and each of the 128,256 entries of the vocabulary, 3.9 GiB, and when backward begins, two gradients of
#   that size come on top. A loss that handles a part of the tokens at a time, forward and backward, avoids most of
#   these 12 GiB.
#
# The sliders show all settings, at first that of "One plan". Each column is what a rank has allocated at its peak; the
# dashed line is the room. No formula gives what is reserved on top: find a setting here, and decide by `plan`.

# %% jupyter={"source_hidden": true}
NAMES = {"gathered, with buffers": "gathered parameters", "whole gradients, buffers": "whole gradients",
         "activations and the rest": "activations"}
parts = ["parameters", "gradients", "optimizer state", *NAMES]
explore(
    "simulated: memory of one rank at its peak, A100-80",
    [Axis("model", MODELS, start=1), Axis("strategy", list(STRATEGIES)),
     Axis("checkpointing", ["none", "selective", "full"]),
     Axis("GPUs", AXES[0], "in hosts of 8"), Axis("samples", AXES[1], "of a rank in a micro-batch"),
     Axis("tokens", AXES[2], "in a sample", start=1), Axis("micro-batches", AXES[3], "in a step")],
    Stack("allocated", "GiB", {part: COLORS[NAMES.get(part, part)] for part in parts}, upto=120,
          limit=round(on_8.available_gib, 2), limit_name="the limit"),
    stored_point,
    scalars={"a step": "s", "of it only sends": "%", "speed of a GPU": "tokens/s"},
    over="GPUs",
    digits=3,
)

# %% [markdown]
# **Find with it**: take the 70B model, full checkpointing and one sample of 8,192 tokens. With how many GPUs is the
# column below the line? And with how many if checkpointing is "none"?
#
# <details><summary>Answer</summary>
#
# With 32: a rank has 52 GiB then, and with 16 it would have 80. Without checkpointing none of these numbers helps: on
# 1,024 GPUs a rank still has 261 GiB, nearly all of it activations of its own sample.
#
# </details>

# %% tags=["check"]
allocated = {
    (how, gpus): round(sum(stored_point("Llama 3 70B", "FULL_SHARD", how, gpus, 1, 8192, 1).parts))
    for how in ("full", "none") for gpus in AXES[0]
}
assert (allocated["full", 16], allocated["full", 32], allocated["none", 1024]) == (80, 52, 261)
assert min(allocated["none", gpus] for gpus in AXES[0]) > on_8.available_gib

# %% [markdown]
# ## What is exact
#
# Some numbers of a plan are no estimates: what a rank keeps, gathers and sends follows from the parameters' shapes and
# dtypes, the strategy and the number of ranks. To see it, real ranks train a small Llama with FSDP2, under FULL_SHARD
# ("full") and ZeRO-2 ("grad_op", which keeps gathered blocks until backward: [lesson
# 6](06_sharding_strategies.ipynb)).

# %%
# %%ranks
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import record_collectives, shard
from fsdp_utils.lessons.meter import Meter

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
SIZES = {"hidden_size": 48, "intermediate_size": 144, "num_hidden_layers": 6, "num_attention_heads": 4}


def local_bytes(tensors):
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)


def measure(strategy):
    """Bytes that this rank keeps and sends; and what is gathered after each operation of a step."""
    torch.manual_seed(0)
    model = shard(LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=96)).to(device), strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        optimizer.zero_grad()
        ids = torch.randint(96, (1, 16), device=device)
        with record_collectives(model) as trace, Meter(model.parameters()) as meter:
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    gradients = [p.grad for p in model.parameters()]
    states = [t for state in optimizer.state.values() for t in state.values()]
    return {
        "at rest": local_bytes([*model.parameters(), *gradients, *states]),
        "gathered": meter.peak_gather_bytes,
        "sent": sum(event.sent_bytes for event in trace.collectives),
    }, meter.gather_bytes


measured = {strategy: measure(strategy) for strategy in ("full", "grad_op")}
with torch.device("meta"):
    small = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=96))
block = sum(p.numel() for p in small.model.layers[0].parameters())
root = sum(p.numel() for p in small.parameters()) - 6 * block

# %% [markdown]
# The curves are gathered bytes through one step. The lowest grey line is the root alone, and each line above it adds
# one block: count lines up to the highest point of each curve.

# %%
block, root = ranks.get("(block, root)")[0]
for strategy, blocks in {"full": 3, "grad_op": 8}.items():      # at the peak: the root, and so many blocks' worth
    assert ranks.get(f"measured['{strategy}'][0]['gathered']")[0] == 4 * (root + blocks * block)
fig, both = plots.figure(2, width=9.6, height=2.8)
for axes, strategy in zip(both, ("full", "grad_op")):
    curve = ranks.get(f"measured['{strategy}'][1]")[0]
    axes.plot([nbytes / 1024 for nbytes in curve], color=plots.RANK_COLORS[0], lw=1.2)
    for blocks in range(9):                                     # a line for the root and so many blocks
        axes.axhline(4 * (root + blocks * block) / 1024, color=plots.FAINT, lw=0.8, zorder=0)
    axes.set(title=f"“{strategy}”", xlabel="operations of forward and backward", ylabel="KiB gathered, with buffers")
    axes.set_ylim(0, 4 * (root + 8.6 * block) / 1024)
plots.show(fig, alt="Gathered bytes on a real rank through a step: a few blocks, or the whole model.")

# %% [markdown]
# Under "full" a rank has the root, the block in use, and the all-gather buffer out of which that block was copied. At
# the spikes the next block is copied out of its buffer while the buffer before is still there: three blocks' worth.
# Under "grad_op" no block is freed in forward, so each adds a line, up to the whole model and two buffers. The root
# stays in both, because by default FSDP2 does not free it after forward.
#
# ## Your turn 1 · A rank's bytes
#
# **Goal**: predict these numbers without training anything, to 1%. All parameters are float32, 4 bytes each.
#
# **Given**: the numbers of parameters in the root and in one block (`root`, `block`), of blocks (`blocks`) and of ranks
# (`world`), and the `strategy`, "full" or "grad_op".
#
# **Return** three numbers of bytes, for one rank:
#
# 1. at rest: its shards of parameters, gradients and AdamW's two moments,
# 2. gathered: the highest point of the curve above,
# 3. sent in one step: `(world - 1) / world` of each tensor that is gathered or reduced.
#
# The first two are held against what the ranks measured, the third against their recorded collectives.
#
# <details><summary>Hint</summary>
#
# For the second, count grey lines. For the third: under "full" each block is gathered twice and the root once, under
# "grad_op" each unit once. Each unit's gradient is reduced once.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

OFF = {
    "at rest": ["A rank has its share of 16 bytes per parameter: parameter, gradient and two moments."] * 2,
    "gathered": ("Under “full”: the root and three blocks' worth, and none of it is divided by the ranks.",
                 "Under “grad_op” the whole model is gathered at the last block, and two blocks' worth more."),
    "sent": ("Under “full”: each block is gathered twice, the root once, each unit reduced once; a share of (world - 1) / world.",
             "Under “grad_op”: each unit is gathered once and reduced once; a rank sends a share of (world - 1) / world."),
}
GOALS = {f"{what}, “{strategy}”: % off": at_most(1, advice)
         for what, sentences in OFF.items() for strategy, advice in zip(measured, sentences)}


@turn(1, GOALS)
def score_rank(my_rank):
    found = {}
    for strategy, (real, _) in measured.items():
        answer = my_rank(root, block, 6, world, strategy)
        if not isinstance(answer, tuple | list) or len(answer) != 3 or None in answer:
            raise NotYet("Return three numbers: at rest, gathered, sent.")
        for (what, right), mine in zip(real.items(), answer):
            found[f"{what}, “{strategy}”: % off"] = round(100 * abs(float(mine) / right - 1), 1)
    return found


# %%
# %%turn 1
def my_rank(root, block, blocks, world, strategy):              # strategy: "full" or "grad_op"
    # your lines here. The whole model has root + blocks * block parameters.
    return None                                                 # at_rest, gathered, sent: bytes of one rank


# %% tags=["solution"] turn=1
def my_rank(root, block, blocks, world, strategy):
    model, twice = root + blocks * block, strategy == "full"
    most = root + (3 if twice else blocks + 2) * block
    gathered = model + (blocks * block if twice else 0)
    return 16 * model / world, 4 * most, 4 * (gathered + model) * (world - 1) / world

# %% tags=["right"] turn=1
def my_rank(root, block, blocks, world, strategy):              # a list of integers
    units = [root] + [block] * blocks
    times = [2] + [3 if strategy == "full" else 2] * blocks     # collectives of each unit
    sent = sum(4 * t * unit for t, unit in zip(times, units)) * (world - 1) // world
    peak = units[:4] if strategy == "full" else [*units, block, block]
    return [16 * sum(units) // world, 4 * sum(peak), sent]

# %% tags=["right"] turn=1
import numpy as np

def my_rank(root, block, blocks, world, strategy):              # NumPy's numbers
    full = np.int64(strategy == "full")
    model = np.float64(root + blocks * block)
    return tuple(4 * np.array([
        4 * model / world, root + block * np.where(full, 3, blocks + 2),
        (2 * model + full * blocks * block) * (1 - 1 / world),
    ]))

# %% tags=["right"] turn=1
def my_rank(root, block, blocks, world, strategy):              # tensors
    model = torch.tensor(4.0 * (root + blocks * block))
    if strategy == "full":
        return 4 * model / world, torch.tensor(4 * (root + 3 * block)), (3 * model - 4 * root) * (world - 1) / world
    return 4 * model / world, model + 8 * block, 2 * model * (world - 1) / world

# %% tags=["wrong"] turn=1 says="16 bytes per parameter"
def my_rank(root, block, blocks, world, strategy):              # without gradients
    model, twice = root + blocks * block, strategy == "full"
    most = root + (3 if twice else blocks + 2) * block
    return 12 * model / world, 4 * most, 4 * (2 * model + twice * blocks * block) * (world - 1) / world

# %% tags=["wrong"] turn=1 says="none of it is divided by the ranks"
def my_rank(root, block, blocks, world, strategy):
    model, twice = root + blocks * block, strategy == "full"
    most = root + (3 if twice else blocks + 2) * block
    return 16 * model / world, 4 * most / world, 4 * (2 * model + twice * blocks * block) * (world - 1) / world

# %% tags=["wrong"] turn=1 says="and two blocks' worth more"
def my_rank(root, block, blocks, world, strategy):              # the strategy changes nothing
    model = root + blocks * block
    return 16 * model / world, 4 * (root + 3 * block), 4 * (3 * model - root) * (world - 1) / world

# %% tags=["wrong"] turn=1 says="the root once"
def my_rank(root, block, blocks, world, strategy):              # the root, too, is gathered twice
    model, twice = root + blocks * block, strategy == "full"
    most = root + (3 if twice else blocks + 2) * block
    return 16 * model / world, 4 * most, 4 * (3 if twice else 2) * model * (world - 1) / world

# %% tags=["wrong"] turn=1 says="Return three numbers"
def my_rank(root, block, blocks, world, strategy):
    return {"at rest": 16 * (root + blocks * block) / world}

# %% [markdown]
# ## How sure
#
# Activations, what the allocator reserves, and seconds are estimates. How good are they? `notebooks/published.yaml` has
# training runs that others have published. The constants of the planner were fitted to some of their sources. The
# runs of the others were **kept apart**, and only these are in the figure. Each dot is a run, at what was published
# divided by what `plan` says: right of 1, it took more than planned.

# %% tags=["errors", "guide"]
from statistics import median

predicted = json.loads((NOTEBOOKS / "predictions.json").read_text(encoding="utf-8"))["rows"]
apart = [row for row in predicted if row["split"] == "held_out"]
ratios = {}
for kind in ("eager", "compiled"):
    of_kind = [row for row in apart if row["kind"] == kind]
    steps = [row["tokens_per_s"][0] / row["tokens_per_s"][1] for row in of_kind if row["tokens_per_s"]]
    memory = [row["peak_gib"][1] / row["peak_gib"][0] for row in of_kind if row["peak_gib"]]
    ratios |= {f"{kind}: seconds of a step": sorted(steps), f"{kind}: peak memory": sorted(memory)}

fig, (axes,) = plots.figure(width=9, height=2.4)
for line, (name, found) in enumerate(ratios.items()):
    axes.plot(found, [line] * len(found), "o", color=plots.RANK_COLORS[line], alpha=0.6)
    axes.plot([median(found)] * 2, [line - 0.35, line + 0.35], color=plots.INK)
axes.axvline(1, color=plots.INK, linewidth=0.8)
axes.set_yticks(range(4), [f"{name}, {len(found)} runs" for name, found in ratios.items()])
axes.set(ylim=(3.6, -0.6), xlabel="published / planned; the dark line is the median")
plots.show(fig, alt="Published divided by planned, for seconds and memory of eager and of compiled runs.")

# %% tags=["check"]
spread = [(f"{found[0]:.2f}", f"{found[-1]:.2f}", len(found)) for found in ratios.values()]
assert spread == [("0.88", "1.12", 24), ("0.97", "1.04", 10), ("0.80", "1.00", 7), ("0.50", "0.97", 7)]

# %% [markdown]
# **Eager runs** took 0.88 to 1.12 times the planned time, and 0.97 to 1.04 times the planned memory. **Compiled runs** are
# planned less well: four took 0.80 to 0.84 times the planned time, all on H200, on which no run was fitted. The dot at
# 0.5 is a 70B with offload, whose source does not say which memory it means. 9 more runs have no plan: float8 and tensor
# parallelism are not simulated.
#
# Is the verdict right, then? The table counts all 99 planned runs, fitted ones too.

# %% tags=["verdicts"]
ended = [(row["verdict"], row["outcome"]) for row in predicted]
Table(
    ["verdict", "ran", "out of memory"],
    [[v, ended.count((v, "ran")), ended.count((v, "out of memory"))] for v in ("fits", "tight", "does not fit")],
)

# %% tags=["check"]
assert (len(ended), ended.count(("fits", "ran")), ended.count(("fits", "out of memory"))) == (99, 83, 0)
assert (ended.count(("tight", "ran")), ended.count(("tight", "out of memory"))) == (13, 1)
assert (ended.count(("does not fit", "ran")), ended.count(("does not fit", "out of memory"))) == (0, 2)

# %% [markdown]
# No run that was said to fit ran out of memory. But failures are rarely published: three say little about "does not
# fit", and make "tight" look safer than it is.
#
# Your first plan may be further off, because **we had read the programs**. Before, the four runs of one program took 1.9
# to 2.5 times the planned memory: its loop keeps `outputs = model(**batch)` until the next step, and these held float32
# logits and all keys and values. Of the fitted runs, one took 1.45 times the planned time, another 1.19 times the
# planned memory.
#
# So `benchmarks/gpu.py` planned ten eager Llamas and then measured them, on one H200 with torch 2.11. Allocated and
# reserved memory were 0.1 to 2.1% above all ten plans. Four of them were one rank of a `fake` group of 8 or 64, whose
# seconds say nothing. The table has the other six: look at its last two rows.

# %% tags=["on-a-gpu"]
from fsdp_utils.lessons import recorded

runs = recorded.load("planner")["results"]["rows"]
memory = [run[key][1] / run[key][0] for run in runs for key in ("peak_allocated_gib", "peak_reserved_gib")]
assert len(memory) == 20 and all(1.001 < ratio < 1.021 for ratio in memory)
rows = []
for run in runs:
    if "step_s" in run:
        planned, measured = run["step_s"]
        name = run["setting"].removeprefix("1 ranks, ").replace("1 samples", "1 sample").replace("strategy ", "")
        rows.append([name, f"{planned:.3f}", f"{measured:.3f}", f"{measured / planned:.2f}"])
rows.sort(key=lambda row: float(row[-1]))
Table(["on one H200", "planned, s", "measured, s", "measured / planned"], rows)

# %% tags=["check"]
assert [row[-1] for row in rows] == ["0.87", "0.90", "0.97", "1.01", "1.36", "5.19"]
assert round(min(run["step_s"][0] for run in runs if "step_s" in run) / 8e-6) == 2574

# %% [markdown]
# In bf16, with enough tokens to keep the GPU busy, seconds are within 13%. The fifth row computes in float32: there
# `plan` takes the GPU's published rate in full, because no run in float32 was there to be fitted. In the last row a
# sample of 512 tokens is so little work that launching kernels sets the pace. `plan` allows 8 µs for each of 2,574
# kernels, and the step took five times as long. So trust memory more than seconds, and seconds least where steps are
# short.
#
# ## Your turn 2 · A verdict with a margin
#
# **Goal**: turn a plan and the errors of earlier plans into a verdict, as `Plan.verdict` does.
#
# **Given**: a plan's two peaks, `allocated` and `reserved`, and the `room` on the GPU, in GiB; and `ratios`, published /
# planned memory of earlier runs, such as `[0.98, 1.1, 0.8, 1.0]`.
#
# **Return** "fits" if the run would need no retries with any of these errors, "does not fit" if its tensors would have
# no room with any of them, and "tight" otherwise. (As long as its tensors have room, a run goes on with retries, slowly:
# [lesson 5](05_maximising_throughput.ipynb).)
#
# <details><summary>Hint</summary>
#
# Which ratio is the worst case, and which one the best? Which amount has to be within the room for a run without
# retries, and which for a run at all?
#
# </details>

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.your_turn import NotYet, exactly, turn

RATIOS, ROOM = [0.98, 1.1, 0.8, 1.0], 77.0
CASES = {                                       # allocated, reserved, right, what another verdict says
    "reserved 75 of 77": (60, 75, "tight", "A run that takes more than its plan has no room: multiply by the largest ratio."),
    "reserved 69 of 77": (60, 69, "fits", "With the largest ratio there is room: multiply the plan by it."),
    "allocated 68, reserved 74": (68, 74, "tight", "The allocator reserves more than tensors take: “fits” is about reserved memory."),
    "allocated 74, reserved 97": (74, 97, "tight", "A run goes on while its tensors have room: “does not fit” is about allocated memory."),
    "allocated 84, reserved 88": (84, 88, "tight", "Some runs took less than their plan: multiply by the smallest ratio."),
    "allocated 98, reserved 110": (98, 110, "does not fit", "Even with the smallest ratio the tensors have no room."),
}


@turn(2, {name: exactly(right, advice) for name, (_, _, right, advice) in CASES.items()})
def score_verdict(my_verdict):
    found = {name: my_verdict(case[0], case[1], ROOM, list(RATIOS)) for name, case in CASES.items()}
    if any(str(said) not in ("fits", "tight", "does not fit") for said in found.values()):
        raise NotYet('Return "fits", "tight" or "does not fit".')
    return {name: str(said) for name, said in found.items()}


# %%
# %%turn 2
def my_verdict(allocated, reserved, room, ratios):
    # your lines here. The real run takes the planned memory times one of the ratios.
    return None                                                 # "fits", "tight" or "does not fit"


# %% tags=["solution"] turn=2
def my_verdict(allocated, reserved, room, ratios):
    if reserved * max(ratios) <= room:
        return "fits"
    return "tight" if allocated * min(ratios) <= room else "does not fit"

# %% tags=["right"] turn=2
def my_verdict(allocated, reserved, room, ratios):              # each run by itself
    if all(reserved * ratio <= room for ratio in ratios):
        return "fits"
    return "tight" if any(allocated * ratio <= room for ratio in ratios) else "does not fit"

# %% tags=["right"] turn=2
import numpy as np

def my_verdict(allocated, reserved, room, ratios):              # NumPy's text
    ratios = np.asarray(ratios)
    return np.select([(reserved * ratios <= room).all(), (allocated * ratios > room).all()], ["fits", "does not fit"], "tight")

# %% tags=["right"] turn=2
def my_verdict(allocated, reserved, room, ratios):              # the room instead of the plan
    low, *_, high = sorted(room / ratio for ratio in ratios)
    return ("tight", "fits", "does not fit")[(reserved <= low) + 2 * (allocated > high)]

# %% tags=["wrong"] turn=2 says="multiply by the largest ratio"
def my_verdict(allocated, reserved, room, ratios):              # no margin
    if reserved <= room:
        return "fits"
    return "tight" if allocated <= room else "does not fit"

# %% tags=["wrong"] turn=2 says="multiply by the smallest ratio"
from statistics import median

def my_verdict(allocated, reserved, room, ratios):
    if reserved * max(ratios) <= room:
        return "fits"
    return "tight" if allocated * median(ratios) <= room else "does not fit"

# %% tags=["wrong"] turn=2 says="The allocator reserves more"
def my_verdict(allocated, reserved, room, ratios):
    if allocated * max(ratios) <= room:
        return "fits"
    return "tight" if allocated * min(ratios) <= room else "does not fit"

# %% tags=["wrong"] turn=2 says="while its tensors have room"
def my_verdict(allocated, reserved, room, ratios):
    if reserved * max(ratios) <= room:
        return "fits"
    return "tight" if reserved * min(ratios) <= room else "does not fit"

# %% tags=["wrong"] turn=2 says="With the largest ratio there is room"
def my_verdict(allocated, reserved, room, ratios):              # divides
    if reserved / min(ratios) <= room:
        return "fits"
    return "tight" if allocated / max(ratios) <= room else "does not fit"

# %% tags=["wrong"] turn=2 says="Return"
def my_verdict(allocated, reserved, room, ratios):
    return reserved * max(ratios) <= room

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `expected a batch_size that 8 ranks in 1 micro-batches can share` | `batch_size` counts the samples of all ranks in a step | a multiple of ranks times micro-batches |
# | `there is a process group already` | `plan` makes one of its own, of ranks that do not exist | plan before `init_process_group`, as the script does |
# | `how far off this prediction may be is unknown` in a plan's notes | no run behind the range is of this kind: another GPU than A100, H100 and H200, offload, experts, LoRA, no causal attention | measure one step before you rent |
# | the run takes more memory than planned | the loop keeps outputs; or what is not simulated: workspaces of cuBLAS and of attention's backward, batches of changing length | write `loss=` as your loop does it; compare what is at rest, as in turn 1 |
# | the run is slower than planned | not simulated: loading data, a slow rank, a shared network, a CPU that takes more than 8 µs to launch a kernel | record a step ([lesson 4](04_backward_prefetch.ipynb)) |
#
# ## The rule
#
# Plan with the `loss=` of your own loop, and rent what "fits". Where it is "tight", compiled, or its error unknown,
# measure a few steps on one host before you rent many.
#
# [← lesson 13](13_from_fsdp1_to_fsdp2.ipynb) · [lesson 15 →](15_when_it_hangs.ipynb)
