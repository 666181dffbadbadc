"""Configs that somebody else wrote: nothing of them is run, and each is translated or refused in words."""

import ast
import copy
import json
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_utils import translate
from fsdp_utils.migration import TranslationError

DATA = Path(__file__).parent / "data"
HOSTILE = (
    'Block"+__import__("os").system("true")+"',
    'Block"}; __import__("os").system("true")  # ',
    "Block\n    __import__('os').system('true')\n",
    "Block\u2028__import__('os').system('true')",
    "\\",
    '"""',
    "2; __import__('os').system('true')",
    "true\n__import__('os').system('true')",
    "\x1b[2J\x1b]0;title\x07",
)
# what the code that is written may call
CALLS = {
    "transformer_block_classes", "init_device_mesh", "MixedPrecisionPolicy", "CPUOffloadPolicy",
    "fully_shard", "checkpoint_wrapper", "DistributedDataParallel", "model.set_submodule",
    "model.named_modules", "reversed", "list", "type", "int", "dist.get_world_size", "model.float",
    "torch.cuda.is_available", "parallelize_module", "model.parameters", "parameter.data.float",
}  # fmt: skip
PUBLIC = [json.loads(line) for line in (DATA / "public_configs.jsonl").read_text().splitlines()]
# of each framework the longest
BASES = [
    max(
        (each["config"] for each in PUBLIC if each["expected"].get("framework") == name),
        key=lambda c: len(str(c)),
    )
    for name in ("Accelerate", "transformers", "Composer", "DeepSpeed")
]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 10**9, 10**30, 0.5, float("nan"), "", "auto", "²", "٣", "no", "cpu",
    "nvme", "bf16", "x" * 100_000, b"bytes", [], [1], [[]], {}, {"device": ["cpu"]}, {"type": None},
    {1: 2, "a": 3},    {None: {}, (1, 2): 1}, {"enabled": {}}, {"fsdp": None}, {1, 2}, (1, 2), *HOSTILE,
]  # fmt: skip


def outcome(config: Any) -> str:
    """Translated or refused; what is printed of either has no control characters, and the code is ours."""
    try:
        found = translate(config)
    except TranslationError as error:
        printed, result = [str(error)], "refused"
    else:
        for node in ast.walk(ast.parse(found.code())):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) in CALLS
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value.isidentifier()
            assert not isinstance(node, ast.Name) or "__" not in node.id
        printed, result = [*str(found).split("\n"), *found.without_counterpart], "translated"
    for line in printed:
        assert len(line) < 4000
        assert line.isprintable(), line
    return result


def section_of(config: Any, path: tuple[Any, ...]) -> dict[Any, Any]:
    for key in path:
        config = config[key]
    return config


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in nested sections."""
    for key, each in value.items() if isinstance(value, dict) and len(path) < 4 else ():
        yield (*path, key)
        yield from places(each, (*path, key))


@pytest.mark.parametrize("base", BASES)
def test_no_text_of_a_config_becomes_code_and_any_value_is_translated_or_refused(
    base: dict[str, Any], tmp_path: Path
) -> None:
    assert outcome(base) == "translated"
    file, tried = tmp_path / "config.yaml", Counter[str]()
    for turn, value in enumerate(VALUES):
        for number, (*path, key) in enumerate(places(base)):  # as each value, and as a key beside it
            if (turn + number) % (2 if value in HOSTILE else 6):
                continue  # of what is only odd, a sixth of the places
            for put in ({key: value}, {value: value} if isinstance(value, Hashable) else {}):
                config = copy.deepcopy(base)
                section_of(config, tuple(path)).update(put)
                tried[outcome(config)] += 1
        if value in HOSTILE:
            file.write_text(yaml.safe_dump(config), encoding="utf-8")
            outcome(file)
    assert min(tried["translated"], tried["refused"]) > 10


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 13)
)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bomb.yaml", BOMB, "more than 20 aliases"),
        ("itself.yaml", "a: &a [*a]", "within itself"),
        ("deep.yaml", "a: " + "[" * 5000, "deep"),
        ("broken.yaml", "a: [", "broken.yaml: expected YAML"),
        ("tag.yaml", "a: !!python/object/apply:os.system [true]", "tag.yaml: expected YAML"),
        ("empty.yaml", "", "in empty.yaml: expected a dict of settings, found NoneType"),
        ("deep.json", '{"a": ' + "[" * 100_000, "deep.json: expected JSON"),
        ("broken.json", "{", "broken.json: expected JSON"),
        ("list.json", "[]", "in list.json: expected a dict of settings, found list"),
        ("a.toml", 'model = "x"', "in a.toml: expected a dict of settings, found str"),
    ],
)
def test_a_file_that_is_no_config_is_one_error(name: str, content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(content)
    began = time.monotonic()
    with pytest.raises(TranslationError) as error:
        translate(file)
    assert said in str(error.value)
    assert len(str(error.value)) < 1000
    assert time.monotonic() - began < 30


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        translate(tmp_path / "nowhere.yaml")
    with pytest.raises(TranslationError, match="expected a dict of settings, found list"):
        translate([])  # type: ignore[arg-type]
    itself: dict[str, Any] = {"distributed_type": "FSDP"}
    itself["fsdp_config"] = itself
    with pytest.raises(TranslationError, match="config: expected "):
        translate(itself)
