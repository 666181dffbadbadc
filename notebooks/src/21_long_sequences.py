# %% [markdown]
# # 21 · Long sequences
#
# The activations of **one** sequence don't fit on a rank, so a smaller batch does not help. What does? **In
# this order: attention that keeps no scores, a loss that keeps no logits, a checkpoint around each block.
# Then cut the sequence over the ranks that already share the weights.** Inside the model, only attention has
# to know of the cut.

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots

fig, (axes,) = plots.figure(width=9.2, height=2.7)
STEPS = ["embedding", "q, k, v", "attention", "MLP, norms", "logits, loss"]
for r, color in enumerate(plots.RANK_COLORS[:4]):
    axes.text(-0.1, r, f"rank {r}:\ntokens {240 * r}-{240 * r + 239}", ha="right", va="center", fontsize=8)
    for place, name in enumerate(STEPS):
        look = {"color": "white", "ha": "center", "va": "center", "fontsize": 8}
        if name == "attention":
            for piece in range(4):
                seen = plots.RANK_COLORS[piece] if piece <= r else plots.FAINT
                axes.add_patch(Rectangle((2 + 0.23 * piece, r - 0.4), 0.21, 0.8, color=seen))
        else:
            axes.add_patch(Rectangle((place, r - 0.4), 0.9, 0.8, color=color))
            axes.text(place + 0.45, r, name, **look)
axes.text(2.45, -0.6, "attention: keys, values", ha="center", fontsize=8)
axes.set(xlim=(-1.1, 5), ylim=(3.5, -0.95), xticks=[], yticks=[])
axes.spines[:].set_visible(False)
plots.show(fig, alt="Four ranks with a quarter of a sequence each; in attention a rank needs the earlier keys.")

# %% [markdown]
# A drawing of one sequence on four ranks, a color for each quarter: **context parallelism**. Nearly
# everything in a transformer treats each token by itself, so a rank computes it for its own tokens. In
# attention a token looks at the keys and values of all tokens before it, and those of other ranks have to
# come from there.

# %% tags=["card"]
lesson.card(
    21,
    learn="find what grows with the length, remove it, and cut one sequence over ranks with the right gradients",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 2](02_activation_checkpointing.ipynb)",
    minutes=(1, 20, 35),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains a small Llama in four ways,
# each on the same two sequences of 960 tokens, and counts the bytes that autograd keeps for backward on rank
# 0.
#
# ```python
# import torch
# import torch.distributed as dist
# import torch.nn.functional as F
# from torch import nn
# from torch.autograd.graph import saved_tensors_hooks
# from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.tensor import DTensor, Partial, Shard
# from torch.nn.attention.bias import causal_lower_right
# from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.set_default_device(device)
# rank, world = dist.get_rank(), dist.get_world_size()
# mesh = init_device_mesh(device, (world,))                    # without it a Mac would take its GPU
# sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
#
#
# def gathered(module, query, key, value, mask, scaling=None, **options):
#     """Attend from this rank's tokens to all tokens up to them."""
#     n, end = query.size(2), query.size(2) * (rank + 1)       # this rank's tokens end at `end`
#     parts = [DTensor.from_local(t, mesh, [Shard(2)]) for t in (key, value)]
#     key, value = (t.full_tensor(grad_placements=[Partial()])[:, :, :end] for t in parts)
#     key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
#     out = F.scaled_dot_product_attention(query, key, value, causal_lower_right(n, end), scale=scaling)
#     return out.transpose(1, 2), None
#
#
# AttentionInterface.register("gathered", gathered)
#
#
# def train(attention, checkpoints=False, cut=False):
#     torch.manual_seed(0)                                     # the same weights on every rank
#     model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
#     model.set_attn_implementation(attention)
#     for index, block in enumerate(model.model.layers):
#         model.model.layers[index] = fully_shard(checkpoint_wrapper(block) if checkpoints else block, mesh=mesh)
#     fully_shard(model, mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters())
#     for step in range(2):
#         ids, places = torch.randint(4096, (1, 960)), torch.arange(960)[None]        # the same on every rank
#         targets = F.pad(ids[:, 1:], (0, 1), value=-100)      # the next token, before the cut
#         count = (targets != -100).sum()                      # of all ranks
#         if cut:
#             ids, places, targets = (t.chunk(world, 1)[rank].clone() for t in (ids, places, targets))
#             count = count / world                            # FSDP averages over the ranks
#         kept = {}                                            # by address: bytes of what autograd keeps
#
#         def keep(tensor):
#             if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
#                 kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
#             return tensor
#
#         labels = {"labels": targets, "shift_labels": targets, "num_items_in_batch": count}
#         with saved_tensors_hooks(keep, lambda tensor: tensor):
#             loss = model(ids, position_ids=places, use_cache=False, **labels).loss
#         loss.backward()
#         norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
#         optimizer.step()
#         optimizer.zero_grad()
#         dist.all_reduce(loss := loss.detach())
#     return f"{sum(kept.values()) / 2**20:6.2f} MiB kept, loss {loss / world:.4f}, norm {norm:.4f}"
#
#
# for name, way in {
#     "eager attention": {"attention": "eager"},
#     "fused attention": {"attention": "sdpa"},
#     "and checkpoints": {"attention": "sdpa", "checkpoints": True},
#     "and a part per rank": {"attention": "gathered", "checkpoints": True, "cut": True},
# }.items():
#     result = train(**way)
#     if rank == 0:
#         print(f"{name:19} {result}")
# dist.destroy_process_group()
# ```
# ```text
# eager attention      91.81 MiB kept, loss 8.3368, norm 0.6446
# fused attention      35.61 MiB kept, loss 8.3368, norm 0.6446
# and checkpoints      16.66 MiB kept, loss 8.3368, norm 0.6446
# and a part per rank   4.16 MiB kept, loss 8.3368, norm 0.6446
# ```
#
# The loss stays the same, and so does the norm of the gradients. FSDP shards weights, gradients and the
# optimizer's state, but no activations. So without the cut four ranks of FSDP do not shorten a sequence.
# (Here each rank computes the same one.) With the cut each rank keeps a quarter. Of the 16.66 MiB, 15 are the
# loss's: log-probabilities, as large as the logits. A later section removes them.
#
# `gathered` is the attention function: `full_tensor` gathers the keys and values of all ranks (`Partial` is
# explained at "Gradients of gathered keys"), and `causal_lower_right` (on a CPU it makes a mask in each
# block, for flash on a GPU it does not) says that the queries are the *last* of these tokens. `places` are
# the `position_ids`: they count from the start of the whole sequence. transformers would shift the labels of
# each part by itself and lose a target at every cut. So the script shifts before the cut and hands over
# `shift_labels`, and `num_items_in_batch`, by which transformers divides the sum. The length has to be a
# multiple of the ranks: pad the end, with -100 as targets.
#
# ## Attention that keeps no scores
#
# Attention compares each token with each earlier one. Written out ("eager"), it keeps these scores: bytes
# grow with the *square* of the length. A fused kernel computes them piece by piece and again in backward; it
# keeps its inputs, its output and one number per query. `scaled_dot_product_attention` picks a kernel by
# itself. `kept_by` (folded) counts what autograd keeps.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(preload=["torch.distributed.tensor", "transformers.models.mistral.modeling_mistral"])

# %% jupyter={"source_hidden": true}
# %%ranks
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.attention.bias import causal_lower_right

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
mesh = init_device_mesh(device.type, (world,))


def kept_by(function, *inputs, **options):
    """Bytes that autograd keeps while the function runs."""
    kept = {}

    def look(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(look, lambda tensor: tensor):
        function(*inputs, **options)
    return sum(kept.values())


# %%
# %%ranks 0
from contextlib import suppress

from torch.nn.attention import SDPBackend, sdpa_kernel

attention, FLASH = F.scaled_dot_product_attention, SDPBackend.FLASH_ATTENTION


def inputs(length, **options):                  # queries, keys, values: bf16[1, heads, tokens, 16]
    return [torch.randn(1, 4, length, 16, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)]


def kernel(*inputs, **options):                 # a kernel that is forced raises an error where it cannot run
    for backend in (FLASH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        with suppress(RuntimeError), sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")     # why this kernel cannot run
            attention(*inputs, **options)
            return backend.name.lower().removesuffix("_attention")
    return "none"


lengths = (128, 256, 512, 1024, 2048)
kept = {}
for name, backend in {"math: written out": SDPBackend.MATH, "flash: fused": FLASH}.items():
    with sdpa_kernel(backend):
        kept[name] = [kept_by(attention, *inputs(n), is_causal=True) / 2**20 for n in lengths]

q, k, v = inputs(1024)
causal = torch.ones(1024, 1024, dtype=torch.bool, device=device).tril()
bias = torch.zeros(1024, 1024, dtype=torch.bfloat16, device=device, requires_grad=True)
CALLS = {
    "is_causal=True": ((q, k, v), {"is_causal": True}),
    "a mask of booleans": ((q, k, v), {"attn_mask": causal}),
    "a bias that is learned": ((q, k, v), {"attn_mask": bias}),
    "dropout_p=0.1": ((q, k, v), {"is_causal": True, "dropout_p": 0.1}),
    "values narrower than keys": ((q, k, v[..., :8]), {"is_causal": True}),
}
taken = [[name, kernel(*args, **options), kept_by(attention, *args, **options) / 2**20] for name, (args, options) in CALLS.items()]

# %%
kept, lengths, taken = ranks.get("rank == 0 and (kept, lengths, taken)")[0]
growth = {name: sizes[-1] / sizes[-2] for name, sizes in kept.items()}
assert 3.5 < growth["math: written out"] < 4.1
assert 1.9 < growth["flash: fused"] < 2.1
assert 60 < kept["math: written out"][-1] / kept["flash: fused"][-1] < 66
fig, (axes,) = plots.figure(width=6.5, height=2.6)
for (name, sizes), color in zip(kept.items(), plots.RANK_COLORS):
    axes.loglog(lengths, sizes, "o-", color=color, label=name)
axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
axes.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
axes.minorticks_off()
axes.set(xlabel="tokens", ylabel="MiB kept")
axes.legend()
plots.show(fig, alt="Kept bytes against length: four times for twice the tokens, or twice with a fused kernel.")

# %%
Table(["attention on 1,024 tokens, with", "kernel", "MiB kept"], [[*row[:2], f"{row[2]:.1f}"] for row in taken])

# %% [markdown]
# At 2,048 tokens the fused kernel keeps a sixtieth. On a GPU it is also faster. The next table is forward and
# backward of one sequence on an H200: 16 heads of 128, causal, bf16, and the memory that they add.

# %% tags=["on-a-gpu"]
from fsdp_utils.lessons import recorded

found = {row["setting"]: row for row in recorded.load("costs")["results"]["rows"]}
KERNELS = {"math": "MATH", "memory-efficient": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}


def on_h200(kernel, length):
    row = found.get(f"{KERNELS[kernel]}, {length} tokens")
    return f"{row['peak_mib'] / 1024:.1f} GiB, {row['ms']:.1f} ms" if row else "not run"


at_16k = {kernel: on_h200(kernel, 16384) for kernel in KERNELS}
assert [*at_16k.values()] == ["64.6 GiB, 216.7 ms", "0.6 GiB, 28.2 ms", "0.7 GiB, 12.5 ms", "0.6 GiB, 6.7 ms"]
runs = {row["setting"]: row for row in recorded.load("kernels")["results"]["rows"]}
assert [name for name, row in runs.items() if row["FLASH_ATTENTION"]] == ["is_causal=True", "dropout_p=0.1"]
assert all(row["EFFICIENT_ATTENTION"] for row in runs.values())
Table(["tokens", *KERNELS], [[f"{n:,}", *(on_h200(kernel, n) for kernel in KERNELS)] for n in (2048, 8192, 16384, 65536)])

# %% [markdown]
# At 16,384 tokens the scores take 65 GiB, and the kernels less than 1. But a kernel is not always taken,
# and nothing is said: on a CPU a learned bias, dropout or narrower values bring the scores back, and a mask
# is kept itself, a number for each pair of tokens. On the H200 flash took dropout, but no mask, no narrower
# values and no float32; the memory-efficient kernel took them all. **Force the kernel, and the fallback
# becomes an error**: `with sdpa_kernel(SDPBackend.FLASH_ATTENTION):`, around forward *and* backward, as a
# checkpoint computes again there. transformers takes "sdpa" by itself where a model supports it:
# `model.config._attn_implementation` says what was chosen. With dropout in attention, as in GPT-2's config,
# or with a mask for padding, look again.
#
# ## A loss that keeps no logits
#
# Logits have a number for each token *and* each word of the vocabulary, and a step holds about three such
# tensors. But the loss is a sum over tokens. So compute the head and the loss for some tokens at a time,
# under a checkpoint. `WithLoss` does it for models like Llama, whose logits are `lm_head(hidden)` and nothing
# more (Gemma 2 caps them, Cohere and Granite scale them). It returns a *sum*. In the script, after the
# blocks, instead of `fully_shard(model, mesh=mesh)` and of `loss = …`:
#
# ```python
# model = fully_shard(WithLoss(model, pieces=16), mesh=mesh)      # the root: its forward gathers lm_head
# loss = model(ids, targets, position_ids=places, use_cache=False) / count
# ```
#
# The folded cell measures a step of a sharded model without blocks.

# %%
# %%ranks
from torch.utils.checkpoint import checkpoint


class WithLoss(nn.Module):
    def __init__(self, model, pieces):
        super().__init__()
        self.model, self.pieces = model, pieces

    def head(self, hidden, targets):                        # [tokens, width], i64[tokens] -> sum of losses
        return F.cross_entropy(self.model.lm_head(hidden).float(), targets, reduction="sum")

    def forward(self, ids, targets, **options):
        hidden = self.model.model(ids, **options).last_hidden_state.flatten(0, 1)
        pairs = zip(hidden.chunk(self.pieces), targets.flatten().chunk(self.pieces))
        return sum(checkpoint(self.head, *pair, use_reentrant=False) for pair in pairs)


# %% jupyter={"source_hidden": true}
# %%ranks
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from fsdp_utils.lessons.meter import Meter

TOKENS, PIECES = 1024, (1, 2, 4, 8, 16, 32)


class AtOnce(WithLoss):                                     # with all logits
    def forward(self, ids, targets):
        return self.head(self.model.model(ids).last_hidden_state[0], targets[0])


class OfTorch(WithLoss):
    def forward(self, ids, targets):
        hidden, how = self.model.model(ids).last_hidden_state[0], nn.LinearCrossEntropyOptions()
        weight = self.model.lm_head.weight
        return F.linear_cross_entropy(hidden, weight, targets[0], reduction="sum", options=how)


def peak(vocabulary, way, pieces=1):
    """The peak of a step without layers, in logits, and the gradient of the head; `way` is sharded."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 0, "num_attention_heads": 1}
    model = way(LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes)).to(device), pieces)
    fully_shard(model, mesh=mesh)
    ids, targets = torch.randint(vocabulary, (2, 1, TOKENS), device=device)
    with Meter([*model.parameters(), ids]) as meter:
        model(ids, targets).backward()
    logits = 4 * TOKENS * vocabulary
    return (meter.peak_tensor_bytes - meter.held_bytes) / logits, model.model.lm_head.weight.grad.full_tensor()


peaks, own, wrong = {}, {}, []
for vocabulary in (1024, 4096):
    found = [peak(vocabulary, AtOnce), *(peak(vocabulary, WithLoss, n) for n in PIECES[1:]), peak(vocabulary, OfTorch)]
    wrong += [not torch.allclose(found[0][1], grad, rtol=1e-3, atol=1e-4) for _, grad in found]
    *peaks[vocabulary], own[vocabulary] = [size for size, _ in found]

# %%
peaks, own, PIECES, wrong = ranks.get("(peaks, own, PIECES, wrong)")[0]
assert not any(wrong)                           # the gradients are those with all logits
assert 4 * 256 * 1024 * 32 * 1024 == 32 * 2**30 # bytes of the float32 logits of a long sequence
assert all(2.9 < top[0] < 3.3 and top[4] < 0.4 and top[4] < top[3] for top in peaks.values())
fig, (axes,) = plots.figure(width=6.5, height=2.7)
for (vocabulary, sizes), color in zip(peaks.items(), plots.RANK_COLORS):
    axes.loglog(PIECES, sizes, "o-", color=color, label=f"vocabulary {vocabulary:,}")
    axes.axhline(own[vocabulary], color=color, linestyle=":")
axes.set_xticks(PIECES, PIECES)
axes.set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
axes.minorticks_off()
axes.set(xlabel="pieces", ylabel="peak of head and loss,\ntimes the logits")
axes.legend(title="dotted: PyTorch's own")
plots.show(fig, alt="The peak falls with the number of pieces, from three times the logits to a fraction.")

# %% [markdown]
# Without pieces the peak is three times the logits, with 16 pieces less than a third of them. With a
# vocabulary of 256k, 32k tokens have 32 GiB of float32 logits (calculated). PyTorch 2.13 has its own,
# `F.linear_cross_entropy` with `nn.LinearCrossEntropyOptions()` (dotted). It also belongs in the root's
# forward, where `lm_head.weight` is whole, and it computes the gradients in forward.
#
# ## Gradients of gathered keys
#
# In backward a rank gets gradients for *all* keys, and each rank those from its own queries. They have to be
# added up. `full_tensor(grad_placements=[Partial()])` says so: its backward is a reduce-scatter. Without the
# argument DTensor takes the gradients for equal on all ranks, and each rank keeps only what its
# own queries gave.

# %% tags=["partial"]
# %%ranks
def gather(tensor, **options):                              # f32[1, heads, tokens / world, 16] -> all tokens
    return DTensor.from_local(tensor, mesh, [Shard(2)]).full_tensor(**options)


def gradients(q, k, v, mask=None, is_causal=False):
    attention = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
    return attention.square().sum()


torch.manual_seed(0)
whole = [torch.randn(1, 4, 48 * world, 16, device=device, requires_grad=True) for _ in range(3)]
gradients(*whole, is_causal=True).backward()
errors = {}
for name, options in {"grad_placements=[Partial()]": {"grad_placements": [Partial()]}, "without it": {}}.items():
    q, k, v = (t.detach().chunk(world, 2)[rank].clone().requires_grad_() for t in whole)
    keys, values = (gather(t, **options)[:, :, : 48 * (rank + 1)] for t in (k, v))
    gradients(q, keys, values, causal_lower_right(48, 48 * (rank + 1))).backward()
    right = [t.grad.chunk(world, 2)[rank] for t in whole]
    errors[name] = [((mine.grad - g).norm() / g.norm()).item() for mine, g in zip((q, k, v), right)]

# %%
errors = ranks.get("errors")[0]
assert max(errors["grad_placements=[Partial()]"]) < 1e-5
assert errors["without it"][0] < 1e-5
assert min(errors["without it"][1:]) > 0.05
Table(
    ["full_tensor", "queries", "keys", "values"],
    [[name, *("none" if e < 1e-5 else f"{e:.0%}" for e in found)] for name, found in errors.items()],
    note="Error of rank 0's gradients.",
)

# %% [markdown]
# No error is raised, the loss is right, and training goes on with wrong gradients.
#
# **Gather or ring.** The script gathers the keys and values of the whole sequence, one block at a time (and
# once more in backward, under a checkpoint). A **ring** passes them on from rank to rank instead, so that a
# rank holds a few parts at a time, not all: turn 1. Either way a rank sends n - 1 parts in forward, on n
# ranks. A third way, [Ulysses](https://arxiv.org/abs/2309.14509), exchanges tokens for heads by an
# all_to_all, so it can use no more ranks than there are heads.
#
# ## Your turn 1 · Ring attention
#
# `attend(q, k, v, causal)` gives the attention of this rank's queries to *some* keys, and for each query the
# logarithm of the sum of the exponentials of its scores (`lse`). `pass_on(k, v)` sends tensors to the next
# rank and returns those of the rank before; all ranks have to call it equally often. Write `ring(q, k, v)`:
# the causal attention of this rank's queries to the whole sequence, of which rank 0 has the first part.
#
# <details><summary>Hint</summary>
#
# The shares of two pieces in the result are `exp(lse_1)` and `exp(lse_2)`, divided by their sum `exp(lse)`:
# `lse = torch.logaddexp(lse_1, lse_2)`. After `step` passes the piece is that of rank
# `(rank - step) % world`.
#
# </details>

# %%
# %%ranks
def attend(q, k, v, causal):                    # f32[1, heads, tokens, 16] each -> the same, f32[1, heads, tokens, 1]
    scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def pass_on(*tensors):
    received, calls = [torch.empty_like(t) for t in tensors], []
    for mine, other in zip(tensors, received):
        calls.append(dist.P2POp(dist.isend, mine.contiguous(), (rank + 1) % world))
        calls.append(dist.P2POp(dist.irecv, other, (rank - 1) % world))
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return received


# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils import record_collectives
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

recorded = fully_shard(nn.Linear(1, 1, device=device), mesh=mesh)   # what record_collectives asks for
whole = [t.detach() for t in whole]
right = F.scaled_dot_product_attention(*whole, is_causal=True).chunk(world, 2)[rank]


@turn(1, {
    "tokens that see later ones": exactly(0, "Keys of later tokens are attended to: use a piece only if it comes from an earlier rank."),
    "tokens that miss earlier ones": exactly(0, "Earlier keys are never seen: the pieces have to come from all earlier ranks."),
    "largest error": at_most(1e-5, "Only the rank's own piece is causal, and each result has to be weighted by its share, exp(its lse - the lse of all)."),
    "KiB that a rank sends": exactly(
        (world - 1) * 2 * whole[0].nbytes / world / 1024,
        less="Too few pieces go around the ring.", more="After world - 1 passes every rank has had every piece: stop there.",
    ),
})
def score_ring(ring):
    def attended(start, stop):                  # the values of these tokens are other ones
        q, k, v = (t.clone() for t in whole)
        v[:, :, start:stop] += 100.0
        mine = ring(*(t.chunk(world, 2)[rank].contiguous() for t in (q, k, v)))
        if not isinstance(mine, torch.Tensor) or mine.shape != right.shape:
            raise NotYet("Return the attention alone, in the shape of q.")
        return mine

    def changed(start, stop):
        return ((attended(start, stop) - mine).abs().amax((0, 1, 3)) > 1e-3).sum().item()

    with record_collectives(recorded) as trace:
        mine = attended(0, 0)
    sees = [changed(48 * other, 48 * other + 48) for other in range(world)]     # its tokens that see each part
    return {
        "tokens that see later ones": sum(sees[rank + 1 :]),
        "tokens that miss earlier ones": 48 * rank - sum(sees[:rank]),
        "largest error": (mine - right).abs().max().item(),
        "KiB that a rank sends": sum(e.bytes for e in trace.collectives if e.kind == "send") / 1024,
    }


# %%
# %%turn 1
def ring(q, k, v):                              # f32[1, heads, tokens of this rank, 16] each
    return None                                 # your lines here: the attention, in the shape of q


# %% tags=["solution"] turn=1
def ring(q, k, v):
    out, lse = attend(q, k, v, causal=True)
    for step in range(1, world):
        k, v = pass_on(k, v)                    # all ranks pass on, also those that do not attend
        if step <= rank:
            other, other_lse = attend(q, k, v, causal=False)
            total = torch.logaddexp(lse, other_lse)
            out = out * (lse - total).exp() + other * (other_lse - total).exp()
            lse = total
    return out

# %% tags=["right"] turn=1
def ring(q, k, v):                              # a softmax over the pieces, at the end
    outs, sums = zip(attend(q, k, v, True))
    for step in range(1, world):
        k, v = pass_on(k, v)
        if (rank - step) % world < rank:
            out, lse = attend(q, k, v, False)
            outs, sums = (*outs, out), (*sums, lse)
    shares = torch.stack(sums).softmax(0)
    return (shares * torch.stack(outs)).sum(0)

# %% tags=["right"] turn=1
def ring(q, k, v):                              # sums of exponentials, divided at the end
    out, lse = attend(q, k, v, True)
    top, bottom = out * lse.exp(), lse.exp()
    for step in range(1, world):
        k, v = pass_on(k, v)
        out, lse = attend(q, k, v, False)
        weight = lse.exp() * (step <= rank)
        top, bottom = top + out * weight, bottom + weight
    return top / bottom

# %% tags=["right"] turn=1
def ring(q, k, v):                              # sends with its own hands, keys and values in one tensor
    pieces, pair = [(k, v)], torch.stack([k, v])
    for _ in range(world - 1):
        pair = pass_on(pair)[0]
        pieces.append(tuple(pair))
    pieces = pieces[: rank + 1]
    keys, values = (torch.cat(parts[::-1], 2) for parts in zip(*pieces))
    return F.scaled_dot_product_attention(q, keys, values, causal_lower_right(q.size(2), keys.size(2)))

# %% tags=["wrong"] turn=1 says="weighted by its share"
def ring(q, k, v):                              # the mean of the pieces
    outs = [attend(q, k, v, True)[0]]
    for step in range(1, world):
        k, v = pass_on(k, v)
        outs += [attend(q, k, v, False)[0]] if step <= rank else []
    return sum(outs) / len(outs)

# %% tags=["wrong"] turn=1 says="Keys of later tokens"
def ring(q, k, v):
    out, lse = attend(q, k, v, causal=True)
    for step in range(1, world):
        k, v = pass_on(k, v)
        other, other_lse = attend(q, k, v, causal=False)
        share = torch.sigmoid(other_lse - lse)
        out, lse = out * (1 - share) + other * share, torch.logaddexp(lse, other_lse)
    return out

# %% tags=["wrong"] turn=1 says="Earlier keys are never seen"
def ring(q, k, v):
    return attend(q, k, v, causal=True)[0]

# %% tags=["wrong"] turn=1 says="After world - 1 passes"
def ring(q, k, v):
    pieces = [(k, v)]
    for _ in range(world):
        pieces.append(pass_on(*pieces[-1]))
    keys, values = (torch.cat(parts[: rank + 1][::-1], 2) for parts in zip(*pieces))
    return F.scaled_dot_product_attention(q, keys, values, causal_lower_right(q.size(2), keys.size(2)))

# %% tags=["wrong"] turn=1 says="Too few pieces go around"
def ring(q, k, v):                              # a gather
    keys, values = gather(k)[:, :, : 48 * (rank + 1)], gather(v)[:, :, : 48 * (rank + 1)]
    return F.scaled_dot_product_attention(q, keys, values, causal_lower_right(48, 48 * (rank + 1)))

# %% [markdown]
# (The solution differs from `scaled_dot_product_attention` by rounding alone. For training a ring also needs
# a backward in which keys, values and *their gradients* go around: PyTorch's is
# `_templated_ring_attention_backward`.)
#
# ## Who has the work
#
# A causal mask gives a late token more keys than an early one. The figure counts pairs of queries and keys.

# %%
WORLD = len(ranks.get("0"))


def shares(owners, piece=64):                   # the rank of each piece -> each rank's share of the pairs
    pairs = [0] * (max(owners) + 1)
    for token in range(len(owners) * piece):
        pairs[owners[token // piece]] += token + 1
    return [count / sum(pairs) for count in pairs]


def in_a_row(world):
    return [piece // 2 for piece in range(2 * world)]


def head_and_tail(world):                       # an early and a late piece each
    return [min(piece, 2 * world - 1 - piece) for piece in range(2 * world)]


for world in (2, 4, 8, 64):
    assert abs(max(shares(in_a_row(world))) * world - (2 - 1 / world)) < 0.01
    assert abs(max(shares(head_and_tail(world))) * world - 1) < 1e-9

fig, panels = plots.figure(2, width=7.0, height=3.0)
for axes, (name, cut) in zip(panels, {"parts in a row": in_a_row, "an early and a late piece": head_and_tail}.items()):
    owners = cut(WORLD)
    for row, owner in enumerate(owners):
        axes.barh(row, row + 1, height=1, color=plots.RANK_COLORS[owner])
    for owner, share in enumerate(shares(owners)):
        axes.text(WORLD * 1.15, owner * 0.9, f"rank {owner}: {share:.0%}", color=plots.RANK_COLORS[owner], weight="bold")
    axes.set(title=name, xlim=(0, 2 * WORLD), ylim=(2 * WORLD - 0.5, -0.5), xticks=[], yticks=[], xlabel="keys")
    axes.spines[:].set_visible(False)
panels[0].set_ylabel("queries")
plots.show(fig, alt="Pairs that each rank computes: most on the last rank, or equally many on each.")

# %% [markdown]
# In a row, the last rank has 2 - 1/n times the mean on n ranks, and the others wait for it in every layer.
# With an early and a late piece each rank has as much. PyTorch's `context_parallel` cuts like this by itself
# if the length is a multiple of 2n, and else in a row, without a warning.
#
# ## The mask that is not there
#
# transformers makes masks only for attention functions that have a mask function of the same name. Your own
# gets `None` (until you register one with `AttentionMaskInterface`), and whatever the mask should have hidden
# is seen: tokens outside of a **sliding window**, padding, other documents of a packed sequence. Here is a
# Mistral with a window of 16 tokens.

# %% tags=["window"]
# %%ranks 0
from transformers import MistralConfig, MistralForCausalLM


def full(module, query, key, value, mask, scaling=None, **options):
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


def windowed(module, query, key, value, mask, scaling=None, sliding_window=None, **options):
    if mask is None and sliding_window is not None:
        places = torch.arange(query.size(2), device=query.device)
        ago = places[:, None] - places              # how many tokens ago
        mask = (ago >= 0) & (ago < sliding_window)
    out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register("full", full)
AttentionInterface.register("windowed", windowed)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 16}
mistral = MistralForCausalLM(MistralConfig(**sizes, **heads)).to(device)
ids, rows, right_logits = torch.randint(64, (1, 128), device=device), [], None
for name in ("eager", "sdpa", "full", "windowed"):
    mistral.set_attn_implementation(name)
    with torch.no_grad():
        found = mistral(input_ids=ids, labels=ids)
    right_logits = found.logits if not rows else right_logits
    wrong = ((found.logits - right_logits).abs().amax(-1)[0] > 1e-4).nonzero()
    rows.append([name, f"{found.loss:.3f}", f"from token {wrong[0].item()} on" if len(wrong) else "none"])

# %%
rows = ranks.get("rank == 0 and rows")[0]
assert [row[2] for row in rows] == ["none", "none", "from token 16 on", "none"]
Table(["attention", "loss", "wrong logits"], rows)

# %% [markdown]
# The loss does not tell. The script's `gathered` has this fault, too: it is for models with full attention.
# Accelerate's context parallelism drops the mask as well, and trained Mistral, Gemma 3 or gpt-oss like this
# until it began to refuse such models
# ([accelerate#4177](https://github.com/huggingface/accelerate/pull/4177)). transformers passes
# `sliding_window` to the function, which can honour it or raise an error. To check, compare logits with
# "eager" on one process, beyond the window.
#
# ## PyTorch's own
#
# `context_parallel` cuts the tensors in its list in place, each along its dimension. Within its `with` block,
# which has to hold backward too, `scaled_dot_product_attention` goes over the ranks' keys and values part by
# part; it gathers them, or passes them on after `set_rotate_method("alltoall")` (from
# `torch.distributed.tensor.experimental._attention`). It takes `is_causal=True` and no mask. Its
# documentation calls it a prototype. With several sequences a mesh has two dimensions: "dp" for the samples,
# "cp" for the parts of a sequence.

# %% tags=["theirs"]
# %%ranks
from torch.distributed.tensor.experimental import context_parallel

ways = init_device_mesh(device.type, (1, world), mesh_dim_names=("dp", "cp"))
x, places = torch.randn(1, 16 * world, 64, device=device), torch.arange(16 * world, device=device)
project = nn.Linear(64, 192, device=device)
try:
    with context_parallel(ways["cp"], buffers=[x, places], buffer_seq_dims=[1, 0]):
        held = places.tolist()
        q, k, v = project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    said = "ran"
except NotImplementedError as error:
    said = str(error)

# %%
held, said = ranks.get("(held, said)")[0]
assert held == [*range(8), *range(16 * WORLD - 8, 16 * WORLD)]
assert said == "ran" or ranks.get("device.type")[0] == "cpu"
print(f"rank 0 has tokens {held[0]}-{held[7]} and {held[8]}-{held[15]}")
print(said)

# %% [markdown]
# The cut works here, an early and a late piece for each rank; the attention does not, because PyTorch 2.13
# has it for the kernels of GPUs alone (`call_maps` in `_sdpa_handler`). We have not run it on GPUs. FSDP
# shards over *all* ranks of both dimensions, on a mesh of its own, `init_device_mesh(device, (dp * cp,))`:
# each rank has gradients of all weights, from its tokens. Its loss is its sum, divided by the
# labels of all dp * cp ranks, times dp * cp (FSDP averages).
#
# ## Your turn 2 · Cut a batch
#
# Write two functions around a model that FSDP shards. `my_cut(ids, labels)` gets a whole sequence, `labels`
# as transformers wants them (equal to `ids`, -100 where nothing is to be learned, *not* shifted), and returns
# this rank's part: ids, targets and places, each i64[1, tokens / world]. The target of a token is the label
# of the next one. All ranks should have about the same work. `my_loss(total, targets)` gets the sum of the
# cross entropies over this rank's targets and returns the loss for `backward`. (The model's attention here
# goes by places, so every cut of equal parts is allowed.)

# %% jupyter={"source_hidden": true}
# %%ranks
LENGTH, VOCABULARY = 48 * world, 256
torch.manual_seed(0)
some_ids = torch.randperm(VOCABULARY, device=device)[None, :LENGTH]             # each id once
place_of = torch.empty(VOCABULARY, dtype=torch.long, device=device)
place_of[some_ids[0]] = torch.arange(LENGTH, device=device)
some_labels = some_ids.clone()
some_labels[:, : LENGTH // 3] = some_labels[:, :: 2 * world] = -100              # a prompt, and gaps
some_labels[0, 0] = some_ids[0, 0]                          # the target of no token: a roll is found out
next_label = F.pad(some_labels[0, 1:], (0, 1), value=-100)


def by_place(module, query, key, value, mask, scaling=None, position_ids=None, **options):
    keys, values = (gather(t, grad_placements=[Partial()]) for t in (key, value))
    places = DTensor.from_local(position_ids, mesh, [Shard(1)]).full_tensor()
    mask = (places[0] <= position_ids[0][:, None]).to(query.dtype).log()        # 0, or minus infinity
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scaling).transpose(1, 2), None


AttentionInterface.register("by_place", by_place)


def small_llama(attention):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).to(device)
    model.set_attn_implementation(attention)
    return model


alone = small_llama("eager")
alone(input_ids=some_ids, labels=some_labels).loss.backward()
RIGHT = [p.grad for p in alone.parameters()]


@turn(2, {
    "tokens on all ranks": exactly(LENGTH, "Each token has to be on one rank, and on no other."),
    "wrong places": exactly(0, "A place counts from the start of the whole sequence, also on the later ranks."),
    "wrong targets": exactly(0, "A target is the label of the next token, which may be on another rank (the last token's is -100): shift before the cut."),
    "busiest rank, times the mean": at_most(1.05, "The late tokens have the most work: give each rank an early and a late piece."),
    "gradients that differ": exactly(0, "The loss needs the labels of all ranks in the denominator, and FSDP divides by the ranks."),
})
def score_cut(my_cut, my_loss):
    part = my_cut(some_ids.clone(), some_labels.clone())
    if not isinstance(part, tuple | list) or [getattr(t, "shape", None) for t in part] != [(1, 48)] * 3:
        raise NotYet("Return three tensors, each i64[1, tokens / world].")
    ids, targets, places = part
    true = place_of[ids[0]]
    model = small_llama("by_place")
    for block in [*model.model.layers, model]:
        fully_shard(block, mesh=mesh)
    logits = model(input_ids=ids, position_ids=places, use_cache=False).logits[0]
    loss = my_loss(F.cross_entropy(logits, targets[0], reduction="sum"), targets)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise NotYet("Return a loss from `my_loss` that has a backward.")
    loss.backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    everyone = DTensor.from_local(true, mesh, [Shard(0)]).full_tensor()     # i64[tokens]
    pairs = (everyone.view(world, -1) + 1).sum(1).double()
    return {
        "tokens on all ranks": len(everyone.unique()),
        "wrong places": int((places[0] != true).sum()),
        "wrong targets": int((targets[0] != next_label[true]).sum()),
        "busiest rank, times the mean": (pairs.max() / pairs.mean()).item(),
        "gradients that differ": sum(not torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(grads, RIGHT)),
    }


# %%
# %%turn 2
def my_cut(ids, labels):                        # i64[1, tokens] each
    return None                                 # your lines here: ids, targets, places of this rank


def my_loss(total, targets):                    # f32[], i64[1, tokens / world]
    return None                                 # your lines here


# %% tags=["solution"] turn=2
def my_cut(ids, labels):
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    places = torch.arange(ids.size(1), device=ids.device)[None]
    pieces = [t.chunk(2 * world, dim=1) for t in (ids, targets, places)]
    return [torch.cat([of[rank], of[2 * world - 1 - rank]], dim=1) for of in pieces]

def my_loss(total, targets):
    dist.all_reduce(count := (targets != -100).sum())
    return total / count * world

# %% tags=["right"] turn=2
def my_cut(ids, labels):                        # every world-th token
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    places = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    return tuple(t[:, rank::world] for t in (ids, targets, places))

def my_loss(total, targets):
    counts = [None] * world
    dist.all_gather_object(counts, int(targets.ne(-100).sum()))
    return total * (world / sum(counts))

# %% tags=["right"] turn=2
def my_cut(ids, labels):                        # the places first, and by them the rest
    n = ids.size(1) // (2 * world)
    mine = torch.cat([torch.arange(n) + n * piece for piece in (rank, 2 * world - 1 - rank)]).to(ids.device)
    after = (mine + 1).clamp(max=ids.size(1) - 1)
    targets = labels[:, after].masked_fill(mine + 1 == ids.size(1), -100)
    return ids[:, mine], targets, mine[None]

def my_loss(total, targets):
    mean = (targets != -100).float().sum()
    dist.all_reduce(mean)
    return total / (mean / world)

# %% tags=["right"] turn=2
def my_cut(ids, labels):                        # forth and back, in pieces of one token
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    places = torch.arange(ids.size(1), device=ids.device)[None]
    table = [t.view(-1, 2, world) for t in (ids, targets, places)]
    return [torch.stack([t[:, 0, rank], t[:, 1, world - 1 - rank]], 1).view(1, -1) for t in table]

def my_loss(total, targets):
    count = DTensor.from_local((targets != -100).sum(), mesh, [Partial()]).full_tensor()
    return world * total / count

# %% tags=["wrong"] turn=2 says="shift before the cut"
def my_cut(ids, labels):
    places = torch.arange(ids.size(1), device=ids.device)[None]
    ids, labels, places = (t[:, rank::world] for t in (ids, labels, places))
    return ids, F.pad(labels[:, 1:], (0, 1), value=-100), places

def my_loss(total, targets):
    dist.all_reduce(count := (targets != -100).sum())
    return total / count * world

# %% tags=["wrong"] turn=2 says="labels of all ranks in the denominator"
def my_cut(ids, labels):
    targets, places = F.pad(labels[:, 1:], (0, 1), value=-100), torch.arange(ids.size(1), device=ids.device)[None]
    return [t[:, rank::world] for t in (ids, targets, places)]

def my_loss(total, targets):                    # a mean of means
    return total / (targets != -100).sum()

# %% tags=["wrong"] turn=2 says="FSDP divides by the ranks"
def my_cut(ids, labels):
    targets, places = F.pad(labels[:, 1:], (0, 1), value=-100), torch.arange(ids.size(1), device=ids.device)[None]
    return [t[:, rank::world] for t in (ids, targets, places)]

def my_loss(total, targets):
    dist.all_reduce(count := (targets != -100).sum())
    return total / count

# %% tags=["wrong"] turn=2 says="from the start of the whole sequence"
def my_cut(ids, labels):                        # each rank counts from 0
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    return ids[:, rank::world], targets[:, rank::world], torch.arange(48, device=ids.device)[None]

def my_loss(total, targets):
    dist.all_reduce(count := (targets != -100).sum())
    return total / count * world

# %% tags=["wrong"] turn=2 says="shift before the cut"
def my_cut(ids, labels):                        # the first label is the last token's target
    order = [*range(rank, ids.size(1), world)]
    return ids[:, order], labels.roll(-1, 1)[:, order], torch.tensor([order], device=ids.device)

def my_loss(total, targets):
    dist.all_reduce(count := (targets != -100).sum())
    return total / count * world

# %% tags=["wrong"] turn=2 says="an early and a late piece"
def my_cut(ids, labels):                        # parts in a row
    targets, places = F.pad(labels[:, 1:], (0, 1), value=-100), torch.arange(ids.size(1), device=ids.device)[None]
    return [t.chunk(world, 1)[rank] for t in (ids, targets, places)]

def my_loss(total, targets):
    dist.all_reduce(count := (targets != -100).sum())
    return total / count * world

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | out of memory at the loss, or in the first step of backward | logits of a large vocabulary | the loss in pieces |
# | memory grows with the square of the length | scores: attention written out, or a kernel that fell back | `set_attn_implementation("sdpa")`; then `sdpa_kernel(SDPBackend.FLASH_ATTENTION)` raises an error where it falls back |
# | `No available kernel` | flash can't run: values narrower than keys; on a GPU also a mask, float32, heads wider than 256 or a GPU older than Ampere; on a CPU also dropout or a learned bias | change that; on a GPU you can also allow `SDPBackend.EFFICIENT_ATTENTION` |
# | `aten.embedding.default got mixed torch.Tensor and DTensor` | `fully_shard` was called on the model inside `WithLoss` | call it on the blocks and on `WithLoss` |
# | `does not have a sharding strategy registered` for `…flash_attention_for_cpu` | `context_parallel` on a CPU | a function like `gathered` |
# | the loss is right at first, then worse than on one process | gradients of gathered keys not summed | `grad_placements=[Partial()]` |
# | a loss that is plausible, a model that is worse at length | the mask was dropped; places that begin at 0 on each rank | compare logits with one process, beyond the window |
#
# ## The rule
#
# Fused attention, a loss in pieces, checkpoints; then cut the sequence. Shift before you cut, give places of
# the whole sequence, divide by the labels of all ranks and multiply by the ranks, and compare one step's
# gradients with one process.
#
# [← lesson 20](20_experts.ipynb) · [lesson 22 →](22_fewer_bits.ipynb)
