# %% [markdown]
# # 18 · Beyond forward and backward
#
# What may you do with a sharded model between its training steps: generate, average, edit, send its weights
# away? **Compute through `model(...)` or a registered method, equally often on all ranks. Average and edit
# the shards in place, after `model.reshard()`. Send `full_tensor()` of one parameter after the other.**

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

AFTER = ["a training step", "model(x) under no_grad", "model.reshard()"]
fig, (axes,) = plots.figure(width=7.5, height=2.0)
for column, moment in enumerate(AFTER):
    for row in range(3):
        full = row == 0 and column == 1
        axes.barh(row, 0.9, left=column, height=0.66, color=plots.FAINT)
        axes.barh(row, 0.9 if full else 0.225, left=column, height=0.66, color=plots.RANK_COLORS[row])
axes.set_yticks(range(3), ["root", "block 0", "block 1"])
axes.set_xticks([column + 0.45 for column in range(3)], [f"after {moment}" for moment in AFTER])
axes.set(ylim=(2.6, -0.6))
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="What a rank holds of three units: after an evaluation all of the root, else a quarter of each.")

# %% [markdown]
# A drawing of what one of four ranks holds of each unit. Backward ends with shards everywhere. A forward
# pass alone leaves the *root*, the unit of `fully_shard(model)`, with full weights (the default). Until
# `model.reshard()`, which frees the root's alone, `model.parameters()` mixes full tensors and shards.

# %% tags=["card"]
lesson.card(
    18,
    learn="generate, average, edit and send away the weights of a sharded model, and run two models side by side",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 30, 27),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It counts what each use of a model of
# three units costs in all-gathers.
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
# torch.manual_seed(1 + dist.get_rank())                       # other samples on each rank
# ids = torch.randint(32, (1, 8))
#
#
# @torch.no_grad()
# def update_average():
#     for name, p in model.named_parameters():
#         average[name].lerp_(p, 0.1)                          # 0.9 * average + 0.1 * p
#
#
# @torch.no_grad()
# def generate():
#     tokens = ids
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
# The average gathers nothing, because each rank averages its own shards. Ten tokens cost four times the
# gathers of a training step, or three in all if the weights are kept (here the blocks then stay full: a
# context below shards them again). The rest of this lesson explains these lines and shows where such uses go
# wrong, some without an error. It is about FSDP2; a folded cell has FSDP1's way.
#
# ## Which calls gather
#
# Each unit has hooks that run when it is *called*: they gather its weights before `forward` and, in a block,
# free them after it. A method of your own has none. `register_fsdp_forward_method(model, "logp")` puts the
# root's hooks around that method. The table counts a call and its backward, for a new model in each row.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(preload=["transformers.models.llama.modeling_llama"])   # slow to import

# %%
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):                                       # f32[batch, tokens, 16]
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        self.blocks = nn.Sequential(*[Block() for _ in range(blocks)])

    def forward(self, ids):                                     # i64[batch, tokens]
        return self.head(self.blocks(self.embed(ids)))          # f32[batch, tokens, 16]

    def logp(self, ids):                                        # a method of your own
        return self.head(self.blocks(self.embed(ids))).log_softmax(-1)


def shard(model):
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


def build(blocks=2):
    torch.manual_seed(0)
    return shard(Model(blocks).to(device))


def stack():                                                    # its root has no parameters of its own
    torch.manual_seed(0)
    return shard(nn.Sequential(Block(), Block()).to(device))


ids = (torch.arange(4, device=device) + 4 * rank)[None] % 16    # i64[1, 4], other tokens on each rank
x = torch.ones(1, 4, 16, device=device)

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils import record_collectives


def full_units(model):
    """Return the number of units whose full weights are in memory."""
    parts = [module for module in model.modules() if isinstance(module, Block | Model)]
    one_of_each = [part.up.weight if isinstance(part, Block) else part.embed.weight for part in parts]
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
        return ["no error", forward + gathers(model, output[0].square().mean().backward), full]
    except RuntimeError as error:
        return [str(error).partition(",")[0].partition("got ")[2], "", ""]


# %%
# %%ranks
registered = build()
register_fsdp_forward_method(registered, "logp")
ways = {
    "model(ids)": way_in(build(), lambda model: model(ids)),
    "model.logp(ids)": way_in(build(), lambda model: model.logp(ids)),
    "model.logp(ids), registered": way_in(registered, lambda model: model.logp(ids)),
    "model.forward(ids)": way_in(build(), lambda model: model.forward(ids)),
    "stack(x): the root has no parameters": way_in(stack(), lambda model: model(x)),
    "stack.forward(x)": way_in(stack(), lambda model: model.forward(x)),
}

# %%
ways = ranks.get("ways")[0]
assert ways["model(ids)"] == ways["model.logp(ids), registered"] == ["no error", 5, 1]
assert ways["model.logp(ids)"] == ways["model.forward(ids)"] == ["mixed torch.Tensor and DTensor", "", ""]
assert ways["stack(x): the root has no parameters"] == ["no error", 4, 0]
assert ways["stack.forward(x)"] == ["no error", 2, 2]
Table(
    ["", "what happens", "all-gathers", "units full after forward"],
    [[name, *map(str, found)] for name, found in ways.items()],
)

# %% [markdown]
# Without the hooks the root's parameters are still DTensors, and the error says so. The last row is the
# silent one: the root of `stack`, an `nn.Sequential` of blocks, has nothing to gather, so `forward` works.
# But in a first call each block takes *itself* for the root and keeps its weights: the memory of the whole
# model. A later `stack(x)` raises `FSDP state has already been lazily initialized`. After an evaluation, when
# the root is full, even `model.forward(ids)` works, by luck.
#
# ## Generate
#
# `generate` of transformers calls `self(...)` for each token, so it needs no registration. But every token
# gathers every block again. The next cell sweeps the number of tokens. `gathered(model)` is the context to
# take home.

# %%
# %%ranks
from contextlib import contextmanager
from functools import partial

from fsdp_utils.lessons.meter import Meter


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


def keeping(model, ids, count):
    with gathered(model):
        return generate(model, ids, count)


counts, sweep, peak = [1, 2, 4, 8, 16], {}, {}
for name, use in {"default": generate, "weights kept": keeping}.items():
    sweep[name] = [gathers(build(), partial(use, build(), ids, count)) for count in counts]
    with Meter() as meter:
        use(build(blocks=6), ids, 1)                            # the peak of any token
    peak[name] = 100 * meter.peak_whole_bytes / sum(p.nbytes for p in Model(blocks=6).parameters())

# %%
sweep, peak, counts = ranks.get("sweep")[0], ranks.get("peak")[0], ranks.get("counts")[0]
assert sweep == {"default": [2 * n + 1 for n in counts], "weights kept": [3 for _ in counts]}
assert 15 < peak["default"] < 30 < 99 < peak["weights kept"] < 120      # uneven shards are padded
fig, (left, right) = plots.figure(2, width=8.5, height=2.3)
for (name, found), color in zip(sweep.items(), plots.RANK_COLORS):
    left.plot(counts, found, "o-", color=color, label=name)
    right.barh(name, peak[name], color=color)
left.set(title="all-gathers", xlabel="tokens", ylim=(0, 36))
left.legend(loc="upper left")
right.set(title="full weights at the peak of six blocks, %", xlim=(0, 115))
plots.show(fig, alt="All-gathers over tokens, and full weights at the peak, for two ways to generate.")

# %% [markdown]
# Kept weights need a gather per unit for any number of tokens, and room for the whole model. (`unshard()` is
# no substitute: it gathers one unit without its children, and the next forward shards a block again.) A
# calculation: 7 billion parameters in bf16 are 14 GB that a rank gathers **for each token**, 0.3 s at 50 GB/s
# (a link of 400 Gbit/s). An A100 of 80 GB that holds them reads them from its memory in 0.007 s. So keep the
# weights if they fit. If not, generate with tensor parallelism ([lesson 16](16_two_dimensions.ipynb)) or in
# an inference engine.
#
# **Ranks must call the model equally often**, and sequences end at different lengths. Transformers notices
# `fully_shard(model)` (not that of the layers alone) and sets `synced_gpus=True`: a rank that has finished
# goes on calling until all have. The next cell takes rank 0's third token for the one that ends a sequence.

# %% tags=["generate"]
# %%ranks
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0)).to(device).eval()
for layer in llama.model.layers:
    fully_shard(layer)
fully_shard(llama)
prompt = (torch.arange(1, 5, device=device) + rank)[None]
options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
end = llama.generate(prompt, **options, eos_token_id=None)[0, 6].clone()
dist.broadcast(end, src=0)
calls = []
llama.register_forward_hook(lambda *_: calls.append(1))


def tokens_and_calls(**more):
    calls.clear()
    found = llama.generate(prompt, **options, eos_token_id=int(end), **more)
    return [found.shape[1] - prompt.shape[1], len(calls)]


synced = tokens_and_calls()
with gathered(llama):
    alone = tokens_and_calls(synced_gpus=False)

# %%
synced, alone = ranks.get("synced"), ranks.get("alone")
assert synced[0][0] == 3
assert len({calls for _, calls in synced}) == 1
assert all(calls == tokens for tokens, calls in alone)
Table(
    ["", "tokens", "calls, synced_gpus", "calls, weights kept"],
    [[f"rank {r}", tokens, calls, alone[r][1]] for r, (tokens, calls) in enumerate(synced)],
)

# %% [markdown]
# Last column: with kept weights nothing is left to gather after the first call, which every rank makes, so
# `synced_gpus=False` is right, and each rank stops when it has finished.
#
# ## Your turn 1 · Generate together
#
# Write `generate_together(model, ids, most)` for a model whose full weights do not fit. `ids` is `i64[1, n]`.
# Append the likeliest token until you have appended a 0, the end token, or `most` tokens. Each rank starts at
# another number. All ranks stop calling the model when the last one has finished; then all weights are
# sharded. The model here counts down: after 7 comes 6. `generate(model, ids, 1)` appends one token.
#
# <details><summary>Hint</summary>
#
# One `all_reduce` of a float for each token answers "has anybody still something to do?". A rank that has
# finished calls the model and ignores the result.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


@torch.no_grad()
def countdown():
    """A sharded model after whose token n comes n - 1."""
    model = Model().to(device)
    for block in model.blocks:
        nn.init.zeros_(block.down.weight)
        nn.init.zeros_(block.down.bias)
    model.embed.weight.copy_(torch.eye(16))
    model.head.weight.copy_(torch.eye(16).roll(-1, 0))
    return shard(model)


@turn(1, {
    "tokens after the end": exactly(0, "A sequence goes on after its 0: do not append to it any more."),
    "tokens missing": exactly(0, "A sequence is cut short: append its 0, too, and go on until the last rank has finished."),
    "calls of the model too many": exactly(0, more="The ranks call the model although all sequences have ended."),
    "units full between two tokens": at_most(1, "All weights stay full, and here they do not fit."),
    "units full at the end": exactly(0, "The root keeps its full weights after the last token: reshard it."),
})
def score_generate(generate_together):
    after = missing = beyond = between = left = 0
    for most in (12, 4):
        model, start = countdown(), 3 + 2 * rank
        answer = partial(generate_together, model, torch.tensor([[start]], device=device), most)
        calls = []
        model.register_forward_hook(lambda module, *_, c=calls: c.append(full_units(module)))
        tokens = torch.as_tensor(answer()).flatten().tolist()
        beyond += max(0, len(calls) - min(most, 3 + 2 * (world - 1)))
        wanted = list(range(start, -1, -1))[: most + 1]
        if tokens[: len(wanted)] != wanted[: len(tokens)]:
            raise NotYet(f"Return `ids` with the new tokens: expected {wanted}, found {tokens}.")
        after += max(0, len(tokens) - len(wanted))
        missing += max(0, len(wanted) - len(tokens))
        between, left = max(between, *calls, 0), left + full_units(model)
    return {
        "tokens after the end": after,
        "tokens missing": missing,
        "calls of the model too many": beyond,
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
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
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

# %% tags=["wrong"] turn=1 says="although all sequences have ended"
def generate_together(model, ids, most):                        # always to the end
    for _ in range(most):
        longer = generate(model, ids, 1)
        ids = longer if ids[0, -1] != 0 else ids
    model.reshard()
    return ids

# %% tags=["wrong"] turn=1 says="is cut short"
def generate_together(model, ids, most):                        # stops with the first
    ended = torch.zeros((), device=ids.device)
    while most and not ended:
        ids, most = generate(model, ids, 1), most - 1
        dist.all_reduce(ended.copy_(ids[0, -1] == 0), dist.ReduceOp.MAX)
    model.reshard()
    return ids

# %% tags=["wrong"] turn=1 says="keeps its full weights"
def generate_together(model, ids, most):
    going = torch.ones((), device=ids.device)
    while most and going:
        longer, most = generate(model, ids, 1), most - 1
        ids = longer if ids[0, -1] != 0 else ids
        dist.all_reduce(going.copy_(ids[0, -1] != 0))
    return ids

# %% [markdown]
# ## Average and edit: the shards
#
# `copy.deepcopy(model)` raises, and so does `torch.optim.swa_utils.AveragedModel`, which calls it. You need
# neither: an average is element-wise, so each rank averages its own shards. The next cell trains ten steps
# with an average, on the ranks and in one process with all samples, then saves the average and loads it.

# %% tags=["ema"]
# %%ranks
import shutil
import tempfile

from fsdp_utils import load_distributed, save_distributed


@torch.no_grad()
def update(average, model):
    for name, p in model.named_parameters():
        average[name].lerp_(p, 0.1)


def train(model, samples):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(10):
        model(samples).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update(average, model)
    return average


torch.manual_seed(0)
alone = train(Model().to(device), (torch.arange(4 * world, device=device) % 16).view(world, 4))
average = train(model := build(), ids)
error = max((average[name].full_tensor() - full).abs().max().item() for name, full in alone.items())

folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, src=0)
save_distributed(folder[0], model, step=10, state={"average": average})
again = load_distributed(folder[0], model)["average"]
loaded = all(torch.equal(again[name].to_local(), average[name].to_local()) for name in average)
sent = kinds(model, lambda: update(average, model))

# %%
sent, error, loaded = ranks.get("sent, error, loaded")[0]
assert loaded
print(f"collectives of an update: {len(sent)}; equal to one process, up to rounding: {error < 1e-5}")

# %% jupyter={"source_hidden": true} tags=["check"]
# %%ranks
import copy
from contextlib import suppress

from torch.optim.swa_utils import AveragedModel

copies = []
for copied in (copy.deepcopy, AveragedModel):
    with suppress(AssertionError):
        copies.append(copied(model))
assert copies == []
one, more = torch.tensor([1.0, 1.5], dtype=torch.bfloat16)
assert one.lerp(more, 0.001) == 1
assert (len(sent), error < 1e-5) == (0, True)

# %% [markdown]
# The average costs one shard per rank. Keep it in float32 (`p.detach().float().clone()`, `lerp_(p.float(),
# …)`): in bf16, an average of 1 that moves towards 1.5 with weight 0.001 stays 1. It is saved in shards, so
# it loads on another number of ranks ([lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb)).
#
# An edit by hand is the same: in place, on shards. The next cell halves all weights in six ways, and looks at
# the next output, and at the one after all units were sharded again.

# %% tags=["edits"]
# %%ranks
def halve(p):
    p.mul_(0.5)


def halve_full(p):
    p.full_tensor().mul_(0.5)


def distribute_half(p):
    p.copy_(distribute_tensor(0.5 * p.full_tensor(), p.device_mesh, p.placements))


@torch.no_grad()
def after(edit, evaluated=False, held=False, reshard=False):
    model = build()
    shards = list(model.parameters())                           # as an optimizer holds them
    if evaluated:
        model(ids)
    if reshard:
        model.reshard()
    for p in shards if held else model.parameters():
        edit(p)
    outputs = [model(ids)]
    model.reshard()
    outputs.append(model(ids))
    return [next((word for word, y in known.items() if torch.allclose(x, y)), "a mix") for x in outputs]


with torch.no_grad():
    known = {"as before": build()(ids)}
    for p in (model := build()).parameters():
        halve(p)
    known["halved"] = model(ids)
edits = {
    "p.mul_(0.5)": after(halve),
    "p.full_tensor().mul_(0.5)": after(halve_full),
    "p.copy_(distribute_tensor(half, p.device_mesh, p.placements))": after(distribute_half),
    "after an evaluation: p.mul_(0.5) of model.parameters()": after(halve, evaluated=True),
    "after an evaluation: p.mul_(0.5) of the optimizer's parameters": after(halve, evaluated=True, held=True),
    "after an evaluation: model.reshard(), p.mul_(0.5)": after(halve, evaluated=True, reshard=True),
}

# %%
edits = ranks.get("edits")[0]
assert list(edits.values()) == [
    ["halved", "halved"], ["as before", "as before"], ["halved", "halved"],
    ["halved", "a mix"], ["a mix", "halved"], ["halved", "halved"],
]
Table(["the edit", "next output", "after model.reshard()"], [[name, *found] for name, found in edits.items()])

# %% jupyter={"source_hidden": true} tags=["check"]
# %%ranks
with suppress(RuntimeError):                                    # model.forward in a first call
    late = stack()
    late.forward(x)
    late(x)
    raise AssertionError("a root after its blocks")
tripped = build()
tripped.forward(tripped(ids).argmax(-1))                        # by luck: the root is full
tripped = build()
step = torch.optim.SGD(tripped.parameters(), lr=1.0)
tripped(ids).square().mean().backward()
with torch.no_grad():
    tripped(ids)                                                # an evaluation between backward and step
    step.step()
    old = tripped(ids)
    tripped.reshard()
    assert not torch.allclose(old, tripped(ids))
safe = fully_shard(Model().to(device), reshard_after_forward=True)
assert kinds(safe, lambda: safe(ids).mean().backward()).count("all_gather") == 2
with torch.no_grad():
    safe(ids)
assert full_units(safe) == 0

# %% [markdown]
# `full_tensor()` is a copy, and editing a copy changes nothing: `distribute_tensor` cuts the edited copy into
# shards again. "A mix" is the output of halved blocks and a root that is not. After an evaluation the root
# holds its shard *and* its full weights. An edit of `model.parameters()` changes the full ones, and the next
# reshard drops the edit. The optimizer's parameters are the shards, which the next forward does not read:
# **the root computes with old weights, without an error**. So does an `optimizer.step()`, if an evaluation
# came between backward and step. `state_dict()` and `load_state_dict()` reshard by themselves.
# `fully_shard(model, reshard_after_forward=True)` spares you all this, for one more all-gather in each
# training step and in each generated token.
#
# ## Your turn 2 · Evaluate with the average
#
# Write `evaluate_with(model, average, evaluate)`. `average` is a dictionary of shards by parameter name. Put
# the averages into the model, call `evaluate()`, which calls the model, and return its result. All of it runs
# under `no_grad`. Afterwards the model computes with its own weights again, and `average` is what it was. The
# model has been evaluated before. No rank has room for full weights beyond those that `evaluate()` gathers.
#
# <details><summary>Hint</summary>
#
# Which two moments need a `model.reshard()`? Look the parameters up after it.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
STALE = "The root computes with old weights: it was full when its shard changed. Reshard it before."
SWAP = {"its own": "The averages do not reach the computation: copy them into the shards, in place."}
BACK = {"the average's": "The averages are still in the model: copy its own weights back, from clones taken before."}


@turn(2, {
    "output with the average": exactly("right", lambda found: SWAP.get(found, STALE)),
    "output afterwards": exactly("right", lambda found: BACK.get(found, STALE)),
    "averages that have changed": exactly(0, "The averages are overwritten: they have to stay as they were."),
    "all-gathers beyond the evaluation's": at_most(0, "Full weights are gathered: copy shard to shard."),
})
@torch.no_grad()
def score_swap(evaluate_with):
    model, other = build(), build()
    for number, p in enumerate(other.parameters()):
        p.mul_(0.5).add_(0.01 * number)
    average = {name: p.clone() for name, p in other.named_parameters()}
    before, averaged, own, found = copy.deepcopy(average), other(ids), model(ids), []
    count = gathers(model, lambda: found.append(evaluate_with(model, average, lambda: model(ids))))
    if not isinstance(found[0], torch.Tensor) or found[0].shape != own.shape:
        raise NotYet("Return what `evaluate()` returns.")
    outputs = {"its own": own, "the average's": averaged}
    during, later = (
        next((word for word, y in outputs.items() if torch.allclose(y, z)), "a mix") for z in (found[0], model(ids))
    )
    return {
        "output with the average": "right" if during == "the average's" else during,
        "output afterwards": "right" if later == "its own" else later,
        "averages that have changed": sum(not torch.equal(before[n].to_local(), average[n].to_local()) for n in before),
        "all-gathers beyond the evaluation's": count - 3,
    }


# %%
# %%turn 2
def evaluate_with(model, average, evaluate):
    return None                                                 # your lines here


# %% tags=["solution"] turn=2
@torch.no_grad()
def evaluate_with(model, average, evaluate):
    model.reshard()
    own = {name: p.clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.copy_(average[name])
    result = evaluate()
    model.reshard()
    for name, p in model.named_parameters():
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
@torch.no_grad()
def evaluate_with(model, average, evaluate):                    # swap twice, on what lies on this rank
    def swap():
        model.reshard()
        for name, p in model.named_parameters():
            was = p.to_local().clone()
            p.to_local().copy_(average[name].to_local())
            average[name].to_local().copy_(was)

    swap()
    try:
        return evaluate()
    finally:
        swap()

# %% tags=["right"] turn=2
@torch.no_grad()
def evaluate_with(model, average, evaluate):                    # all tensors at once
    model.reshard()
    mine = [p.to_local() for p in model.parameters()]
    own = [p.clone() for p in mine]
    torch._foreach_copy_(mine, [average[name].to_local() for name, _ in model.named_parameters()])
    result = evaluate()
    model.reshard()
    torch._foreach_copy_(mine, own)
    return result

# %% tags=["wrong"] turn=2 says="The root computes with old weights"
@torch.no_grad()
def evaluate_with(model, average, evaluate):                    # no reshard after the evaluation
    own = {name: p.clone() for name, p in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        p.copy_(average[name])
    result = evaluate()
    for name, p in parameters.items():
        p.copy_(own[name])
    return result

# %% tags=["wrong"] turn=2 says="still in the model"
def evaluate_with(model, average, evaluate):
    model.load_state_dict(average)
    return evaluate()

# %% tags=["wrong"] turn=2 says="do not reach the computation"
@torch.no_grad()
def evaluate_with(model, average, evaluate):
    model.reshard()
    for name, p in model.named_parameters():
        p.full_tensor().copy_(average[name].full_tensor())
    return evaluate()

# %% [markdown]
# ## Send the weights away
#
# An inference engine wants full tensors. `full_tensor()` is an all-gather: all ranks call it, in the same
# order. The table counts how many of the model's ten tensors come out complete.

# %% tags=["send"]
# %%ranks
def one_by_one(model, take=lambda p: p.full_tensor()):
    done = {}
    for name, p in model.state_dict().items():
        full = take(p)                                          # rank 0 sends it here
        done[name] = full.shape
        del full                                                # else it lives until the next is gathered
    return done


def unit_by_unit(model):
    done = {}
    for prefix, block in model.named_modules():
        if isinstance(block, FSDPModule) and block is not model:
            block.unshard()
            done |= {f"{prefix}.{name}": p.shape for name, p in block.named_parameters()}
            block.reshard()
    return done


held, sent, plain = [], {}, Model()
for name, use in {
    "all, then send": partial(one_by_one, take=lambda p: held.append(p.full_tensor()) or p),
    "one by one": one_by_one,
    "one by one, cast to bf16 first": partial(one_by_one, take=lambda p: p.to(torch.bfloat16).full_tensor()),
    "unit by unit": unit_by_unit,
}.items():
    peaks = []
    for _ in range(5):                                          # gloo's thread may let go of a tensor late
        with Meter() as meter:
            done = use(build())
        peaks.append(meter.peak_whole_bytes)
        held.clear()
    complete = sum(p.shape == done.get(key) for key, p in plain.named_parameters())
    shares = [n / sum(p.nbytes for p in plain.parameters()) for n in (meter.gathered_bytes, min(peaks))]
    sent[name] = [complete, *(round(100 * share) for share in shares)]

# %%
sent = ranks.get("sent")[0]
assert [complete for complete, *_ in sent.values()] == [10, 10, 10, 8]
assert sent["all, then send"][2] >= 100 > 40 > sent["one by one"][2]
assert abs(2 * sent["one by one, cast to bf16 first"][1] - sent["one by one"][1]) < 3
Table(["", "complete tensors", "gathered, % of the model", "full at once, %"], [[k, *v] for k, v in sent.items()])

# %% [markdown]
# One by one holds the largest tensor, and a cast of the shard halves the bytes. The last row forgets what
# belongs to the root, embedding and head: `unshard` is not recursive, and a loop over inner units does not
# see the root. This happened in [open-instruct](https://github.com/allenai/open-instruct/pull/1642). To
# notice it, compare the engine's log-probabilities with the trainer's after the first send.
#
# **Finish each gather before you send.** [trl hung](https://github.com/huggingface/trl/pull/6798) with more
# than two ranks: rank 0 gathered inside the engine's transfer loop, on that loop's CUDA stream, behind
# transfers to the engine. The other ranks ran ahead, and the two NCCL groups waited for each other. (The CPU
# here has no streams to show it.) Gather on the default stream and synchronise, then send. Or gather all
# first, if there is room ([a proposed change](https://github.com/huggingface/trl/pull/7131)).
#
# ## Two models, two forwards
#
# The next cell counts what a step sends: with two forwards before one backward (as for DPO), with a frozen
# teacher, and in the generator's step of a GAN, whose discriminator is `judge`.

# %% tags=["pairs"]
# %%ranks
student, teacher, maker, judge = build(), build().requires_grad_(False), stack(), stack()
other = (ids + 1) % 16


def distil():
    with torch.no_grad():
        wanted = teacher(ids)
    teacher.reshard()
    (student(ids) - wanted).square().mean().backward()


steps = {
    "one forward": lambda: student(ids).mean().backward(),
    "two forwards": lambda: (student(ids) - student(other)).mean().backward(),
    "one forward of both batches": lambda: student(torch.cat([ids, other])).mean().backward(),
    "with a frozen teacher": distil,
    "generator's step": lambda: judge(maker(x)).mean().backward(),
    "generator's step, judge frozen": lambda: judge.requires_grad_(False)(maker(x)).mean().backward(),
}
pairs = {name: kinds(student, step) for name, step in steps.items()}
pairs = {name: [sent.count("all_gather"), sent.count("reduce_scatter")] for name, sent in pairs.items()}
assert full_units(teacher) == 0

# %%
pairs = ranks.get("pairs")[0]
assert list(pairs.values()) == [[5, 3], [9, 3], [5, 3], [8, 3], [8, 4], [8, 2]]
Table(["a step", "all-gathers", "reduce-scatters"], [[name, *found] for name, found in pairs.items()])

# %% [markdown]
# A second forward gathers the blocks twice more each and reduces nothing more, since autograd adds up first;
# one forward of both batches gathers as little as one. The teacher is a model with its own `fully_shard`, not
# a part of the student, where each checkpoint would hold it. A judge that is frozen for the
# generator's step passes gradients on and reduces none: `judge.requires_grad_(True)` before its own step.
#
# ## Modules that only some ranks run
#
# If only some ranks run a unit, the ranks issue different collectives: they hang, or take the bytes of one
# for another's. Here rank 0 has images in its batch, and the others have none. `outcome` (folded) compares
# the ranks' collectives before they begin, and the gradients with those of one process.

# %%
# %%ranks
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x, weight):                               # f32[batch, 8]; weight None: no images
        y = self.text(x)
        return self.head(y if weight is None else y + weight * self.image(x))


# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.together import run_together


def outcome(units, weight, unused=False):
    """Train a step in which rank 0 has images; say where the ranks part, or how good the gradients are."""
    samples = torch.randn(4 * world, 8, generator=torch.Generator().manual_seed(1)).to(device).chunk(world)
    torch.manual_seed(0)
    alone = Two().to(device)
    for r, part in enumerate(samples):
        (alone(part, None if r else 1).square().mean() / world).backward()
    torch.manual_seed(0)
    model = Two().to(device)
    for name in units:
        fully_shard(getattr(model, name))
    fully_shard(model).set_reduce_scatter_unused_params(unused)
    _, parted = run_together(lambda: model(samples[rank], weight if rank else 1).square().mean().backward() or 1)
    if parted:
        return "hang or mix: " + parted.partition(": ")[2].rstrip(".")
    both = zip(model.parameters(), alone.parameters())
    right = all(torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6) for p, q in both)
    return f"{'right' if right else 'wrong'} gradients"


# %%
# %%ranks
said = {
    "`image` is a unit": outcome(["text", "image"], None),
    "`image` is a unit, the others add 0 * image(x)": outcome(["text", "image"], 0),
    "`image` is part of the root": outcome(["text"], None),
    "the same, set_reduce_scatter_unused_params(True)": outcome(["text"], None, unused=True),
}

# %%
said = ranks.get("said")[0]
assert [words.partition(" ")[0] for words in said.values()] == ["hang", "right", "hang", "right"]
Table(["", "result"], [[name, words] for name, words in said.items()])

# %% [markdown]
# A unit must be called on every rank, if only with its result times 0. For a module inside a larger unit,
# which all ranks gather anyway, `model.set_reduce_scatter_unused_params(True)` reduces zeros for what a rank
# did not use: FSDP2's `find_unused_parameters`. A unit that *no* rank uses in a step needs neither.
#
# **Buffers are not synchronised.** BatchNorm updates each rank's own with that rank's samples.

# %%
# %%ranks
norm = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device))
for _ in range(5):
    norm(torch.eye(8, device=device)[:4] + rank)
own = norm[1].running_mean.mean().item()
try:
    save_distributed(folder[0], norm, step=20)
except RuntimeError as error:
    refused = str(error)
for buffer in norm.buffers():                                   # before you evaluate or save
    dist.all_reduce(buffer)
    buffer.copy_(buffer / world)
equal = norm[1].running_mean.mean().item()

# %%
own, equal, refused = ranks.get("own"), ranks.get("equal"), ranks.get("refused")
assert len({f"{mean:.3f}" for mean in own}) == len(own)
assert len({f"{mean:.3f}" for mean in equal}) == 1
assert all("1.running_mean" in words for words in refused)
print("running mean by rank:", *(f"{mean:.2f}" for mean in own), "· averaged:", f"{equal[0]:.2f}")

# %% [markdown]
# An evaluation would differ by rank. `dcp.save` keeps one rank's buffer, without saying whose;
# `save_distributed` refuses. (DDP broadcasts rank 0's before a forward.) The mean of `running_var` leaves out
# how the ranks' means differ; `nn.SyncBatchNorm`, for GPUs, normalises over all ranks.

# %% jupyter={"source_hidden": true}
# %%ranks
dist.barrier()
if rank == 0:
    shutil.rmtree(folder[0])

# the way of 2022: FSDP1 has no registered methods; summon_full_params gathers, and writes edits back
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

torch.manual_seed(0)
options = {"device_id": device, "use_orig_params": True}
fsdp1 = Model().to(device)
fsdp1.blocks = nn.Sequential(*[FSDP(block, **options) for block in fsdp1.blocks])
fsdp1 = FSDP(fsdp1, **options)
with torch.no_grad(), FSDP.summon_full_params(fsdp1, recurse=False, writeback=False):
    assert gathers(fsdp1, lambda: generate(fsdp1, ids, 10)) == 20       # the blocks, for each token
with torch.no_grad(), FSDP.summon_full_params(fsdp1, writeback=True):
    for p in fsdp1.parameters():
        halve(p)
with torch.no_grad():
    assert torch.allclose(fsdp1(ids), known["halved"])

# %% [markdown]
# The folded cell is FSDP1's way: `summon_full_params(model, writeback=True)` gathers all and writes edits
# back; under `no_grad`, `summon_full_params(model, recurse=False, writeback=False)` also lets forward run,
# though PyTorch's documentation excludes that.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `got mixed torch.Tensor and DTensor` | a method of your own, `model.forward` or `model.embed(ids)`: no hooks ran. Or full weights beside a shard, after an evaluation | `model(...)`, `register_fsdp_forward_method`. Or `model.reshard()` |
# | `'weight' must be 2-D` (FSDP1) | a method of the wrapped model: no hooks ran | `summon_full_params` |
# | `FSDP state has already been lazily initialized` | a block was called before the model, or `model.forward` | build the model anew, and call it first |
# | `FSDP does not support deepcopy` | `AveragedModel`, or a copy as reference model | a dictionary of shards; build the second model anew and load the first one's state dict |
# | `'Tensor' object has no attribute 'full_tensor'` | in a `state_dict()`: a buffer, or one of `ignored_params`, not sharded. `'Parameter' object`, in `model.parameters()`: an ignored one, or the root is full | send it as it is. Or take it from `state_dict()` |
# | generation hangs at the end | ranks stop at different lengths | agree as in turn 1, or keep the weights |
# | memory stays high after an evaluation | full units: the root, or all with `reshard_after_forward=False` | `reshard()` on each |
# | embedding and head do not change | edited while the root was full | `model.reshard()` before |
# | the engine's log-probabilities are others | the root's tensors, or names with `_checkpoint_wrapped_module` | names and tensors of `state_dict()` |
#
# ## The rule
#
# Full weights: through `model(...)` or a registered method, on all ranks alike. Everything element-wise: in
# place on the shards, after `model.reshard()`; of every unit, if `reshard_after_forward` is False or a
# number.
#
# [← lesson 17](17_fine_tune_three_ways.ipynb) · [lesson 19 →](19_whole_matrix_optimizers.ipynb)
