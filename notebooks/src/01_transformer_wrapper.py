# %% [markdown]
# # 1 · The transformer wrapper
#
# Which modules of a transformer should you call `fully_shard` on? **On each block, then on the model:**
#
# ```python
# for unit in [*model.model.layers, model]:
#     fully_shard(unit)
# ```
#
# Each call makes a *unit*: a set of parameters that FSDP **gathers** on every rank before they are used, and
# frees together afterwards. As long as no parameter is left out and all computation is in one dtype ([lesson
# 7](07_mixed_precision.ipynb) has the other case), your choice does not change the losses; it changes memory
# and time. Llama-3-8B, for example, has 15 GiB of weights in bfloat16. As one unit, each GPU holds all of
# them through forward, together with the buffer they arrived in: 30 GiB. With a unit for each block, gathered
# parameters and buffers never exceed 4.7 GiB, and 2.4 GiB if embedding and output head are units, too.
# Gradients and activations come on top. Units lower the peak of gradients, too, but not that of activations.
#
# The drawing follows one rank through one training step of a model with six blocks. A bar stands where a
# unit's parameters are gathered; the buffers are left out.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

colors = {"computes": plots.RANK_COLORS[0], "is gathered early": plots.FAINT, "root": plots.RANK_COLORS[3]}
fig, (axes,) = plots.figure(width=8.6, height=2.7)
for moment in range(13):  # six blocks forward, head and loss, six blocks backward
    block = moment if moment < 6 else 12 - moment
    held = {6: "root"} | ({block: "computes"} if moment != 6 else {})
    held |= {block - 1: "is gathered early"} if moment >= 6 and block else {}
    for row, what in held.items():
        late = 0.5 if moment == 6 and row == 5 else 0  # backward asks for the last block after the loss
        axes.barh(row, 1 - late, left=moment + late, height=0.8, color=colors[what], edgecolor=plots.CARD)
for x, text in ((3, "forward"), (6.5, "head, loss"), (10, "backward")):
    axes.text(x, 7.1, text, ha="center")
axes.text(2.6, 0.8, "blue: computes", color=plots.RANK_COLORS[0])
axes.text(2.6, -0.2, "grey: is gathered early", color=plots.INK)
axes.text(0.1, 5.0, "pink: the root, all step long", color=plots.RANK_COLORS[3], va="center")
axes.vlines([6, 7], -0.6, 6.6, color=plots.INK, linewidth=0.8)
axes.set_yticks(range(7), [*(f"block {n}" for n in range(6)), "root"])
axes.set(xlim=(0, 13), ylim=(-0.6, 7.6), xticks=[], xlabel="one training step →")
axes.tick_params(length=0)
plots.show(fig, alt="A step by block: the root stays gathered, each block only while it is needed.")

# %% [markdown]
# In forward, each block is gathered, computes (blue) and is freed before the next one computes. Backward
# needs the parameters again, last block first, so each block is gathered a second time. While a block
# computes its gradients, FSDP already gathers the one that comes next (grey), so that a GPU need not wait for
# it. (GPUs gather ahead in forward, too: [lesson 4](04_backward_prefetch.ipynb).) The **root** (pink) is the
# unit that the last call, `fully_shard(model)`, makes of everything outside the blocks.

# %% tags=["card"]
lesson.card(
    1,
    learn="choose units, see what a wrong choice costs, and check your own model",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 18, 17),
)

# %% [markdown]
# ## The script
#
# This script trains a Llama of six blocks twice, first as one unit and then by block, and counts the
# all-gathers of a step. Save it as `train.py`, then run `torchrun --nproc-per-node 4 train.py`. It uses four
# GPUs, or the CPU where there is none. (With one to three GPUs, put `CUDA_VISIBLE_DEVICES=` before the
# command.)
#
# ```python
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from transformers import LlamaConfig, LlamaForCausalLM
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))     # all ranks; without it a Mac takes its GPU
# config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=6)
#
#
# def train(name, choose_units):
#     torch.manual_seed(0)                                      # the same weights on every rank
#     model = LlamaForCausalLM(config).to(device)
#     whole = sum(p.nbytes for p in model.parameters())
#     for unit in [*choose_units(model), model]:                # the model comes last
#         fully_shard(unit, mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters())         # after sharding
#     torch.manual_seed(1 + dist.get_rank())                    # other samples on each rank
#     for step in range(3):
#         ids = torch.randint(64, (4, 30), device=device)       # your data
#         with record_collectives(model) as trace:              # notes each collective of this step
#             loss = model(input_ids=ids, labels=ids).loss
#             loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     gathers = [event.bytes for event in trace.events if event.kind == "all_gather"]
#     if dist.get_rank() == 0:
#         largest = max(gathers) / whole
#         print(f"{name}: {len(gathers):2} all-gathers, largest {largest:4.0%} of the model, loss {loss:.4f}")
#
#
# train("one unit", lambda model: [])
# train("by block", lambda model: model.model.layers)
# dist.destroy_process_group()
# ```
# ```text
# one unit:  1 all-gathers, largest 100% of the model, loss 4.1837
# by block: 13 all-gathers, largest  16% of the model, loss 4.1837
# ```
#
# Start with the last number. The **loss** is the same, because units change when parameters travel and not
# what is computed; so a loss curve does not show that units are too large or too small. The **largest
# all-gather** is the gain: as one unit, each rank gathers the whole model in one piece, which is what FSDP
# exists to avoid; by block, it is one of six blocks, 16%. The price is the **number of all-gathers**, and of
# the reduce-scatters of gradients, one for each unit.
#
# ## What a unit is
#
# `fully_shard(module)` makes one unit of all parameters inside `module` that no earlier call has taken. That
# is why you call it on the parts first and on the model last: the model's call takes what is left. It also
# hooks itself into the module: right before the module's `forward` runs, one all-gather brings all parameters
# of the unit, and when `forward` returns, they are freed (except the root's, see below). So a unit has to be a
# module that *every rank calls*. A block is; `model.model.layers` is a `ModuleList`, which only holds blocks,
# and `fully_shard` refuses it.
#
# A transformer repeats a **block**: attention, then a feed-forward network. In Llama the block is the class
# `LlamaDecoderLayer`, and the root gets the embedding, the last norm and the head. Blocks are natural units
# because they run one after another: while one computes, no other is needed.
#
# This explains the 13 all-gathers. Each block is gathered for forward and, since it was freed, again for
# backward: six blocks make twelve. The root is gathered once, because FSDP2 does not free it after forward:
# backward begins with the head, which is in the root. As one unit, the whole model is the root,
# gathered once and kept until backward is over.
#
# ## What four choices cost
#
# The next cells measure one step on four ranks, for four choices of units: the two that you know, one that
# leaves too much to the root (only the feed-forward networks are units), and one that is very fine (each
# weight matrix of the blocks is a unit). `Meter` watches every operation on a rank.
#
# "Gathered at the peak" counts gathered parameters **and the buffers they arrive in**: FSDP2 gathers a unit
# into one flat buffer and then copies each parameter out of it. In forward it keeps the buffer after the copy,
# so a unit is in memory twice while it computes.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(preload=["transformers.models.llama.modeling_llama"])  # slow to import

# %% jupyter={"source_hidden": true}
# %%ranks
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import check_sharding, record_collectives, shard, transformer_block_classes
from fsdp_utils.lessons.meter import Meter
from fsdp_utils.lessons.tables import Table

rank = dist.get_rank()
on_gpu = torch.cuda.is_available()  # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


# %% tags=["measure"]
# %%ranks
def llama(blocks=6, vocabulary=64):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_hidden_layers=blocks, **sizes)).to(device)


def linears(module):
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


ways = {
    "one unit": lambda model: [],
    "by block": lambda model: [*model.model.layers],
    "feed-forward": lambda model: [block.mlp for block in model.model.layers],
    "by matrix": lambda model: linears(model.model.layers),
}


def measure(model, shape=(3, 30), vocabulary=64):
    """Return the meter of the second step, and how many operations its forward has."""
    ids = torch.randint(vocabulary, shape, device=device)
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    with Meter(model.parameters()) as meter:
        loss = model(input_ids=ids, labels=ids).loss
        forward = len(meter.gather_bytes)
        loss.backward()
    return meter, forward


def sharded(model, choose):
    for unit in [*choose(model), model]:
        fully_shard(unit)
    return model


whole = sum(p.nbytes for p in llama().parameters())
steps, rows = {}, []
for way, choose in ways.items():
    meter, _ = steps[way] = measure(sharded(llama(), choose))
    in_percent = [round(100 * n / whole) for n in (meter.gathered_bytes, meter.peak_gather_bytes)]
    rows.append([way, meter.all_gathers, meter.reduce_scatters, *in_percent])

# %%
rows = [min(of_ranks) for of_ranks in zip(*ranks.get("rows"))]  # a thread of gloo may free a buffer late
titles = ["all-gathers", "reduce-scatters", "all-gathers' sum, %", "gathered at the peak, %"]
Table(["units", *titles], rows, note="All percentages are of the model.")

# %% [markdown]
# Begin with "gathered at the peak". **One unit** peaks at 200%: the whole model in the buffer, and once more
# in the parameters copied out of it. **By block** peaks at a quarter of that. **Feed-forward** is a mistake
# that is hard to see: there are as many all-gathers as by block, but the attention of all six blocks was left
# to the root, which stays gathered, so the peak is half as high again. **By matrix** has the lowest peak, and
# over six times as many all-gathers as by block. Their sum is what freeing costs: one unit travels once; by
# block, nearly everything travels twice.
#
# Units govern **gradients** as well: before reduce-scatter leaves each rank its share, a unit's gradients are
# complete on each rank, and once more in a buffer. As one unit, that is the whole model twice. No choice of
# units lowers **activations**; [lesson 2](02_activation_checkpointing.ipynb) does.
#
# The figure follows the gathered bytes through the same four steps. Compare forward with backward.

# %%
curves, forward = {}, []
for way, gathered, length in ranks.get("[(way, m.gather_bytes, n) for way, (m, n) in steps.items()]")[0]:
    curves[way] = gathered
    forward.append(length)
plots.alive(curves, whole_model=ranks.get("whole")[0], what="gathered", forward=forward)

# %% [markdown]
# By block, forward runs at a height of 35%: the root (2%), the parameters of one block (16%) and the buffer
# they were copied from (16%). FSDP2 keeps that buffer until the *next* unit is copied out, so that on a GPU
# the copies and the gathering can overlap. For that moment a rank holds the root, the next block twice and
# the old buffer: 2 + 3 * 16 makes the thin spikes and, before rounding, the 51% of the table. In backward a
# buffer is freed at once, so the maximum is the root and two blocks, as in the drawing at the top.
#
# Don't subtract these peaks from a GPU's peak of memory: a spike in forward meets few activations.
#
# ## Why not smaller units?
#
# The height of the spikes follows from the sizes of the units. This holds for FSDP2's defaults (units are
# freed after forward, and you set no prefetch by hand), if units lie side by side, forward runs each of them
# once, and all have one dtype. `root` and `units` are sizes in bytes, the units in the order of forward:


# %%
# %%ranks
def peak(root, units):
    """Return the bytes gathered at the peak: the root, a unit, its buffer, and the buffer before it."""
    before = [root, *units[:-1]]
    return max([2 * root] + [root + last + 2 * unit for last, unit in zip(before, units)])


blocks = [sum(p.nbytes for p in block.parameters()) for block in llama().model.layers]
print(f"by block: {peak(whole - sum(blocks), blocks) / whole:.0%}")

# %% [markdown]
# That is the 51% measured above. Should you go on cutting? The next figure shows what cutting gains: seven
# choices in a Llama of twelve blocks, measured on the ranks (the folded cell asserts that the formula is right
# to within 6%). For "½ block", attention and feed-forward network are units, and the norms stay in the root.


# %% tags=["sweep"] jupyter={"source_hidden": true}
# %%ranks
def in_groups(count):
    def choose(model):
        blocks = [*model.model.layers]
        return [blocks[start : start + count] for start in range(0, len(blocks), count)]

    return choose


def nbytes(*modules):
    return sum(p.nbytes for module in modules for p in module.parameters())


cuts = {f"{count} blocks": in_groups(count) for count in (6, 4, 3, 2)} | {"1 block": in_groups(1)}
cuts["½ block"] = lambda m: [u for b in m.model.layers for u in (b.self_attn, b.mlp)]
cuts["1 matrix"] = lambda m: linears(m.model.layers)
deep, swept = nbytes(llama(12)), []
for cut, choose in cuts.items():
    sizes = [nbytes(*(u if isinstance(u, list) else [u])) for u in choose(llama(12))]
    (found, _), expected = measure(sharded(llama(12), choose)), peak(deep - sum(sizes), sizes)
    swept.append((cut, found.all_gathers, 100 * found.peak_gather_bytes / deep, found.peak_gather_bytes / expected))

# %% jupyter={"source_hidden": true}
swept = [min(of_ranks) for of_ranks in zip(*ranks.get("swept"))]  # one may free a buffer late
assert all(abs(of_expected - 1) < 0.06 for *_, of_expected in swept)  # three ranks pad 64 rows to 66
assert [count for _, count, *_ in swept] == [5, 7, 9, 13, 25, 49, 169]
fig, (gain,) = plots.figure(width=5.6, height=3.0)
gain.plot([count for _, count, *_ in swept], [high for _, _, high, _ in swept], "o-", color=plots.RANK_COLORS[0])
for name, count, high, _ in swept:
    gain.annotate(name, (count, high), (6, 4), textcoords="offset points", fontsize=9)
gain.set(xscale="log", ylim=(0, 170), xlim=(4, 400), title="smaller units")
gain.set(xlabel="all-gathers in a step", ylabel="gathered at the peak, %")
gain.set_xticks([5, 10, 25, 50, 169], ["5", "10", "25", "50", "169"], minor=False)
gain.set_xticks([], minor=True)
plots.show(fig, alt="Smaller units lower the peak less and less.")

# %% [markdown]
# Cutting pays most at first: from units of six blocks to one block the peak falls from 149% to 26%. A unit
# for each matrix brings it to 7%, with 169 all-gathers instead of 25. Their number matters because every
# all-gather takes some time to start, however little it sends. Multiply this time by the speed of the link,
# and you have the size of a unit that spends half of its gathering on the start. With 20 µs and 25 GiB/s that
# is 0.5 MiB, with 100 µs and 200 GiB/s it is 20 MiB (assumed values; nccl-tests measures yours). A block of
# Llama-3-8B has 416 MiB in bfloat16, one of its matrices 59 MiB in the mean, and a block of GPT-2 14 MiB. An
# all-gather that runs while the GPU computes costs little; [lesson 4](04_backward_prefetch.ipynb) shows which
# ones do.
#
# So take the block, unless your blocks are as small as GPT-2's **and** a profile shows the GPU waiting for
# all-gathers. Then put two or more blocks in a unit: `fully_shard([block_0, block_1])`.
#
# ## In your own code
#
# Besides the first lines of the script, a training loop for one GPU needs three changes and one check, marked
# in the next cell. The other lines of a step stay, gradient clipping too; saving changes ([lesson
# 3](03_full_state_dict.ipynb)), and evaluation has to run on every rank, not on rank 0 alone.
# `fsdp_utils.shard(model)` finds the class of the blocks, and does what the loop of the script does. (It
# leaves embedding and head to the root, unless you called `fully_shard` on them before.) Neither makes the
# ranks' weights equal: each rank keeps its rows of what it built itself. So build the same model on each rank,
# with the same seed or from the same file.

# %% tags=["job"]
# %%ranks
model = llama()  # the same on every rank; if no rank can hold it: lesson 12
shard(model)  # 1: the units
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # 2: moves below the sharding
assert check_sharding(model, optimizer) == []  # the check, on every rank
torch.manual_seed(1 + rank)  # 3: other samples on each rank (with a DataLoader: DistributedSampler)
for step in range(3):
    ids = torch.randint(64, (4, 30), device=device)
    with record_collectives(model) as trace:
        model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

kept = sum(p.to_local().nbytes for p in model.parameters()) / sum(p.nbytes for p in model.parameters())
print(f"a rank keeps {kept:.0%} of the parameters")
print("a block is a", type(model.model.layers[0]).__name__)
print(sum(event.kind == "all_gather" for event in trace.events), "all-gathers")

# %% [markdown]
# A rank keeps one part in `world_size` of the parameters, so the model is sharded. The class of a block
# begins with `FSDP`, so `fully_shard` was called on it. And six blocks give 2 * 6 + 1 all-gathers, so they
# are freed and gathered as planned; turn 2 reads other counts.
#
# With `torch.compile`, call `block.compile()` on each block: the graph of a compiled model would break at
# FSDP's hooks. ([Lesson 2](02_activation_checkpointing.ipynb) has the order with checkpoints.) FSDP1
# wraps the blocks itself, by a rule, `auto_wrap_policy`: [lesson 13](13_from_fsdp1_to_fsdp2.ipynb).
#
# ## Embedding, head and tied weights
#
# So far the root was 2% of the model. With a real vocabulary it can become the largest unit of all, and it
# stays gathered for the whole step. The table gives the peak by the formula above, in GiB of bfloat16, which
# is what a GPU gathers under mixed precision ([lesson 7](07_mixed_precision.ipynb)). The models have their
# real sizes, but are built on the **meta device**, without memory.

# %% tags=["block-class"] jupyter={"source_hidden": true}
# %%ranks 0
LLAMA3 = {"vocab_size": 128_256, "num_key_value_heads": 8}
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
families = {
    "Llama-2-7B": (LlamaForCausalLM, LlamaConfig()),
    "Llama-3-8B": (LlamaForCausalLM, LlamaConfig(**LLAMA3, intermediate_size=14_336)),
    "Llama-3.2-1B": (LlamaForCausalLM, LlamaConfig(**LLAMA3, **SMALL)),
    "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config()),
}


def elements(*modules):
    return sum({p: p.numel() for module in modules for p in module.parameters()}.values())


rows = []
for name, (kind, config) in families.items():
    with torch.device("meta"):
        model = kind(config)
    (block_class,) = transformer_block_classes(model)
    blocks = [elements(module) for module in model.modules() if isinstance(module, block_class)]
    total, ends = elements(model), [model.get_input_embeddings(), model.get_output_embeddings()]
    root, (embedding, head) = total - sum(blocks), map(elements, ends)
    peaks = [peak(total, []), peak(root, blocks)]
    if not config.tie_word_embeddings:
        peaks.append(peak(root - embedding - head, [embedding, *blocks, head]))
    gib = [f"{2 * elements_ / 2**30:.1f}" for elements_ in peaks]
    rows.append([name, block_class.__name__, round(100 * root / total), *gib, *["tied"] * (3 - len(gib))])
names = ["model", "block class", "in the root, %", "one unit, GiB", "by block, GiB", "and both ends, GiB"]
Table(names, rows)

# %% [markdown]
# In Llama-2-7B and Llama-3-8B, embedding and head are two matrices. Call `fully_shard` on each before the
# call on the model. For Llama-3-8B this halves the peak of what is gathered, because the two are used at
# opposite ends of forward and need not be in memory together. In backward, where the step's own peak often
# lies, it gains up to 2 GiB: while all but the first and last block compute their gradients, at most two
# blocks are gathered, 0.8 GiB, and not the root as well, 2.8 GiB. The step's peak falls by a smaller share, because gradients and
# activations are in it, too. Torchtitan, PyTorch's own training code, makes both units in its Llama 3, and
# keeps the head until backward, which begins with it. That saves an all-gather:
# `fully_shard([norm, head], reshard_after_forward=False)`.
#
# In Llama-3.2-1B and GPT-2, one matrix is both: the weights are **tied**. It is the first parameter that
# forward uses and the last, so leave both modules to the root. `fully_shard(embedding)` alone fails, because
# the head is then in the root, and a parameter cannot be in two units. The error advises
# `fully_shard([embedding, head])`. That works, but the matrix stays gathered between its two uses as before,
# and the step has two more all-gathers.
#
# ## Your turn 1 · A budget
#
# In some models, such as those with experts in every fourth block, blocks differ in size.
#
# - **Given:** `model`, a Llama of twelve blocks. The table below has the sizes of its parts. `shard(model)`
#   peaks at 53%, with 25 all-gathers.
# - **Goal:** at most 36% of the model gathered at the peak, with at most 23 all-gathers.
# - **Return:** the model, after your calls of `fully_shard`.
#
# `peak` takes percentages, too. Try it in a cell of your own, whose first line is `%%ranks 0`.
#
# <details><summary>Hint</summary>
#
# How many units may there be besides the root? Which two blocks can share one without a neighbour that is too
# large for it?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from transformers.models.llama.modeling_llama import LlamaMLP

from fsdp_utils.lessons.your_turn import Goal, NotYet, Picture, at_most, exactly, turn
from fsdp_utils.sharding.units import ROOT, find_units, parameter_sizes

_goals = ["all-gathers in one step", "gathered at the peak, % of the model", "problems of check_sharding"]


def uneven():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1024}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, intermediate_size=64, **sizes))
    for block in model.model.layers[3::4]:
        block.mlp = LlamaMLP(LlamaConfig(intermediate_size=512, **sizes))
    return model.to(device)


def _why(model, found, nbytes):
    """Say which unit makes the peak."""
    root, *parts = units = find_units(model, also_empty=True)
    if root.name != ROOT:
        return "The call on the model is missing."
    in_root = parameter_sizes(model, units)[root]
    for end, weight in {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}.items():
        if weight in in_root:
            return f"The {end} is in the root, which stays gathered: make it a unit before the root."
    if sum(size for name, size in in_root.items() if ".layers." in name) > 0.1 * nbytes / 4:
        return "Part of each block is in the root, which stays gathered."
    sizes = [unit.nbytes for unit in parts]
    if found > 1.03 * peak(root.nbytes, sizes):
        for unit in parts:
            if "lm_head" not in unit.name and not all(part._reshard_after_forward for part in unit.parts):
                return f"{unit.name} stays gathered after forward: do not set reshard_after_forward there."
        return "A unit lies around others, or its modules don't follow each other, so it stays gathered."
    before = [root.nbytes, *sizes]
    last, size, name = max(zip(before, sizes, [unit.name for unit in parts]), key=lambda u: u[0] + 2 * u[1])
    last, size = 100 * last / nbytes, 100 * size / nbytes
    return f"The peak is at {name}: twice its {size:.1f}%, and {last:.1f}% of the unit before it."


@turn(
    1,
    {
        _goals[0]: at_most(23, "These are more than eleven units: let small neighbours share one."),
        _goals[1]: Goal("at most 36", lambda found: found <= 36, lambda _: score_uneven.why),
        _goals[2]: exactly(0, "Print check_sharding(model): it says what is wrong."),
    },
)
def score_uneven(choose_units):
    model = uneven()
    nbytes = sum(p.nbytes for p in model.parameters())
    model = choose_units(model)
    if not isinstance(model, nn.Module):
        raise NotYet("Return the model.")
    problems = len(check_sharding(model))
    meter, forward = measure(model, (1, 8), 1024)
    score_uneven.why = _why(model, meter.peak_gather_bytes, nbytes)
    found = dict(zip(_goals, (meter.all_gathers, round(100 * meter.peak_gather_bytes / nbytes), problems)))
    options = {"whole_model": nbytes, "what": "gathered", "forward": [forward]}
    return {**found, "picture": Picture("alive", [{"yours": meter.gather_bytes}], options)}


_model = uneven()
_parts = {
    "embedding, model.model.embed_tokens": _model.model.embed_tokens,
    "blocks 3, 7 and 11, each (of model.model.layers)": _model.model.layers[3],
    "the nine other blocks, each": _model.model.layers[0],
    "head, model.lm_head": _model.lm_head,
}
_shares = [[name, round(100 * nbytes(part) / nbytes(_model), 1)] for name, part in _parts.items()]
Table(["part", "% of the model"], _shares)


# %%
# %%turn 1
def choose_units(model):
    # fully_shard(...) on each unit, the model last
    return None  # the model


# %% tags=["solution"] turn=1
def choose_units(model):
    blocks = model.model.layers
    for i in range(0, 12, 4):  # two small blocks, the third alone before the wide one
        for unit in [[blocks[i], blocks[i + 1]], blocks[i + 2], blocks[i + 3]]:
            fully_shard(unit)
    for unit in [model.model.embed_tokens, model.lm_head, model]:
        fully_shard(unit)
    return model


# %% tags=["right"] turn=1
def choose_units(model):
    blocks = model.model.layers
    fully_shard([model.model.embed_tokens, blocks[0], blocks[1]])
    rest = [*blocks[2:4], [*blocks[4:6]], *blocks[6:8], [*blocks[8:10]], *blocks[10:12]]
    return sharded(model, lambda m: [*rest, m.lm_head])


# %% tags=["right"] turn=1
def choose_units(model):
    blocks = model.model.layers
    fully_shard(model.model.embed_tokens)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    for i in range(0, 12, 4):
        fully_shard([blocks[i], blocks[i + 1]])
    for i in (2, 3, 6, 7, 10, 11):
        fully_shard(blocks[i])
    return fully_shard(model)


# %% tags=["right"] turn=1
def choose_units(model):
    blocks, starts = [*model.model.layers], [0, 2, 3, 4, 6, 7, 8, 10, 11]
    groups = [blocks[start:end] for start, end in zip(starts, [*starts[1:], None])]
    return sharded(model, lambda m: [m.model.embed_tokens, *groups, m.lm_head])


# %% tags=["wrong"] turn=1 says="The embedding is in the root"
def choose_units(model):
    return shard(model)


# %% tags=["wrong"] turn=1 says="The head is in the root"
def choose_units(model):
    fully_shard(model.model.embed_tokens)
    return shard(model)


# %% tags=["wrong"] turn=1 says="more than eleven units"
def choose_units(model):
    return sharded(model, lambda m: [m.model.embed_tokens, *m.model.layers, m.lm_head])


# %% tags=["wrong"] turn=1 says="The peak is at model.layers.3: twice its 15.6%, and 11.8% of the unit before it."
def choose_units(model):
    blocks = model.model.layers
    groups = [u for i in range(0, 12, 4) for u in ([*blocks[i : i + 3]], blocks[i + 3])]
    return sharded(model, lambda m: [m.model.embed_tokens, *groups, m.lm_head])


# %% tags=["wrong"] turn=1 says="A unit lies around others"
def choose_units(model):
    return sharded(model, lambda m: [*m.model.layers, m.lm_head, m.model])


# %% tags=["wrong"] turn=1 says="Part of each block is in the root"
def choose_units(model):
    return sharded(model, lambda m: [m.model.embed_tokens, *[b.mlp for b in m.model.layers], m.lm_head])


# %% tags=["wrong"] turn=1 says="stays gathered after forward"
def choose_units(model):
    for unit in [model.model.embed_tokens, *model.model.layers, model.lm_head, model]:
        fully_shard(unit, reshard_after_forward=False)
    return model


# %% tags=["wrong"] turn=1 says="The call on the model is missing. Print check_sharding(model)"
def choose_units(model):
    for unit in [model.model.embed_tokens, *model.model.layers, model.lm_head]:
        fully_shard(unit)
    return model


# %% [markdown]
# ## Your turn 2 · Read a trace
#
# - **Given:** `gathers`, the share of the model that each all-gather brought, in order, and `blocks`, how many
#   blocks the model has. For the run `"by block"` with four blocks, `gathers` is 0.03 and then eight times
#   0.24. Embedding, last norm and head together have under 5% of each model.
# - **Goal:** tell six runs apart, each with four blocks and with six: `"by block"`, `"one unit"`, `"no root"`
#   (`fully_shard(model)` was forgotten), `"not freed"` (`reshard_after_forward=False`), `"parts of blocks"`
#   (only the feed-forward networks are units) and `"pairs"` (two blocks in each unit).
# - **Return:** the name of the run.
#
# <details><summary>Hint</summary>
#
# How many all-gathers, what is their sum, and how large is the first? Without the call on the model, each
# block is a root, and FSDP2 does not free a root after forward.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
_runs = {
    "by block": lambda m: sharded(m, in_groups(1)),
    "one unit": fully_shard,
    "no root": lambda m: [fully_shard(block) for block in m.model.layers],
    "not freed": lambda m: [fully_shard(u, reshard_after_forward=False) for u in (*m.model.layers, m)],
    "parts of blocks": lambda m: sharded(m, ways["feed-forward"]),
    "pairs": lambda m: sharded(m, in_groups(2)),
}


def _gathers(blocks, choose):
    model, ids = llama(blocks), torch.zeros(1, 8, dtype=torch.int64, device=device)
    all_bytes = nbytes(model)
    choose(model)
    with record_collectives(model) as trace:
        model(input_ids=ids, labels=ids).loss.backward()
    return [event.bytes / all_bytes for event in trace.events if event.kind == "all_gather"]


runs = {run: {blocks: _gathers(blocks, choose) for blocks in (4, 6)} for run, choose in _runs.items()}

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.your_turn import Goal, NotYet, turn

_runs = ranks.get("runs")[0]
_counts = [len(gathers) for run in _runs.values() for gathers in run.values()]
assert _counts == [9, 13, 1, 1, 4, 6, 5, 7, 9, 13, 5, 7]
_advice = {
    "by block": "Here each block came twice and the small root once.",
    "one unit": "Here a single all-gather brought 100% of the model.",
    "no root": "Here no small all-gather came before the blocks' own: who holds the embedding?",
    "not freed": "Here no parameter came twice: all shares together are 100%.",
    "parts of blocks": "Here the number is right, but the first share is too large for embedding, norm and head.",
    "pairs": "Here are as many as where nothing is freed, but together they are far more than 100%.",
}


@turn(
    2,
    {
        f"run {letter}": Goal(run, lambda found, run=run: found == run, _advice[run])
        for letter, run in zip("ABCDEF", _runs)
    },
)
def score_diagnosis(diagnose):
    found = {}
    for letter, (run, traces) in zip("ABCDEF", _runs.items()):
        names = [diagnose(list(gathers), blocks) for blocks, gathers in traces.items()]
        if strange := [name for name in names if name not in _runs]:
            raise NotYet(f"`diagnose` returned {strange[0]!r}, which is not one of the six names.")
        found[f"run {letter}"] = next((name for name in names if name != run), run)
    return found


# %%
# %%turn 2
def diagnose(gathers, blocks):
    # for instance: if len(gathers) == ...: return "one unit"
    return None  # one of the six names


# %% tags=["solution"] turn=2
def diagnose(gathers, blocks):
    if len(gathers) == 1:
        return "one unit"
    if len(gathers) == blocks:
        return "no root"  # and nothing came twice
    if sum(gathers) < 1.01:
        return "not freed"
    if gathers[0] > 0.05:
        return "parts of blocks"  # the rest of the blocks is in the root
    return "by block" if len(gathers) == 2 * blocks + 1 else "pairs"


# %% tags=["right"] turn=2
def diagnose(gathers, blocks):
    first, *others = gathers
    if not others:
        return "one unit"
    if abs(first - others[0]) < 0.01:
        return "no root"
    if first > others[0]:
        return "parts of blocks"
    if others[0] > 1.5 / blocks:
        return "pairs"
    return "by block" if len(others) > blocks else "not freed"


# %% tags=["right"] turn=2
def diagnose(gathers, blocks):
    total, root = sum(gathers), gathers[0]
    if total > 1.1:
        wide = max(gathers) > 1.5 / blocks
        return "parts of blocks" if root > 0.05 else "pairs" if wide else "by block"
    return {1: "one unit", blocks: "no root", blocks + 1: "not freed"}[len(gathers)]


# %% tags=["right"] turn=2
def diagnose(gathers, blocks):
    number = len(gathers)
    if number == 2 * blocks + 1:
        return "by block" if gathers[0] < gathers[1] else "parts of blocks"
    if number == blocks + 1:
        return "not freed" if gathers[1] * blocks < 1 else "pairs"
    return "one unit" if number == 1 else "no root"


# %% tags=["wrong"] turn=2 says="the first share is too large"
def diagnose(gathers, blocks):
    counts = {1: "one unit", blocks: "no root", blocks + 1: "not freed", 2 * blocks + 1: "by block"}
    return counts[len(gathers)]


# %% tags=["wrong"] turn=2 says="together they are far more than 100%"
def diagnose(gathers, blocks):
    if len(gathers) == 2 * blocks + 1:
        return "by block" if gathers[0] < 0.05 else "parts of blocks"
    return {1: "one unit", blocks: "no root", blocks + 1: "not freed"}[len(gathers)]


# %% tags=["wrong"] turn=2 says="who holds the embedding?"
def diagnose(gathers, blocks):
    if len(gathers) == 1:
        return "one unit"
    if sum(gathers) < 1.1:
        return "not freed"
    return "parts of blocks" if gathers[0] > 0.05 else "by block" if gathers[1] * blocks < 1 else "pairs"


# %% [markdown]
# ## When it goes wrong
#
# `check_sharding` finds the first four, which raise no error of their own. (The fourth raises in
# `clip_grad_norm_`: `got mixed torch.Tensor and DTensor`.)
#
# | you see | cause | cure |
# | :-- | :-- | :-- |
# | the loss does not move | the optimizer was built before `fully_shard` and holds the old parameters | build it after sharding |
# | the peak hardly falls with more ranks, although what is kept between steps does | one unit for the whole model | `fully_shard` on each block, or `shard(model)` |
# | the same, with the right number of units | units of the wrong class, so that part of each block is in the root | the class of the blocks |
# | the ranks' embeddings differ, and blocks stay gathered after forward | `fully_shard(model)` is missing: what is outside of the blocks is not reduced, and each block is a root | call it last |
# | `ValueError: Parameter 'lm_head.weight' is shared with a parameter already managed by another FSDP group`, in the first forward | tied weights in two units | leave both to the root |
# | from `fully_shard(block)`: `TypeError: Invariant encountered`, or with a named mesh `RuntimeError: Cannot concatenate overlapping meshes` | the model was sharded before its blocks | blocks first, the model last |
#
# The next cell makes two of the silent mistakes in one model:

# %%
# %%ranks
model = llama()
early = torch.optim.AdamW(model.parameters())  # too early
for block in model.model.layers:
    fully_shard(block)  # and no fully_shard(model)
for problem in check_sharding(model, early):
    print("-", problem)

# %% [markdown]
# ## The rule
#
# Make each block a unit, then the model; build the optimizer afterwards. A large embedding and a large head
# that are not tied are units too. `check_sharding(model, optimizer)` says when something was forgotten.
#
# [← lesson 0](00_fsdp_from_scratch.ipynb) · [lesson 2 →](02_activation_checkpointing.ipynb)
