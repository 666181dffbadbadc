# %% [markdown]
# # 18 · Beyond forward and backward
#
# What may you do with a sharded model between its training steps: generate, average, edit, send its weights away?
# **Compute through `model(...)` or a registered method; unless all weights are kept, equally often on all ranks.
# Average and edit shards in place, after `model.reshard()`. To send weights away, gather each with `full_tensor()`.**

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

AFTER = ["a training step", "model(x) under no_grad", "model.reshard()"]
fig, (axes,) = plots.figure(width=8.0, height=2.4)
for column in range(3):
    for row, color in enumerate(plots.RANK_COLORS[:3]):
        axes.barh(row, 0.9, left=column, height=0.66, color=plots.FAINT)
        axes.barh(row, 0.225, left=column, height=0.66, color=color)
axes.barh(-0.19, 0.9, left=1, height=0.28, color="#80b8d8")
for y, text in (-0.19, "full copy: forward reads it"), (0.16, "shard: optimizer writes it"):
    axes.text(1.25, y, text, va="center", fontsize=8)
axes.set_yticks(range(3), ["root", "block 0", "block 1"])
axes.set_xticks([column + 0.45 for column in range(3)], [f"after {moment}" for moment in AFTER])
axes.set(ylim=(2.6, -0.6))
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="What a rank holds of three units: a quarter of each, and after an evaluation a full copy of the root.")

# %% [markdown]
# The drawing shows what one of four ranks holds of each unit; grey parts are on the other ranks. By default a training
# step ends with shards everywhere, and a forward pass alone leaves the *root*, the unit of `fully_shard(model)`, with
# its full weights beside the shard. Until the next backward, `state_dict()` or `model.reshard()`, `model.parameters()`
# gives full copies of the root's weights and shards of the blocks'. **In this state a method of your own works by
# accident, and edits get lost. `reshard()` frees the full copies: do not use one that you looked up before it.**
#
# | you want to | write | all-gathers, with n blocks |
# |:--|:--|:--|
# | generate, and the full weights fit on a GPU | `with gathered(model):` (defined under Generate) around the loop | n + 1, for any number of tokens |
# | generate, and they do not fit | `model(ids)` on all ranks, until the last one has finished | n for each token, and 1 for the root |
# | keep an EMA (an average of the weights) | under `no_grad`, after `optimizer.step()`: `average[name].lerp_(p, 0.1)` for each parameter (`model.reshard()` first if an evaluation has run since the backward) | 0 |
# | edit weights by hand | under `no_grad`: `model.reshard()`, then `for p in model.parameters(): p.mul_(0.5)` | 0 |
# | run a frozen teacher or reference model | a second model with its own `fully_shard`; under `no_grad`; then `teacher.reshard()` | n + 1 more in a step |
# | send weights to vLLM (a weight sync) | `p.full_tensor()` for each DTensor `p` of `model.state_dict().values()`, on all ranks (buffers are sent as they are) | 1 for each parameter |
# | call a method of your own | `register_fsdp_forward_method(model, "logp")`, once | as for `model(...)` |

# %% tags=["card"]
lesson.card(
    18,
    learn="generate, average, edit and send away the weights of a sharded model, and run two models side by side",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 28, 24),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It counts what each use of a model of three
# units costs in all-gathers. (FSDP2; for FSDP1 see [lesson 13](13_from_fsdp1_to_fsdp2.ipynb).)
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.set_default_device(device)
# mesh = init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
# torch.manual_seed(0)                                         # the same weights on every rank
# blocks = [nn.Linear(64, 64, bias=False) for _ in range(2)]
# model = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32, bias=False))
# for part in [*blocks, model]:                                # the root takes embedding and head
#     fully_shard(part, mesh=mesh)
# average = {name: p.detach().clone() for name, p in model.named_parameters()}    # shards, too
# ids = (torch.arange(8)[None] + dist.get_rank()) % 32         # other samples on each rank
#
#
# @torch.no_grad()
# def update_average():
#     for name, p in model.named_parameters():
#         average[name].lerp_(p, 0.1)                          # 0.9 * average + 0.1 * p
#
#
# @torch.no_grad()
# def generate(tokens=ids):
#     for _ in range(10):
#         tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
#     model.reshard()                                          # the root
#
#
# def count(what, use):
#     with record_collectives(model) as trace:
#         use()
#     if dist.get_rank() == 0:
#         print(f"{what:26} {sum(e.kind == 'all_gather' for e in trace.events):2} all-gathers")
#
#
# count("forward and backward", lambda: model(ids).logsumexp(-1).mean().backward())
# count("averaging the weights", update_average)
# count("10 tokens", generate)
# count("sending all weights away", lambda: [p.full_tensor().shape for p in model.state_dict().values()])
# model.set_reshard_after_forward(False)
# count("10 tokens, weights kept", generate)
# dist.destroy_process_group()
# ```
# ```text
# forward and backward        5 all-gathers
# averaging the weights       0 all-gathers
# 10 tokens                  21 all-gathers
# sending all weights away    4 all-gathers
# 10 tokens, weights kept     3 all-gathers
# ```
#
# - **5:** a training step gathers the root once, and each block for its forward and its backward: 1 + 2 + 2.
# - **21:** each of ten tokens gathers both blocks again, and the root stays full: 1 + 10 x 2.
# - **0 and 4:** each rank averages its own shards; `full_tensor()` gathers each of the four parameters.
# - **3:** with the weights kept, each unit is gathered once. `generate` reshards the root only, so both blocks
#   are still full when the script ends. A backward pass, `state_dict()` or `block.reshard()` would free them.
#
# ## Which calls gather
#
# Each unit has hooks that run when it is *called*: they gather its weights before `forward` and, in a block, free
# them after it. A method that calls submodules itself, as `logp` does below, runs the blocks' hooks but not the root's,
# until `register_fsdp_forward_method(model, "logp")` puts the root's hooks around it. `way_in` (folded) counts the
# all-gathers of a call and its backward pass, and the units that are full between them.

# %%
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Model(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        layers = [(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()) for _ in range(blocks)]
        self.blocks = nn.Sequential(*[nn.Sequential(*block) for block in layers])

    def forward(self, ids):                                     # i64[batch, tokens]
        return self.head(self.blocks(self.embed(ids)))          # f32[batch, tokens, 16]

    def logp(self, ids):                                        # a method of your own
        return self.head(self.blocks(self.embed(ids))).log_softmax(-1)


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def build(blocks=2):
    torch.manual_seed(0)
    return shard(Model(blocks).to(device))


ids = (torch.arange(4, device=device) + 4 * rank)[None] % 16    # i64[1, 4], other tokens on each rank

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.distributed.tensor import DTensor

from fsdp_utils import record_collectives
from fsdp_utils.lessons.meter import Meter
from fsdp_utils.lessons.tables import Table


def full_units(model):
    """Return the number of units whose full weights are in memory."""
    one_of_each = [model.embed.weight, *(block[0].weight for block in model.blocks)]
    return sum(not isinstance(p, DTensor) for p in one_of_each)


def kinds(model, use):
    """Call `use` and return the kinds of what it sent, in order."""
    with record_collectives(model) as trace:
        use()
    return [event.kind for event in trace.collectives]


def gathers(model, use):
    return kinds(model, use).count("all_gather")


def way_in(model, call):
    """Say what comes of a call and a backward pass, and count."""
    output = []
    try:
        forward = gathers(model, lambda: output.append(call(model)))
        full = full_units(model)
        return ["no error", str(forward + gathers(model, output[0].square().mean().backward)), str(full)]
    except RuntimeError as error:
        return [str(error).partition(",")[0].partition(" ")[2], "", ""]


def shares(use):
    """Bytes gathered, and the most that were full at once, in % of the model."""
    for meter in (meters := [Meter() for _ in range(5)]):       # gloo's thread may let go of a tensor late
        with meter:
            use(build())
    found = meters[0].gathered_bytes, min(meter.peak_whole_bytes for meter in meters)
    return [round(100 * n / sum(p.nbytes for p in Model().parameters())) for n in found]


# %%
# %%ranks
registered, evaluated = build(), build()
register_fsdp_forward_method(registered, "logp")
with torch.no_grad():
    evaluated(ids)                                              # leaves the root full
ways = {
    "model(ids), a new model": way_in(build(), lambda model: model(ids)),
    "model.logp(ids), registered": way_in(registered, lambda model: model.logp(ids)),
    "model.logp(ids), a new model": way_in(build(), lambda model: model.logp(ids)),
    "model.logp(ids), after an evaluation": way_in(evaluated, lambda model: model.logp(ids)),
    "the same again, after that backward": way_in(evaluated, lambda model: model.logp(ids)),
}
whole, mixed = ["no error", "5", "1"], ["got mixed torch.Tensor and DTensor", "", ""]
assert list(ways.values()) == [whole, whole, mixed, ["no error", "4", "1"], mixed]
Table(["", "what happens", "all-gathers", "units full"], [[name, *found] for name, found in ways.items()])

# %% [markdown]
# Without the hooks the root's parameters are still shards: **DTensors**, tensors that hold one rank's part and know
# the full shape. After an evaluation the root is full, so the call runs without registration, with right gradients,
# until the next backward: it works in your notebook and dies in training. So register the method. One that calls
# `self(...)` needs no registration.
#
# ## Generate
#
# Every token gathers every block again, unless `gathered(model)`, a context to take home, keeps the weights. The cell
# sweeps the number of tokens (with two blocks) and counts all-gathers, and the number of blocks (for one token) and
# takes the peak of full weights and gather buffers; shards and activations are not included.

# %%
# %%ranks
from contextlib import contextmanager, nullcontext


@contextmanager
def gathered(model):
    """Keep full weights once they are gathered; shard them at the end."""
    model.set_reshard_after_forward(False)
    try:
        yield
    finally:
        model.set_reshard_after_forward(True)                   # the blocks' default; other settings are lost
        model.set_reshard_after_forward(False, recurse=False)   # the root's; leave it out if yours reshards
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@torch.no_grad()
def generate(model, ids, count):                                # i64[1, n] -> i64[1, n + count]
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids


def measure(context, count, blocks):
    model, weights = build(blocks), sum(p.nbytes for p in Model(blocks).parameters())
    with context(model), Meter() as meter:                      # follows gathers, full weights and buffers
        generate(model, ids, count)
    return meter.all_gathers, round(100 * meter.peak_gather_bytes / weights)


contexts = {"default": nullcontext, "weights kept": gathered}
by_tokens = {name: [measure(context, n, 2)[0] for n in (1, 4, 8, 16)] for name, context in contexts.items()}
by_blocks = {                                                   # the least of three: gloo may free a buffer late
    name: [min(measure(way, 1, n)[1] for _ in range(3)) for n in (2, 4, 8, 16, 32)] for name, way in contexts.items()
}

# %% jupyter={"source_hidden": true}
for by_tokens, by_blocks in (found := ranks.get("(by_tokens, by_blocks)")):
    assert by_tokens == {"default": [2 * n + 1 for n in (1, 4, 8, 16)], "weights kept": [3] * 4}
    assert 165 > by_blocks["default"][0] > 130 > 45 > by_blocks["default"][2] > 30 > 13 > by_blocks["default"][4]
    assert 210 > by_blocks["weights kept"][0] > 170 > 120 > by_blocks["weights kept"][4] > 100
fig, (left, right) = plots.figure(2, width=8.4, height=2.7)
for axes, x, lines in zip((left, right), ((1, 4, 8, 16), (2, 4, 8, 16, 32)), found[0]):
    for (name, y), color in zip(lines.items(), plots.RANK_COLORS):
        axes.plot(x, y, "o-", color=color, label=name)
    axes.set(xticks=x, ylim=(0, None))
left.set(title="all-gathers, 2 blocks", xlabel="tokens")
right.set(title="full weights and buffers, % of the model", xlabel="blocks")
left.legend()
plots.show(fig, alt="All-gathers grow with the tokens unless the weights are kept; kept weights take the whole model.")

# %% [markdown]
# With n blocks, t tokens cost 1 + n t all-gathers, or 1 + n with the weights kept, which takes room for the whole
# model. By default a rank holds the root, one block and the buffers of two gathers at once: a tenth of this model with
# 32 blocks, whose root is under 1 %. A large embedding and head add their share.
#
# A calculation from data sheets: 7 billion parameters in bf16 are 14 GB that a rank gathers **for each token**,
# whatever the batch, in 0.3 s between hosts (a 400 Gbit/s link for each GPU) or 0.03 s over an H100's NVLink. A GPU
# that keeps them reads them from its own memory in 0.004 s. If they do not fit, share the 0.3 s among a large batch,
# or generate with tensor parallelism ([lesson 16](16_two_dimensions.ipynb)) or in an inference engine.
#
# **Unless the weights are kept, ranks must call the model equally often**, and sequences end at different lengths.
# `generate` of transformers calls `self(...)`, so it needs no registration. It notices `fully_shard(model)` (not that
# of the layers alone) and sets `synced_gpus=True`: a rank that has finished goes on calling until all have.
#
# ```python
# model.generate(prompt, max_new_tokens=100)                              # synced_gpus=True by itself
# with gathered(model):
#     model.generate(prompt, max_new_tokens=100, synced_gpus=False)       # all units are gathered in the first call
# ```
#
# ## Your turn 1 · Generate together
#
# Write `generate_together(model, ids, most)` for a model whose full weights do not fit. `ids` is `i64[1, n]`. Append
# the likeliest token until you have appended a 0, the end token, or `most` tokens. Each rank starts at another
# number. No rank may stop before the last one has finished. Return with all weights sharded. The model here counts
# down: after 7 comes 6. `generate(model, ids, 1)`, defined above, appends one token.
#
# <details><summary>Hint</summary>
#
# One `all_reduce` of a float per token answers "has any rank still something to do?". A rank that has finished keeps
# calling the model and drops the token.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


@torch.no_grad()
def countdown():
    """A sharded model after whose token n comes n - 1."""
    model = Model().to(device)
    for layer in (layer for block in model.blocks for layer in (block[0], block[2])):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    model.embed.weight.copy_(torch.eye(16))
    model.head.weight.copy_(torch.eye(16).roll(-1, 0))
    return shard(model)


@turn(1, {
    "tokens after the end": exactly(0, "A sequence goes on after its 0: do not append to it any more."),
    "tokens missing": exactly(0, "A sequence is cut short: append its 0, too, and go on until the last rank has finished."),
    "units full between two tokens": at_most(1, "All weights stay full, and here they do not fit."),
    "units full at the end": exactly(0, "The root keeps its full weights after the last token: reshard it."),
})
def score_generate(generate_together):
    after = missing = between = left = 0
    for most in (12, 4):
        model, start = countdown(), 3 + 2 * rank
        calls = []
        model.register_forward_hook(lambda module, *_, c=calls: c.append(full_units(module)))
        try:
            found = generate_together(model, torch.tensor([[start]], device=device), most)
        except RuntimeError as raised:
            if "got mixed" in str(raised):
                raise NotYet("The root's hooks did not run: call `model(...)`, not `model.forward(...)`.") from None
            raise
        tokens = torch.as_tensor(found).flatten().tolist()
        wanted = list(range(start, -1, -1))[: most + 1]
        if tokens[: len(wanted)] != wanted[: len(tokens)]:
            raise NotYet(f"Return `ids` with the new tokens: expected {wanted}, found {tokens}.")
        after += max(0, len(tokens) - len(wanted))
        missing += max(0, len(wanted) - len(tokens))
        between, left = max(between, *calls, 0), left + full_units(model)
    return {
        "tokens after the end": after,
        "tokens missing": missing,
        "units full between two tokens": between,
        "units full at the end": left,
    }


# %%
# %%turn 1
def generate_together(model, ids, most):                        # i64[1, n] -> i64[1, n + new]
    return None                                                 # your lines here


# %% tags=["solution"] turn=1
def generate_together(model, ids, most):
    for _ in range(most):
        longer = generate(model, ids, 1)
        if ids[0, -1] != 0:
            ids = longer
        going = (ids[0, -1] != 0).float()
        dist.all_reduce(going)
        if not going:
            break
    model.reshard()
    return ids

# %% tags=["right"] turn=1
def generate_together(model, ids, most):                        # a flag of each rank
    flags = [torch.ones((), device=ids.device) for _ in range(world)]
    while most and sum(flags):
        longer, most = generate(model, ids, 1), most - 1
        ids = longer if ids[0, -1] != 0 else ids
        dist.all_gather(flags, (ids[0, -1] != 0).float())
    model.reshard()
    return ids

# %% tags=["right"] turn=1
@torch.no_grad()
def generate_together(model, ids, most):                        # objects, and a list
    tokens, going = ids[0].tolist(), [True] * world
    last = len(tokens) + most
    while any(going):
        token = model(torch.tensor([tokens], device=ids.device))[0, -1].argmax().item()
        tokens += [token] if going[rank] else []
        dist.all_gather_object(going, tokens[-1] != 0 and len(tokens) < last)
    model.reshard()
    return [tokens]

# %% tags=["right"] turn=1
def generate_together(model, ids, most):                        # too many tokens, cut afterwards
    ended = torch.zeros((), device=ids.device)
    while most and not ended:
        ids, most = generate(model, ids, 1), most - 1
        dist.all_reduce(ended.copy_(ids.eq(0).any()), dist.ReduceOp.MIN)
    model.reshard()
    tokens = ids[0].tolist()
    return ids[:, : tokens.index(0) + 1] if 0 in tokens else ids

# %% tags=["wrong"] turn=1 says="different collectives"
def generate_together(model, ids, most):                        # each rank stops by itself
    while most and ids[0, -1] != 0:
        ids, most = generate(model, ids, 1), most - 1
    model.reshard()
    return ids

# %% tags=["wrong"] turn=1 says="here they do not fit"
def generate_together(model, ids, most):                        # the weights kept: nothing to agree on
    with gathered(model):
        while most and ids[0, -1] != 0:
            ids, most = generate(model, ids, 1), most - 1
    return ids

# %% tags=["wrong"] turn=1 says="is cut short"
def generate_together(model, ids, most):                        # stops with the first
    ended = torch.zeros((), device=ids.device)
    while most and not ended:
        ids, most = generate(model, ids, 1), most - 1
        dist.all_reduce(ended.copy_(ids[0, -1] == 0), dist.ReduceOp.MAX)
    model.reshard()
    return ids

# %% tags=["wrong"] turn=1 says="not `model.forward(...)`"
def generate_together(model, ids, most):
    return torch.cat([ids, model.forward(ids)[:, -1:].argmax(-1)], dim=1)

# %% tags=["wrong"] turn=1 says="keeps its full weights"
def generate_together(model, ids, most):
    going = torch.ones((), device=ids.device)
    while most and going:
        longer, most = generate(model, ids, 1), most - 1
        ids = longer if ids[0, -1] != 0 else ids
        dist.all_reduce(going.copy_(ids[0, -1] != 0))
    return ids

# %% [markdown]
# ## EMA and edits: on the shards
#
# You need no `torch.optim.swa_utils.AveragedModel` (which raises: it copies the model). An exponential moving average
# (EMA) is element-wise, so each rank averages its own shards, as the script's `update_average` does. It costs each
# rank one more copy of its shards. Keep the average in float32: shards are float32 if the model was built so, also
# under a `MixedPrecisionPolicy`. If the model itself is bf16, write `p.detach().float().clone()` and `lerp_(p.float(),
# …)`: in bf16, an average of 1 that moves towards 1.5 with weight 0.001 stays 1.
# `save_distributed(folder, model, step=step, state={"average": average})` saves it in shards, and
# `load_distributed(folder, model)["average"]` returns it, on any number of ranks ([lesson
# 8](08_local_state_dict_and_distributed_checkpoints.ipynb)).
#
# An edit by hand is the same: in place, on shards. It goes wrong after an evaluation, when the root has its weights
# twice. The next cell halves all weights in four ways, and finds which weights the next two outputs are computed with.

# %% tags=["edits"]
# %%ranks
@torch.no_grad()
def after(edit=lambda p: p.mul_(0.5), evaluated=False, held=False):
    model = build()
    shards = list(model.parameters())                           # as an optimizer holds them
    if evaluated:
        model(ids)
    for p in shards if held else model.parameters():
        edit(p)
    outputs = [model(ids)]
    model.reshard()
    outputs.append(model(ids))
    return [next(word for word, y in known.items() if torch.allclose(x, y)) for x in outputs]


with torch.no_grad():
    known = {"no weights halved": build()(ids)}
    for word, part in {"the blocks' halved": lambda model: model.blocks, "all halved": lambda model: model}.items():
        for p in part(halved := build()).parameters():
            p.mul_(0.5)
        known[word] = halved(ids)
edits = {
    "p.mul_(0.5), on the shards": after(),
    "p.full_tensor().mul_(0.5)": after(lambda p: p.full_tensor().mul_(0.5)),
    "after an evaluation: the optimizer's parameters": after(evaluated=True, held=True),
    "after an evaluation: model.parameters()": after(evaluated=True),
}
every, none, part = "all halved", "no weights halved", "the blocks' halved"
assert list(edits.values()) == [[every, every], [none, none], [part, every], [every, part]]
Table(["the edit", "the next output is that of", "and after model.reshard()"], [[name, *found] for name, found in edits.items()])

# %% [markdown]
# - **`full_tensor()` is a copy**: editing it does not change the model. To write an edited copy `full` back, on all
#   ranks: `p.copy_(distribute_tensor(full, p.device_mesh, p.placements))`, which takes rank 0's copy.
# - **The optimizer's parameters are the shards.** The next forward does not read the root's: it computes with old
#   weights, without an error. So does the training forward after an evaluation between backward and `step()`.
# - **`model.parameters()` gives the root's full copies**, and the next reshard drops the edit.
#
# Three ways out. `model.load_state_dict(...)` reshards each unit first and copies in place. Or call `model.reshard()`
# before each edit, and **look the parameters up after it**: a full copy that you looked up before has no memory any
# more. Or `fully_shard(model, reshard_after_forward=True)`, for one more all-gather in each training step and each
# later token ([until 2025](https://github.com/pytorch/pytorch/issues/154655) the root ignored it).
#
# ## Your turn 2 · Evaluate with the average
#
# Write `evaluate_with(model, average, evaluate)`. `average` is a dictionary of shards by parameter name. Put the
# averages into the model, call `evaluate()` and return its result; all of it runs under `no_grad`. Afterwards the
# model computes with its own weights again, its parameters are those that the optimizer holds, and `average` is what
# it was. The model has been evaluated before, so **do not use full copies after `reshard()`**: the verdict here says
# so; in your own script the process may end. Gather nothing beside what `evaluate()` gathers.
#
# <details><summary>Hint</summary>
#
# Which two moments need a `model.reshard()`? Call `model.named_parameters()` once, after the first of them: it gives
# the shards, to which both writes go. While the root is full it gives full copies, which `reshard()` frees.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STALE = "The root computes with old weights: it was full when its shard changed. Reshard it before."
FULL = "While the root is full, `model.named_parameters()` has plain tensors: call `model.reshard()` before you look them up."
FREED = "This weight was looked up before `model.reshard()`, which freed it: look the parameters up after it."
OTHER = "The model has other parameters than the optimizer holds: copy into them, without `assign=True`."
SWAP = {"its own": "The averages do not reach the computation: copy them into the shards, in place."}
BACK = {"the average's": "The averages are still in the model: copy its own weights back, from clones taken before."}


class NoFreedWeights(TorchDispatchMode):                        # to read a freed weight would end the process
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            if type(x) in (torch.Tensor, nn.Parameter) and x.numel() and not x.untyped_storage().nbytes():
                raise NotYet(FREED)
        return func(*args, **(kwargs or {}))


@turn(2, {
    "output with the average": exactly("right", lambda found: SWAP.get(found, STALE)),
    "output afterwards": exactly("right", lambda found: BACK.get(found, STALE)),
    "averages that have changed": exactly(0, "The averages are overwritten: they have to stay as they were."),
    "parameters that the optimizer lacks": exactly(0, OTHER),
    "all-gathers beyond the evaluation's": at_most(0, "Full weights are gathered: copy shard to shard."),
})
@torch.no_grad()
def score_swap(evaluate_with):
    model, other = build(), build()
    for number, p in enumerate(other.parameters()):
        p.mul_(0.5).add_(0.01 * number)
    given = {name: p.clone() for name, p in other.named_parameters()}
    before = {name: p.to_local().clone() for name, p in given.items()}
    held = list(model.parameters())
    averaged, own, found = other(ids), model(ids), []
    try:
        with NoFreedWeights():
            count = gathers(model, lambda: found.append(evaluate_with(model, given, lambda: model(ids))))
    except (AttributeError, RuntimeError) as raised:
        if any(words in str(raised) for words in ("got mixed", "must match the size", "attribute 'to_local'")):
            raise NotYet(FULL) from None
        raise
    if not isinstance(found[0], torch.Tensor) or found[0].shape != own.shape:
        raise NotYet("Return what `evaluate()` returns.")
    outputs = {"its own": own, "the average's": averaged}
    during, later = (
        next((word for word, y in outputs.items() if torch.allclose(y, z)), "a mix") for z in (found[0], model(ids))
    )
    model.state_dict()                                          # reshards all units
    return {
        "output with the average": "right" if during == "the average's" else during,
        "output afterwards": "right" if later == "its own" else later,
        "averages that have changed": sum(not torch.equal(before[name], p.to_local()) for name, p in given.items()),
        "parameters that the optimizer lacks": sum(p is not q for p, q in zip(model.parameters(), held)),
        "all-gathers beyond the evaluation's": count - 3,
    }


# %%
# %%turn 2
def evaluate_with(model, average, evaluate):
    return None                                                 # your lines here


# %% tags=["solution"] turn=2
def evaluate_with(model, average, evaluate):
    model.reshard()
    shards = dict(model.named_parameters())
    own = {name: p.clone() for name, p in shards.items()}
    for name, p in shards.items():
        p.copy_(average[name])
    result = evaluate()
    model.reshard()
    for name, p in shards.items():
        p.copy_(own[name])
    return result

# %% tags=["right"] turn=2
def evaluate_with(model, average, evaluate):                    # state dicts reshard by themselves
    own = {name: p.clone() for name, p in model.state_dict().items()}
    model.load_state_dict(average)
    result = evaluate()
    model.load_state_dict(own)
    return result

# %% tags=["right"] turn=2
def evaluate_with(model, average, evaluate):                    # swap twice, on what lies on this rank
    results = []
    for use in (evaluate, lambda: None):
        model.reshard()
        for name, p in model.named_parameters():
            was = p.to_local().clone()
            p.to_local().copy_(average[name].to_local())
            average[name].to_local().copy_(was)
        results.append(use())
    return results[0]

# %% tags=["right"] turn=2
def evaluate_with(model, average, evaluate):                    # all tensors at once
    model.reshard()
    mine = [p.to_local() for p in model.parameters()]
    own = [p.clone() for p in mine]
    torch._foreach_copy_(mine, [average[name].to_local() for name, _ in model.named_parameters()])
    result = evaluate()
    model.reshard()
    torch._foreach_copy_(mine, own)
    return result

# %% tags=["wrong"] turn=2 says="before you look them up"
def evaluate_with(model, average, evaluate):                    # no reshard before
    for name, p in model.named_parameters():
        p.copy_(average[name])
    return evaluate()

# %% tags=["wrong"] turn=2 says="before you look them up"
def evaluate_with(model, average, evaluate):                    # no reshard after the evaluation
    own = [p.to_local().clone() for p in model.state_dict().values()]
    model.load_state_dict(average)
    result = evaluate()
    torch._foreach_copy_(list(model.parameters()), own)
    return result

# %% tags=["wrong"] turn=2 says="The root computes with old weights"
def evaluate_with(model, average, evaluate):                    # the same, with shards that were looked up before
    own = [p.to_local().clone() for p in model.state_dict().values()]
    mine = [p.to_local() for p in model.parameters()]
    model.load_state_dict(average)
    result = evaluate()
    torch._foreach_copy_(mine, own)
    return result

# %% tags=["wrong"] turn=2 says="which freed it"
def evaluate_with(model, average, evaluate):                    # read after it was freed: else SIGSEGV
    parameters = list(model.parameters())
    model.reshard()
    return [p.clone() for p in parameters]

# %% tags=["wrong"] turn=2 says="which freed it"
def evaluate_with(model, average, evaluate):                    # written after it was freed
    parameters = list(model.parameters())
    model.reshard()
    return [p.copy_(new) for p, new in zip(parameters, average.values())]

# %% tags=["wrong"] turn=2 says="than the optimizer holds"
def evaluate_with(model, average, evaluate):
    own = {name: p.clone() for name, p in model.state_dict().items()}
    model.load_state_dict({name: p.clone() for name, p in average.items()}, assign=True)
    result = evaluate()
    model.load_state_dict(own, assign=True)
    return result

# %% tags=["wrong"] turn=2 says="still in the model"
def evaluate_with(model, average, evaluate):
    model.load_state_dict(average)
    return evaluate()

# %% tags=["wrong"] turn=2 says="do not reach the computation"
def evaluate_with(model, average, evaluate):
    model.reshard()
    for name, p in model.named_parameters():
        p.full_tensor().copy_(average[name].full_tensor())
    return evaluate()

# %% [markdown]
# ## Two models, two forwards
#
# `kinds` (folded above) lists what a step sends: with two forwards before one backward (DPO, unless chosen and
# rejected samples are concatenated), and with a frozen teacher or reference model.

# %% tags=["pairs"]
# %%ranks
student, teacher = build(), build().requires_grad_(False)
rejected = (ids + 1) % 16


def distil():
    with torch.no_grad():
        wanted = teacher(ids)
    teacher.reshard()
    (student(ids) - wanted).square().mean().backward()


steps = {
    "one forward": lambda: student(ids).mean().backward(),
    "two forwards": lambda: (student(ids) - student(rejected)).mean().backward(),
    "one forward of both batches": lambda: student(torch.cat([ids, rejected])).mean().backward(),
    "with a frozen teacher": distil,
}
sent = {name: kinds(student, step) for name, step in steps.items()}
pairs = {name: [made.count("all_gather"), made.count("reduce_scatter")] for name, made in sent.items()}
assert list(pairs.values()) == [[5, 3], [9, 3], [5, 3], [8, 3]]
Table(["a step", "all-gathers", "reduce-scatters"], [[name, *found] for name, found in pairs.items()])

# %% [markdown]
# A second forward gathers each block twice more, for its forward and its backward. It adds no reduce-scatter:
# autograd sums the gradients of both forwards before FSDP reduces them. **Until then each rank holds the full
# gradients of all blocks**, so concatenate the batches where you can. The teacher's forward gathers its units once.
#
# ## Send the weights away
#
# An inference engine such as vLLM wants full tensors (a *weight sync*). `full_tensor()` is an all-gather: all ranks
# call it, in the same order, and each gather has to finish before its tensor is sent. `one_by_one` is the loop to
# take home. `shares` (folded above) measures three ways to send: what is gathered, and how much is full at once.

# %%
# %%ranks
def one_by_one(model, send, dtype=None):
    for name, p in model.state_dict().items():
        full = p.to(dtype).full_tensor() if isinstance(p, DTensor) else p       # a buffer is not sharded
        if full.is_cuda:
            torch.cuda.current_stream().synchronize()           # the gather has finished
        if rank == 0:
            send(name, full)                                    # to the engine; lets go of the tensor
        del full                                                # else it lives until the next is gathered


ways_to_send = {
    "all, then send": shares(lambda model: [p.full_tensor() for p in model.state_dict().values()]),
    "one by one": shares(lambda model: one_by_one(model, lambda *_: None)),
    "one by one, cast to bf16 first": shares(lambda model: one_by_one(model, lambda *_: None, torch.bfloat16)),
}
every, each, cast = ways_to_send.values()
assert every[1] >= 100 > 40 > each[1]
assert abs(2 * cast[0] - each[0]) < 3
Table(["", "gathered, % of the model", "full at once, %"], [[name, *found] for name, found in ways_to_send.items()])

# %% [markdown]
# Gathered one by one, no more than the largest tensor is full at a time, if `send` has let go of it. Casting the
# float32 shards to bf16 first halves the bytes. `state_dict()` has all tensors; a loop that calls `unshard()` on the
# submodules leaves out the root's. An engine with old weights raises nothing: compare its log-probabilities with the
# trainer's after the first send.
#
# **Gather on the default stream, synchronise, send**, as `one_by_one` does. The CPU here has no streams to show why:
# [trl hung](https://github.com/huggingface/trl/pull/6798) with more than two training ranks, by the author's account
# because rank 0's gathers waited behind vLLM's transfers on the same CUDA streams. While rank 0 sends, the other ranks
# wait in the next gather, and one send longer than the process group's timeout ends the job: [a user's
# report](https://github.com/huggingface/trl/issues/7103). Where all full weights have room on rank 0, gather them first.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `got mixed torch.Tensor and DTensor` | `model.forward(ids)`, `model.embed(ids)` or a method of your own that does not call `self(...)`: the root's hooks did not run. Or full weights beside a shard, as when [an EMA is put](https://github.com/pytorch/pytorch/issues/144289) into a model after an evaluation | `model(...)`, `register_fsdp_forward_method`. Or `model.reshard()`, then look the parameters up anew |
# | on a CPU SIGSEGV, or `The tensor has a non-zero number of elements, but its data is not allocated yet`; on a GPU `CUDA error: an illegal memory access was encountered` | a full weight that was looked up before `reshard()`, which freed it | look the parameters up after `reshard()` |
# | `FSDP state has already been lazily initialized` | the model's first call was one of a block, or `forward` of a root without parameters of its own | build the model anew, and call it first |
# | `FSDP does not support deepcopy` | `AveragedModel`, or a copy as reference model | a dictionary of shards; build the second model anew and load the first one's state dict |
# | `'Tensor' object has no attribute 'full_tensor'` (or `'device_mesh'`) | in a `state_dict()`: a buffer, or one of `ignored_params`, not sharded. `'Parameter' object`, in `model.parameters()`: an ignored one, or the root is full | send it as it is. Or take it from `state_dict()` |
# | memory stays high after an evaluation, or embedding and head ignore edits | full units: the root, or all with `reshard_after_forward=False` | `reshard()` on each, before you edit |
# | the engine's log-probabilities are others | it has old weights, or names with `_checkpoint_wrapped_module` | names and tensors of `state_dict()` |
#
# ## The rule
#
# To compute with full weights, call `model(...)` or a registered method, equally often on all ranks. To change
# weights, call `model.reshard()`, then look the parameters up, and write in place under `no_grad`. (If blocks keep
# their weights, because `reshard_after_forward` is False or a number, reshard each of them.)
#
# [← lesson 17](17_fine_tune_three_ways.ipynb) · [lesson 19 →](19_whole_matrix_optimizers.ipynb)
