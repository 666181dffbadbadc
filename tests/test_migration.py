"""Configs of four frameworks: what comes of each, held against golden files, and built.

Each line of data/public_configs.jsonl is a public file: where it is, its keys and values as far as they
matter, and what it asks for. data/translations.json holds what `translate` says of these (by number) and of
others: each row once ("!" marks a lost setting), each program once; a case names its rows and its program by
number.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils import translate
from fsdp_utils.migration import TranslationError
from tests.blocks import Block
from tests.on_ranks import fake_group

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "translations.json").read_text())
PUBLIC = [json.loads(line) for line in (DATA / "public_configs.jsonl").read_text().splitlines()]
NAMES = [f"{public['repo'].split('/')[1]}/{Path(public['path']).stem}" for public in PUBLIC]
TRANSLATED = [public for public in PUBLIC if "refused" not in public["expected"]]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["rows"][:20])
def test_rows_and_code_are_those_on_record(case: dict[str, Any]) -> None:
    config = PUBLIC[case["public"]]["config"] if "public" in case else case["config"]
    found = translate(config, given=case.get("given"))
    rows = [f"{' ' if row.has_counterpart else '!'} {row.key}: {row.fsdp2}" for row in found.rows]
    assert rows == [GOLDEN["rows"][int(number)] for number in case["rows"].split()]
    assert all(row.source.startswith("https://") for row in found.rows)
    assert found.code() == GOLDEN["programs"][case["program"]]
    assert found.state_dict == case["state_dict"]


# --- built


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        kinds = [type(name, (Block,), {}) for name in names]
        self.blocks = nn.ModuleList(kind(16, 32) for kind in kinds for _ in range(2))
        self.head = nn.Linear(16, 16)


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
    updated = torch.float32 if ".float()" in code.replace("# model.float()", "") else torch.bfloat16
    model = Model(blocks or ["Block"]).bfloat16()
    model.head.bias.requires_grad_(False)
    with fake_group(copies * size * tp):
        model = names["shard_model"](model, *([plan] if tp > 1 else []))
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {updated}
        frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
        assert frozen == {updated if asked.get("ddp") else torch.bfloat16}
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


def test_every_field_of_accelerates_config_is_known() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING

    above = dict.fromkeys(ClusterConfig.__dataclass_fields__)
    config = {**above, "distributed_type": "FSDP", "fsdp_config": dict.fromkeys(ARGUMENT_KEY_MAPPING)}
    assert translate(config).without_counterpart == []


# --- the table, files and errors


def test_the_table_marks_what_is_lost() -> None:
    fsdp = {"fsdp_state_dict_type": "LOCAL_STATE_DICT", "fsdp_backward_prefetch": "BACKWARD_PRE"}
    found = translate({"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": fsdp})
    assert "".join(line[0] for line in str(found).split("\n")[1:-1:2]) == " ! !"
    assert str(found).endswith("(! has no counterpart in FSDP2)")
    assert [text.partition(":")[0] for text in found.without_counterpart] == [
        "fsdp_config.fsdp_state_dict_type = 'LOCAL_STATE_DICT'",
        "mixed_precision = 'bf16'",
    ]


def test_files_are_read_and_frameworks_are_told(tmp_path: Path) -> None:
    def file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return translate(tmp_path / name).framework

    assert (
        file("a.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}")
        == "Accelerate"
    )
    assert file("b.yml", yaml.safe_dump({"fsdp_config": {"mixed_precision": "FULL"}})) == "Composer"
    assert file("c.json", json.dumps({"zero_optimization": {"stage": 3}})) == "DeepSpeed"
    assert file("d.json", json.dumps({"transformer_layer_cls_to_wrap": ["A"]})) == "transformers"


def test_values_that_are_given_are_put_in() -> None:
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
    assert translate(config).param_dtype is None
    assert "given={'bf16.enabled': ...}" in translate(config).without_counterpart[0]
    found = translate(config, given={"bf16.enabled": True, "train_batch_size": 64})
    assert found.param_dtype == "bfloat16"
    assert [row.key for row in found.rows if not row.has_counterpart] == ["bf16.enabled"]
    assert config["bf16"] == {"enabled": "auto"}
    with pytest.raises(TranslationError, match=r"given: expected keys that stand .* found 'bf16.on'"):
        translate(config, given={"bf16.on": True})


def test_references_within_the_config_are_followed() -> None:
    fsdp = {"activation_checkpointing": "${variables.on}", "sharding_strategy": "${oc.env:STRATEGY}"}
    variables = {
        "on": True,
        "precision": "${variables.low}",
        "low": "amp_bf16",
        "itself": "${variables.itself}",
    }
    config = {"variables": variables, "precision": "${variables.precision}", "fsdp_config": fsdp}
    found = translate(config)
    assert (found.param_dtype, found.checkpointing) == ("bfloat16", True)
    (lost,) = found.without_counterpart
    assert lost.startswith(
        "fsdp_config.sharding_strategy = '${oc.env:STRATEGY}': its value comes from outside"
    )
    assert not translate(config, given={"fsdp_config.sharding_strategy": "SHARD_GRAD_OP"}).without_counterpart
    endless = translate({**config, "precision": "${variables.itself}"})
    assert "add 'precision'" in endless.without_counterpart[1]


ZERO3 = {"zero_optimization": {"stage": 3}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": 1}, r"expected a config with the key .* found 'model'"),
    ({"zero_optimization": {"stage": 4}}, r"zero_optimization.stage: expected one of 0, 1, 2, 3, found 4"),
    ({"zero_optimization": {"stage": "auto"}}, r"stage: expected 0, 1, 2 or 3, found 'auto'. Give it"),
    ({**ZERO3, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, r"fp16.enabled: .* found both enabled"),
    ({"distributed_type": "FSDP", "fsdp_config": 3}, r"fsdp_config: expected a section with keys, found 3"),
    (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL"}},
        r"fsdp_config.fsdp_sharding_strategy: expected one of \['FULL_SHARD', 1\], .*'FULL'",
    ),
    ({"base_model": "x", "deepspeed": "z.json"}, r"deepspeed: expected fsdp, found DeepSpeed's settings"),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
        r"deepspeed_config_file: expected the settings themselves, .* Translate that file",
    ),
    ({"parallelism_config": {"tp": {}}}, r"parallelism_config: expected a section 'fsdp'"),
    ({"fsdp_config": {"data_parallel_replicate_degree": -1}}, r"one of the two can be left open"),
    (
        {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_dp_replicate_size": 2}},
        r"parallelism_config: expected dp_shard_size or cp_size above 1",
    ),
    (
        {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_dp_shard_size": 0}},
        r"dp_shard_size: expected one of .*'from': 1.*, found 0",
    ),
]


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_what_does_not_go_is_named_with_what_was_expected(config: dict[str, Any], said: str) -> None:
    with pytest.raises(TranslationError, match=said):
        translate(config)
