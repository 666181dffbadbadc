# %% [markdown]
# # 1 · The transformer wrapper
#
# Which modules of a transformer should be FSDP units? **Its blocks: call `fully_shard` on each block, then on
# the model.** In a model of six blocks and a tiny vocabulary the gathered parameters and buffers then peak at
# about half the model; as one unit, at twice the model. A large embedding or head needs a unit, too.

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
# A drawing of one step, with the blocks as units. A blue or pink bar is a unit that is complete on every
# rank, a grey one is on its way. In forward one block is complete at a time; that a GPU gathers the next one
# meanwhile is not drawn. In backward the next block is gathered while the present one computes. The root,
# which is the unit of the model itself, stays complete from its first use to the end of backward.

# %% tags=["card"]
lesson.card(
    1,
    learn="choose units, and see what a wrong choice costs",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 12, 17),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It needs four GPUs, or none.
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
# mesh = init_device_mesh(device, (dist.get_world_size(),))     # without it a Mac would take its GPU
# config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=6)
#
#
# def train(choose_units):
#     torch.manual_seed(0)                                      # the same weights on every rank
#     model = LlamaForCausalLM(config).to(device)
#     whole = sum(p.nbytes for p in model.parameters())
#     for part in [*choose_units(model), model]:                # each part is a unit; the model has the rest
#         fully_shard(part, mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters())         # after sharding
#     torch.manual_seed(1 + dist.get_rank())                    # other samples on each rank
#     for step in range(3):
#         ids = torch.randint(64, (4, 30), device=device)       # your data
#         with record_collectives(model) as trace:
#             model(input_ids=ids, labels=ids).loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     gathers = [event.bytes for event in trace.events if event.kind == "all_gather"]
#     return len(gathers), max(gathers) / whole
#
#
# for name, units in {"one unit": lambda m: [], "by block": lambda m: m.model.layers}.items():
#     count, largest = train(units)
#     if dist.get_rank() == 0:
#         print(f"{name}: {count:2} all-gathers, the largest holds {largest:.0%} of the model")
# dist.destroy_process_group()
# ```
# ```text
# one unit:  1 all-gathers, the largest holds 100% of the model
# by block: 13 all-gathers, the largest holds 16% of the model
# ```
#
# One all-gather of everything is what FSDP exists to avoid. The rest of this lesson explains these two lines.
# `fsdp_utils.shard(model)` makes the second choice for you: it finds the class of the blocks.
#
# ## What a unit is
#
# A **unit** is what FSDP gathers, uses and frees in one piece. `fully_shard(module)` makes one unit of all
# parameters in the module that no earlier call has taken. So call it on the parts first and on the model
# last: the model's own unit, the **root**, takes what is left.
#
# A transformer repeats a **block**: attention, then a feed-forward network. Here the block is
# `LlamaDecoderLayer`, six times, and the root holds the embedding, the last norm and the head. The next cell
# starts four ranks, and the one after it chooses units in four ways.

# %%
from fsdp_utils.notebook import ranks

ranks.start(preload=["transformers.models.llama.modeling_llama"])  # slow to import

# %% jupyter={"source_hidden": true}
# %%ranks
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import (
    check_sharding,
    checkpoints,
    load_pretrained,
    save_distributed,
    shard,
    transformer_block_classes,
)
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
    "wrong class": lambda model: [block.mlp for block in model.model.layers],
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
        [
            way,
            meter.all_gathers,
            round(meter.gathered_bytes / 2**20, 1),
            round(100 * meter.peak_gather_bytes / whole),
        ]
        for way, meter in meters.items()
    ],
)

# %% [markdown]
# `Meter` watches one step on each rank. "Gathered at the peak" counts full parameters and the buffers into
# which FSDP2 gathers them. One unit holds the model twice: once in the buffer, once in the parameters that
# are copied out of it. "Wrong class" makes each feed-forward network, `LlamaMLP`, a unit. The attention of
# all six blocks then falls to the root and stays gathered, so the peak is half as high again as by block. "By
# matrix" has the lowest peak and six to seven times as many all-gathers as "by block".
#
# ## Why 13 all-gathers
#
# A block is freed after its forward pass and gathered again for backward: six blocks, twice each, make
# twelve. The root is not freed after forward, because backward needs it at once. It is gathered once:
# thirteen. The bytes hardly differ between by block and by matrix, since each parameter outside of the root
# travels twice.

# %%
curves = dict(ranks.get("[(way, meter.whole_bytes) for way, meter in meters.items()]")[0])
plots.alive(curves, whole_model=ranks.get("whole")[0])

# %% [markdown]
# The same four steps over time. A buffer counts here only until its unit is copied out. By block, forward
# holds the root and one block, backward the root and two blocks. The buffers make forward the peak of the
# table: the root, the parameters of one block, its buffer, and the buffer of the block before, which FSDP2
# keeps until the next one is copied out.
#
# ## Why not smaller
#
# The peak can be calculated from the sizes of the units. The next cell does that for seven choices in a Llama
# of twelve blocks, measures the same on the ranks, and asserts that the two agree.

# %% tags=["sweep"]
# %%ranks
def peak(root, units):
    """Return the bytes gathered at the peak: in forward a unit, its buffer, and the buffer before it."""
    before = [root, *units[:-1]]
    return max([2 * root] + [root + last + 2 * unit for last, unit in zip(before, units)])


def in_groups(count):
    def choose(model):
        blocks = [*model.model.layers]
        return [blocks[start : start + count] for start in range(0, len(blocks), count)]

    return choose


cuts = {f"{count} blocks": in_groups(count) for count in (6, 4, 3, 2)} | {"1 block": in_groups(1)}
cuts["attention, feed-forward"] = lambda m: [u for b in m.model.layers for u in (b.self_attn, b.mlp)]
cuts["1 matrix"] = lambda m: linears(m.model.layers)
deep, rows = sum(p.nbytes for p in llama(12).parameters()), []
for cut, choose in cuts.items():
    sizes = [
        sum(p.nbytes for part in (u if isinstance(u, list) else [u]) for p in part.parameters())
        for u in choose(llama(12))
    ]
    found, expected = measure(sharded(llama(12), choose)), peak(deep - sum(sizes), sizes)
    assert abs(found.peak_gather_bytes / expected - 1) < 0.06  # three ranks pad 64 rows to 66
    rows.append(
        [cut, found.all_gathers, round(100 * found.peak_gather_bytes / deep), round(100 * expected / deep)]
    )
Table(["a unit is", "all-gathers", "gathered at the peak, %", "calculated, %"], rows)

# %% [markdown]
# Smaller units lower the peak, but each all-gather costs a fixed time before the first byte arrives. Measure
# that time for your GPUs with nccl-tests, at its smallest sizes. The next cell does not measure it: it
# calculates the share of the sending time that starting takes, for a block of Llama-3-8B in bfloat16 (416
# MiB, seven matrices), over a range of starting times and links.

# %%
from fsdp_utils.lessons.tables import Table


def starting(count, start_us, link_gib_s):
    sending_us = 416 / 1024 / link_gib_s * 1e6
    return 100 * count * start_us / (count * start_us + sending_us)


cases = [(start, link) for start in (20, 50, 100) for link in (25, 50, 200)]
assert all(starting(1, *case) < 5 and starting(7, *case) < 27 for case in cases)
Table(
    ["µs to start", "link, GiB/s", "by block, %", "by matrix, %"],
    [[*case, f"{starting(1, *case):.1f}", f"{starting(7, *case):.1f}"] for case in cases],
    note="Calculated: the share of an all-gather's time that starting it takes.",
)

# %% [markdown]
# By block the fixed cost stays below 5% up to the 100 µs of the table; by matrix it reaches a quarter. In a
# model with smaller blocks both shares are larger, and a unit of two blocks can pay off.
#
# ## Embedding, head and tied weights
#
# `transformer_block_classes` finds the class of the blocks. The models below have their real sizes; they are
# built on the meta device, where tensors have a shape and no memory, so the peaks are calculated.

# %% tags=["block-class"]
# %%ranks 0
LLAMA3 = {"vocab_size": 128_256, "intermediate_size": 14_336, "num_key_value_heads": 8}
families = {
    "Llama-2-7B": (LlamaForCausalLM, LlamaConfig()),
    "Llama-3-8B": (LlamaForCausalLM, LlamaConfig(**LLAMA3)),
    "T5-small": (transformers.T5ForConditionalGeneration, transformers.T5Config()),
    "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config()),
    "ViT-base": (transformers.ViTForImageClassification, transformers.ViTConfig()),
}
rows = []
for name, (kind, config) in families.items():
    with torch.device("meta"):
        model = kind(config)
    (block_class,) = transformer_block_classes(model)
    blocks = [sum(p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, block_class)]
    total = sum(p.numel() for p in model.parameters())
    root = total - sum(blocks)
    rows.append(
        [
            name,
            block_class.__name__,
            len(blocks),
            round(100 * root / total),
            round(100 * peak(root, blocks) / total),
        ]
    )
Table(["model", "block class", "blocks", "in the root, %", "gathered at the peak, %"], rows)

# %% [markdown]
# The larger the vocabulary, the more is in the root. Where embedding and head are two matrices, as in
# Llama-2-7B and Llama-3-8B, make each a unit of its own, before the call on the model; turn 1 does this. In
# GPT-2 and T5 one matrix is both embedding and head: the weights are **tied**. A tied matrix must lie in one
# unit. Leave both modules to the root, or name them together: `fully_shard([embedding, head])`.
#
# ## Your turn 1 · A large vocabulary
#
# In this Llama 57% of the parameters are in the embedding, `model.model.embed_tokens`, and the head,
# `model.lm_head`, which are not tied. By block the peak is 128% of the model. Choose units so that it is at
# most 66%, with at most 18 all-gathers. Shard the model with `fully_shard` and return it.
#
# <details><summary>Hint</summary>
#
# The two ends are needed at different times, so one unit for both holds each of them too long. The last norm,
# `model.model.norm`, is small: it may stay in the root.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import Goal, NotYet, at_most, exactly, turn


@turn(
    1,
    {
        "all-gathers in one step": at_most(18, "There are units smaller than a block."),
        "gathered at the peak, % of the model": at_most(
            66, "Some unit, the root or another, is larger than the larger of one block and one end."
        ),
        "problems that check_sharding finds": exactly(
            0, "Print check_sharding(model): it says what is wrong."
        ),
    },
)
def score_large(choose_units):
    model = llama(vocabulary=4096)
    nbytes = sum(p.nbytes for p in model.parameters())
    model = choose_units(model)
    if not isinstance(model, nn.Module):
        raise NotYet("Return the model.")
    problems = len(check_sharding(model))
    meter = measure(model, 4096)
    percent = round(100 * meter.peak_gather_bytes / nbytes)
    return dict(zip(_goals, (meter.all_gathers, percent, problems)))


_goals = [
    "all-gathers in one step",
    "gathered at the peak, % of the model",
    "problems that check_sharding finds",
]


# %%
# %%turn 1
def choose_units(model):
    return None  # your lines here; return the model


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


# %% tags=["wrong"] turn=1 says="larger than the larger of"
def choose_units(model):
    return shard(model)


# %% tags=["wrong"] turn=1 says="larger than the larger of"
def choose_units(model):
    fully_shard([model.model.embed_tokens, model.model.norm, model.lm_head])
    return shard(model)


# %% tags=["wrong"] turn=1 says="smaller than a block"
def choose_units(model):
    return sharded(model, lambda m: [m.model.embed_tokens, *linears(m)])


# %% tags=["wrong"] turn=1 says="check_sharding"
def choose_units(model):
    for unit in [model.model.embed_tokens, *model.model.layers, model.lm_head]:
        fully_shard(unit)
    return model


# %% [markdown]
# ## Your turn 2 · Shard GPT-2 by hand
#
# The blocks of this GPT-2 are in `model.transformer.h`. Its embedding, `model.transformer.wte`, is tied to
# its head, `model.lm_head`. Make each block a unit, and leave no parameter out. The verdict counts
# all-gathers and compares the loss with the unsharded model's.

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
                "Blocks share a unit: give each its own."
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
    expected, model = gpt2()(input_ids=ids, labels=ids).loss, shard_by_hand(gpt2())
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
    return None  # your lines here; return the model


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


# %% [markdown]
# ## The real job
#
# The same loop as you would run it: loaded weights, mixed precision, clipping, checkpoints. Each line names
# the lesson that explains it. `folder` is what `save_pretrained` wrote, `runs` is where checkpoints go; a
# folded cell makes both. As a program it needs the first lines of `train.py`, up to `mesh` (pass it as
# `mesh=mesh`), then `rank = dist.get_rank()`, your two folders, `from torch.distributed.fsdp import
# MixedPrecisionPolicy` and `from fsdp_utils import check_sharding, checkpoints, load_pretrained,
# save_distributed`.

# %% jupyter={"source_hidden": true}
# %%ranks
import tempfile

transformers.utils.logging.disable_progress_bar()
made = [tempfile.mkdtemp(), tempfile.mkdtemp()] if rank == 0 else [None, None]
dist.broadcast_object_list(made)
folder, runs = made
if rank == 0:
    llama().save_pretrained(folder)
dist.barrier()

# %% tags=["job"]
# %%ranks
with torch.device("meta"):  # no rank builds the whole model: lesson 12
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # compute in bf16, reduce in float32: lesson 7
for part in [*model.model.layers, model]:
    fully_shard(part, mp_policy=policy)
load_pretrained(model=model, folder=folder)  # each rank reads its shards: lesson 12
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)
for step in range(3):
    ids = torch.randint(64, (4, 30), device=device)  # your data
    model(input_ids=ids, labels=ids).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the whole model, not of the shard
    optimizer.step()
    optimizer.zero_grad()
    save_distributed(runs, model, optimizer, step=step, keep=1)     # resumes on other ranks: lesson 8
assert norm.full_tensor() > 0
assert not check_sharding(model, optimizer)
print("checkpoints of steps", [*checkpoints(runs)])

# %% [markdown]
# ## With `torch.compile`
#
# Compile the units. FSDP's hooks are not compiled (`torch._dynamo.disable` marks them in torch's source), so
# a graph ends at each of them. The next cell gives `torch.compile` a backend of its own, which counts the
# graphs and runs them as they are.

# %% tags=["compile"]
# %%ranks
def graphs_of(prepare):
    torch.compiler.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    model = llama(blocks=2)
    prepare(model, model.model.layers, backend)
    ids = torch.arange(16, device=device).reshape(1, 16)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    key = next(name for name in model.state_dict() if "layers.0" in name)
    return [len(graphs), max(graphs), key.removesuffix("self_attn.q_proj.weight"), loss.item()]


def compile_blocks(model, blocks, backend):
    for block in blocks:
        block.compile(backend=backend)


def wrap_blocks(model, blocks, backend):
    for i, block in enumerate(blocks):
        blocks[i] = torch.compile(block, backend=backend)


def compile_all(model, blocks, backend):
    model.compile(backend=backend)


def shard_all(model, blocks, backend):
    for part in [*blocks, model]:
        fully_shard(part)


orders = {
    "`block.compile()`, then FSDP": (compile_blocks, shard_all),
    "FSDP, then `block.compile()`": (shard_all, compile_blocks),
    "`blocks[i] = torch.compile(block)`, then FSDP": (wrap_blocks, shard_all),
    "FSDP, then `model.compile()`": (shard_all, compile_all),
    "`model.compile()`, no FSDP": (compile_all,),
}
found = {name: graphs_of(lambda *args, steps=steps: [step(*args) for step in steps]) for name, steps in orders.items()}

# %%
found = ranks.get("found")[0]
assert [row[0] for row in found.values()] == [1, 1, 1, 5, 1]
assert len({round(row[3], 5) for row in found.values()}) == 1  # the same loss
Table(["", "graphs", "operations in the largest", "names begin with"], [[name, *row[:3]] for name, row in found.items()])

# %% [markdown]
# A compiled block is one graph in either order, and one graph serves all blocks, which are alike. The whole
# model under FSDP falls apart where the hooks stand. Prefer `block.compile()`: `torch.compile(block)` returns
# a wrapper, whose `_orig_mod.` gets into the names of every checkpoint. (The graphs are cut before a backend
# sees them, so the default one, inductor, which on a CPU needs a C++ compiler, gets the same.)

# %% [markdown]
# ## The way of 2022: FSDP1 and its policies
#
# FSDP1 takes a rule, `auto_wrap_policy`, and wraps the modules itself. The folded cell names the block class
# to it and prints the count of the script, 13. The rest of FSDP1 is in [lesson
# 13](13_from_fsdp1_to_fsdp2.ipynb).

# %% tags=["fsdp1"] jupyter={"source_hidden": true}
# %%ranks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

policy = ModuleWrapPolicy(transformer_block_classes(llama()))
print(measure(FSDP(llama(), auto_wrap_policy=policy, device_id=device)).all_gathers, "all-gathers")

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# | :-- | :-- | :-- |
# | the loss does not move | the optimizer was built before `fully_shard` and holds the old parameters | build it after sharding |
# | `ValueError: Parameter 'lm_head.weight' is shared with a parameter already managed by another FSDP group` | tied weights in two units | leave both to the root, or `fully_shard([embedding, head])` |
# | no error, and the peak hardly falls with more ranks, although what is kept between steps does | one unit, or units of the wrong class | `fully_shard` on each block, or `shard(model)` |
# | no error, and the ranks' embeddings differ | `fully_shard(model)` is missing, so what is outside of the blocks is not reduced | call it last |
#
# `check_sharding` finds all four. Here it looks at a model with two of these mistakes:

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
