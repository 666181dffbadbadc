"""Configs that somebody else wrote: nothing of them is run, and each is translated or refused in words."""

import ast
import copy
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_utils.migration import TranslationError, accelerate, composer, deepspeed, trainer, translate

HOSTILE = (
    'Block"+__import__("os").system("true")+"',
    "Block'+__import__('os').system('true')+'",
    'Block"}; __import__("os").system("true")  # ',
    "Block\n    __import__('os').system('true')\n",
    "Block\r__import__('os').system('true')",
    "Block\u2028__import__('os').system('true')",
    "\\",
    '"""',
    "{__import__('os')}",
    "2; __import__('os').system('true')",
    "true\n__import__('os').system('true')",
    "\x1b[2J\x1b]0;title\x07",
)
# what the code that is written may call, and import
CALLS = {
    "transformer_block_classes", "init_device_mesh", "MixedPrecisionPolicy", "CPUOffloadPolicy",
    "fully_shard", "checkpoint_wrapper", "DistributedDataParallel", "model.set_submodule",
    "model.named_modules", "reversed", "list", "type", "int", "dist.get_world_size",
    "torch.cuda.is_available", "parallelize_module", "model.parameters", "parameter.data.float",
    "model.modules", "any", "module.parameters", "module.buffers", "buffer.is_floating_point",
    "buffer.data.float",
}  # fmt: skip
IMPORTS = {
    "fsdp_utils", "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.device_mesh",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "torch.nn.parallel", "os",
    "torch.distributed.tensor.parallel",
}  # fmt: skip


def check_code(code: str) -> None:
    """One function, of expected calls and imports alone, and of no text that a file brought."""
    module = ast.parse(code)
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) in CALLS, ast.unparse(node)
        elif isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= IMPORTS
        elif isinstance(node, ast.ImportFrom):
            assert node.module in IMPORTS
        elif isinstance(node, ast.Attribute | ast.Name):
            assert "__import__" not in ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value.isidentifier()
    *imports, function = module.body
    assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in imports)
    assert isinstance(function, ast.FunctionDef)
    assert ast.unparse(function.args) in ("model", "model, tp_plan")


def outcome(config: Any, framework: str | None = None) -> str:
    """Translated or refused, with all that is printed of either in a few lines."""
    try:
        found = translate(config, framework=framework)
    except TranslationError as error:
        printed = [str(error)]
        result = "refused"
    else:
        check_code(found.code())
        assert found.mp_policy is not None
        printed = [*str(found).split("\n"), *found.without_counterpart]
        result = "translated"
    for line in printed:
        assert len(line) < 4000
        assert line.isprintable(), line
    return result


# --- names that would be code

BASES: dict[str, list[dict[str, Any]]] = {
    "accelerate": [
        {
            "distributed_type": "FSDP",
            "mixed_precision": "fp16",
            "num_processes": 8,
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "Block,Other",
                "fsdp_activation_checkpointing": True,
                "fsdp_offload_params": "true",
                "fsdp_reshard_after_forward": "HYBRID_SHARD",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            },
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 2,
            },
        },
    ],
    "composer": [
        {
            "precision": "amp_bf16",
            "parallelism_config": {
                "fsdp": {
                    "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
                    "data_parallel_shard_degree": 4,
                    "data_parallel_replicate_degree": -1,
                    "sharding_strategy": "HYBRID_SHARD",
                    "activation_checkpointing": True,
                },
                "tp": {},
            },
        },
        {
            "precision": "fp32",
            "fsdp_config": {"mixed_precision": "PURE", "auto_wrap": False},
            "tp_config": {},
        },
    ],
    "transformers": [
        {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "transformer_layer_cls_to_wrap": ["Block", "Other"],
                "backward_prefetch": "backward_pre",
                "fsdp_state_dict_type": "FULL_STATE_DICT",
                "activation_checkpointing": "true",
                "min_num_params": 1,
            },
            "bf16": True,
            "gradient_checkpointing": True,
            "dp_shard_size": 2,
            "tensor_parallel_size": 2,
            "context_parallel_size": 2,
        },
    ],
    "deepspeed": [
        {
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": 4,
                "mics_shard_size": 8,
                "offload_param": {"device": "cpu", "pin_memory": True},
                "offload_optimizer": {"device": "cpu"},
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "fp16": {"enabled": True, "loss_scale": 0},
            "communication_data_type": "fp32",
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        },
    ],
}
TABLES = {  # where each table of keys stands in a config
    "accelerate": [
        ([], accelerate.ABOVE),
        (["fsdp_config"], accelerate.FSDP),
        (["parallelism_config"], accelerate.PARALLELISM),
    ],
    "transformers": [
        ([], trainer.ABOVE),
        (["fsdp_config"], {**accelerate.FSDP, **trainer.FSDP}),
    ],
    "composer": [(["parallelism_config", "fsdp"], composer.FSDP)],
    "deepspeed": [
        ([], deepspeed.ABOVE),
        (["zero_optimization"], deepspeed.ZERO),
        (["fp16"], deepspeed.PRECISION),
    ],
}


def section_of(config: Any, path: list[str]) -> dict[Any, Any]:
    for key in path:
        config = config[key]
    return config


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in nested sections, of which none here is deeper than four."""
    inside = value.items() if isinstance(value, dict) and len(path) < 4 else ()
    for key, each in inside:
        yield (*path, key)
        yield from places(each, (*path, key))


@pytest.mark.parametrize("framework", BASES)
def test_no_text_of_a_config_becomes_code(framework: str, tmp_path: Path) -> None:
    base = BASES[framework][0]
    assert outcome(base) == "translated"
    tried: Counter[str] = Counter()
    for text in HOSTILE:
        for path, keys in TABLES[framework]:
            for key in [*keys, text]:  # as the value of each key that is known, and as a key
                config = copy.deepcopy(base)
                section_of(config, path)[key] = text
                tried[outcome(config, framework)] += 1
        for path in places(base):  # as each value, deep inside too
            config = copy.deepcopy(base)
            section_of(config, list(path[:-1]))[path[-1]] = text
            tried[outcome(config, framework)] += 1
            file = tmp_path / "config.yaml"
            file.write_text(yaml.safe_dump(config), encoding="utf-8")
            tried[outcome(file, framework)] += 1
    assert tried["translated"] > 100  # of keys that say the same for whatever value
    assert tried["refused"] > 100


def test_a_class_is_named_by_an_identifier() -> None:
    config = copy.deepcopy(BASES["accelerate"][0])
    assert 'names = {"Block", "Other"}' in translate(config).code()
    config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = HOSTILE[0]
    with pytest.raises(
        TranslationError, match=r"cls_to_wrap: expected names of classes .* found 'Block\"\+__"
    ):
        translate(config)
    found = translate(BASES["accelerate"][0])
    found.blocks = (HOSTILE[0],)  # by hand
    with pytest.raises(TranslationError, match="blocks: expected names of classes"):
        found.code()


# --- values of all kinds

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 13)
)


def within_itself() -> list[Any]:
    itself: list[Any] = []
    itself.append(itself)
    return itself


def shared(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value] * 9
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 10**9, 2**63, 10**30, 10**5000, 0.5, float("nan"), float("inf"),
    "", "auto", "AUTO", "²", "٣", "2", "-1", "no", "None", "cpu", "nvme", "bf16", "HYBRID_SHARD",
    "x" * 100_000, b"bytes", [], [1], ["cpu"], [[]], {}, {"device": ["cpu"]}, {"type": None},
    {"type": "Adam", "params": []}, {1: 2, "a": 3}, {None: {}, (1, 2): 1, "enabled": True}, {"enabled": {}},
    {"fsdp": None}, {"fsdp": []}, {"param_dtype": []}, set(), {1, 2}, (1, 2), nested(40), nested(200),
    within_itself(), shared(20), *HOSTILE,
]  # fmt: skip
KEYS: list[Any] = [None, 1, 1.5, True, (1, 2), "", "enabled", "fsdp", "stage", "x" * 10_000, *HOSTILE]


def mutated(random_: random.Random) -> tuple[Any, str | None]:
    """A config with one to three changes: a value, a key or a section replaced, added or left out."""
    framework = random_.choice(list(BASES))
    config = copy.deepcopy(random_.choice(BASES[framework]))
    for _ in range(random_.randint(1, 3)):
        path = random_.choice([*places(config), ("new",)])
        section = section_of(config, list(path[:-1]))
        kind = random_.choice(("value", "value", "add", "rename", "remove"))
        if kind == "value":
            section[path[-1]] = random_.choice(VALUES)
        elif not isinstance(section, dict) or path[-1] not in section:
            continue
        elif kind == "remove":
            del section[path[-1]]
        elif kind == "add":
            _, known = random_.choice(TABLES[framework])
            section[random_.choice([*KEYS, *known])] = random_.choice(VALUES)
        else:
            section[random_.choice(KEYS)] = section.pop(path[-1])
    return config, random_.choice((framework, None))


PIECES = (
    b"{",
    b"[",
    b"}",
    b"&a ",
    b"*a ",
    b": ",
    b"\n",
    b"- ",
    b"!!x ",
    b"\0",
    b"?",
    b"\xff",
    b"1",
    b"e",
    b" ",
)


def mutated_text(random_: random.Random, text: str) -> bytes:
    """A file with one or two changes: a byte changed, put in or taken out, or a stretch repeated."""
    data = bytearray(text.encode())
    for _ in range(random_.randint(1, 2)):
        at = random_.randrange(len(data))
        kind = random_.choice(("change", "insert", "remove", "repeat"))
        if kind == "change":
            data[at : at + 1] = random_.choice(PIECES)
        elif kind == "insert":
            data[at:at] = random_.choice(PIECES)
        elif kind == "remove":
            del data[at]
        else:
            data[at:at] = data[at : at + random_.randint(1, 200)]
    return bytes(data)


@pytest.mark.parametrize("kind", ["values", "json", "yaml"])
def test_500_mutations_of_each_kind_are_translated_or_refused(kind: str, tmp_path: Path) -> None:
    random_ = random.Random(f"mutations of {kind}")
    bases = [(name, config) for name, configs in BASES.items() for config in configs]
    tried: Counter[str] = Counter()
    for _ in range(500):
        if kind == "values":
            tried[outcome(*mutated(random_))] += 1
            continue
        framework, config = random_.choice(bases)
        text = json.dumps(config, indent=1) if kind == "json" else yaml.safe_dump(config)
        file = tmp_path / f"config.{kind}"
        file.write_bytes(mutated_text(random_, text))
        tried[outcome(file, random_.choice((framework, None)))] += 1
    print(f"{kind}: {dict(tried)}")
    assert tried.total() == 500
    assert min(tried["translated"], tried["refused"]) > 10


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bomb.yaml", BOMB, "replaced by what they stand for"),
        ("itself.yaml", "a: &a [*a]", "within itself"),
        ("deep.yaml", "a: " + "[" * 5000, "deep"),
        ("broken.yaml", "a: [", "broken.yaml: expected YAML"),
        ("tag.yaml", "a: !!python/object/apply:os.system [true]", "tag.yaml: expected plain YAML"),
        ("deep.json", '{"a": ' + "[" * 100_000, "deep.json: expected JSON"),
        ("long.json", '{"a": ' + "9" * 5000 + "}", "long.json: expected JSON"),
        ("number.json", '{"a": ' + "9" * 40 + "}", "expected whole numbers of at most 64 bits"),
        ("twice.json", '{"zero_optimization": {"stage": 3, "stage": 0}}', "the key 'stage' stands twice"),
        ("broken.json", "{", "broken.json: expected JSON"),
        ("large.json", " " * (1024 * 1024 + 1), "expected at most 1,048,576 bytes"),
        ("latin.json", b'{"a": "\xe4"}', "expected JSON in UTF-8"),
        ("mixed.yaml", "{1: 2, a: 3, null: 4, 2001-01-01: 5}", "found 1, 'a', None, datetime.date"),
        ("many.json", json.dumps({"a": [0] * 20_000}), "expected at most 10,000 values"),
        ("list.json", "[]", "in list.json: expected a dict of settings, found list"),
    ],
)
def test_a_file_that_is_no_config_is_one_error(
    name: str, content: str | bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.monotonic()
    with pytest.raises(TranslationError) as error:
        translate(file)
    assert said in str(error.value)
    assert len(str(error.value)) < 1000
    assert time.monotonic() - began < 5


ENDLESS = {
    "itself": within_itself(),
    "shared": shared(20),
    "deep": nested(100),
    "number": 10**5000,
    "text": "x" * 2**21,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_dict_that_would_be_printed_without_end_is_refused(name: str) -> None:
    with pytest.raises(TranslationError, match="config: expected "):
        translate({"distributed_type": "FSDP", "fsdp_config": {"fsdp_min_num_params": ENDLESS[name]}})


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(TranslationError, match=r"pipe.yaml: expected a file, found a folder, a pipe"):
        translate(tmp_path / "pipe.yaml")
    with pytest.raises(FileNotFoundError):
        translate(tmp_path / "nowhere.yaml")


def test_a_subclass_of_int_is_written_as_the_number_that_it_is() -> None:
    class Ranks(int):
        def __str__(self) -> str:
            return "os.abort()"

        __repr__ = __str__

        def __format__(self, _: str) -> str:
            return "os.abort()"

    section = {"stage": Ranks(3), "zero_hpz_partition_size": Ranks(8)}
    found = translate({"zero_optimization": section})
    assert "reshard_after_forward=8" in found.code()
    assert "abort" not in found.code() + str(found)
    assert section["stage"].__class__ is Ranks  # the config itself is left as it was
