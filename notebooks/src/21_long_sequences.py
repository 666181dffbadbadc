# %% [markdown]
# # 21 · Long sequences
#
# The activations of **one** sequence don't fit on a rank, so a smaller batch does not help. What does? **In
# the order of their price: attention that keeps no scores (a number for each pair of tokens), a loss that
# keeps no logits (a number for each token and each word of the vocabulary), a checkpoint around each block.
# If that is not enough, cut the sequence over the ranks that already share the weights.** In a model like
# Llama only attention has to know of the cut: it then communicates in every block.

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots

KEPT = {"eager attention": 91.81, "fused attention": 35.61, "loss in pieces": 20.61, "checkpoints": 1.66, "a part per rank": 0.41}
fig, (bars, axes) = plots.figure(2, width=9.6, height=2.9)
bars.barh(list(KEPT), list(KEPT.values()), color=[plots.RANK_COLORS[0]] * 4 + [plots.RANK_COLORS[2]])
for row, mib in enumerate(KEPT.values()):
    bars.text(mib + 2, row, f"{mib:.3g}", va="center")
bars.set(title="MiB kept (960 tokens, 4 blocks)", xlim=(0, 115), xticks=[], ylim=(4.6, -0.6))
for r, color in enumerate(plots.RANK_COLORS[:4]):
    axes.text(-0.1, r, f"rank {r}", ha="right", va="center")
    for place, name in (0, "q, k, v"), (2, "MLP"), (3, "loss"):
        axes.add_patch(Rectangle((place, r - 0.4), 0.9, 0.8, color=color))
        axes.text(place + 0.45, r, name, color="white" if r in (0, 2) else plots.INK, ha="center", va="center")
    for piece in range(4):
        seen = plots.RANK_COLORS[piece] if piece <= r else plots.FAINT
        axes.add_patch(Rectangle((1 + 0.23 * piece, r - 0.4), 0.21, 0.8, color=seen))
axes.text(1.45, -0.55, "attention:\nkeys, values", ha="center")
axes.set(title="A part per rank", xlim=(-0.7, 4), ylim=(3.5, -1.2), xticks=[], yticks=[])
for panel in (bars, axes):
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0)
plots.show(fig, alt="Kept bytes fall from 92 to 0.41 MiB in four steps; the last gives each rank a quarter of the sequence.")

# %% [markdown]
# Left, what the scripts below keep of one sequence of 960 tokens, in float32; each bar adds one change to the
# bar above it. Loss and gradients stay the same. Right, the last change, **context parallelism**, with a color
# for each quarter of the sequence. Nearly everything in a transformer treats each token by itself, so a rank
# computes it for its own tokens. In attention a token looks at the keys and values of all tokens before it,
# which have to come from the other ranks. The mask of a causal model hides later keys (grey). For a model of 8 billion
# parameters see "When you need the cut".

# %% tags=["card"]
lesson.card(
    21,
    learn="find what grows with the length, remove it, and cut one sequence over ranks with the right gradients",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 2](02_activation_checkpointing.ipynb)",
    minutes=(1, 40, 27),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains a small Llama in four ways on
# the same two sequences. Rank 0 prints what the second step had: the bytes that autograd keeps for backward
# (parameters not counted), the loss, and the norm of all gradients. To save a file for transformers
# ([lesson 3](03_full_state_dict.ipynb)), take the state dict of `model.model`: `WithLoss` adds `model.` to each key.
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
# from torch.utils.checkpoint import checkpoint
# from transformers import LlamaConfig, LlamaForCausalLM
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.set_default_device(device)
# rank, world, kept = dist.get_rank(), dist.get_world_size(), {}                  # kept: bytes by address
# mesh = init_device_mesh(device, (world,))                    # without it a Mac would take its GPU
#
#
# class WithLoss(nn.Module):
#     def __init__(self, model, pieces):
#         super().__init__()
#         self.model, self.pieces = model, pieces
#
#     def head(self, hidden, targets):                         # [tokens, width], i64[tokens] -> sum of losses
#         return F.cross_entropy(self.model.lm_head(hidden).float(), targets, reduction="sum")
#
#     def forward(self, ids, targets, **options):
#         hidden, targets = self.model.model(ids, **options).last_hidden_state.flatten(0, 1), targets.flatten()
#         if self.pieces == 1:
#             return self.head(hidden, targets)
#         pairs = zip(hidden.chunk(self.pieces), targets.chunk(self.pieces))
#         return sum(checkpoint(self.head, *pair, use_reentrant=False) for pair in pairs)
#
#
# def keep(tensor):                                            # for each tensor that autograd keeps for backward
#     if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
#         kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
#     return tensor
#
#
# def train(name, attention, pieces=1, wrap=lambda block: block):
#     torch.manual_seed(0)                                     # the same weights on every rank
#     sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
#     model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
#     model.set_attn_implementation(attention)
#     for index, block in enumerate(model.model.layers):
#         model.model.layers[index] = fully_shard(wrap(block), mesh=mesh)
#     model = fully_shard(WithLoss(model, pieces), mesh=mesh)  # the root: its forward gathers lm_head
#     optimizer = torch.optim.AdamW(model.parameters())
#     for step in range(2):
#         ids, places = torch.randint(4096, (1, 960)), torch.arange(960)[None]    # the same on every rank
#         targets = F.pad(ids[:, 1:], (0, 1), value=-100)      # the next token
#         count = (targets != -100).sum()                      # of tokens that have a target
#         kept.clear()
#         with saved_tensors_hooks(keep, lambda tensor: tensor):
#             loss = model(ids, targets, position_ids=places, use_cache=False) / count
#         loss.backward()
#         norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
#         optimizer.step()
#         optimizer.zero_grad()
#         dist.all_reduce(loss := loss.detach())
#     if rank == 0:
#         print(f"{name:15} {sum(kept.values()) / 2**20:5.2f} MiB, loss {loss / world:.4f}, norm {norm:.4f}")
#
#
# train("eager attention", "eager")
# train("fused attention", "sdpa")
# train("loss in pieces", "sdpa", pieces=16)
# train("checkpoints", "sdpa", pieces=16, wrap=checkpoint_wrapper)
# dist.destroy_process_group()
# ```
# ```text
# eager attention 91.81 MiB, loss 8.3368, norm 0.6446
# fused attention 35.61 MiB, loss 8.3368, norm 0.6446
# loss in pieces  20.61 MiB, loss 8.3368, norm 0.6446
# checkpoints      1.66 MiB, loss 8.3368, norm 0.6446
# ```
#
# All four train the same model. Probabilities of attention took 56 MiB: 4 blocks x 4 heads x 960² pairs x 4
# bytes. The loss took 15, for log-probabilities as large as the logits: 960 tokens x 4,096 words x 4 bytes.
# Checkpoints leave each block's input, and what lies around the blocks. "Kept" is between forward and backward.
# The peak is elsewhere: in the loss, or in the block that backward computes again.
#
# ## Attention that keeps no scores
#
# Written out ("eager" in transformers, `MATH` in PyTorch), attention keeps the probabilities made of its
# scores, and bytes grow with the *square* of the length. A fused kernel computes them piece by piece, and again
# in backward; it keeps its inputs, its output and one number per query. Peak and time of forward and backward,
# one sequence on an H200 (torch 2.11), 16 heads of 128, causal, in bf16:

# %% jupyter={"source_hidden": true} tags=["on-a-gpu"]
from fsdp_utils.lessons import recorded
from fsdp_utils.lessons.tables import Table

found = {row["setting"]: row for row in recorded.load("costs")["results"]["rows"]}
KERNELS = {"written out": "MATH", "memory-efficient": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}
cells = {name: f"{row['peak_mib'] / 1024:.1f} GiB, {row['ms']:.1f} ms" for name, row in found.items() if "ms" in row}
table = {n: [cells.get(f"{kernel}, {n} tokens", "not run") for kernel in KERNELS.values()] for n in (2048, 8192, 16384, 65536)}
assert table[16384] == ["64.6 GiB, 216.7 ms", "0.6 GiB, 28.2 ms", "0.7 GiB, 12.5 ms", "0.6 GiB, 6.7 ms"]
Table(["tokens", *KERNELS], [[f"{n:,}", *row] for n, row in table.items()])

# %% [markdown]
# `scaled_dot_product_attention` picks a kernel by itself, and where none can run, attention is written out without a
# warning (on a GPU float64 is such a case; on a CPU dropout or a learned bias).
# A boolean mask brings the square back: each block keeps a copy of it in the queries' dtype (seen on a CPU).
# **Leave out `MATH`, and the fallback becomes an error**:
#
# ```python
# from torch.nn.attention import SDPBackend, sdpa_kernel
#
# with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
#     ...                                     # forward *and* backward: a checkpoint computes again there
# ```
#
# PyTorch tries the three in an order of its own, or in yours with `set_priority=True`: at 16,384 tokens flash
# takes nearly twice cuDNN's time. In transformers `model.config._attn_implementation` names the attention that it took.
#
# ## A loss that keeps no logits
#
# A step holds about three tensors as large as the logits. But the loss is a sum over tokens, so `WithLoss`
# computes head and loss for some tokens at a time, under a checkpoint, and returns the *sum*. It is for models
# like Llama, whose logits are `lm_head(hidden)` and nothing more, and it is the root, because the root's forward
# gathers `lm_head`. For Llama 3 8B with checkpoints, on eight H100s of 80 GB, in bf16, `plan`
# ([lesson 14](14_plan_before_you_rent.ipynb)) predicts these peaks:
#
# | tokens on a rank | all at once | in 16 pieces |
# |--:|--:|--:|
# | 4,096 | 20.6 GiB | 19.6 GiB |
# | 8,192 | 27.6 GiB | 20.7 GiB |
# | 16,384 | 41.6 GiB | 23.5 GiB |
# | 32,768 | 69.6 GiB | 31.5 GiB |
#
# **The loss in pieces pays where a rank has more tokens than the model is wide** (here 4,096): the root's
# weights and gradients do not shrink with the pieces. In bf16 autograd adds up the pieces' gradients of the head
# in bf16, so hundreds of pieces cost precision. PyTorch 2.13's own, `F.linear_cross_entropy` with
# `nn.LinearCrossEntropyOptions()`, also belongs in the root's forward; it computes the gradients in forward.
#
# ## When you need the cut
#
# For this model with 32,768 tokens on a rank, `plan` predicts 258 GiB with fused attention, 215 with the loss in
# pieces, 31 with checkpoints. **With all three it has room for 98,304 tokens at most.** Its verdict is "fits" where
# 1.12 times what PyTorch reserves is at most 77 GiB: published runs took mostly 0.83 to 1.12 times the prediction.
#
# | tokens | on each rank | predicted peak | reserved | verdict of `plan` |
# |--:|--:|--:|--:|:--|
# | 65,536 | 65,536 | 47 GiB | 58.5 GiB | fits |
# | 81,920 | 81,920 | 55 GiB | 69.6 GiB | tight |
# | 98,304 | 98,304 | 64 GiB | 76.9 GiB | tight |
# | 131,072 | 16,384, cut over 8 | 24 GiB, and one block's keys and values | 30.5 GiB, and these | fits |
#
# ## Cut the sequence
#
# FSDP shards weights, gradients and the optimizer's state but no activations: so far each rank computes a full
# sequence. These lines give each a quarter:
#
# ```diff
#  from torch.distributed.fsdp import fully_shard
# +from torch.distributed.tensor import DTensor, Partial, Shard
# +from torch.nn.attention.bias import causal_lower_right
#  from torch.utils.checkpoint import checkpoint
# -from transformers import LlamaConfig, LlamaForCausalLM
# +from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
# @@
# -def train(name, attention, pieces=1, wrap=lambda block: block):
# +def gathered(module, query, key, value, mask, scaling=None, **options):        # [batch, heads, tokens, width]
# +    n, end = query.size(2), query.size(2) * (rank + 1)       # this rank has n tokens, the last is end - 1
# +    parts = [DTensor.from_local(t, mesh, [Shard(2)]) for t in (key, value)]
# +    key, value = (t.full_tensor(grad_placements=[Partial()])[:, :, :end] for t in parts)
# +    key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
# +    out = F.scaled_dot_product_attention(query, key, value, causal_lower_right(n, end), scale=scaling)
# +    return out.transpose(1, 2), None
# +
# +
# +AttentionInterface.register("gathered", gathered)
# +
# +
# +def train(name, attention, pieces=1, wrap=lambda block: block, cut=False):
# @@
#          count = (targets != -100).sum()                      # of tokens that have a target
# +        if cut:                                              # after the shift
# +            ids, places, targets = (t.chunk(world, 1)[rank].clone() for t in (ids, places, targets))
# +            count = count / world                            # FSDP averages over the ranks
# @@
#  train("checkpoints", "sdpa", pieces=16, wrap=checkpoint_wrapper)
# +train("a part per rank", "gathered", pieces=16, wrap=checkpoint_wrapper, cut=True)
# ```
# ```text
# a part per rank  0.41 MiB, loss 8.3368, norm 0.6446
# ```
# The block that backward computes again now holds keys and values of the whole sequence, and `repeat_interleave`
# copies them for every query head: in Llama 3 8B (32 query heads, 8 of keys) 0.5 GiB at 131,072 tokens become 2.
#
# **`gathered`** is the attention function. `from_local` says that the ranks hold parts of one tensor, cut along
# dimension 2, and `full_tensor` gathers it. `Partial()` has backward add up the ranks' gradients (more below).
# `causal_lower_right` says that the queries are the *last* of these tokens. On every rank but the first it calls flash
# or memory-efficient attention on a GPU, never cuDNN's; where neither can run, as here on a CPU, it writes its mask
# out, and `sdpa_kernel` without `MATH` raises no error. `gathered` is right only for parts in a row: rank 0 has the
# first tokens, rank 1 the next.
#
# **Around the model**
#
# - `places`, the model's `position_ids`, count from the start of the whole sequence.
# - Shift, then cut. transformers' own loss shifts the labels of each part and so loses a target at every cut, unless
#   it gets `shift_labels` beside `labels` (and the next line's count as `num_items_in_batch`).
# - Divide the sum by the labels of the whole sequence, divided by the ranks: FSDP averages.
# - The length is a multiple of the ranks (of twice the ranks for `balanced`, below): pad the end, with -100 as targets.
#
# ## Gradients of gathered keys
#
# In backward each rank gets gradients for *all* keys and values, from its own queries. They have to be added
# up over the ranks. `full_tensor(grad_placements=[Partial()])` says so: its backward is a reduce-scatter. Without the
# argument DTensor takes the gradients for equal on all ranks, and each rank keeps for its keys only what its own
# queries gave. No error is raised, and the first loss is right. The last row then has loss 8.3374 and norm 0.5155.
#
# **Gather or ring.** `gathered` holds keys and values of the whole sequence: with checkpoints in one block at a
# time, without in every block. A **ring** passes them on from rank to rank, so a rank holds a few parts: turn 1.
# **What the cut sends**: with `gathered`, a rank receives in each block (n - 1) / n of all keys and values, again
# where a checkpoint computes again, and in backward sends as many bytes of gradients. For Llama 3 8B, 131,072 tokens
# and 8 ranks that is 448 MiB each time; a gather of the block's weights has 364 (calculated for bf16).
#
# ## Your turn 1 · Ring attention
#
# Write `ring(q, k, v)`: the causal attention of this rank's queries to the whole sequence, of which rank 0
# has the first part. `attend(q, k, v, causal)` gives the attention of this rank's queries to *one* part of
# the keys, and for each query `lse`, the logarithm of the sum of the exponentials of its scores.
# `pass_on(k, v)` sends tensors (24 KiB here) to the next rank and returns those of the rank before; all ranks have to call
# it equally often. Two parts come together like this:
# ```text
# lse = log(exp(lse_1) + exp(lse_2))
# out = out_1 · exp(lse_1 - lse) + out_2 · exp(lse_2 - lse)
# ```
#
# <details><summary>Hint</summary> <code>torch.logaddexp(lse_1, lse_2)</code>. After <code>step</code> passes the part is
# that of rank <code>(rank - step) % world</code>.</details>

# %%
from fsdp_utils.notebook import ranks

ranks.start(preload=["torch.distributed.tensor", "transformers.models.mistral.modeling_mistral"])

# %% jupyter={"source_hidden": true}
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
mesh = init_device_mesh(device.type, (world,))

# %%
# %%ranks
def attend(q, k, v, causal):                    # f32[1, heads, tokens, 16] each -> out like q, lse f32[1, heads, tokens, 1]
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
from unittest.mock import patch

from fsdp_utils import record_collectives
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

recorded = fully_shard(nn.Linear(1, 1, device=device), mesh=mesh)   # what record_collectives asks for
torch.manual_seed(0)
whole = [torch.randn(1, 4, 48 * world, 16, device=device) for _ in range(3)]
right = F.scaled_dot_product_attention(*whole, is_causal=True).chunk(world, 2)[rank]
TO_SEND = (world - 1) * 2 * whole[0].nbytes / world / 1024


@turn(1, {
    "tokens that see later ones": exactly(0, "Later keys are attended to: the rank's own part needs causal=True, and a later rank's part is left out."),
    "tokens that miss earlier ones": exactly(0, "Earlier keys are not seen: attend to every earlier rank's part, which `pass_on` returns, with causal=False."),
    "largest error": at_most(1e-5, "Each result has to be weighted by its share, exp(its lse - the lse of all), and lse has to grow with each part."),
    "KiB that a rank sends": exactly(
        TO_SEND, less="Too few parts go around the ring: pass on keys and values, world - 1 times.",
        more="Too much goes around the ring: pass keys and values alone, without the queries, and stop after world - 1 passes.",
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
        return ((attended(start, stop) - mine).abs().amax((0, 1, 3)) > 1e-6).sum().item()

    passes, of_ranks = [], [0] * world
    with patch.object(dist, "batch_isend_irecv", lambda calls: passes.append(1) or []):
        attended(0, 0)                          # sends nothing, and counts the calls of pass_on
    dist.all_gather_object(of_ranks, len(passes))
    if len(set(of_ranks)) > 1:
        raise NotYet(
            "All ranks have to call `pass_on` equally often, also those that do not attend: the calls of ranks 0, 1, … "
            f"are {', '.join(map(str, of_ranks))}."
        )
    with record_collectives(recorded) as trace:
        mine = attended(0, 0)
    sees = [changed(48 * part + 47, 48 * part + 48) for part in range(world)]   # its tokens that see each part's last
    later, missing = sum(sees[rank + 1 :]) + max(sees[rank] - 1, 0), 48 * rank - sum(sees[:rank])
    sent = sum(e.bytes for e in trace.collectives if e.kind == "send") / 1024
    few = 0 < sent < TO_SEND                    # then wrong keys or values follow from it
    return {
        "tokens that see later ones": None if few else later,
        "tokens that miss earlier ones": None if few else missing,
        "largest error": None if few or later or missing else (mine - right).abs().max().item(),
        "KiB that a rank sends": sent,
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
    keys, values = (torch.cat(parts[::-1], 2) for parts in zip(*pieces[: rank + 1]))
    return F.scaled_dot_product_attention(q, keys, values, causal_lower_right(q.size(2), keys.size(2)))

# %% tags=["wrong"] turn=1 says="All ranks have to call `pass_on` equally often"
def ring(q, k, v):                              # each rank passes on as long as it attends
    outs = [attend(q, k, v, True)[0]]
    for _ in range(rank):
        k, v = pass_on(k, v)
        outs.append(attend(q, k, v, False)[0])
    return sum(outs) / len(outs)

# %% tags=["wrong"] turn=1 says="weighted by its share"
def ring(q, k, v):                              # the mean of the pieces
    outs = [attend(q, k, v, True)[0]]
    for step in range(1, world):
        k, v = pass_on(k, v)
        outs += [attend(q, k, v, False)[0]] if step <= rank else []
    return sum(outs) / len(outs)

# %% tags=["wrong"] turn=1 says="a later rank's part is left out"
def ring(q, k, v):
    pairs = [attend(q, k, v, causal=True)]
    for step in range(1, world):
        k, v = pass_on(k, v)
        pairs.append(attend(q, k, v, causal=False))
    outs, sums = map(torch.stack, zip(*pairs))
    return (sums.softmax(0) * outs).sum(0)

# %% tags=["wrong"] turn=1 says="the rank's own part needs causal=True"
def ring(q, k, v):
    pairs = [attend(q, k, v, causal=False)]
    for step in range(1, world):
        k, v = pass_on(k, v)
        pairs += [attend(q, k, v, causal=False)] if step <= rank else []
    outs, sums = map(torch.stack, zip(*pairs))
    return (sums.softmax(0) * outs).sum(0)

# %% tags=["wrong"] turn=1 says="Earlier keys are not seen"
def ring(q, k, v):
    pairs = [attend(q, k, v, causal=True)]
    for step in range(1, world):
        k, v = pass_on(k, v)
        pairs += [attend(q, k, v, causal=True)] if step <= rank else []
    outs, sums = map(torch.stack, zip(*pairs))
    return (sums.softmax(0) * outs).sum(0)

# %% tags=["wrong"] turn=1 says="which `pass_on` returns"
def ring(q, k, v):                              # what came from the rank before is thrown away
    pairs = [attend(q, k, v, True)]
    for step in range(1, world):
        pass_on(k, v)
        pairs += [attend(q, k, v, False)] if step <= rank else []
    outs, sums = map(torch.stack, zip(*pairs))
    return (sums.softmax(0) * outs).sum(0)

# %% tags=["wrong"] turn=1 says="with causal=False"
def ring(q, k, v):                              # the own part alone
    return attend(q, k, v, causal=True)[0]

# %% tags=["wrong"] turn=1 says="stop after world - 1 passes"
def ring(q, k, v):
    pieces = [(k, v)]
    for _ in range(world):
        pieces.append(pass_on(*pieces[-1]))
    keys, values = (torch.cat(parts[: rank + 1][::-1], 2) for parts in zip(*pieces))
    return F.scaled_dot_product_attention(q, keys, values, causal_lower_right(q.size(2), keys.size(2)))

# %% tags=["wrong"] turn=1 says="without the queries"
def ring(q, k, v):                              # the queries go around, too
    pieces = [(q, k, v)]
    for _ in range(world - 1):
        pieces.append(pass_on(*pieces[-1]))
    keys, values = (torch.cat(parts[: rank + 1][::-1], 2) for parts in list(zip(*pieces))[1:])
    return F.scaled_dot_product_attention(q, keys, values, causal_lower_right(48, 48 * (rank + 1)))

# %% tags=["wrong"] turn=1 says="pass on keys and values"
def ring(q, k, v):                              # the values stay
    keys = [k]
    for _ in range(world - 1):
        keys += pass_on(keys[-1])
    keys, values = torch.cat(keys[: rank + 1][::-1], 2), v.repeat(1, 1, rank + 1, 1)
    return F.scaled_dot_product_attention(q, keys, values, causal_lower_right(48, 48 * (rank + 1)))

# %% tags=["wrong"] turn=1 says="Too few parts go around"
def ring(q, k, v):                              # a gather
    keys, values = (DTensor.from_local(t, mesh, [Shard(2)]).full_tensor()[:, :, : 48 * (rank + 1)] for t in (k, v))
    return F.scaled_dot_product_attention(q, keys, values, causal_lower_right(48, 48 * (rank + 1)))

# %% [markdown]
# ## Who has the work
#
# A causal mask gives a late token more keys than an early one. The pairs of queries and keys on each rank:

# %% jupyter={"source_hidden": true}
WORLD = len(ranks.get("0"))
ROW = [piece // 2 for piece in range(2 * WORLD)]                            # the rank of each piece
BALANCED = [min(piece, 2 * WORLD - 1 - piece) for piece in range(2 * WORLD)]
fig, panels = plots.figure(2, width=7.0, height=2.9)
for axes, (name, owners) in zip(panels, {"parts in a row": ROW, "an early and a late piece": BALANCED}.items()):
    pairs = [sum(2 * i + 1 for i, owner in enumerate(owners) if owner == r) for r in range(WORLD)]     # of pieces
    assert max(pairs) * WORLD / sum(pairs) == (2 - 1 / WORLD if owners == ROW else 1)
    axes.barh(range(2 * WORLD), range(1, 2 * WORLD + 1), height=1, color=[plots.RANK_COLORS[r] for r in owners])
    for r, count in enumerate(pairs):
        axes.text(WORLD * 1.15, r * 0.9, f"rank {r}: {count / sum(pairs):.0%}", color=plots.RANK_COLORS[r], weight="bold")
    axes.set(title=name, xlim=(0, 2 * WORLD), ylim=(2 * WORLD - 0.5, -0.5), xticks=[], yticks=[], xlabel="keys")
    axes.spines[:].set_visible(False)
panels[0].set_ylabel("queries")
plots.show(fig, alt="Pairs that each rank computes: most on the last rank, or equally many on each.")

# %% [markdown]
# In a row, the last of n ranks has 2 - 1/n times the mean, and the others wait for it. With an early and a late
# piece each rank has as much. With such a cut `gathered` is wrong and says nothing: the last row has
# loss 8.3363, norm 0.6252. `balanced` puts the pieces back in order and attends twice; turn 2 trains with it.

# %%
# %%ranks
def in_order(tensor):                                       # keys or values of all ranks, as in the sequence
    tensor = DTensor.from_local(tensor, mesh, [Shard(2)]).full_tensor(grad_placements=[Partial()])
    pieces = tensor.chunk(2 * world, 2)                     # numbers 0, 2n - 1, 1, 2n - 2, ...
    return torch.cat([*pieces[::2], *pieces[1::2][::-1]], 2)


def balanced(module, query, key, value, mask, scaling=None, **options):
    key, value = (in_order(t).repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    n, outs = query.size(2) // 2, []                        # tokens of a piece
    for part, piece in zip(query.chunk(2, 2), (rank, 2 * world - 1 - rank)):
        end = n * (piece + 1)
        bias = causal_lower_right(n, end)
        outs.append(F.scaled_dot_product_attention(part, key[:, :, :end], value[:, :, :end], bias, scale=scaling))
    return torch.cat(outs, 2).transpose(1, 2), None


AttentionInterface.register("balanced", balanced)

# %% [markdown]
# ## The mask that is not there
#
# `gathered` and `balanced` are for full attention alone. transformers makes masks only for attention functions that
# have a mask function of the same name; yours gets `None`, unless you register one with `AttentionMaskInterface` or
# give the model a mask of four dimensions. Then whatever the mask should have hidden is seen: padding, other documents
# of a packed sequence, tokens outside of a **sliding window** of, here, 16 tokens:

# %% tags=["window"]
# %%ranks 0
from transformers import MistralConfig, MistralForCausalLM


def full(module, query, key, value, mask, scaling=None, **options):
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register("full", full)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, sliding_window=16)
mistral = MistralForCausalLM(config).to(device)
ids, found = torch.randint(64, (1, 128), device=device), {}
for name in ("eager", "full"):
    mistral.set_attn_implementation(name)
    found[name] = mistral(input_ids=ids, labels=ids)
differs = (found["full"].logits - found["eager"].logits).abs().amax((0, 2)) > 1e-4
losses, first = [f"{out.loss:.3f}" for out in found.values()], differs.nonzero()[0].item()

# %%
losses, first = ranks.get("rank == 0 and (losses, first)")[0]
assert first == 16
Table(["attention", "loss", "wrong logits"], [["eager", losses[0], "none"], ["full", losses[1], f"from token {first} on"]])

# %% [markdown]
# In an untrained model the loss does not tell. Accelerate's context parallelism had this fault, too, until it
# [began to refuse such models](https://github.com/huggingface/accelerate/pull/4177). transformers passes
# `sliding_window` and `dropout` to the function, which can honour them or raise an error; `balanced` does neither.
#
# ## Your turn 2 · Cut a batch
#
# Write what stands around `balanced` in a training. `my_cut(ids, labels)` gets a whole sequence, `labels` as
# transformers wants them (equal to `ids`, -100 where nothing is to be learned, *not* shifted), and returns
# this rank's part, its early and then its late piece: ids, targets and places, each i64[1, tokens / world].
# The target of a token is the label of the next one. `my_loss(total, targets)` gets the sum of the cross
# entropies over this rank's targets and returns the loss for `backward`.

# %% jupyter={"source_hidden": true}
# %%ranks
LENGTH = VOCABULARY = 48 * world
torch.manual_seed(0)
some_ids = torch.randperm(VOCABULARY, device=device)[None]                      # each id once
place_of = some_ids[0].argsort()                            # the place of each id
some_labels = some_ids.clone()
some_labels[:, : LENGTH // 3] = some_labels[:, :: 2 * world + 1] = -100              # a prompt, and gaps
some_labels[0, 0] = some_ids[0, 0]                          # the target of no token: a roll is found out
next_label = F.pad(some_labels[0, 1:], (0, 1), value=-100)
expected = torch.arange(LENGTH, device=device).view(2 * world, -1)[[rank, -1 - rank]].flatten()


def small_llama(attention):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).to(device)
    model.set_attn_implementation(attention)
    return model


alone = small_llama("eager")
alone(input_ids=some_ids, labels=some_labels).loss.backward()
RIGHT = [p.grad for p in alone.parameters()]


@turn(2, {
    "tokens out of place": exactly(0, "`balanced` computes an early and a late piece, in this order: rank and 2 * world - 1 - rank out of 2 * world."),
    "wrong places": exactly(0, "A place counts from the start of the whole sequence, also on the later ranks."),
    "wrong targets": exactly(0, "A target is the label of the next token, which may be on another rank (the last token's is -100): shift before the cut."),
    "gradients 1 / world of the right ones": exactly(0, "FSDP averages over the ranks: multiply the loss by world."),
    "gradients that differ otherwise": exactly(0, "The denominator has to be the number of labels of all ranks, without those that are -100."),
})
def score_cut(my_cut, my_loss):
    part = my_cut(some_ids.clone(), some_labels.clone())
    if not isinstance(part, tuple | list) or [getattr(t, "shape", None) for t in part] != [(1, 48)] * 3:
        raise NotYet("Return three tensors, each i64[1, tokens / world].")
    ids, targets, places = part
    true = place_of[ids[0]]
    if torch.equal(targets[0], true):
        raise NotYet("Return them in the order ids, targets, places.")
    model = small_llama("balanced")
    for block in [*model.model.layers, model]:
        fully_shard(block, mesh=mesh)
    logits = model(input_ids=ids, position_ids=places, use_cache=False).logits[0]
    loss = my_loss(F.cross_entropy(logits, targets[0], reduction="sum"), targets)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise NotYet("Return a loss from `my_loss` that has a backward.")
    loss.backward()
    wrong = {
        "tokens out of place": int((true != expected).sum()),
        "wrong places": int((places[0] != true).sum()),
        "wrong targets": int((targets[0] != next_label[true]).sum()),
    }
    dist.all_reduce(amiss := torch.tensor(sum(wrong.values()), device=device))
    pairs = [(p.grad.full_tensor(), grad) for p, grad in zip(model.parameters(), RIGHT)]
    differ, small = (sum(not torch.allclose(n * g, r, rtol=1e-3, atol=1e-6) for g, r in pairs) for n in (1, world))
    found = [None, None] if amiss else [0, differ] if small else [differ, 0]
    return wrong | dict(zip(["gradients 1 / world of the right ones", "gradients that differ otherwise"], found))


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
def my_cut(ids, labels):                        # a table of pieces
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    places = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    return tuple(t.view(2 * world, -1)[[rank, -1 - rank]].view(1, -1) for t in (ids, targets, places))
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
    dist.all_reduce(mean := (targets != -100).sum() / world)
    return total / mean

# %% tags=["right"] turn=2
def my_cut(ids, labels):                        # from both ends
    n, end = ids.size(1) // (2 * world), ids.size(1)
    stack = torch.stack([ids[0], F.pad(labels[0], (0, 1), value=-100)[1:], torch.arange(end, device=ids.device)])
    return torch.cat([stack[:, rank * n :][:, :n], stack[:, : end - rank * n][:, -n:]], 1)[:, None].unbind()
def my_loss(total, targets):
    count = DTensor.from_local((targets != -100).sum(), mesh, [Partial()]).full_tensor()
    return world * total / count

# %% tags=["wrong"] turn=2 says="number of labels of all ranks"
my_cut = lambda ids, labels: (ids[:, expected], next_label[None, expected], expected[None])
my_loss = lambda total, targets: total / (targets != -100).sum()                # a mean of means

# %% tags=["wrong"] turn=2 says="multiply the loss by world"
my_cut = lambda ids, labels: (ids[:, expected], next_label[None, expected], expected[None])
my_loss = lambda total, targets: total / (next_label != -100).sum()             # the labels of all ranks

# %% tags=["wrong"] turn=2 says="without those that are -100"
my_cut = lambda ids, labels: (ids[:, expected], next_label[None, expected], expected[None])
my_loss = lambda total, targets: total / targets.numel()                        # all tokens

# %% tags=["wrong"] turn=2 says="from the start of the whole sequence"
my_cut = lambda ids, labels: (ids[:, expected], next_label[None, expected], torch.arange(48, device=ids.device)[None])
my_loss = lambda total, targets: total / 24                                     # each rank counts from 0

# %% tags=["wrong"] turn=2 says="an early and a late piece"
my_cut = lambda *_: [t.chunk(world)[rank][None] for t in (some_ids[0], next_label, expected.new_tensor(range(LENGTH)))]
my_loss = lambda total, targets: total / 24                                     # parts in a row

# %% tags=["wrong"] turn=2 says="in this order"
late = expected.view(2, -1).flip(0).flatten()
my_cut = lambda ids, labels: (ids[:, late], next_label[None, late], late[None])
my_loss = lambda total, targets: total / 24                                     # the late piece first

# %% tags=["wrong"] turn=2 says="in the order ids, targets, places"
my_cut = lambda ids, labels: (ids[:, expected], expected[None], next_label[None, expected])
my_loss = lambda total, targets: total / 24

# %% tags=["wrong"] turn=2 says="shift before the cut"
my_cut = lambda ids, labels: (ids[:, expected], labels.roll(-1, 1)[:, expected], expected[None])
my_loss = lambda total, targets: total / 24                                     # the first label is the last's target

# %% [markdown]
# ## Several sequences, and PyTorch's own
#
# n ranks that share a sequence take n times fewer sequences in a step: accumulate n times as many steps. Or let half
# of an even number of ranks share each of two sequences; FSDP still shards over all. This changes the script with the cut:
#
# ```diff
#  mesh = init_device_mesh(device, (world,))                    # without it a Mac would take its GPU
# +ways = init_device_mesh(device, (2, world // 2), mesh_dim_names=("dp", "cp"))
# +cp, cp_rank, cp_mesh = world // 2, ways.get_local_rank("cp"), ways["cp"]
# @@
# -    n, end = query.size(2), query.size(2) * (rank + 1)       # this rank has n tokens, the last is end - 1
# -    parts = [DTensor.from_local(t, mesh, [Shard(2)]) for t in (key, value)]
# +    n, end = query.size(2), query.size(2) * (cp_rank + 1)    # this rank has n tokens, the last is end - 1
# +    parts = [DTensor.from_local(t, cp_mesh, [Shard(2)]) for t in (key, value)]
# @@
# +    torch.manual_seed(ways.get_local_rank("dp"))             # another sequence for each half
#      for step in range(2):
# @@
# -            ids, places, targets = (t.chunk(world, 1)[rank].clone() for t in (ids, places, targets))
# +            dist.all_reduce(count, group=ways.get_group("dp"))           # the labels of both
# +            ids, places, targets = (t.chunk(cp, 1)[cp_rank].clone() for t in (ids, places, targets))
# ```
# ```text
# a part per rank  0.83 MiB, loss 8.3323, norm 0.3749
# ```
#
# **Which one?** Full attention and a few ranks of one host: `balanced`. Put `in_order`, `balanced` and the line that
# registers it before `train` of the script, `"balanced"` in the last call, and for the part
# `t.view(2 * world, -1)[[rank, -1 - rank]].view(1, -1)`; with two sequences, write `cp`, `cp_rank` and `cp_mesh` for
# `world`, `rank` and `mesh` in all of these. If one block's keys and values do not fit: a ring with a backward (turn 1's
# has none). PyTorch's `context_parallel` is a prototype for GPUs alone, not run here: forward *and* backward belong
# inside it, it gathers unless you call `set_rotate_method("alltoall")`, and its attention has to get no mask.
# With a window, packing or padding: none of these without a mask of your own.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | out of memory at the loss, or in the first step of backward | logits of a large vocabulary | the loss in pieces |
# | memory grows with the square of the length | scores: attention written out, or a kernel that fell back; or a mask | `set_attn_implementation("sdpa")`, and `sdpa_kernel` with all kernels but `MATH` |
# | `No available kernel` | none of the kernels you allow takes these inputs | change the inputs, or allow memory-efficient attention |
# | `aten.embedding.default got mixed torch.Tensor and DTensor` | `fully_shard` was called on the model inside `WithLoss` | call it on the blocks and on `WithLoss` |
# | another loss than the model's own | its logits are not `lm_head(hidden)`: Gemma 2 caps them, Cohere and Granite scale them | do so in `head` |
# | the first loss is right, the norm of the gradients is not | gradients of gathered keys not summed | `grad_placements=[Partial()]` |
# | a loss that is plausible, a model that is worse at length | the mask was dropped; places that begin at 0 on each rank (the last row then has loss 8.3368 and norm 0.6443) | compare logits, or each gradient, with one process, beyond the window |

# %% [markdown]
# ## The rule
#
# Fused attention, a loss in pieces, checkpoints; then cut the sequence. Shift before you cut, count places and
# labels over the whole sequence, and compare each gradient of a step, not only the norm, with one process.
#
# [← lesson 20](20_experts.ipynb) · [lesson 22 →](22_fewer_bits.ipynb)
