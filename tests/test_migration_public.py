"""Public config files: what comes out of each, built on a fake group and held against the frameworks.

Each line of data/public_configs.jsonl is a file: where it is, its keys and values as far as they matter, and
what it asks for. The texts of the files are not in it.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_utils.migration import Translation, TranslationError, translate

DATA = Path(__file__).parent / "data" / "public_configs.jsonl"
PUBLIC = [json.loads(line) for line in DATA.read_text().splitlines()]
NAMES = [f"{public['repo'].split('/')[1]}/{Path(public['path']).stem}" for public in PUBLIC]
TRANSLATED = [public for public in PUBLIC if "refused" not in public["expected"]]


def outcome(config: dict[str, Any]) -> dict[str, Any]:
    """What comes out, without what is as a Translation has it by default."""
    try:
        found = translate(config)
    except TranslationError as error:
        return {"refused": str(error).partition(":")[0]}
    sharded: dict[str, Any] = {} if found.ddp else {"reshard_after_forward": found.reshard_after_forward}
    if not found.ddp:
        for name in ("copies", "shard_size", "tensor_parallel", "param_dtype", "reduce_dtype", "offload"):
            if (value := getattr(found, name)) != getattr(Translation(""), name):
                sharded[name] = value
        if not found.pin_memory:
            sharded["pin_memory"] = False
    return {
        "framework": found.framework,
        **({"ddp": True} if found.ddp else sharded),
        **({} if found.blocks is None else {"blocks": list(found.blocks)}),
        **({"checkpointing": True} if found.checkpointing else {}),
        "state_dict": found.state_dict,
        "lost": [row.key for row in found.rows if not row.has_counterpart],
    }


@pytest.mark.parametrize("public", PUBLIC, ids=NAMES)
def test_what_comes_out(public: dict[str, Any]) -> None:
    assert outcome(public["config"]) == public["expected"]


def test_at_most_three_are_refused() -> None:
    kinds = Counter(public["expected"].get("framework", "refused") for public in PUBLIC)
    assert kinds.total() >= 72
    assert kinds.pop("refused") <= 3
    assert min(kinds.values()) >= 10
    assert set(kinds) == {"Accelerate", "transformers", "Composer", "DeepSpeed"}


def test_every_key_has_a_row() -> None:
    for public in TRANSLATED:
        config, keys = public["config"], {row.key for row in translate(public["config"]).rows}
        config = config.get("parameters", config)
        named = {"fsdp_config", "deepspeed_config", "parallelism_config", "zero_optimization", "bf16", "fp16"}
        for name, section in config.items():
            if name in named and isinstance(section, dict):
                assert {f"{name}.{key}" for key in section} <= keys
            elif "distributed_type" in config or "zero_optimization" in config:
                assert name in keys or not section


# --- built


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        kinds = [type(name, (Part,), {}) for name in names]
        self.blocks = nn.ModuleList(kind() for kind in kinds for _ in range(2))
        self.head = nn.Linear(16, 16)


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("public", TRANSLATED, ids=[NAMES[PUBLIC.index(public)] for public in TRANSLATED])
def test_the_code_builds_what_is_asked_for(public: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = public["expected"]
    copies, tp = asked.get("copies", 1), asked.get("tensor_parallel", 1)
    size = asked.get("shard_size", 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    names: dict[str, Any] = {}
    code = translate(public["config"]).code()
    exec(code.replace("CPUOffloadPolicy()", "CPUOffloadPolicy(pin_memory=False)"), names)  # no GPU to pin for
    blocks = asked.get("blocks", ["Block"])
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    with fake_group(copies * size * tp):
        model = names["shard_model"](Model(blocks or ["Block"]), *([plan] if tp > 1 else []))
        parts = list(model.modules())
        wrapped = [part for part in parts if isinstance(part, CheckpointWrapper)]
        assert len(wrapped) == (2 * len(blocks) if asked.get("checkpointing") else 0)
        if asked.get("ddp"):
            assert isinstance(model, DistributedDataParallel)
            return
        units = [part for part in parts if isinstance(part, FSDPModule)]
        assert len(units) == 1 + 2 * len(blocks)
        for unit in units:
            state = unit._get_fsdp_state()
            policy, group = state._mp_policy, state._fsdp_param_group
            dtype = asked.get("param_dtype")
            assert policy.param_dtype is (getattr(torch, dtype) if dtype else None)
            assert policy.reduce_dtype is (getattr(torch, asked["reduce_dtype"]) if dtype else None)
            if unit is not model:
                resharded = group.post_forward_mesh_info is not None
                assert resharded is bool(asked["reshard_after_forward"])
            assert isinstance(group.offload_policy, CPUOffloadPolicy) is asked.get("offload", False)
            mesh = group.mesh_info.mesh
            assert mesh.size(-1) == size
            assert (mesh.size(0) if mesh.ndim == 2 else 1) == copies or asked["framework"] == "Composer"
        weight = model.blocks[0].up.weight if not asked.get("checkpointing") else next(model.parameters())
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.size() == copies * size * tp
        if blocks:  # a shard of what a rank of the layer holds
            assert weight.to_local().numel() == weight.numel() // (size * tp)


# --- held against the frameworks

OF_ACCELERATE = [public for public in TRANSLATED if public["config"].get("distributed_type") == "FSDP"]
OF_TRAINER = [
    public
    for public in TRANSLATED
    if public["expected"]["framework"] == "transformers" and not public["expected"].get("ddp")
]


@pytest.mark.parametrize("public", OF_ACCELERATE, ids=lambda public: public["path"])
def test_accelerates_own_launcher_sets_the_same(
    public: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(public["config"]))
    command = launch_command_parser().parse_args(
        ["--config_file", str(file), "--num_processes", "2", "train.py"]
    )
    arguments, _, _ = _validate_launch_command(command)
    environment = prepare_multi_gpu_env(arguments)
    off = {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}  # ask for a GPU
    for name, value in (environment | off).items():
        if name.startswith(("FSDP", "PARALLELISM", "ACCELERATE")):
            monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin, sizes = FullyShardedDataParallelPlugin(), ParallelismConfig()
    asked = public["expected"]
    strategy = plugin.sharding_strategy.name if plugin.fsdp_version == 1 else plugin.reshard_after_forward
    assert strategy in ((True, "FULL_SHARD") if asked["reshard_after_forward"] else (False, "SHARD_GRAD_OP"))
    assert plugin.state_dict_type.name == f"{asked['state_dict'].upper()}_STATE_DICT"
    assert (plugin.auto_wrap_policy is None) == (asked.get("blocks") == [])
    assert (plugin.transformer_cls_names_to_wrap or None) == (asked.get("blocks") or None)
    assert plugin.activation_checkpointing == asked.get("checkpointing", False)
    offload = plugin.cpu_offload
    assert bool(getattr(offload, "offload_params", isinstance(offload, CPUOffloadPolicy))) == asked.get(
        "offload", False
    )
    assert (
        environment["ACCELERATE_MIXED_PRECISION"]
        == {"bfloat16": "bf16", None: "no"}[asked.get("param_dtype")]
    )
    assert sizes.tp_size == asked.get("tensor_parallel", 1)
    assert sizes.dp_replicate_size == asked.get("copies", 1)
    if "shard_size" in asked:
        assert sizes.dp_shard_size * sizes.cp_size == asked["shard_size"]


@pytest.mark.parametrize("public", OF_TRAINER, ids=lambda public: public["path"])
def test_transformers_gives_its_plugin_the_same(public: dict[str, Any]) -> None:
    from transformers import TrainingArguments

    config, asked = public["config"], public["expected"]
    arguments = SimpleNamespace(
        fsdp=config.get("fsdp", True),
        fsdp_config=dict(config.get("fsdp_config", {})),
        activation_checkpointing=False,
        _apply_legacy_fsdp_to_config=TrainingArguments._apply_legacy_fsdp_to_config,
    )
    plugin = TrainingArguments._process_fsdp_args(arguments)  # type: ignore[arg-type]
    assert plugin["reshard_after_forward"] is asked["reshard_after_forward"]
    assert plugin["state_dict_type"] == f"{asked['state_dict'].upper()}_STATE_DICT"
    assert plugin["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    if "fsdp_transformer_layer_cls_to_wrap" not in config:  # an argument that transformers 5 does not have
        assert plugin.get("transformer_cls_names_to_wrap", "") == ",".join(asked.get("blocks", []))
    recomputed = plugin.get("activation_checkpointing") or config.get("gradient_checkpointing", False)
    assert bool(recomputed) == asked.get("checkpointing", False)


# --- values from elsewhere


def test_a_deepspeed_file_beside_the_config_is_read(tmp_path: Path) -> None:
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}
    (tmp_path / "zero3.json").write_text(json.dumps(settings))
    (tmp_path / "configs").mkdir()
    file = tmp_path / "configs" / "accelerate.yaml"
    config = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}
    file.write_text(yaml.safe_dump({**config, "deepspeed_config": {"deepspeed_config_file": "zero3.json"}}))
    found = translate(file)
    assert (found.framework, found.param_dtype, found.reshard_after_forward) == (
        "Accelerate",
        "bfloat16",
        True,
    )
    assert [row.key for row in found.rows if not row.has_counterpart] == ["bf16.enabled"]
    assert next(row.value for row in found.rows if row.key == "_read_from") == str(tmp_path / "zero3.json")

    file.write_text(yaml.safe_dump({"base_model": "x", "deepspeed": "zero3.json", "bf16": True}))
    found = translate(file)
    assert (found.framework, found.param_dtype) == ("transformers", "bfloat16")
    file.write_text(yaml.safe_dump({"base_model": "x", "deepspeed": "other.json"}))
    with pytest.raises(
        TranslationError, match=r"deepspeed: expected the settings themselves, .* 'other.json'"
    ):
        translate(file)


def test_values_that_are_given_are_put_in() -> None:
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
    assert translate(config).param_dtype is None
    assert "given={'bf16.enabled': ...}" in translate(config).without_counterpart[0]
    found = translate(config, given={"bf16.enabled": True, "train_batch_size": 64})
    assert found.param_dtype == "bfloat16"
    assert [row.key for row in found.rows if not row.has_counterpart] == ["bf16.enabled"]
    assert config["bf16"] == {"enabled": "auto"}
    with pytest.raises(
        TranslationError, match=r"given: expected keys that stand in the config, found 'bf16.on'"
    ):
        translate(config, given={"bf16.on": True})
    with pytest.raises(TranslationError, match=r"stage: expected 0, 1, 2 or 3, found 'auto'. Give it"):
        translate({"zero_optimization": {"stage": "auto"}})


def test_references_within_the_config_are_followed() -> None:
    config: dict[str, Any] = {
        "variables": {"dtype": "bf16", "precision": "amp_${variables.dtype}", "degree": [2, 4]},
        "precision": "${variables.precision}",
        "fsdp_config": {
            "data_parallel_shard_degree": "${variables.degree[1]}",
            "activation_checkpointing": "${.verbose}",
            "verbose": True,
            "sharding_strategy": "${oc.env:STRATEGY}",
        },
    }
    found = translate(config)
    assert (found.param_dtype, found.shard_size, found.checkpointing) == ("bfloat16", 4, True)
    (lost,) = found.without_counterpart
    assert lost.startswith(
        "fsdp_config.sharding_strategy = '${oc.env:STRATEGY}': its value comes from outside"
    )
    found = translate(config, given={"fsdp_config.sharding_strategy": "SHARD_GRAD_OP"})
    assert (found.reshard_after_forward, found.without_counterpart) == (False, [])


@pytest.mark.parametrize(
    "variables",
    [
        {"a": "${variables.a}"},
        {"a": "${variables.b}", "b": "${variables.a}"},
        {f"x{n}": f"${{variables.x{n + 1}}}" * 9 for n in range(30)} | {"a": "${variables.x0}"},
    ],
)
def test_references_without_end_are_left_or_refused(variables: dict[str, str]) -> None:
    config = {
        "variables": variables,
        "precision": "${variables.a}",
        "fsdp_config": {"mixed_precision": "PURE"},
    }
    try:
        lost = translate(config).without_counterpart
        assert "add 'precision'" in lost[0]
    except TranslationError as error:
        assert "expected at most 10,000" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "text",
    [
        '{"zero_optimization": {"stage": 3} /* all */, // of it\n "train_batch_size": 8,}',
        '# as hjson takes it\n{"zero_optimization": {"stage": 3, "comment": "http://x # {1,}"}}',
    ],
)
def test_comments_in_json_are_passed_over(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    found = translate(file)
    assert (found.framework, found.reshard_after_forward, found.without_counterpart) == (
        "DeepSpeed",
        True,
        [],
    )
    comments = [row.value for row in found.rows if row.fsdp2 == "nothing: a comment"]
    assert comments in ([], ["http://x # {1,}"])


def test_a_trainers_section_in_a_file_of_its_own() -> None:
    found = translate(
        {"transformer_layer_cls_to_wrap": ["A", "B"], "backward_prefetch": "backward_post", "xla": False}
    )
    assert (found.framework, found.blocks) == ("transformers", ("A", "B"))
    assert [text.split(" = ")[0] for text in found.without_counterpart] == ["backward_prefetch"]
    off = translate({"fsdp": "", "fsdp_config": {"fsdp_offload_params": True}})
    assert (off.ddp, off.offload) == (True, False)
    assert any("does not look at it" in row.fsdp2 for row in off.rows)
    kept = translate({"fsdp": "full_shard offload", "fsdp_config": {"cpu_offload": False}, "bf16": "full"})
    assert (kept.ddp, kept.offload, kept.param_dtype) == (False, False, None)
    hybrid = translate({"fsdp": "hybrid_shard auto_wrap offload", "fsdp_config": {"version": 1}})
    assert (hybrid.shard_size, hybrid.offload) == ("host", True)
