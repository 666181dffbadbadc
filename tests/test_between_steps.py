"""Uses of a sharded model between its training steps, and their mistakes: evidence for lesson 18."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import AveragedModel

from fsdp_utils import record_collectives, run_on_ranks
from fsdp_utils.lessons.meter import Meter
from fsdp_utils.lessons.together import run_together
from tests.blocks import Block

Evidence = dict[str, list[Any]]  # what each function below returned, by its name and rank


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    uses = (averages, full_root, method_that_calls_the_model, without_own_parameters)
    uses = (*uses, generated, method_under_fsdp1, outcomes, full_after_submodules, two_forwards)
    ranks = run_on_ranks(lambda: {use.__name__: use() for use in uses}, world_size=2, timeout=200)
    return {use.__name__: [rank[use.__name__] for rank in ranks] for use in uses}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        self.blocks = nn.Sequential(Block(16), Block(16))

    def forward(self, ids: Tensor) -> Tensor:  # i64[batch, tokens] -> f32[batch, tokens, 16]
        return self.head(self.blocks(self.embed(ids)))

    def ask(self, ids: Tensor) -> Tensor:
        return self(ids)


def plain() -> Model:
    torch.manual_seed(0)
    return Model()


def sharded(**root: Any) -> Any:
    model = plain()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model, **root)


def samples() -> Tensor:
    return torch.arange(4)[None] + 4 * dist.get_rank()


def full_after_submodules() -> list[str]:
    """Names of the parameters that are still shards after `unshard` of all units but the root."""
    model = sharded()
    for block in model.blocks:
        block.unshard()
    return [name for name, p in model.named_parameters() if isinstance(p, DTensor)]


def gathers(model: nn.Module, use: Callable[[], object]) -> int:
    with record_collectives(model) as trace:
        use()
    return sum(event.kind == "all_gather" for event in trace.collectives)


def evaluate(model: Any, tokens: int = 1) -> Tensor:
    with torch.no_grad():
        return [model(samples()) for _ in range(tokens)][-1]


# ---- averages


def averaged_while_training(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(10):
        model(ids).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 0.1)
    return average


def averages() -> tuple[float, bool]:
    alone = averaged_while_training(plain(), torch.arange(4 * dist.get_world_size()).view(-1, 4))
    average = averaged_while_training(model := sharded(), samples())
    copied = False
    with suppress(AssertionError):
        copied = bool(AveragedModel(model))
    return max((average[name].full_tensor() - p).abs().max().item() for name, p in alone.items()), copied


def test_an_average_of_shards_is_that_of_one_process(evidence: Evidence) -> None:
    for error, copied in evidence["averages"]:
        assert error < 1e-5
        assert not copied
    one, more = torch.tensor([1.0, 1.5], dtype=torch.bfloat16)
    assert one.lerp(more, 0.001) == 1


# ---- a root that an evaluation left full


def full_root() -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = sharded()
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    evaluate(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        model.embed.weight.copy_(average["embed.weight"])
    model.state_dict()
    found["sharded by state_dict"] = isinstance(model.embed.weight, DTensor)

    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model(samples())
    before.square().mean().backward()
    head = model.head.weight  # the shard
    old = plain().head.weight
    evaluate(model)
    optimizer.step()
    read = model(samples())  # with new blocks and the old head
    found["the shard moved"] = not torch.equal(head.full_tensor(), old)
    found["forward reads the old root"] = torch.equal(model.head.weight, old)
    read.square().mean().backward()
    found["sharded by backward"] = isinstance(model.head.weight, DTensor)

    model, half = sharded(), evaluate(sharded()) / 2
    evaluate(model)
    model.reshard()
    with torch.no_grad():
        p = model.head.weight  # the last layer, so half of it gives half of the output
        p.copy_(distribute_tensor(0.5 * p.full_tensor(), p.device_mesh, p.placements))
    found["edited after reshard"] = torch.allclose(evaluate(model), half)

    for name, root in {"default": {}, "resharded": {"reshard_after_forward": True}}.items():
        model = sharded(**root)
        step = gathers(model, lambda m=model: m(samples()).mean().backward())
        found[name] = step, gathers(model, lambda m=model: evaluate(m, tokens=10))
    found["left full by it"] = not isinstance(model.embed.weight, DTensor)
    return found


def test_a_root_that_was_evaluated_holds_its_weights_twice(evidence: Evidence) -> None:
    for found in evidence["full_root"]:
        for name in ("sharded by state_dict", "sharded by backward", "the shard moved"):
            assert found[name], name
        assert found["forward reads the old root"]
        assert found["edited after reshard"]
        assert (found["default"], found["resharded"]) == ((5, 21), (6, 30))
        assert not found["left full by it"]


def without_own_parameters() -> tuple[int, int, str]:
    model = nn.Sequential(Block(16), Block(16))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    x = torch.ones(1, 16)
    count = gathers(model, lambda: model.forward(x))
    full = sum(not isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(RuntimeError) as raised:
        model(x)
    return count, full, str(raised.value)


def method_that_calls_the_model() -> list[int]:
    """Gathers of a step through `Model.ask`, as it is and registered."""
    found = []
    for registered in (False, True):
        model = sharded()
        if registered:
            register_fsdp_forward_method(model, "ask")
        found.append(gathers(model, lambda m=model: m.ask(samples()).mean().backward()))
    return found


def test_what_is_called_around_the_root_is_counted(evidence: Evidence) -> None:
    """A registered method gathers the root twice; blocks called before their root take themselves for it."""
    assert evidence["method_that_calls_the_model"] == [[5, 6]] * 2
    for count, full, told in evidence["without_own_parameters"]:
        assert (count, full) == (2, 8)
        assert "FSDP state has already been lazily initialized" in told
    assert evidence["full_after_submodules"] == [["embed.weight", "head.weight"]] * 2  # not the root's


# ---- generate


def generated() -> list[tuple[int, int]]:
    """New tokens and calls of the model, by default and with the weights kept and each rank for itself."""
    from transformers import LlamaConfig, LlamaForCausalLM  # slow

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0)).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    prompt = (torch.arange(1, 5) + dist.get_rank())[None]
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    end = model.generate(prompt, **options, eos_token_id=None)[0, prompt.shape[1] + 2].clone()
    dist.broadcast(end, src=0)  # so that rank 0 ends with its third token
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    found = []
    for more in ({}, {"synced_gpus": False}):
        model.set_reshard_after_forward(not more)
        calls.clear()
        tokens = model.generate(prompt, **options, eos_token_id=int(end), **more)
        found.append((tokens.shape[1] - prompt.shape[1], len(calls)))
    return found


def test_transformers_calls_a_sharded_model_until_all_ranks_are_done(evidence: Evidence) -> None:
    first, second = evidence["generated"]
    assert first[0][0] == 3 < second[0][0]
    assert first[0][1] == second[0][1] == second[0][0]
    assert (first[1], second[1]) == ((3, 3), (second[0][0], second[0][0]))


def method_under_fsdp1() -> int:
    """Call what `forward` calls from outside: it raises, or gathers the blocks once."""
    options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model = plain()
    model.blocks = nn.Sequential(*[FSDP(block, **options) for block in model.blocks])
    fsdp = FSDP(model, **options)
    fsdp(samples()).sum().backward()
    with pytest.raises(RuntimeError, match="'weight' must be 2-D"):
        model.forward(samples())
    with torch.no_grad(), FSDP.summon_full_params(fsdp, recurse=False, writeback=False):
        return gathers(fsdp, lambda: model.forward(samples()))


def test_fsdp1_runs_another_method_under_summon_full_params_of_the_root(evidence: Evidence) -> None:
    assert evidence["method_under_fsdp1"] == [2, 2]


# ---- a module that only some ranks run


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, weight: int | None) -> Tensor:  # weight None: no images
        y = self.text(x)
        return self.head(y if weight is None else y + weight * self.image(x))


def outcome(units: list[str], weight: int | None, unused: bool = False) -> str:
    """Train a step in which rank 0 has images; say where the ranks part, or how good the gradients are."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(4 * world, 8, generator=torch.Generator().manual_seed(1)).chunk(world)
    torch.manual_seed(0)
    alone = Two()
    for r, part in enumerate(x):
        (alone(part, None if r else 1).square().mean() / world).backward()
    torch.manual_seed(0)
    model: Any = Two()
    for name in units:
        fully_shard(getattr(model, name))
    fully_shard(model).set_reduce_scatter_unused_params(unused)
    _, parted = run_together(lambda: model(x[rank], weight if rank else 1).square().mean().backward())
    if parted:
        return "hangs"
    both = zip(model.parameters(), alone.parameters(), strict=True)
    right = all(torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6) for p, q in both)
    return "right" if right else "wrong"


def outcomes() -> list[str]:
    apart, within = ["text", "image"], ["text"]
    found = [outcome(apart, None), outcome(apart, 0), outcome(within, None)]
    return [*found, outcome(within, None, unused=True)]


def test_a_unit_that_only_some_ranks_run_is_called_on_all_of_them_times_0(evidence: Evidence) -> None:
    assert evidence["outcomes"][0] == ["hangs", "right", "hangs", "right"]


# ---- two forwards before one backward


def two_forwards() -> list[float]:
    """Peak of tensors, as a share of the model: one batch; two, each in a forward; both in one forward."""
    ids, other = samples()[:, :1], samples()[:, 1:2]
    steps: list[Callable[[Any], Tensor]] = [
        lambda model: model(ids).mean(),
        lambda model: (model(ids) - model(other)).mean(),
        lambda model: model(torch.cat([ids, other])).mean(),
    ]
    size, peaks = sum(p.nbytes for p in deep().parameters()), []
    for step in steps:
        meters = [Meter() for _ in range(3)]  # gloo's thread may let go of a tensor late
        for meter in meters:
            model: Any = deep()
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            with meter:
                step(model).backward()
        peaks.append(min(meter.peak_tensor_bytes for meter in meters) / size)
    return peaks


def deep() -> Model:
    model = Model()
    model.blocks = nn.Sequential(*[Block(16) for _ in range(12)])
    return model


def test_two_forwards_keep_the_full_gradients_of_all_blocks(evidence: Evidence) -> None:
    for one, two, both in evidence["two_forwards"]:
        assert two - one > 0.4  # all but what is gathered and reduced meanwhile
        assert abs(both - one) < 0.15
