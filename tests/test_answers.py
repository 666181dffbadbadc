"""Each message of the table is raised as written and its cure runs; tracebacks of others are found in it."""

import copy
import importlib
import io
import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as sd
import torch.distributed.tensor.parallel as tp
import yaml
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import record_collectives, run_on_ranks
from fsdp_utils.answers import explain, table
from tests.answers_ranks import CELLS, run_all, shared_names
from tests.on_ranks import on_ranks
from tools.answers_page import PAGE, page

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = {entry["id"]: entry for entry in table()["messages"]}
QUESTIONS = table()["questions"]
RAISED = [name for name, entry in MESSAGES.items() if "only_with" not in entry]
PASTED = yaml.safe_load((ROOT / "tests" / "data" / "tracebacks.yaml").read_text(encoding="utf-8"))
OF = {"FSDP1", "FSDP2", "DTensor", "DeviceMesh", "DCP", "state dict", "gloo", "NCCL", "CUDA", "torch"}
OF |= {"Accelerate", "transformers", "peft", "Lightning", "torchtitan", "torchao", "Ray"}


@pytest.fixture(scope="module")
def raised(request: pytest.FixtureRequest) -> dict[str, list[tuple[str, str]]]:
    """By id: what each rank raised, and what went wrong in the cure; of the tests that were selected."""
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in RAISED if name in wanted and name in CELLS]
    cases = [(name, MESSAGES[name]["code"]) for name in names]
    ranks = run_on_ranks(run_all, cases, world_size=2, timeout=200)
    return {name: [rank[name] for rank in ranks] for name in names}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [name for name in RAISED if name in CELLS])
def test_a_message_is_raised_as_written_and_its_cure_runs(
    name: str, raised: dict[str, list[tuple[str, str]]]
) -> None:
    texts = [text for text, _ in raised[name]]
    assert [wrong for _, wrong in raised[name] if wrong] == []
    assert any(is_in(MESSAGES[name]["message"], text) for text in texts), texts
    first = [explain(text)[0].id for text in texts if is_in(MESSAGES[name]["message"], text)]
    assert set(first) == {name}


def is_in(message: str, text: str) -> bool:
    """Whether a text has the message letter by letter, but for line breaks."""
    pattern = re.escape(" ".join(message.split())).replace("…", ".*?").replace(r"\#", r"\d+")
    return bool(re.search(pattern, " ".join(text.split())))


def differing_sizes() -> None:
    dist.all_reduce(torch.ones(2 + 1000 * dist.get_rank()))


def test_a_rank_that_gloo_ends_leaves_its_message(capfd: pytest.CaptureFixture[str]) -> None:
    """gloo throws in a thread of its own, which ends the process: nothing can be caught."""
    entry = MESSAGES["received-data-size"]
    with pytest.raises(RuntimeError, match=r"rank . was killed by SIGABRT|closed|Timed out"):
        run_on_ranks(differing_sizes, world_size=2, timeout=60)
    assert is_in(entry["message"].rstrip(), capfd.readouterr().err)
    run_on_ranks(lambda: exec(entry["code"], shared_names()), world_size=2, timeout=90)


def test_every_message_has_a_test_or_says_why_it_has_none() -> None:
    tested = {*CELLS, "received-data-size"}
    assert [name for name in RAISED if name not in tested] == []
    assert [name for name in tested if name not in RAISED] == []
    for name, entry in MESSAGES.items():
        compile(entry.get("code", ""), name, "exec")
        assert ("only_with" in entry) != ("code" in entry), name
        assert re.match(
            r"(CUDA|torch(run|ao|titan)?|Accelerate|Lightning|Ray|transformers)( before [\d.]+)?: \S+, \S+",
            entry.get("only_with", "CUDA: file, symbol"),
        ), name


def test_the_table_is_large_and_whole() -> None:
    assert len(MESSAGES) == len(table()["messages"])  # no name twice
    assert len(RAISED) >= 70
    assert len(QUESTIONS) >= 40
    for entry in MESSAGES.values():
        assert entry["of"] in OF
        assert 0 <= entry["lesson"] <= 22
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry["id"])
        assert all(entry[key].strip().endswith((".", ")", "`", ":")) for key in ("means", "cause", "cure"))
        fixed = re.sub(r"[\s…]", "", entry["message"])
        assert len(fixed) >= (12 if "near" in entry else 16), entry["id"]
    for entry in QUESTIONS:
        assert entry.keys() >= {"question", "answer", "evidence", "lesson"}
        assert entry["question"].endswith("?")


def test_evidence_that_is_named_exists() -> None:
    for entry in QUESTIONS:
        for path in re.findall(
            r"\b(?:tests|notebooks|benchmarks|fsdp_utils)/[\w./]+\.\w+", entry["evidence"]
        ):
            assert (ROOT / path).exists(), (entry["question"], path)


def test_headings_of_lessons_that_are_named_exist() -> None:
    named = r"[Ll]esson (\d+)((?:(?:,| and)(?: turn \d,)? \"[^\"]+\")+)"
    found, missing = 0, []
    for entry in QUESTIONS:
        for number, names in re.findall(named, entry["evidence"]):
            (lesson,) = (ROOT / "notebooks" / "src").glob(f"{int(number):02}_*.py")
            headings = re.findall(
                r"^# ##+ (?:Your turn \d · )?(.+)$", lesson.read_text(encoding="utf-8"), re.M
            )
            found += 1
            missing += [(number, name) for name in re.findall(r"\"([^\"]+)\"", names) if name not in headings]
    assert missing == []
    assert found > 40


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tools/answers_page.py"


@pytest.mark.parametrize("pasted", PASTED, ids=lambda pasted: pasted["source"].rpartition("/")[2])
def test_a_pasted_traceback_is_found_or_not_claimed(pasted: dict[str, Any]) -> None:
    found = [answer.id for answer in explain(pasted["text"])]
    assert found[:1] == [pasted["id"]] if pasted["id"] else found == []


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[31m[rank0]: ValueError: Cannot flatten\x1b[0m\n[rank0]: integer dtype tensors",
        "[default3]:ValueError: Cannot flatten integer dtype ten\n[default3]:sors",
        "(RayTrainWorker pid=123, ip=10.0.0.1) ValueError: CANNOT flatten integer  dtype tensors",
        "0: ValueError: Cannot flatten integer dtype tensors\n1: ValueError: Cannot flatten integer dtype",
    ],
)
def test_colors_prefixes_and_wrapped_lines_do_not_matter(text: str) -> None:
    assert [answer.id for answer in explain(text)] == ["cannot-flatten-integer-dtype"]


def test_an_error_comes_before_its_consequences() -> None:
    consequence = "[rank1]: RuntimeError: [../pair.cc:553] Connection closed by peer [127.0.0.1]:45992"
    cause = "[rank0]: ValueError: Cannot flatten integer dtype tensors"
    ids = [answer.id for answer in explain(f"{consequence}\n{cause}")]
    assert ids == ["cannot-flatten-integer-dtype", "connection-closed-by-peer"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "KeyError: 'loss'",
        "ValueError: expected 3 values",
        "RuntimeError: CUDA error: misaligned address",
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and Half",
        "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
        'File "torch/optim/adam.py", in step\n  loss = closure()\n'
        "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
        "in forward\nRuntimeError: shape '[4, 2, 4]' is invalid for input of size 16",
        "in forward\nRuntimeError: shape '[4, -1, 4]' is invalid for input of size 18",
        "TypeError: cannot assign 'int' as parameter 'weight' (torch.nn.Parameter or None expected)",
        "AttributeError: 'Params4bit' object has no attribute 'absmax'",
        "RuntimeError: FlashAttention only support fp16 and bf16 data type",
        "RuntimeError: Output 0 of MyFunctionBackward is a view and is being modified inplace",
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        "ValueError: invalid truth value maybe",
        "The module 'weights' does not have a method generate",
    ],
)
def test_what_has_nothing_to_do_with_it_is_not_claimed(text: str) -> None:
    assert explain(text) == []


@pytest.mark.parametrize("name", MESSAGES)
def test_explain_puts_each_message_first(name: str) -> None:
    entry = MESSAGES[name]
    for wording in [entry["message"], *entry.get("also", [])]:
        text = f"[rank1]: {' '.join(entry.get('near', [])[:1])}\n[rank1]: RuntimeError: {wording}"
        assert explain(re.sub("[…#]", "7", text))[0].id == name


# ---- the evidence of some questions ----------------------------------------------------------------------


def running_means() -> list[float]:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 8))
    return model[1].running_mean.tolist()


COUNTS = ((2, 6), (4, 12))  # labels by rank and micro-batch


def accumulated_gradients() -> list[float]:
    """How far gradients over micro-batches are from one process that has all labels, for three divisors."""
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    y = torch.randint(5, (24,), generator=torch.Generator().manual_seed(2))
    rank, counts = dist.get_rank(), [one for row in COUNTS for one in row]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))

    alone, off = build(), []
    nn.functional.cross_entropy(alone(x), y).backward()
    whole = torch.cat([p.grad.flatten() for p in alone.parameters()])
    for divisors in ([2 * n for n in COUNTS[rank]], [sum(COUNTS[rank])] * 2, [sum(counts) / 2] * 2):
        model = fully_shard(build())
        for i, divisor in enumerate(divisors):
            begin = sum(counts[: 2 * rank + i])
            part = slice(begin, begin + COUNTS[rank][i])
            model.set_requires_gradient_sync(i == 1)
            (nn.functional.cross_entropy(model(x[part]), y[part], reduction="sum") / divisor).backward()
        found = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        off.append(((found - whole).norm() / whole.norm()).item())
    return off


class Sharing(nn.Module):
    """A block that uses a linear layer of others: the module, or only its weight."""

    def __init__(self, shared: nn.Linear, as_module: bool) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(8, 8), shared if as_module else nn.Linear(8, 8, bias=False)
        self.shared.weight = shared.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shared(torch.tanh(self.own(x)))


def shared_weights() -> float:
    """The largest error of gradients: a shared module as its own unit; blocks that share a weight in one."""
    x, off = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), []
    for as_module in (True, False):
        torch.manual_seed(0)
        shared = nn.Linear(8, 8, bias=False)
        alone = nn.Sequential(*[Sharing(shared, as_module) for _ in range(3)])
        model = copy.deepcopy(alone)
        for part in [model[0].shared, *model, model] if as_module else [[*model], model]:
            fully_shard(part)
        model(x.chunk(2)[dist.get_rank()]).square().mean().backward()
        alone(x).square().mean().backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        off += [(a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs]
    return max(off)


def ties_after_to_empty() -> list[bool]:
    """Whether embedding and head of a meta model are one parameter after to_empty: before, and after FSDP."""
    tied = []
    for sharded in (False, True):
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
        model[1].weight = model[0].weight
        if sharded:
            fully_shard(model)
        model.to_empty(device="cpu")
        tied.append(model[0].weight is model[1].weight)
    return tied


@on_ranks()
def test_questions_whose_evidence_is_here() -> None:
    means: list[Any] = [None, None]
    dist.all_gather_object(means, running_means())
    assert means[0] != means[1]
    of_means, of_rank, of_all = accumulated_gradients()
    assert of_means > 0.5
    assert of_rank > 0.3
    assert of_all < 1e-5
    assert shared_weights() < 1e-6
    assert ties_after_to_empty() == [False, True]


class Adapted(nn.Module):
    """A linear layer with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.A = nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False)
        self.B = nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.B(self.A(x))


def adapters_after_to_empty() -> tuple[list[str], bool, bool]:
    """Names that the load reports as missing; whether the output is NaN before; whether it is right after."""
    base, x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.ones(2, 8)
    with torch.device("meta"):
        model = Adapted()
    fully_shard(model)
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.detach().to_local().fill_(float("nan"))  # what to_empty may leave
    weights = {"base.weight": base}
    new = [name for name, _ in model.named_parameters() if name not in weights]  # the load enters them
    options = sd.StateDictOptions(full_state_dict=True, strict=False)
    reported = sd.set_model_state_dict(model, weights, options=options).missing_keys
    before = model(x).isnan().any().item()
    model.reshard()
    for name, p in model.named_parameters():
        if name in new:
            (nn.init.zeros_ if name == "B.weight" else nn.init.kaiming_uniform_)(p)
    return reported, before, torch.allclose(model(x), nn.functional.linear(x, base))


def gathers_of_optimizer_state() -> list[int]:
    """Collectives of a sharded and of a full optimizer state."""
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer, counted = torch.optim.AdamW(model.parameters()), []
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    for full in (False, True):
        with record_collectives(model) as trace:
            options = sd.StateDictOptions(full_state_dict=full)
            sd.get_optimizer_state_dict(model, optimizer, options=options)
        counted.append(len(trace.collectives))
    return counted


fsdp1 = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))


def gathers_of_model_state() -> list[int]:
    """All-gathers of a sharded state dict of two units, under FSDP1 and FSDP2."""
    counted = []
    for fsdp in (fsdp1, fully_shard):
        model = nn.Sequential(*(fsdp(nn.Linear(8, 8)) for _ in range(2)))
        with record_collectives(model) as trace:
            sd.get_model_state_dict(fsdp(model))
        counted.append(sum(event.kind == "all_gather" for event in trace.collectives))
    return counted


def gathers_of_checkpointing() -> list[int]:
    """All-gathers of a step of a Llama, without and with its own checkpointing."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    config, counted = LlamaConfig(num_hidden_layers=2, **sizes), []
    for kept in (False, True):
        model = LlamaForCausalLM(config)
        if kept:
            model.gradient_checkpointing_enable()
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        ids = torch.arange(8)[None]
        with record_collectives(model) as trace:
            model(input_ids=ids, labels=ids).loss.backward()
        counted.append(sum(event.kind == "all_gather" for event in trace.collectives))
    return counted


def steps_of_four() -> float:
    """The largest difference from one process after a step in which biases have another rate than weights."""
    torch.manual_seed(0)
    plain, x, states = nn.Linear(8, 8), torch.randn(4, 8), []
    for wrap in (nn.Module.train, DistributedDataParallel, fsdp1, fully_shard):  # the first changes nothing
        model = wrap(copy.deepcopy(plain))
        of = {name.rpartition(".")[2]: p for name, p in model.named_parameters()}
        groups = [{"params": [of["weight"]], "lr": 0.5}, {"params": [of["bias"]], "lr": 0.25}]
        optimizer = torch.optim.SGD(groups)
        model(x if wrap is nn.Module.train else x.chunk(2)[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        states.append(sd.get_model_state_dict(model, options=sd.StateDictOptions(full_state_dict=True)))
    alone, *others = states
    return max(float((other[name] - alone[name]).abs().max()) for other in others for name in alone)


def cached_plans() -> list[int]:
    """The entries of the plans that this rank sends for two saves of the same model."""
    model, sent, folder = fully_shard(nn.Linear(8, 8)), [], shared_folder()

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> dcp.SavePlan:
            plan = super().create_local_plan()
            sent.append(len(plan.items))
            return plan

    for step in (1, 2):
        planner = Planner(enable_plan_caching=True)
        dcp.save(model.state_dict(), checkpoint_id=folder / str(step), planner=planner)
        loaded = {"weight": torch.zeros_like(model.weight)}
        dcp.load(loaded, checkpoint_id=folder / str(step))
        assert loaded["weight"].full_tensor().equal(model.weight.full_tensor())
    return sent


def shared_folder() -> Path:
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    return Path(shared[0])


def consolidated() -> tuple[list[str], bool]:
    """The files that DCP's writer of safetensors leaves, and whether they hold the model's weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = sd.get_model_state_dict(fully_shard(model))
    folder = shared_folder()
    mapping = {name: 1 + name.startswith("1.") for name in state}
    writer = HuggingFaceStorageWriter(
        folder, fqn_to_index_mapping=mapping, save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer)
    dist.barrier()
    files = sorted(folder.glob("*.safetensors"))
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    same = read.keys() == full.keys() and all(torch.equal(read[name], full[name]) for name in full)
    return [file.name for file in files], same


def offloaded() -> dict[str, tuple[float, int]]:
    """By way of offloading: the largest error of gradients, and the bytes packed for the host."""
    ways = {"neither": lambda block: block, "offload": offload_wrapper}
    ways["both"] = lambda block: offload_wrapper(checkpoint_wrapper(block))
    found: dict[str, tuple[float, int]] = {}
    plain: list[torch.Tensor] = []
    empty = torch.empty
    for name, way in ways.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(way(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(2)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        packed = []

        def counting(*args: Any, packed: list[int] = packed, **options: Any) -> torch.Tensor:
            made = empty(*args, **options)
            packed.append(made.nbytes if "pin_memory" in options else 0)
            return made

        torch.empty = counting
        try:
            loss = model(torch.ones(2, 8)).sum()
        finally:
            torch.empty = empty
        loss.backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        plain = plain or gradients
        error = max((a - b).abs().max().item() for a, b in zip(gradients, plain, strict=True))
        found[name] = error, sum(packed)
    return found


def norm_outside_the_plan() -> list[str]:
    """What a norm, which the plan leaves out, raises after a layer whose output is a DTensor, or a tensor."""
    mesh, raised = init_device_mesh("cpu", (2,)), []
    for local in (False, True):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        way = tp.RowwiseParallel(input_layouts=Replicate(), use_local_output=local)
        tp.parallelize_module(model, mesh, {"0": way})
        try:
            model(torch.ones(2, 8))
            raised.append("")
        except RuntimeError as error:
            raised.append(str(error))
    return raised


def graphs_of_compiled_units() -> dict[str, int]:
    """Count the graphs of a Llama of two blocks: blocks compiled, then sharded; in reverse; all compiled."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    ids, found, losses = torch.arange(16).reshape(1, 16), {}, []
    for order in ("compile, shard", "shard, compile", "shard, compile all"):
        torch.compiler.reset()
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, _: Any, graphs: list[Any] = graphs) -> torch.fx.GraphModule:
            graphs.append(graph)
            return graph

        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
        blocks = list(model.model.layers)
        for step in order.split(", "):
            for part in [model] if step == "compile all" else blocks:
                fully_shard(part) if step == "shard" else part.compile(backend=backend)
            if step == "shard":
                fully_shard(model)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found[order] = len(graphs)
        losses.append(round(loss.item(), 4))
    assert len(set(losses)) == 1
    return found


@on_ranks()
def test_questions_on_states_adapters_and_activations() -> None:
    assert adapters_after_to_empty() == ([], True, True)
    assert gathers_of_optimizer_state() == [0, 8]
    assert gathers_of_model_state() == [2, 0]
    assert cached_plans() == [2, 0]
    without, with_checkpoints = gathers_of_checkpointing()
    assert without == with_checkpoints > 0
    assert steps_of_four() < 1e-6
    assert consolidated() == ([f"model-0000{number}-of-00002.safetensors" for number in (1, 2)], True)
    found = offloaded()
    assert max(error for error, _ in found.values()) < 1e-6
    assert 0 == found["neither"][1] < found["both"][1] < found["offload"][1]
    mixed, local = norm_outside_the_plan()
    assert "got mixed torch.Tensor and DTensor" in mixed
    assert local == ""
    assert importlib.import_module("torch.distributed._composable.fsdp").fully_shard is fully_shard


@on_ranks(1, timeout=150)
def test_a_compiled_block_is_one_graph_and_fsdp_cuts_a_compiled_model() -> None:
    found = graphs_of_compiled_units()
    assert found == {"compile, shard": 1, "shard, compile": 1, "shard, compile all": 5}


# ---- the command -----------------------------------------------------------------------------------------


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`python -m fsdp_utils explain ARGUMENTS < text` in this process: its exit code, stdout and stderr."""

    def run(*arguments: str, text: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["explain", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("fsdp_utils.answers", run_name="__main__", alter_sys=True)
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


FLATTEN = "ValueError: Cannot flatten integer dtype tensors"


def test_the_command_prints_the_answer_or_that_it_knows_none(tmp_path: Path, command: Command) -> None:
    code, shown, _ = command(text=f"[rank0]: {FLATTEN}")
    assert code == 0
    assert shown.startswith("cannot-flatten-integer-dtype (FSDP1)")
    assert "Lesson:  17" in shown
    (tmp_path / "log").write_text(FLATTEN)
    found = json.loads(command("--json", str(tmp_path / "log"))[1])
    assert found[0]["id"] == "cannot-flatten-integer-dtype"
    code, shown, _ = command(text="KeyError: 'loss'")
    assert code == 1
    assert "No message in this text is known" in shown
    code, shown, _ = command(
        text="RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float"
    )
    assert code == 1
    assert shown.startswith("Perhaps: programs without FSDP raise this message, too.")
    assert "can be read" in command(str(tmp_path / "none"))[2]


def test_a_warning_alone_is_not_given_out_for_the_error(command: Command) -> None:
    warning = "UserWarning: No device id is provided via `init_process_group` or `barrier `."
    note = "this is a warning, not the error in this text"
    assert note in command(text=f"{warning}\nRuntimeError: nobody has written about this")[1]
    assert note not in command(text=warning)[1]
    known = command(text=f"{warning}\n{FLATTEN}")[1]
    assert note not in known
    assert known.startswith("cannot-flatten-integer-dtype")


def test_a_reader_that_stops_early_is_no_error() -> None:
    line = [sys.executable, "-m", "fsdp_utils", "explain"]
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as started:
        started.stdout.close()  # as `| head` does
        started.stdin.write(b"ValueError: Cannot flatten integer dtype tensors")
        started.stdin.close()
        assert started.stderr.read() == b""
        assert started.wait(60) == 0


def test_explain_needs_no_torch() -> None:
    code = (
        "import sys; from fsdp_utils.answers import explain; explain('x'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def flattened_integers() -> None:
    raise ValueError("Cannot flatten integer dtype tensors")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_the_last_line_of_a_known_error_of_run_on_ranks_names_the_entry() -> None:
    with pytest.raises(ValueError, match=r"^Cannot flatten integer dtype tensors") as caught:
        run_on_ranks(flattened_integers, world_size=1)
    (line,) = caught.value.__notes__
    assert line.startswith("Explained: cannot-flatten-integer-dtype in notebooks/answers.md, lesson 17. ")
