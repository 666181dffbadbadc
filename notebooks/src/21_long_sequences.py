# %% [markdown]
# # 21 · Long sequences
#
# The activations of **one** sequence don't fit on a rank, so a smaller batch does not help. What does? **In
# this order: attention that keeps no scores, a loss that keeps no logits, a checkpoint around each block. Then
# cut the sequence over the ranks that already share the weights.** Only attention has to know of the cut.

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots

fig, (axes,) = plots.figure(width=9.2, height=2.7)
STEPS = ["embedding", "q, k, v", "attention", "MLP, norms", "logits, loss"]
for r, color in enumerate(plots.RANK_COLORS[:4]):
    axes.text(-0.1, r, f"rank {r}:\ntokens {256 * r}-{256 * r + 255}", ha="right", va="center", fontsize=8)
    for place, name in enumerate(STEPS):
        look = {"color": "white", "ha": "center", "va": "center", "fontsize": 8}
        if name == "attention":
            for piece in range(4):
                seen = plots.RANK_COLORS[piece] if piece <= r else plots.FAINT
                axes.add_patch(Rectangle((2 + 0.23 * piece, r - 0.4), 0.21, 0.8, color=seen))
        else:
            axes.add_patch(Rectangle((place, r - 0.4), 0.9, 0.8, color=color))
            axes.text(place + 0.45, r, name, **look)
axes.text(2.45, -0.62, "keys and values of", ha="center", fontsize=8)
axes.set(xlim=(-1.1, 5), ylim=(3.5, -0.95), xticks=[], yticks=[])
axes.spines[:].set_visible(False)
plots.show(fig, alt="Four ranks with a quarter of a sequence each; in attention a rank needs the earlier keys.")

# %% [markdown]
# A drawing of one sequence on four ranks, a color for each quarter: **context parallelism**. Nearly everything
# in a transformer treats each token by itself, so a rank computes it for its own tokens. In attention a token
# looks at the keys and values of all tokens before it, and those of other ranks have to come from there.

# %% tags=["card"]
lesson.card(
    21,
    learn="find what grows with the length, remove it, and cut one sequence over ranks with the right gradients",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 2](02_activation_checkpointing.ipynb)",
    minutes=(1, 11, 30),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains a small Llama in four ways on
# the same sequence of 1,024 tokens, and counts the bytes that autograd keeps for the backward pass on rank 0.
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
#         ids = torch.randint(4096, (1, 1024))                 # one sequence: the same on every rank
#         places = torch.arange(1024)[None]
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
#         with saved_tensors_hooks(keep, lambda tensor: tensor):
#             options = {"labels": targets, "shift_labels": targets, "num_items_in_batch": count}
#             loss = model(ids, position_ids=places, use_cache=False, **options).loss
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
# eager attention     101.93 MiB kept, loss 8.3376, norm 0.6003
# fused attention      37.99 MiB kept, loss 8.3376, norm 0.6003
# and checkpoints      17.77 MiB kept, loss 8.3376, norm 0.6003
# and a part per rank   4.44 MiB kept, loss 8.3376, norm 0.6003
# ```
#
# Loss and gradients stay the same. FSDP shards weights, gradients and the optimizer's state, but no
# activations. So without the cut four ranks of FSDP do not help a single sequence at all. (They compute it
# four times here; yours would have other sequences.) With it each rank keeps a quarter. Of the 17.77 MiB, 16
# are logits, which the loss keeps; below they go, too.
#
# `gathered` is an attention function for any transformers model: `full_tensor` gathers the keys and values of
# all ranks, and `causal_lower_right` says that the queries are the *last* of these tokens. It knows nothing
# of FSDP, so it also works under FSDP1, which averages gradients as FSDP2 does.
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
warnings.filterwarnings("ignore", ".*(kernel|kernels) .*")      # why a kernel was refused


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
from torch.nn.attention import SDPBackend, sdpa_kernel

attention, FLASH = F.scaled_dot_product_attention, SDPBackend.FLASH_ATTENTION


def inputs(length, **options):                  # queries, keys, values: bf16[1, heads, tokens, 16]
    return [torch.randn(1, 4, length, 16, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)]


def kernel(*inputs, **options):                 # a kernel that is forced raises an error where it cannot run
    for backend in (FLASH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        try:
            with sdpa_kernel(backend):
                attention(*inputs, **options)
            return backend.name.lower().removesuffix("_attention")
        except RuntimeError:
            pass


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
    "and enable_gqa=True, half as many k and v": ((q, k[:, :2], v[:, :2]), {"is_causal": True, "enable_gqa": True}),
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
fig, (axes,) = plots.figure(width=6.5, height=2.6)
for (name, sizes), color in zip(kept.items(), plots.RANK_COLORS):
    axes.loglog(lengths, sizes, "o-", color=color, label=name)
axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
axes.minorticks_off()
axes.set(xlabel="tokens", ylabel="MiB kept")
axes.legend()
plots.show(fig, alt="Kept bytes against length: four times for twice the tokens, or twice with a fused kernel.")

# %%
Table(["attention on 1,024 tokens, with", "kernel", "MiB kept"], [[*row[:2], f"{row[2]:.1f}"] for row in taken])

# %% [markdown]
# At 2,048 tokens the fused kernel keeps a fraction of what the scores take. But it is not always taken, and
# nothing is said: on a CPU a learned bias, dropout or narrower values bring the scores back, and a mask is
# kept itself, one row of numbers per query. **Force the kernel, and the fallback becomes an error**: `with
# sdpa_kernel(SDPBackend.FLASH_ATTENTION):`. On GPUs the lists differ: flash takes dropout, but no mask and no
# float32; the memory-efficient kernel takes both; cuDNN has a third
# ([documentation](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html);
# `torch.backends.cuda.can_use_flash_attention(params, debug=True)` gives the reason). In transformers you
# choose by `attn_implementation=` or `model.set_attn_implementation("sdpa")`; `model.config._attn_implementation`
# says what it is.
#
# ## A loss that keeps no logits
#
# Logits have a number for each token *and* each word of the vocabulary, and a step holds about three such
# tensors. But the loss is a sum over tokens. So compute the head and the loss for some tokens at a time,
# under a checkpoint. `WithLoss` does it for any transformers decoder. FSDP's root has to be this module,
# because the loss reads `lm_head`, which is a shard outside of the root's forward.

# %%
# %%ranks
from torch.utils.checkpoint import checkpoint


class WithLoss(nn.Module):
    def __init__(self, model, pieces):
        super().__init__()
        self.model, self.pieces = model, pieces

    def head(self, hidden, targets):                        # f32[tokens, width], i64[tokens] -> their sum
        return F.cross_entropy(self.model.lm_head(hidden), targets, reduction="sum")

    def forward(self, ids, targets, **options):
        hidden = self.model.model(ids, **options).last_hidden_state.flatten(0, 1)
        pairs = zip(hidden.chunk(self.pieces), targets.flatten().chunk(self.pieces))
        return sum(checkpoint(self.head, *pair, use_reentrant=False) for pair in pairs)


# %% jupyter={"source_hidden": true}
# %%ranks 0
from types import SimpleNamespace

from fsdp_utils.lessons.meter import Meter

TOKENS, WIDTH, PIECES = 512, 64, (1, 2, 4, 8, 16, 32)


class Head(nn.Module):                                      # in place of a model: its hidden states are given
    def __init__(self, vocabulary):
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False, device=device)
        self.hidden = torch.randn(1, TOKENS, WIDTH, device=device, requires_grad=True)

    def model(self, ids):
        return SimpleNamespace(last_hidden_state=self.hidden)


def peak(vocabulary, loss_of):
    """The peak of a step, in logits, and the gradient of the weight."""
    head, targets = Head(vocabulary), torch.randint(vocabulary, (1, TOKENS), device=device)
    with Meter([head.lm_head.weight, head.hidden, targets]) as meter:
        loss_of(head, targets).backward()
    logits = 4 * TOKENS * vocabulary
    return (meter.peak_tensor_bytes - meter.held_bytes) / logits, head.lm_head.weight.grad


def plain(head, targets):
    return F.cross_entropy(head.lm_head(head.hidden[0]), targets[0], reduction="sum")


def of_torch(head, targets):
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(head.hidden[0], head.lm_head.weight, targets[0], reduction="sum", options=options)


peaks, own, wrong = {}, {}, []
for vocabulary in (1024, 4096, 16384):
    top, right = peak(vocabulary, plain)
    ways = [lambda head, targets, n=n: WithLoss(head, n)(targets, targets) for n in PIECES[1:]]
    found = [peak(vocabulary, way) for way in [*ways, of_torch]]
    wrong += [not torch.allclose(right, grad, rtol=1e-3, atol=1e-4) for _, grad in found]
    *pieced, own[vocabulary] = [size for size, _ in found]
    peaks[vocabulary] = [top, *pieced]

# %%
peaks, own, PIECES, wrong = ranks.get("rank == 0 and (peaks, own, PIECES, wrong)")[0]
assert not any(wrong)                           # the gradients are those of the plain loss
assert all(2.9 < top[0] < 3.2 and top[4] < 0.4 for top in peaks.values())
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

# %% jupyter={"source_hidden": true} tags=["check"]
assert 4 * 256 * 1024 * 32 * 1024 == 32 * 2**30             # the float32 logits of a long sequence

# %% [markdown]
# Without pieces the peak is three times the logits, with 16 less than a third of them. At a vocabulary of
# 256k, 32k tokens have 32 GiB of float32 logits (calculated), so without pieces this is the first thing that
# doesn't fit. PyTorch 2.13 has its own, `F.linear_cross_entropy` with `nn.LinearCrossEntropyOptions()`
# (dotted): it needs `lm_head.weight` in the root's forward as well, and computes gradients in forward.
#
# ## Gradients of gathered keys
#
# In backward a rank gets gradients for *all* keys, and each rank those from its own queries. They have to be
# added up. `full_tensor(grad_placements=[Partial()])` says so: its backward is a reduce-scatter. Without the
# argument DTensor takes the gradients for equal on all ranks, and each rank keeps its own.

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
assert errors["without it"][0] < 1e-5 and min(errors["without it"][1:]) > 0.05
say = lambda error: "below 0.001%" if error < 1e-5 else f"{error:.0%}"
Table(
    ["full_tensor", "queries", "keys", "values"],
    [[name, *map(say, found)] for name, found in errors.items()],
    note="Error of rank 0's gradients.",
)

# %% [markdown]
# No error is raised, the loss is right, and training goes on with wrong gradients.
#
# **Gather or ring.** A gather holds the keys and values of the whole sequence for the time of one layer; with
# grouped-query attention they are a small part of the activations. A **ring** passes them on instead, from
# rank to rank, and a rank holds one foreign part at a time: turn 1. Both send the same bytes in forward. A
# third way, [Ulysses](https://arxiv.org/abs/2309.14509), exchanges tokens for heads by an all_to_all, so it
# can use no more ranks than there are heads.
