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
# A drawing of what one of four ranks holds of each unit. Backward ends with shards everywhere. A forward pass
# alone leaves the *root*, the unit of `fully_shard(model)`, with full weights. Until `reshard()` an average or
# an edit of `model.parameters()` meets two kinds of tensors. Most surprises below come from there.

# %% tags=["card"]
lesson.card(
    18,
    learn="generate, average, edit and send away the weights of a sharded model, and run two models side by side",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 11, 25),
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
# blocks = [nn.Linear(64, 64) for _ in range(2)]
# model = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32, bias=False))
# for part in [*blocks, model]:                                # the root takes embedding and head
#     fully_shard(part, mesh=mesh)
# optimizer = torch.optim.AdamW(model.parameters())
# average = {name: p.detach().clone() for name, p in model.named_parameters()}    # shards, too
# torch.manual_seed(1 + dist.get_rank())                       # other samples on each rank
# ids = torch.randint(32, (1, 8))
#
#
# def train():
#     model(ids).logsumexp(-1).mean().backward()
#     optimizer.step()
#     optimizer.zero_grad()
#
#
# @torch.no_grad()
# def update_average():
#     for name, p in model.named_parameters():
#         average[name].lerp_(p, 0.1)                          # 0.9 * average + 0.1 * p
#
#
# @torch.no_grad()
# def generate(count=10, ids=ids):
#     for _ in range(count):
#         ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
#     model.reshard()                                          # the root
#
#
# def send_away():
#     for name, p in model.state_dict().items():
#         full = p.full_tensor()                               # on all ranks; rank 0 sends it
#
#
# def count(what, use):
#     with record_collectives(model) as trace:
#         use()
#     if dist.get_rank() == 0:
#         print(f"{what:26} {sum(e.kind == 'all_gather' for e in trace.events):3} all-gathers")
#
#
# for use in (train, update_average, generate, send_away):
#     count(use.__name__, use)
# model.set_reshard_after_forward(False)
# count("generate, weights kept", generate)
# dist.destroy_process_group()
# ```
# ```text
# ```
#
# The average costs nothing, because each rank averages its own shards. Ten tokens cost four times a training
# step's gathers, or three if the weights are kept. The rest of this lesson explains these lines, what each
# holds in memory, and where it goes wrong without an error. It is about FSDP2; what FSDP1 does instead stands
# in a folded cell.
#
# ## Which calls gather
#
# FSDP2 hangs its all-gathers on `model(...)`: hooks before and after `forward`. A method of your own has
# none. `register_fsdp_forward_method(model, "logp")` puts them around that method. `way_in` (folded) makes a
# new model, calls it in one way, runs backward, and counts.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(preload=["transformers.models.llama.modeling_llama"])    # slow to import

# %%
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_utils import record_collectives

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                                       # f32[batch, tokens, width]
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, vocabulary=16, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):                                     # i64[batch, tokens]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)                                     # f32[batch, tokens, vocabulary]

    def logp(self, ids):                                        # a method of your own
        return Model.forward(self, ids).log_softmax(-1)


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model, **options)


def build(**options):
    torch.manual_seed(0)
    return shard(Model().to(device), **options)


ids = (torch.arange(4, device=device) + 4 * rank)[None]         # i64[1, 4], other tokens on each rank

# %% jupyter={"source_hidden": true}
# %%ranks
def units(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def full_units(model):
    """Return the number of units whose full weights are in memory."""
    own = [p for unit in units(model) for p in [next(unit.parameters())]]
    return sum(not isinstance(p, DTensor) for p in own)


def kinds(model, use):
    """Call `use` and return the kinds of collectives that it made, in order."""
    with record_collectives(model) as trace:
        use()
    return [event.kind for event in trace.events if event.kind in ("all_gather", "reduce_scatter", "all_reduce")]


def gathers(model, use):
    return kinds(model, use).count("all_gather")


def way_in(model, call):
    """Say what comes of a call and a backward pass, and count."""
    left = []

    def step():
        output = call(model)
        left.append(full_units(model))
        output.square().mean().backward()

    try:
        return ["no error", gathers(model, step), left[0]]
    except RuntimeError as error:
        return [str(error).partition(",")[0].partition("got ")[2], "", ""]


class Stack(nn.Sequential):                                     # a root without parameters of its own
    blocks = property(lambda self: list(self))


def stack():
    torch.manual_seed(0)
    return shard(Stack(Block(), Block()).to(device))


# %%
# %%ranks
registered = build()
register_fsdp_forward_method(registered, "logp")
x = torch.ones(1, 4, 16, device=device)

ways = {
    "model(ids)": way_in(build(), lambda model: model(ids)),
    "model.logp(ids)": way_in(build(), lambda model: model.logp(ids)),
    "model.logp(ids), registered": way_in(registered, lambda model: model.logp(ids)),
    "model.forward(ids)": way_in(build(), lambda model: model.forward(ids)),
    "model(x), no parameters in the root": way_in(stack(), lambda model: model(x)),
    "model.forward(x), no parameters in the root": way_in(stack(), lambda model: model.forward(x)),
}

# %%
ways = ranks.get("ways")[0]
assert ways["model(ids)"] == ways["model.logp(ids), registered"] == ["no error", 5, 1]
assert ways["model.logp(ids)"] == ways["model.forward(ids)"] == ["mixed torch.Tensor and DTensor", "", ""]
assert ways["model(x), no parameters in the root"] == ["no error", 4, 0]
assert ways["model.forward(x), no parameters in the root"] == ["no error", 2, 2]
Table(
    ["", "what happens", "all-gathers", "units full after forward"],
    [[name, said, str(count), str(full)] for name, (said, count, full) in ways.items()],
)

# %% [markdown]
# Without the hooks the root's parameters are still DTensors, and the error says so. The last row is the
# silent one: the root has nothing to gather, so `model.forward` works. But each block then takes *itself* for
# the root and keeps its weights: the memory of the whole model. The same happens under `no_grad`, and a later
# `model(x)` raises `FSDP state has already been lazily initialized`. Where the root *is* full, after an
# evaluation, `model.forward(ids)` works by luck.
#
# ## Generate
#
# `generate` of transformers calls `self(...)` for each token, so it needs no registration. It needs patience:
# every token gathers every block again. The next cell sweeps the number of tokens in three ways.
# `gathered(model)` is the context to take home.

# %%
# %%ranks
from contextlib import contextmanager

from fsdp_utils.lessons.meter import Meter


@contextmanager
def gathered(model):
    """Keep the full weights once they are gathered; afterwards shard them again."""
    model.set_reshard_after_forward(False)
    try:
        yield
    finally:
        model.set_reshard_after_forward(True)
        model.set_reshard_after_forward(False, recurse=False)   # the root's default
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@torch.no_grad()
def generate(model, ids, count):
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids                                                  # i64[1, tokens + count]


def kept(model, count):
    with gathered(model):
        return generate(model, ids, count)


counts = [1, 2, 4, 8, 16]
uses = {
    "root sharded after each token": lambda count: (build(reshard_after_forward=True), generate),
    "the default": lambda count: (build(), generate),
    "weights kept": lambda count: (build(), lambda model, _, count: kept(model, count)),
}
sweep, peak = {}, {}
for name, use in uses.items():
    sweep[name] = []
    for count in counts:
        model, run = use(count)
        sweep[name].append(gathers(model, lambda: run(model, ids, count)))
    model, run = use(16)
    with Meter(model.parameters()) as meter:
        run(model, ids, 16)
    peak[name] = meter.peak_whole_bytes / (4 * sum(p.numel() for p in Model().parameters()))

# %%
sweep, peak, counts = ranks.get("sweep")[0], ranks.get("peak")[0], ranks.get("counts")[0]
assert sweep["root sharded after each token"] == [3 * n for n in counts]
assert sweep["the default"] == [2 * n + 1 for n in counts]
assert sweep["weights kept"] == [3] * len(counts)
fig, (left, right) = plots.figure(2, width=8.5, height=2.6)
for (name, found), color in zip(sweep.items(), plots.RANK_COLORS):
    left.plot(counts, found, "o-", color=color, label=name)
left.set(title="all-gathers", xlabel="tokens", ylim=(0, 55))
left.legend(loc="upper left")
right.bar(range(3), [100 * peak[name] for name in sweep], color=plots.RANK_COLORS[:3])
right.set_xticks(range(3), ["root sharded", "default", "kept"])
right.set(title="full weights at the peak, % of the model", ylim=(0, 115))
plots.show(fig, alt="All-gathers over tokens, and full weights at the peak, for three ways to generate.")

# %% jupyter={"source_hidden": true} tags=["check"]
assert peak["root sharded after each token"] < peak["weights kept"]
assert peak["the default"] < peak["weights kept"]
assert 0.99 < peak["weights kept"] < 1.2                        # uneven shards are padded

# %% [markdown]
# With the weights kept the gathers no longer depend on the number of tokens, and the whole model is in memory.
# (`model.unshard()` is no substitute: it gathers one unit, not its children, and the next forward shards it
# again.) A calculation for your model: 7 billion parameters in bf16 are 14 GB to receive **for each token**,
# 0.3 s at 50 GB/s. One GPU that holds the model reads the same bytes from its own memory. So keep the weights
# if they fit; if not, generate with tensor parallelism ([lesson 16](16_two_dimensions.ipynb)) or in an
# inference engine.
#
# **Ranks must call the model equally often**, and sequences end at different lengths. Transformers notices
# FSDP2 and then runs `generate` with `synced_gpus=True`: a rank that has finished goes on calling until all
# have. The next cell chooses the third token of rank 0 as the one that ends a sequence.

# %% tags=["generate"]
# %%ranks
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
torch.manual_seed(0)
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
# Last column: once the weights are kept there is nothing left to gather, so `synced_gpus=False` is right, and
# each rank stops when it has finished.
#
# ## Your turn 1 · Generate together
#
# Write `generate_together(model, ids, most)` for a model that has no room for all of its weights. `ids` is
# `i64[1, n]`. Append the likeliest token (`argmax`) until it is 0, which ends the sequence and belongs to it,
# or until `most` tokens are new. Ranks finish at different times. All of them stop when the last one has
# finished, and afterwards all weights are sharded. The model here counts down: after 7 comes 6.
#
# <details><summary>Hint</summary>
#
# One `all_reduce` for each token answers “has anybody still something to do?”. A rank that has finished calls
# the model and ignores the result.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


@torch.no_grad()
def countdown():
    """A sharded model after whose token n comes n - 1."""
    model = Model().to(device)
    model.embed.weight.copy_(torch.eye(16))
    model.head.weight.copy_(torch.eye(16).roll(-1, 0))
    for block in model.blocks:
        block.down.weight.zero_()
        block.down.bias.zero_()
    return shard(model)


@turn(1, {
    "tokens after the end of a sequence": exactly(0, "A sequence goes on after its 0: do not append to it any more."),
    "tokens missing": exactly(0, "A sequence is cut short: go on until the last rank has finished."),
    "all-gathers beyond those of the longest sequence": at_most(
        0, "The ranks call the model although all sequences have ended."
    ),
    "units whose full weights remain": exactly(0, "The root keeps its full weights after the last token: reshard it."),
})
def score_generate(generate_together):
    after = missing = beyond = left = 0
    for most in (12, 4):
        model, start = countdown(), 3 + 2 * rank
        prompt = torch.tensor([[start]], device=device)
        found = []

        def use():
            found.extend(torch.as_tensor(generate_together(model, prompt, most)).flatten().tolist())

        count = gathers(model, use)
        wanted = list(range(start, -1, -1))[: most + 1]
        if found[: len(wanted)] != wanted[: len(found)]:
            raise NotYet(f"Return `ids` with the new tokens: expected {wanted}, found {found}.")
        after += max(0, len(found) - len(wanted))
        missing += max(0, len(wanted) - len(found))
        beyond += count - (2 * min(most, 3 + 2 * (world - 1)) + 1)
        left += full_units(model)
    return {
        "tokens after the end of a sequence": after,
        "tokens missing": missing,
        "all-gathers beyond those of the longest sequence": beyond,
        "units whose full weights remain": left,
    }


# %%
# %%turn 1
@torch.no_grad()
def generate_together(model, ids, most):                # i64[1, n] -> i64[1, n + new]
    return None                                         # your lines here


# %% tags=["solution"] turn=1
@torch.no_grad()
def generate_together(model, ids, most):
    done = torch.zeros((), device=ids.device)           # 1 when this rank has finished
    for _ in range(most):
        token = model(ids)[:, -1:].argmax(-1)
        if not done:
            ids = torch.cat([ids, token], dim=1)
            done += ids[0, -1] == 0
        dist.all_reduce(all_done := done.clone(), dist.ReduceOp.MIN)
        if all_done:
            break
    model.reshard()
    return ids

# %% tags=["right"] turn=1
@torch.no_grad()
def generate_together(model, ids, most):                # objects, and a list
    tokens, new = ids[0].tolist(), 0
    while True:
        going = [None] * world
        dist.all_gather_object(going, tokens[-1] != 0 and new < most)
        if not any(going):
            break
        token = model(torch.tensor([tokens], device=ids.device))[0, -1].argmax().item()
        if going[rank]:
            tokens.append(token)
            new += 1
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return [tokens]

# %% tags=["right"] turn=1
def generate_together(model, ids, most):                # the weights kept: nothing to agree on
    with gathered(model), torch.no_grad():
        for _ in range(most):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
            if ids[0, -1] == 0:
                break
    return ids

# %% tags=["right"] turn=1
@torch.no_grad()
def generate_together(model, ids, most):                # rank 0 is told, and decides
    flags = [torch.zeros(1, device=ids.device) for _ in range(world)] if rank == 0 else None
    for _ in range(most):
        logits = model(ids)
        if ids[0, -1] != 0:
            ids = torch.hstack([ids, logits[:, -1].argmax(-1, keepdim=True)])
        dist.gather((ids[0, -1:] != 0).float(), flags)
        more = torch.tensor(float(sum(flags) > 0) if rank == 0 else 0.0, device=ids.device)
        dist.broadcast(more, src=0)
        if not more:
            break
    model.reshard()
    return ids

# %% tags=["wrong"] turn=1 says="no such call on rank"
@torch.no_grad()
def generate_together(model, ids, most):                # each rank stops by itself
    for _ in range(most):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == 0:
            break
    model.reshard()
    return ids

# %% tags=["wrong"] turn=1 says="although all sequences have ended"
@torch.no_grad()
def generate_together(model, ids, most):                # always to the end
    for _ in range(most):
        token = model(ids)[:, -1:].argmax(-1)
        if ids[0, -1] != 0:
            ids = torch.cat([ids, token], dim=1)
    model.reshard()
    return ids

# %% tags=["wrong"] turn=1 says="is cut short"
@torch.no_grad()
def generate_together(model, ids, most):                # stops with the first
    for _ in range(most):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
        done = (ids[0, -1] == 0).float()
        dist.all_reduce(done, dist.ReduceOp.MAX)
        if done:
            break
    model.reshard()
    return ids

# %% tags=["wrong"] turn=1 says="keeps its full weights"
@torch.no_grad()
def generate_together(model, ids, most):
    done = torch.zeros((), device=ids.device)
    for _ in range(most):
        token = model(ids)[:, -1:].argmax(-1)
        if not done:
            ids = torch.cat([ids, token], dim=1)
            done += ids[0, -1] == 0
        dist.all_reduce(all_done := done.clone(), dist.ReduceOp.MIN)
        if all_done:
            break
    return ids

# %% [markdown]
# ## Average and edit: the shards
#
# `copy.deepcopy(model)` raises, and so does `torch.optim.swa_utils.AveragedModel`, which calls it. You need
# neither. An average is element-wise, so each rank can average its own shards. The next cell trains ten steps
# with such an average, holds it against one process with all samples, saves it and loads it.

# %% tags=["ema"]
# %%ranks
import copy
import tempfile

from fsdp_utils import load_distributed, save_distributed


@torch.no_grad()
def update(average, model, weight=0.1):
    for name, p in model.named_parameters():
        average[name].lerp_(p, weight)


def with_average(model, samples, steps=10):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(steps):
        model(samples).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = kinds(model, lambda: update(average, model))
    return average, seen


torch.manual_seed(0)
alone, _ = with_average(Model().to(device), (torch.arange(4 * world, device=device) % 16).view(world, 4))
model = build()
average, seen = with_average(model, ids % 16)
error = max((average[name].full_tensor() - full).abs().max().item() for name, full in alone.items())

folder = [tempfile.mkdtemp()] if rank == 0 else [None]
dist.broadcast_object_list(folder, src=0)
save_distributed(folder[0], model, step=10, state={"average": average})
again = {name: torch.zeros_like(shard) for name, shard in average.items()}
load_distributed(folder[0], model, state={"average": again})
loaded = all(torch.equal(again[name].to_local(), average[name].to_local()) for name in average)

# %%
(seen, error, loaded), *_ = ranks.get("seen, error, loaded")
assert seen == []
assert loaded
assert error < 1e-5
print(f"collectives of an update: {len(seen)}; equal to one process up to rounding: {error < 1e-5}")

# %% jupyter={"source_hidden": true} tags=["check"]
# %%ranks
from torch.optim.swa_utils import AveragedModel

for copied in (copy.deepcopy, AveragedModel):
    try:
        copied(model)
    except AssertionError as raised:
        assert "does not support deepcopy" in str(raised)
    else:
        raise RuntimeError("a copy was made")
in_bf16 = torch.ones(1, dtype=torch.bfloat16).lerp_(torch.full((1,), 1.5, dtype=torch.bfloat16), 0.001)
assert in_bf16 == 1

# %% [markdown]
# The average costs a shard of memory per rank. Keep it in float32: in bf16, 1 averaged with 1.5 at a weight
# of 0.001 stays 1. The file holds it in shards, so it loads on another number of ranks ([lesson
# 8](08_local_state_dict_and_distributed_checkpoints.ipynb)).
#
# An edit by hand is the same: in place, on shards. The next cell halves all weights in six ways. It looks at
# the next output and at the one after all units were sharded again.

# %% tags=["edits"]
# %%ranks
def halve(model):
    for p in model.parameters():
        p.mul_(0.5)


def halve_full(model):
    for p in model.parameters():
        p.full_tensor().mul_(0.5)


def halve_and_distribute(model):
    for p in model.parameters():
        half = 0.5 * p.full_tensor()
        p.copy_(distribute_tensor(half, p.device_mesh, p.placements))


def reshard_and_halve(model):
    model.reshard()
    halve(model)


@torch.no_grad()
def after(edit, evaluate=False):
    model = build()
    before = model(ids)
    model.reshard()
    shards = list(model.parameters())                   # as an optimizer holds them
    if evaluate:
        model(ids)
    edit(model) if edit else [p.mul_(0.5) for p in shards]
    outputs = [model(ids)]
    for unit in units(model):
        unit.reshard()
    outputs.append(model(ids))
    known = {"halved": halved, "as before": before}
    return [next((word for word, y in known.items() if torch.allclose(x, y)), "a mix") for x in outputs]


with torch.no_grad():
    halve(model := build())
    halved = model(ids)
edits = {
    "p.mul_(0.5)": after(halve),
    "p.full_tensor().mul_(0.5)": after(halve_full),
    "p.copy_(distribute_tensor(half, p.device_mesh, p.placements))": after(halve_and_distribute),
    "after an evaluation: p.mul_(0.5) of model.parameters()": after(halve, evaluate=True),
    "after an evaluation: the same of the optimizer's parameters": after(None, evaluate=True),
    "after an evaluation: model.reshard(), then p.mul_(0.5)": after(reshard_and_halve, evaluate=True),
}

# %%
edits = ranks.get("edits")[0]
assert list(edits.values()) == [
    ["halved", "halved"], ["as before", "as before"], ["halved", "halved"],
    ["halved", "a mix"], ["a mix", "halved"], ["halved", "halved"],
]
Table(["the edit", "next output", "after reshard"], [[name, *found] for name, found in edits.items()])

# %% [markdown]
# `full_tensor()` is a copy, so editing it changes nothing. After an evaluation the root holds both its shard
# and its full weights. In row 4 the edit reaches the full ones, and the next reshard throws it away. In row 5
# it reaches the shard, and the next forward does not look: **the root computes with old weights, without an
# error**. An `optimizer.step()` between an evaluation and the next forward does the same if no backward came
# in between. `state_dict()` and `load_state_dict()` reshard by themselves.
#
# ## Your turn 2 · Evaluate with the average
#
# Write `evaluate_with(model, average, evaluate)`. `average` is a dictionary of shards by parameter name. It
# returns what `evaluate()` returns (a call of the model under `no_grad`) with the averages in the model.
# Afterwards the model computes with its own weights again, and `average` is what it was. The model has been
# evaluated before, and no rank has room for full weights beyond those that `evaluate()` gathers.
#
# <details><summary>Hint</summary>
#
# Which two moments need a `model.reshard()`? Look the parameters up after it.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
SWAP = {"right": "", "its own": "The averages do not reach the computation: copy them into the shards, in place."}
BACK = {"right": "", "the average's": "The averages are still in the model: copy its own weights back."}
STALE = "The root computes with old weights: it was full when its shard changed. Reshard it before."


@turn(2, {
    "output with the average is": exactly("right", lambda found: SWAP.get(found, STALE)),
    "output afterwards is": exactly("right", lambda found: BACK.get(found, STALE)),
    "averages that have changed": exactly(0, "The averages are overwritten: they have to stay as they were."),
    "all-gathers beyond the evaluation's": exactly(0, more="Full weights are gathered: copy shard to shard."),
})
def score_swap(evaluate_with):
    with torch.no_grad():
        model, other = build(), build()
        for number, p in enumerate(other.parameters()):
            p.mul_(0.5).add_(0.01 * number)
        means = {name: p.detach().clone() for name, p in other.named_parameters()}
        kept, averaged, own = {name: p.clone() for name, p in means.items()}, other(ids), model(ids)
        found = []
        count = gathers(model, lambda: found.append(evaluate_with(model, means, lambda: model(ids))))
        if not isinstance(found[0], torch.Tensor) or found[0].shape != own.shape:
            raise NotYet("Return what `evaluate()` returns.")
        again = model(ids)

    def named(y, names):
        return next((name for name, right in names.items() if torch.allclose(y, right)), "a mix")

    return {
        "output with the average is": named(found[0], {"right": averaged, "its own": own}),
        "output afterwards is": named(again, {"right": own, "the average's": averaged}),
        "averages that have changed": sum(not torch.equal(kept[n].to_local(), means[n].to_local()) for n in kept),
        "all-gathers beyond the evaluation's": max(0, count - 3),
    }


# %%
# %%turn 2
@torch.no_grad()
def evaluate_with(model, average, evaluate):
    return None                                         # your lines here


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
def evaluate_with(model, average, evaluate):            # state dicts reshard by themselves
    own = {name: p.clone() for name, p in model.state_dict().items()}
    model.load_state_dict(average)
    result = evaluate()
    model.load_state_dict(own)
    return result

# %% tags=["right"] turn=2
@torch.no_grad()
def evaluate_with(model, average, evaluate):            # swap twice, on what lies on this rank
    def swap():
        model.reshard()
        for name, p in model.named_parameters():
            mine, other = p.to_local(), average[name].to_local()
            was = mine.clone()
            mine.copy_(other)
            other.copy_(was)

    swap()
    try:
        return evaluate()
    finally:
        swap()

# %% tags=["right"] turn=2
@torch.no_grad()
def evaluate_with(model, average, evaluate):            # all tensors at once
    def reshard():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    reshard()
    names, parameters = zip(*model.named_parameters())
    own = [p.detach().clone() for p in parameters]
    torch._foreach_copy_([p.to_local() for p in parameters], [average[name].to_local() for name in names])
    result = evaluate().clone()
    reshard()
    torch._foreach_copy_([p.to_local() for p in parameters], [p.to_local() for p in own])
    return result

# %% tags=["wrong"] turn=2 says="The root computes with old weights"
@torch.no_grad()
def evaluate_with(model, average, evaluate):            # no reshard after the evaluation
    model.reshard()
    parameters = dict(model.named_parameters())
    own = {name: p.clone() for name, p in parameters.items()}
    for name, p in parameters.items():
        p.copy_(average[name])
    result = evaluate()
    for name, p in parameters.items():
        p.copy_(own[name])
    return result

# %% tags=["wrong"] turn=2 says="mixed torch.Tensor and DTensor"
@torch.no_grad()
def evaluate_with(model, average, evaluate):            # no reshard at all
    own = {name: p.clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.copy_(average[name])
    result = evaluate()
    for name, p in model.named_parameters():
        p.copy_(own[name])
    return result

# %% tags=["wrong"] turn=2 says="still in the model"
def evaluate_with(model, average, evaluate):
    model.load_state_dict(average)
    result = evaluate()
    model.reshard()
    return result

# %% tags=["wrong"] turn=2 says="do not reach the computation"
@torch.no_grad()
def evaluate_with(model, average, evaluate):
    model.reshard()
    for name, p in model.named_parameters():
        p.full_tensor().copy_(average[name].full_tensor())
    return evaluate()

# %% tags=["wrong"] turn=2 says="The averages are overwritten"
@torch.no_grad()
def evaluate_with(model, average, evaluate):            # swaps once, and copies back
    model.reshard()
    for name, p in model.named_parameters():
        was = p.clone()
        p.copy_(average[name])
        average[name].copy_(was)
    result = evaluate()
    model.reshard()
    for name, p in model.named_parameters():
        p.copy_(average[name])
    return result

# %% [markdown]
# ## Send the weights away
#
# An inference engine wants full tensors. `full_tensor()` is an all-gather: all ranks call it, in the same
# order. The table counts how many of the model's ten tensors come out complete.

# %% tags=["send"]
# %%ranks
def all_at_once(model):
    return {name: p.full_tensor() for name, p in model.state_dict().items()}


def one_by_one(model):
    done = {}
    for name, p in model.state_dict().items():
        full = p.full_tensor()                          # rank 0 sends it here
        done[name] = full.shape
    return done


def in_bf16(model):
    done = {}
    for name, p in model.state_dict().items():
        full = p.to(torch.bfloat16).full_tensor()       # cast the shard, then gather
        done[name] = full.shape
    return done


def unit_by_unit(model):
    done = {}
    for prefix, block in model.named_modules():
        if isinstance(block, FSDPModule) and block is not model:
            block.unshard()
            done |= {f"{prefix}.{name}": p.shape for name, p in block.named_parameters()}
            block.reshard()
    return done


sent, plain = {}, Model()
model_bytes = 4 * sum(p.numel() for p in plain.parameters())
for use in (all_at_once, one_by_one, in_bf16, unit_by_unit):
    with Meter() as meter:
        done = use(build())
    complete = sum(p.shape == done.get(name) for name, p in plain.named_parameters())
    sent[use.__name__] = [complete, *(round(100 * n / model_bytes) for n in (meter.gathered_bytes, meter.peak_whole_bytes))]

# %%
sent = ranks.get("sent")[0]
assert [complete for complete, *_ in sent.values()] == [10, 10, 10, 8]
assert sent["all_at_once"][2] >= 100 > 30 > sent["one_by_one"][2]
assert 2 * sent["in_bf16"][1] <= sent["one_by_one"][1] + 2
Table(
    ["", "complete tensors", "gathered, % of the model", "full at once, %"],
    [[name, *found] for name, found in sent.items()],
)

# %% [markdown]
# One at a time holds the largest tensor, and casting the shard first halves the bytes. The last row forgets
# what belongs to the root, embedding and head: its `unshard` is not recursive, and a loop over submodules does
# not see the root. This happened in [open-instruct](https://github.com/allenai/open-instruct/pull/1642).
# Compare log-probabilities of trainer and engine after the first send.
#
# **Finish each gather before you send.** If rank 0 sends from inside a generator that gathers, its gathers
# may be queued behind the engine's transfers on other streams. The other ranks run ahead, and the two NCCL
# groups wait for each other: [trl hung in this way](https://github.com/huggingface/trl/pull/6798). Nothing of
# that can be shown on a CPU. Gather on the default stream, synchronise, then send; or gather all first, if
# there is room ([trl](https://github.com/huggingface/trl/pull/7131)).
#
# ## Two models, two forwards, some ranks
#
# `step` counts what a step of these common set-ups sends: two forwards before one backward (DPO), a frozen
# teacher, the generator's step of a GAN.

# %% tags=["pairs"]
# %%ranks
student, teacher = build(), build().requires_grad_(False)
other = (ids + 1) % 16


def distil():
    with torch.no_grad():
        wanted = teacher(ids)
    teacher.reshard()
    (student(ids) - wanted).square().mean().backward()


def generator_step():
    judge(maker(x)).mean().backward()


maker, judge = stack(), stack()
steps = {
    "one forward, one backward": lambda: student(ids).logsumexp(-1).mean().backward(),
    "two forwards, one backward": lambda: (student(ids) - student(other)).logsumexp(-1).mean().backward(),
    "one forward of both batches": lambda: student(torch.cat([ids, other])).logsumexp(-1).mean().backward(),
    "with a frozen teacher, a model of its own": distil,
    "generator and discriminator": generator_step,
}
pairs = {name: kinds(student, step) for name, step in steps.items()}
judge.requires_grad_(False)                             # for the generator's step
pairs["the same, discriminator frozen"] = kinds(student, generator_step)
held = full_units(teacher)

# %%
pairs, held = ranks.get("pairs, held")[0]
Table(
    ["a step", "all-gathers", "reduce-scatters"],
    [[name, found.count("all_gather"), found.count("reduce_scatter")] for name, found in pairs.items()],
)

# %% [markdown]
# placeholder
