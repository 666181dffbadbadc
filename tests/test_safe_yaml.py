"""YAML from somebody else: what safe_load reads is read alike, what would never end is refused at once."""

import time

import pytest
import yaml

from fsdp_utils._safe_yaml import MOST_CHARACTERS, MOST_DEPTH, MOST_EXPANDED, YamlError, load_yaml


def bomb(levels: int, each: int = 9) -> str:
    lines = [f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * each)}]" for i in range(levels)]
    return "\n".join(["a0: &a0 [x, x, x]", *lines])


def merges(levels: int) -> str:
    lines = [f"a{i + 1}: &a{i + 1} {{<<: [*a{i}, *a{i}], k{i + 1}: 1}}" for i in range(levels)]
    return "\n".join(["a0: &a0 {k0: 1}", *lines])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: [1, 2.5, 1e-4, yes, null, 2020-01-02]\nb: {c: text}\n",
        "base: &base {x: 1, y: [2]}\none: {<<: *base, x: 3}\ntwo: *base\n",
        bomb(2),
        "a: &a {k: a}\nb: &b {k: a, m: 1}\nc: {<<: *a, <<: *b, k: k}\nd: [a, a, a]\n",
        "- " * (MOST_DEPTH - 1) + "x",
    ],
)
def test_what_safe_load_reads_is_read_alike(text: str) -> None:
    assert load_yaml(text, where="f.yaml") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (bomb(9), "f.yaml, line 7: .*aliases"),
        (merges(40), "aliases"),
        (f"a: &a {'x' * 4000}\nb: [{', '.join(['*a'] * 300)}]", "f.yaml, line 2: .*aliases"),
        ("a: &a [1, *a]", "line 1: .*within itself"),
        ("[" * 100_000, f"at most {MOST_DEPTH} deep"),
        ("- " * (MOST_DEPTH + 1) + "x", "deep"),
        ("x" * (MOST_CHARACTERS + 1), "at most 262,144 characters, found 262,145"),
        ("a: [1, 2", "f.yaml: expected YAML"),
        ("a: *nobody", "f.yaml: .*undefined alias.*line 1"),
        ("a: \x00", "f.yaml: expected YAML"),
        ("a: 1\n--- \nb: 2", "f.yaml: .*single document"),
        ("a: 2020-13-45", "f.yaml: .*month"),
        ("a: !!timestamp x", "f.yaml: .*cannot be read"),
        ("a: !!int ''", "f.yaml: .*cannot be read"),
        ("a: !!python/object/apply:os.getcwd []", "f.yaml: .*cannot be read"),
        ("? [1, {b: 2}]\n: x", "f.yaml: .*unhashable"),
        ("a: " + "9" * 5000, "f.yaml: .*cannot be read"),
        ("a: 1\nb: 2\na: 3\n", "line 3: expected each key once in a section, found 'a' again"),
        ("x:\n  - {a: 1, 'a': 2}\n", "line 2: expected each key once in a section, found 'a' again"),
        ("x: {y: [{a: {}, b: 1, a: []}]}\n", "line 1: expected each key once in a section, found 'a' again"),
    ],
)
def test_what_is_no_configuration_is_refused_at_once(text: str, told: str) -> None:
    begun = time.perf_counter()
    with pytest.raises(YamlError, match=f"(?s){told}"):
        load_yaml(text, where="f.yaml")
    assert time.perf_counter() - begun < 5


def test_the_limits_are_where_they_are_said_to_be() -> None:
    load_yaml("x" * MOST_CHARACTERS, where="f.yaml")
    block = MOST_EXPANDED // 64
    repeated = f"a: &a {'x' * (block - 1)}\nb: [{', '.join(['*a'] * 62)}]"  # 63 blocks and some
    load_yaml(repeated, where="f.yaml")
    with pytest.raises(YamlError):
        load_yaml(repeated.replace("]", ", *a]"), where="f.yaml")
