# %% [markdown]
# # 1 · The transformer wrapper
#
# Which modules of a transformer should you call `fully_shard` on? **On each block, then on the model.**
#
# Each call makes a *unit*: a set of parameters that FSDP rebuilds on every rank before they are used, and
# frees together afterwards. So your choice of units decides how much of the model each GPU holds in full
# during a step. A poor choice raises no error and trains to the same losses; it only costs memory. For
# Llama-3-8B in bfloat16, what a GPU has rebuilt at once peaks at 30 GiB if the whole model is one unit, at
# 4.7 GiB with a unit for each block, and at 2.4 GiB if embedding and output head are units, too.
#
# The drawing follows one rank through one training step of a model with six blocks. A bar stands where a
# unit's full parameters are in memory, so each column shows what the rank holds at that moment.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

fig, (axes,) = plots.figure(width=8.6, height=2.7)
for moment in range(12):  # six blocks forward, then six backward
    block = moment if moment < 6 else 11 - moment
    held = {6: "complete", block: "computes"} | ({block - 1: "arrives"} if moment >= 6 and block else {})
    for row, what in held.items():
        color = {"computes": plots.RANK_COLORS[0], "arrives": plots.FAINT, "complete": plots.RANK_COLORS[3]}[
            what
        ]
        axes.barh(row, 1, left=moment, height=0.8, color=color, edgecolor=plots.CARD)
for x, text in ((3, "forward"), (9, "backward")):
    axes.text(x, 7.1, text, ha="center")
axes.text(3.0, 0.8, "blue: computes", color=plots.RANK_COLORS[0])
axes.text(3.0, -0.2, "grey: is gathered early", color=plots.INK)
axes.axvline(6, color=plots.INK, linewidth=0.8)
axes.set_yticks(range(7), [*(f"block {n}" for n in range(6)), "root"])
axes.set(xlim=(0, 12), ylim=(-0.6, 7.6), xticks=[], xlabel="one training step →")
axes.tick_params(length=0)
plots.show(fig, alt="A step by block: the root stays complete, each block only while it is needed.")

# %% [markdown]
# In forward, each block is gathered, computes (blue) and is freed before the next one computes. Backward
# visits the blocks in reverse, so each has to be gathered a second time. While a block computes its
# gradients, FSDP already gathers the one that comes next (grey), so that a GPU need not wait for it. (In
# forward a GPU gathers ahead, too, which is not drawn: [lesson 4](04_backward_prefetch.ipynb).) The pink bar
# is the **root**, the unit that the last call, `fully_shard(model)`, makes of everything outside the blocks.
# It stays for the whole step.

# %% tags=["card"]
lesson.card(
    1,
    learn="choose units, see what a wrong choice costs, and check your own model",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 17, 20),
)

# %% [markdown]
# ## The script
#
# This script trains a Llama of six blocks twice, first as one unit and then by block, and counts the
# all-gathers of a step. Save it as `train.py`, then run `torchrun --nproc-per-node 4 train.py`. It uses four
# GPUs, or four CPU processes where there is no GPU.
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
# Read the lines from right to left. The **loss** is the same, because units change when parameters travel
# and not what is computed; so no loss curve will tell you that your units are wrong. The **largest
# all-gather** is the gain: as one unit, each rank has to rebuild the whole model in one piece, which is what
# FSDP exists to avoid. By block the largest piece is one of six blocks, 16%. (The blocks hold 98% of this
# model's parameters; its vocabulary is tiny.) The **number of all-gathers** is the price. The lesson explains
# the 13, turns the 16% into a peak of memory, asks whether smaller units would be better still, and ends with
# a check of your own model.
#
# ## What a unit is
#
# `fully_shard(module)` makes one unit of all parameters inside `module` that no earlier call has taken. That
# is why you call it on the parts first and on the model last: the model's call takes what is left, and that
# is the root. It also hooks itself into the module: right before the module's `forward` runs, one collective
# gathers all parameters of the unit, and when `forward` returns, they are freed (except the root's, for a
# reason that follows). So a unit has to be a module that is *called*. A block is; `model.model.layers` is a `ModuleList`, which only holds blocks, and
# `fully_shard` refuses it.
#
# A transformer repeats a **block**: attention, then a feed-forward network. In Llama the block is the class
# `LlamaDecoderLayer`, and the root gets the embedding, the last norm and the head. Blocks are natural units
# because they run one after another: while one computes, no other is needed.
#
# ## Why 13 all-gathers
#
# Each block is gathered for forward and, since it was freed, again for backward: six blocks make twelve. The
# root is gathered only once, because FSDP2 does not free it after forward: backward begins with the head,
# which is in the root, so it would be needed again at once. Twelve and one make thirteen. With one unit, that
# unit is the root: one all-gather, and the whole model stays on every rank from then until backward is over.
#
# That counts messages; now the memory. The next cells start four ranks and measure one step for four choices
# of units: the two that you know, one that leaves too much to the root (only the feed-forward networks are
# units), and one that is very fine (each weight matrix of the blocks is a unit). `Meter`, a tool of these
# lessons, watches every operation on a rank. The last column counts the parameters that are complete **and
# the buffers they come from**: FSDP2 gathers a unit into one flat buffer and then copies each parameter
# out of it, so for a moment a unit is in memory twice.

# %%
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

rank, world = dist.get_rank(), dist.get_world_size()
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


def measure(model, vocabulary=64):
    """Return the meter of the second forward and backward pass; in its first pass FSDP sets itself up."""
    ids = torch.randint(vocabulary, (3, 30), device=device)
    model(input_ids=ids, labels=ids).loss.backward()
    with Meter(model.parameters()) as meter:
        model(input_ids=ids, labels=ids).loss.backward()
    return meter


def sharded(model, choose):
    for unit in [*choose(model), model]:
        fully_shard(unit)
    return model


whole = sum(p.nbytes for p in llama().parameters())
meters = {way: measure(sharded(llama(), choose)) for way, choose in ways.items()}
Table(
    ["units", "all-gathers", "MiB gathered in a step", "gathered at the peak, % of the model"],
    [
        [way, m.all_gathers, round(m.gathered_bytes / 2**20, 1), round(100 * m.peak_gather_bytes / whole)]
        for way, m in meters.items()
    ],
)

# %% [markdown]
# Begin with the last column. **One unit** peaks at 200%: the whole model in the buffer, and once more in the
# parameters copied out of it. **By block** peaks at a quarter of that. **Feed-forward** is a mistake that is
# hard to see: there are as many units and all-gathers as by block, but the attention of all six blocks was
# left to the root, which stays gathered, so the peak is half as high again. **By matrix** has the lowest
# peak, and needs over six times as many all-gathers as by block.
#
# The middle column is what freeing costs: one unit gathers the model once (1.5 MiB); by block and by matrix,
# nearly every parameter travels twice.
#
# The figure shows the same four steps over time. Compare forward, the left half of each panel, with backward.

# %%
curves = dict(ranks.get("[(way, meter.gather_bytes) for way, meter in meters.items()]")[0])
plots.alive(curves, whole_model=ranks.get("whole")[0], what="gathered")

# %% [markdown]
# One unit keeps parameters and buffer through all of forward. By block, forward runs at a height of 35%: the
# root (2%), the parameters of one block (16%) and the buffer they were copied from (16%). FSDP2 keeps that
# buffer until the *next* unit is copied out, so that on a GPU the copies and the gathering can overlap. For
# that moment there are three times a block and the root: the thin spikes, and the 51% of the table. They are
# short, but the memory has to be there. In backward a buffer is freed at once, so the maximum is the root
# and two blocks, 35%, as in the drawing at the top.
#
# ## Why not smaller units?
#
# What makes the spikes is a formula, so you can predict the peak of a choice before you run it. `root` and
# `units` are sizes in bytes, the units in the order of forward:


# %%
# %%ranks
def peak(root, units):
    """Return the bytes gathered at the peak: the root, a unit, its buffer, and the buffer before it."""
    before = [root, *units[:-1]]
    return max([2 * root] + [root + last + 2 * unit for last, unit in zip(before, units)])


blocks = [sum(p.nbytes for p in block.parameters()) for block in llama().model.layers]
print(f"by block: {peak(whole - sum(blocks), blocks) / whole:.0%}")

# %% [markdown]
# That is the 51% measured above. Should you go on cutting? On the left of the next figure is the gain: seven
# choices in a Llama of twelve blocks, measured on the ranks (the folded cell asserts that the formula
# agrees). On the right is the price. Every all-gather takes some time to start, however little it sends, so
# the smaller the unit, the larger the share of time that goes into starting. These lines are calculated, for
# three assumed pairs of starting time and link; nccl-tests, at its smallest sizes, measures the starting time
# of your GPUs.


# %% tags=["sweep"] jupyter={"source_hidden": true}
# %%ranks
def in_groups(count):
    def choose(model):
        blocks = [*model.model.layers]
        return [blocks[start : start + count] for start in range(0, len(blocks), count)]

    return choose


cuts = {f"{count} blocks": in_groups(count) for count in (6, 4, 3, 2)} | {"1 block": in_groups(1)}
cuts["½ block"] = lambda m: [u for b in m.model.layers for u in (b.self_attn, b.mlp)]
cuts["1 matrix"] = lambda m: linears(m.model.layers)
deep, swept = sum(p.nbytes for p in llama(12).parameters()), []
for cut, choose in cuts.items():
    sizes = [
        sum(p.nbytes for part in (u if isinstance(u, list) else [u]) for p in part.parameters())
        for u in choose(llama(12))
    ]
    found, expected = measure(sharded(llama(12), choose)), peak(deep - sum(sizes), sizes)
    assert abs(found.peak_gather_bytes / expected - 1) < 0.06  # three ranks pad 64 rows to 66
    swept.append((cut, found.all_gathers, 100 * found.peak_gather_bytes / deep))

# %% jupyter={"source_hidden": true}
swept = ranks.get("swept")[0]
assert [count for _, count, _ in swept] == [5, 7, 9, 13, 25, 49, 169]


def starting(mib, start_us, link_gib_s):
    """Return the share of an all-gather's time that starting it takes, in percent."""
    return 100 * start_us / (start_us + mib / 1024 / link_gib_s * 1e6)


fig, (gain, price) = plots.figure(2, width=9.0, height=3.0)
gain.plot([count for _, count, _ in swept], [high for *_, high in swept], "o-", color=plots.RANK_COLORS[0])
for name, count, high in swept:
    gain.annotate(name, (count, high), (6, 4), textcoords="offset points", fontsize=9)
gain.set(xscale="log", ylim=(0, 170), xlim=(4, 400), title="gain (measured)")
gain.set(xlabel="all-gathers in a step", ylabel="gathered at the peak, %")
gain.set_xticks([5, 10, 25, 50, 169], ["5", "10", "25", "50", "169"], minor=False)
gain.set_xticks([], minor=True)
for index, (start, link) in enumerate([(20, 25), (50, 50), (100, 200)]):
    sizes = [2 ** (n / 4) for n in range(8, 41)]
    shares = [starting(mib, start, link) for mib in sizes]
    price.plot(sizes, shares, color=plots.RANK_COLORS[index], label=f"{start} µs, {link} GiB/s")
for mib, name in ((14, "GPT-2\nblock"), (59, "8B matrix\n(mean)"), (416, "8B\nblock")):
    price.axvline(mib, color=plots.INK, linewidth=0.8, linestyle=":")
    price.text(mib * 1.06, 97, name, va="top", fontsize=9)
price.set(xscale="log", ylim=(0, 100), xlim=(4, 1024), title="price (calculated)")
price.set(xlabel="MiB in the unit", ylabel="time spent starting, %")
price.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1,024"], minor=False)
price.set_xticks([], minor=True)
price.legend(loc="center right", fontsize=8, facecolor=plots.CARD, edgecolor=plots.CARD, framealpha=1)
assert starting(416, 100, 200) < 5
assert 25 < starting(59, 100, 200) < 26
assert 59 < starting(14, 100, 200) < 60
plots.show(
    fig, alt="Smaller units lower the peak less and less; starting takes a larger share of their time."
)

# %% [markdown]
# On the left, cutting pays most at first: from units of six blocks to one block the peak falls from 149% to
# 26%. A unit for each matrix brings it to 7%, with 169 all-gathers instead of 25. On the right, a block of
# Llama-3-8B in bfloat16 (416 MiB) loses under 5% of its gathering time to starting, even on the worst of the
# three lines. One of its matrices loses a quarter there, and a block of GPT-2 (14 MiB) three fifths.
#
# So take the block, unless your blocks are as small as GPT-2's **and** a profile shows the GPU waiting for
# all-gathers. Then put two or more blocks in a unit: `fully_shard([block_0, block_1])`. The peak rises, but
# with blocks of this size it is small anyway, as the next table shows.
#
# ## Embedding, head and tied weights
#
# So far the root was 2% of the model. Real vocabularies are larger, and with embedding and head the root can
# become the largest unit of all. It stays gathered for the whole step. The table gives the peak by the
# formula above, in GiB of bfloat16, which is what a GPU gathers under mixed precision ([lesson
# 7](07_mixed_precision.ipynb)). The models have their real sizes, but are built on the **meta device**, where
# tensors have a shape and no memory. Look at what the last column still gains.

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
# In Llama-2-7B and Llama-3-8B, embedding and head are two matrices. Give each a unit of its own, before the
# call on the model. For Llama-3-8B this halves the peak, because the two are used at opposite ends of forward
# and need not be in memory together. Torchtitan, PyTorch's own training code, cuts its Llama 3 in this way,
# with the last norm in the head's unit: `fully_shard([norm, head])`.
#
# In Llama-3.2-1B and GPT-2, one matrix is both embedding and head: the weights are **tied**. It is the first
# parameter that forward uses and the last, so a unit of its own would gain nothing, and it must not be in two
# units. Leave both modules to the root, or name them together: `fully_shard([embedding, head])`.
#
# ## Your turn 1 · A large vocabulary
#
# - **Given:** `model`, a Llama whose embedding `model.model.embed_tokens` and head `model.lm_head` are not tied
#   and hold 57% of its parameters. By block it peaks at 128%.
# - **Goal:** a peak of at most 66% of the model, with at most 18 all-gathers in a step.
# - **Return:** the model, after your calls of `fully_shard`.
#
# <details><summary>Hint</summary>
#
# The loop of the script, with two more units. The last norm, `model.model.norm`, is small: it may stay in the
# root.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import Goal, NotYet, at_most, exactly, turn
from fsdp_utils.sharding.units import ROOT, find_units, parameter_sizes

_goals = [
    "all-gathers in one step",
    "gathered at the peak, % of the model",
    "problems that check_sharding finds",
]


def _returned(model):
    if not isinstance(model, nn.Module):
        raise NotYet("Return the model.")
    return model


def _why_so_much(model):
    """Say which choice of units gathers more than one end at a time."""
    sizes = parameter_sizes(model, find_units(model))
    unit_of = {name: unit for unit, names in sizes.items() if unit for name in names}
    ends = {"embedding": unit_of.get("model.embed_tokens.weight"), "head": unit_of.get("lm_head.weight")}
    for end, unit in ends.items():
        if unit is not None and unit.name == ROOT:
            return f"The {end} is in the root, which stays gathered: make it a unit before the root."
    if ends["embedding"] is ends["head"]:
        return "One unit holds embedding and head, so both are gathered when one is needed: make them two."
    if len({unit_of.get(f"model.layers.{n}.mlp.up_proj.weight") for n in range(6)}) < 6:
        return "A unit holds several blocks: give each its own."
    return "Units stay gathered after forward: leave reshard_after_forward at its default."


@turn(
    1,
    {
        _goals[0]: at_most(18, "There are units smaller than a block."),
        _goals[1]: Goal("at most 66", lambda found: found <= 66, lambda _: score_large.why),
        _goals[2]: exactly(0, "Print check_sharding(model): it says what is wrong."),
    },
)
def score_large(choose_units):
    model = llama(vocabulary=4096)
    nbytes = sum(p.nbytes for p in model.parameters())
    model = _returned(choose_units(model))
    problems = len(check_sharding(model))
    score_large.why = _why_so_much(model)
    meter = measure(model, 4096)
    percent = round(100 * meter.peak_gather_bytes / nbytes)
    return dict(zip(_goals, (meter.all_gathers, percent, problems)))


# %%
# %%turn 1
def choose_units(model):
    # fully_shard(...) on each unit, the model last
    return None  # the model


# %% tags=["solution"] turn=1
def choose_units(model):
    for unit in [model.model.embed_tokens, *model.model.layers, model.lm_head, model]:
        fully_shard(unit)
    return model


# %% tags=["right"] turn=1
def choose_units(model):
    fully_shard(model.model.embed_tokens)
    fully_shard([model.model.norm, model.lm_head])
    return shard(model)


# %% tags=["right"] turn=1
def choose_units(model):
    for part in model.modules():
        if isinstance(part, nn.Embedding) or part is model.lm_head or "DecoderLayer" in type(part).__name__:
            fully_shard(part)
    return fully_shard(model)


# %% tags=["right"] turn=1
def choose_units(model):
    fully_shard(model.lm_head, reshard_after_forward=False)
    fully_shard(model.get_input_embeddings())
    return shard(model)


# %% tags=["wrong"] turn=1 says="The embedding is in the root"
def choose_units(model):
    return shard(model)


# %% tags=["wrong"] turn=1 says="The head is in the root"
def choose_units(model):
    fully_shard(model.model.embed_tokens)
    return shard(model)


# %% tags=["wrong"] turn=1 says="One unit holds embedding and head"
def choose_units(model):
    fully_shard([model.model.embed_tokens, model.model.norm, model.lm_head])
    return shard(model)


# %% tags=["wrong"] turn=1 says="several blocks"
def choose_units(model):
    return sharded(model, lambda m: [m.model.embed_tokens, *in_groups(2)(m), m.lm_head])


# %% tags=["wrong"] turn=1 says="stay gathered after forward"
def choose_units(model):
    for unit in [model.model.embed_tokens, *model.model.layers, model.lm_head, model]:
        fully_shard(unit, reshard_after_forward=False)
    return model


# %% tags=["wrong"] turn=1 says="smaller than a block"
def choose_units(model):
    return sharded(model, lambda m: [m.model.embed_tokens, *linears(m)])


# %% tags=["wrong"] turn=1 says="check_sharding"
def choose_units(model):
    for unit in [model.model.embed_tokens, *model.model.layers, model.lm_head]:
        fully_shard(unit)
    return model


# %% [markdown]
# ## Your turn 2 · Another model: GPT-2 by hand
#
# - **Given:** `model`, a GPT-2 whose four blocks are in `model.transformer.h`. Its embedding,
#   `model.transformer.wte`, is tied to its head, `model.lm_head`.
# - **Goal:** each block a unit, no parameter left out, the loss of the unsharded model.
# - **Return:** the model, after your calls of `fully_shard`.
#
# <details><summary>Hint</summary>
#
# How many lines do tied weights need if the root may hold them? With four blocks, the script's counting gives
# nine all-gathers.
#
# </details>


# %% jupyter={"source_hidden": true}
# %%ranks
def gpt2():
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval().to(device)


@turn(
    2,
    {
        "all-gathers in one step": Goal(
            "9 to 11",
            lambda found: 9 <= found <= 11,
            lambda found: (
                "Blocks share a unit, or stay gathered after forward."
                if found < 9
                else "There are units smaller than a block."
            ),
        ),
        "problems that check_sharding finds": exactly(
            0, "Print check_sharding(model): it says what is wrong."
        ),
        "the loss of the unsharded model": exactly(True, "The loss differs from the unsharded model's."),
    },
)
def score_gpt2(shard_by_hand):
    ids = torch.arange(16, device=device)[None]
    expected, model = gpt2()(input_ids=ids, labels=ids).loss, _returned(shard_by_hand(gpt2()))
    problems = len(check_sharding(model))
    with Meter(model.parameters()) as meter:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return {
        "all-gathers in one step": meter.all_gathers,
        "problems that check_sharding finds": problems,
        "the loss of the unsharded model": torch.allclose(loss, expected, atol=1e-5),
    }


# %%
# %%turn 2
def shard_by_hand(model):
    # fully_shard(...) on each block, then on what takes the rest
    return None  # the model


# %% tags=["solution"] turn=2
def shard_by_hand(model):
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)  # embedding and head stay together, in the root


# %% tags=["right"] turn=2
def shard_by_hand(model):
    fully_shard([model.transformer.wte, model.lm_head])
    return sharded(model, lambda m: [*m.transformer.h])


# %% tags=["right"] turn=2
def shard_by_hand(model):
    return shard(model)


# %% tags=["right"] turn=2
def shard_by_hand(model):
    for part in model.modules():
        if type(part).__name__ == "GPT2Block":
            fully_shard(part)
    fully_shard(model)
    return model


# %% tags=["wrong"] turn=2 says="Blocks share a unit"
def shard_by_hand(model):
    fully_shard(list(model.transformer.h))
    return fully_shard(model)


# %% tags=["wrong"] turn=2 says="Blocks share a unit"
def shard_by_hand(model):
    return fully_shard(model)


# %% tags=["wrong"] turn=2 says="is shared with a parameter"
def shard_by_hand(model):
    return sharded(model, lambda m: [*m.transformer.h, m.lm_head])


# %% tags=["wrong"] turn=2 says="check_sharding"
def shard_by_hand(model):
    for block in model.transformer.h:
        fully_shard(block)
    return model


# %% tags=["wrong"] turn=2 says="stay gathered after forward"
def shard_by_hand(model):
    for part in [*model.transformer.h, model]:
        fully_shard(part, reshard_after_forward=False)
    return model


# %% [markdown]
# ## In your own code
#
# Besides the first lines of the script, a training loop for one GPU needs four changes, marked in the next
# cell. The other lines stay as they are; gradient clipping, for instance, takes the norm of the whole model
# and not of the shard. `fsdp_utils.shard(model)` is the loop of the script: it finds the class of the blocks,
# calls `fully_shard` on each, then on the model. (It leaves embedding and head to the root, unless you called
# `fully_shard` on them before.) The cell ends with three checks.

# %% tags=["job"]
# %%ranks
model = llama()  # as before; if no rank can hold it: lesson 12
shard(model)  # 1: the units
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # 2: moves below the sharding
assert check_sharding(model, optimizer) == []  # 3: on every rank
torch.manual_seed(1 + rank)  # 4: other samples on each rank (with a DataLoader: DistributedSampler)
for step in range(3):
    ids = torch.randint(64, (4, 30), device=device)
    with record_collectives(model) as trace:
        model(input_ids=ids, labels=ids).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

kept = sum(p.to_local().nbytes for p in model.parameters()) / sum(p.nbytes for p in model.parameters())
print(f"a rank keeps {kept:.0%} of the parameters")
print("a block is a", type(model.model.layers[0]).__name__)
print(sum(event.kind == "all_gather" for event in trace.events), "all-gathers")
assert norm.full_tensor() > 0

# %% [markdown]
# A rank keeps one part in `world_size` of the parameters, so the model is sharded. The class of a block
# begins with `FSDP`, so the block is a unit (`print(model)` shows this for all modules). And six blocks give
# 2 * 6 + 1 all-gathers, so they are freed and gathered as planned; if you count 1, you called `fully_shard`
# on the model alone. On GPUs, compare `torch.cuda.max_memory_allocated()` too. For mixed precision see lesson
# [7](07_mixed_precision.ipynb), for saving lessons [3](03_full_state_dict.ipynb) and
# [8](08_local_state_dict_and_distributed_checkpoints.ipynb).
#
# ## With `torch.compile`
#
# Compile the units, not the model. FSDP's hooks are not compiled, so the graph of a
# compiled model ends at each of them. The folded cell counts the graphs in a Llama of two blocks:


# %% tags=["compile"] jupyter={"source_hidden": true}
# %%ranks
def graphs_of(*steps):
    torch.compiler.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    model = llama(blocks=2)
    for step in steps:
        step(model, backend)
    ids = torch.arange(16, device=device).reshape(1, 16)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    key = next(name for name in model.state_dict() if "layers.0" in name)
    return [len(graphs), max(graphs), key.removesuffix("self_attn.q_proj.weight"), round(loss.item(), 5)]


def compile_blocks(model, backend):
    for block in model.model.layers:
        block.compile(backend=backend)


def wrap_blocks(model, backend):
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(block, backend=backend)


def compile_all(model, backend):
    model.compile(backend=backend)


def shard_all(model, backend):
    for part in [*model.model.layers, model]:
        fully_shard(part)


orders = {
    "`block.compile()`, then FSDP": (compile_blocks, shard_all),
    "FSDP, then `block.compile()`": (shard_all, compile_blocks),
    "`blocks[i] = torch.compile(block)`, then FSDP": (wrap_blocks, shard_all),
    "FSDP, then `model.compile()`": (shard_all, compile_all),
    "`model.compile()`, no FSDP": (compile_all,),
}
found = {name: graphs_of(*steps) for name, steps in orders.items()}
assert [row[0] for row in found.values()] == [1, 1, 1, 5, 1]
assert len({row[3] for row in found.values()}) == 1  # the same loss
names = ["", "graphs", "operations in the largest", "names begin with"]
Table(names, [[name, *row[:3]] for name, row in found.items()])

# %% [markdown]
# A compiled block is one graph, in either order, and one graph serves all blocks, because they are alike. The
# compiled model is cut into five where the hooks stand. Prefer `block.compile()`: `torch.compile(block)`
# returns a wrapper, and its `_orig_mod.` gets into the names of your checkpoints.
#
# ## The way of 2022: FSDP1 and its policies
#
# Everything above is FSDP2. To FSDP1, the class `FullyShardedDataParallel`, you pass a rule,
# `auto_wrap_policy`, and it wraps the blocks itself. The folded cell names the block class in that rule, and
# counts the same 13 all-gathers. [Lesson 13](13_from_fsdp1_to_fsdp2.ipynb) has the rest.

# %% tags=["fsdp1"] jupyter={"source_hidden": true}
# %%ranks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

policy = ModuleWrapPolicy(transformer_block_classes(llama()))
print(measure(FSDP(llama(), auto_wrap_policy=policy, device_id=device)).all_gathers, "all-gathers")

# %% [markdown]
# ## When it goes wrong
#
# The first four rows raise no error, and `check_sharding` finds all of them.
#
# | you see | cause | cure |
# | :-- | :-- | :-- |
# | the loss does not move | the optimizer was built before `fully_shard` and holds the old parameters | build it after sharding |
# | the peak hardly falls with more ranks, although what is kept between steps does | one unit for the whole model | `fully_shard` on each block, or `shard(model)` |
# | the same, with the right number of units | units of the wrong class, so that part of each block is in the root | the class of the blocks |
# | the ranks' embeddings differ | `fully_shard(model)` is missing, so what is outside of the blocks is not reduced | call it last |
# | `ValueError: Parameter 'lm_head.weight' is shared with a parameter already managed by another FSDP group`, in the first forward | tied weights in two units | leave both to the root, or `fully_shard([embedding, head])` |
# | `ValueError: fully_shard does not support containers that do not implement forward` | `fully_shard` on the `ModuleList` | loop over its blocks |
# | from `fully_shard(block)`: `TypeError: Invariant encountered`, or with a named mesh `Cannot concatenate overlapping meshes` | the model was sharded before its blocks | blocks first, the model last |
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
