"""What lesson 21 says of its script with one line changed, of PyTorch's own, and of a model of 8 billion."""

import ast
import functools
import re
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import plan
from tests import test_series
from tests.on_ranks import fake_group, on_ranks

STEM = "21_long_sequences"
TEXT = test_series.TEXTS[STEM]
LAST = re.compile(r'^train\("(?!a part per rank).*\n', re.MULTILINE)  # the calls before the last one

(CHANGES, FIFTH), (CHANGES_FOR_TWO, OF_TWO) = (
    [re.sub(r"^# ?", "", block, flags=re.MULTILINE) for block in blocks]
    for blocks in re.findall(r"# ```diff\n(.*?)# ```\n# ```text\n(.*?)# ```\n", TEXT, re.DOTALL)
)


def with_the_cut(code: str = "", changes: str = CHANGES) -> str:
    """Return the lesson's script, or another, with a diff of the lesson applied."""
    code = code or test_series.script(STEM)[0]
    for hunk in changes.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


SEED = 'torch.manual_seed(ways.get_local_rank("dp"))'
ONE_EACH = {  # two sequences again, without the cut: ranks 0 and 1 train on one, ranks 2 and 3 on the other
    "    for step in range(2):": "    torch.manual_seed(rank // 2)\n    for step in range(2):",
    '"gathered", pieces=16': '"sdpa", pieces=16',
    "cut=True": "cut=False",
}
LOCAL_PLACES = {
    "(ids, places, targets))": "(ids, places, targets)); places = torch.arange(ids.size(1))[None]"
}
PIECES = "t.view(2 * world, -1)[[rank, -1 - rank]].view(1, -1)"
EARLY_AND_LATE = {"t.chunk(world, 1)[rank].clone()": PIECES}
(FUNCTIONS,) = re.findall(r"^def in_order.*?(?=\n# %% )", TEXT, re.MULTILINE | re.DOTALL)
BALANCED = EARLY_AND_LATE | {
    "def train(": f"{FUNCTIONS}\n\ndef train(",
    '"gathered", pieces': '"balanced", pieces',
}


def for_two(code: str) -> str:
    """Name the ranks that share a sequence, in what `balanced` adds to the script."""
    for name, new in {"world": "cp", "rank": "cp_rank", "mesh": "cp_mesh"}.items():
        code = re.sub(rf"\b{name}\b", new, code)
    return code


BALANCED_FOR_TWO = BALANCED | {
    "t.chunk(cp, 1)[cp_rank].clone()": for_two(PIECES),
    "def train(": f"{for_two(FUNCTIONS)}\n\ndef train(",
}
del BALANCED_FOR_TWO["t.chunk(world, 1)[rank].clone()"]


# by what is changed: the change, and what the last row says then
CHANGED: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, FIFTH.partition("  ")[2].strip()),
    "gradients not summed": ({"grad_placements=[Partial()]": ""}, "loss 8.3374, norm 0.5155"),
    "early and late pieces": (EARLY_AND_LATE, "loss 8.3363, norm 0.6252"),
    "balanced": (BALANCED, "loss 8.3368, norm 0.6446"),
    "balanced, two sequences": (BALANCED_FOR_TWO, OF_TWO.partition("MiB, ")[2].strip()),
    "local places": (LOCAL_PLACES, "loss 8.3368, norm 0.6443"),
    "two sequences": ({}, OF_TWO.partition("  ")[2].strip()),
    "the same sequence twice": ({SEED: "pass"}, "loss 8.3368, norm 0.6446"),
    "two sequences, each on one rank": (ONE_EACH, OF_TWO.partition("MiB, ")[2].strip()),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the last row by change. One process group runs all: most of a first run is what it does once."""
    codes = []
    for name, (changes, _) in CHANGED.items():
        code = LAST.sub("", with_the_cut())
        if name in ("two sequences", "the same sequence twice", "balanced, two sequences"):
            code = with_the_cut(code, CHANGES_FOR_TWO)
        for old, new in changes.items():
            assert code.count(old) == 1, old
            code = code.replace(old, new)
        codes.append(code)
    codes[1:] = [
        re.sub(r"^dist\.init_process_group\(.*\n", "", code, flags=re.MULTILINE) for code in codes[1:]
    ]
    codes[:-1] = [code.replace("dist.destroy_process_group()\n", "") for code in codes[:-1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("script"))
        lines = test_series.printed("\n".join(codes), timeout=200).splitlines()
    assert len(lines) == len(CHANGED)
    return dict(zip(CHANGED, lines, strict=True))


@pytest.mark.timeout(240)  # for all scripts; a quarter of a minute where the cores are free
@pytest.mark.parametrize("name", CHANGED)
def test_the_last_row_of_the_script_with_a_change(name: str, rows: dict[str, str]) -> None:
    says = CHANGED[name][1]
    assert rows[name].startswith("a part per rank")
    assert says in rows[name]
    assert says in TEXT or says.replace(", norm", " and norm") in TEXT


def test_the_first_figure_has_the_bytes_that_the_script_prints() -> None:
    (drawn,) = re.findall(r"^KEPT = (.*)$", TEXT, re.MULTILINE)
    printed = re.findall(r"^(.+?) +([\d.]+) MiB", test_series.script(STEM)[1] + FIFTH, re.MULTILINE)
    assert ast.literal_eval(drawn) == {name: float(mib) for name, mib in printed}


# ---- PyTorch's own


@on_ranks(2)
def test_context_parallel_cuts_an_early_and_a_late_piece_or_a_row_and_has_no_attention_for_a_cpu() -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    for length, held in ((16, [[0, 1, 2, 3, 12, 13, 14, 15], [*range(4, 12)]]), (6, [[0, 1, 2], [3, 4, 5]])):
        places = torch.arange(length)
        with context_parallel(mesh, buffers=[places], buffer_seq_dims=[0]):
            assert places.tolist() == held[rank]
    q = torch.randn(1, 4, 16, 16)
    cut = context_parallel(mesh, buffers=[torch.ones(16)], buffer_seq_dims=[0])
    with cut, pytest.raises(NotImplementedError) as raised:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert "flash_attention_for_cpu.default does not have a sharding strategy registered" in str(raised.value)


@pytest.mark.filterwarnings("ignore")  # why each kernel cannot run
def test_without_math_a_kernel_that_cannot_run_is_an_error() -> None:
    attend = F.scaled_dot_product_attention
    q, k, v = torch.randn(3, 1, 4, 64, 16, dtype=torch.bfloat16)
    bias = torch.zeros(64, 64, dtype=torch.bfloat16, requires_grad=True)
    fused = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    calls = [
        partial(attend, q, k, v, dropout_p=0.1),
        partial(attend, q, k, v[..., :8]),
        partial(attend, q, k, v, bias),
    ]
    with sdpa_kernel(fused):
        attend(q, k, v, is_causal=True)
        for call in calls:
            with pytest.raises(RuntimeError, match="No available kernel"):
                call()
    for call in calls:
        call()


# ---- the loss in pieces, and a model of 8 billion parameters


(CLASS,) = re.findall(r"^class WithLoss.*?(?=\n\n\n)", test_series.script(STEM)[0], re.MULTILINE | re.DOTALL)
scope: dict[str, Any] = {"__name__": __name__, "nn": nn, "F": F, "checkpoint": checkpoint}
exec(CLASS, scope)
WithLoss: Any = scope["WithLoss"]

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
)  # fmt: skip


@functools.cache
def llama_3_8b() -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(LLAMA_3_8B)


@functools.cache  # the table asks for some of the same
def planned(tokens: int, pieces: int, checkpointing: str | None) -> Any:
    """Plan one sequence on each of eight ranks."""
    return plan(
        WithLoss(llama_3_8b(), pieces),
        world_size=8,
        batch_size=8,
        seq_len=tokens,
        checkpointing=checkpointing,
        inputs=lambda batch, length: (torch.ones(batch, length or 1, dtype=torch.long),) * 2,
        loss=lambda model, batch: model(*batch, use_cache=False),
    )


@pytest.mark.parametrize(
    ("tokens", "pieces", "checkpointing", "gib"),
    [
        (32768, 1, None, 258), (32768, 16, None, 215), (32768, 16, "full", 31), (65536, 16, "full", 47),
        (81920, 16, "full", 55), (98304, 16, "full", 64), (114688, 16, "full", 72), (131072, 16, "full", 80),
        (16384, 16, "full", 24),
    ],
)  # fmt: skip
def test_a_llama_of_8_billion_needs_the_cut_beyond_98304_tokens(
    tokens: int, pieces: int, checkpointing: str | None, gib: int
) -> None:
    found = planned(tokens, pieces, checkpointing)
    assert int(found.peak_allocated_gib + 0.5) == gib
    assert found.fits == (gib < 70)
    assert (found.verdict == "fits") == (1.12 * found.peak_reserved_gib <= found.available_gib)
    said = TEXT.partition("## When you need the cut")[2].partition("# ## ")[0]
    if tokens > 98304:
        assert "it has room for 98,304 tokens at most" in said
        return
    assert re.search(rf"\b{gib}\b", said)
    row = rf"\| {found.peak_reserved_gib:.1f} GiB[^|]*\| {found.verdict} \|"
    assert tokens == 32768 or re.search(row, said)


@pytest.mark.parametrize(
    "row", re.findall(r"^# \| ([\d,]+) \| ([\d.]+) GiB \| ([\d.]+) GiB \|$", TEXT, re.MULTILINE)
)
def test_the_loss_in_pieces_pays_where_a_rank_has_more_tokens_than_the_width(
    row: tuple[str, ...],
) -> None:
    peaks = [planned(int(row[0].replace(",", "")), pieces, "full").peak_allocated_gib for pieces in (1, 16)]
    assert [f"{gib:.1f}" for gib in peaks] == list(row[1:])


def test_what_the_cut_sends_is_calculated() -> None:
    """For Llama 3 8B: 8 heads of 128 for keys, and for values, in bf16; the weights of a block."""
    keys_and_values = 2 * 131072 * 8 * 128 * 2
    assert keys_and_values == 2**29  # 0.5 GiB, of 8 of 32 heads
    weights = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert [round(size * 7 / 8 / 2**20) for size in (keys_and_values, weights)] == [448, 364]


def test_hundreds_of_pieces_cost_precision_in_bf16() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = (
        torch.randn(4096, 128),
        torch.randn(1024, 128) / 50,
        torch.randint(1024, (4096,)),
    )
    hidden, weight = hidden.bfloat16(), weight.bfloat16()

    def gradient(dtype: torch.dtype, pieces: int) -> torch.Tensor:
        head = weight.to(dtype).clone().requires_grad_()
        pairs = zip(hidden.to(dtype).chunk(pieces), targets.chunk(pieces), strict=True)
        losses = [F.cross_entropy(F.linear(some, head).float(), of, reduction="sum") for some, of in pairs]
        (given,) = torch.autograd.grad(torch.stack(losses).sum() / 4096, head)
        return given.float()

    right = gradient(torch.float32, 1)
    once, few, many = ((gradient(torch.bfloat16, n) - right).norm() / right.norm() for n in (1, 16, 256))
    assert few < 4 * once < many


class PyTorchsOwn(WithLoss):
    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden, weight = self.model.model(ids).last_hidden_state.flatten(0, 1), self.model.lm_head.weight
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden, weight, targets.flatten(), reduction="sum", options=options)


@on_ranks(2)
def test_pytorchs_own_loss_in_the_roots_forward_gives_the_gradients_of_the_loss_in_pieces() -> None:
    mesh, grads = init_device_mesh("cpu", (2,)), []
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    for kind, pieces in ((WithLoss, 1), (WithLoss, 4), (PyTorchsOwn, 1)):
        torch.manual_seed(0)
        model: Any = fully_shard(kind(LlamaForCausalLM(config), pieces), mesh=mesh)
        ids, targets = torch.randint(64, (2, 1, 32))
        model(ids, targets).backward()
        grads.append(model.model.lm_head.weight.grad.full_tensor())
    assert grads[0].abs().max() > 0.1
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-3, atol=1e-4)


def test_causal_lower_right_is_written_out_on_a_cpu_unless_there_are_as_many_keys_as_queries() -> None:
    fused = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    q = torch.randn(1, 4, 32, 16, requires_grad=True)
    for kernels in (fused, [*fused, SDPBackend.MATH]):
        for keys in (32, 64):
            k, kept = torch.randn(1, 4, keys, 16), list[torch.Tensor]()
            with sdpa_kernel(kernels), saved_tensors_hooks(kept.append, lambda _: torch.empty(0)):
                F.scaled_dot_product_attention(q, k, k, causal_lower_right(32, keys))
            assert ((32, keys) in [tensor.shape for tensor in kept]) == (keys == 64)


def test_transformers_makes_a_mask_of_places_that_jump() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    ids, places = torch.ones(1, 8, dtype=torch.long), torch.arange(8)[None]
    for jump, masked in ((0, False), (24, True)):
        with patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attend:
            model(ids, position_ids=places + jump * (places > 3), use_cache=False)
        assert (attend.call_args.kwargs["attn_mask"] is not None) == masked


def test_fully_shard_on_the_model_inside_is_an_error() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    model, ids = WithLoss(LlamaForCausalLM(config), 1), torch.ones(1, 8, dtype=torch.long)
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        for part in (model.model, model):
            fully_shard(part, mesh=mesh)
        with pytest.raises(
            RuntimeError, match=r"aten\.embedding\.default got mixed torch.Tensor and DTensor"
        ):
            model(ids, ids)
