"""Attacks on configs: of Accelerate, Composer, DeepSpeed and transformers' models."""

import ast
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.attack_parts.harness import REFUSED, Attack, Verdict, judge
from benchmarks.attack_parts.mutate import mutate_bytes, mutate_tree

GOOD: dict[str, dict[str, Any]] = {
    "accelerate": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 8,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": True,
        },
    },
    "composer": {
        "precision": "amp_bf16",
        "parallelism_config": {
            "fsdp": {
                "sharding_strategy": "FULL_SHARD",
                "mixed_precision": "PURE",
                "activation_checkpointing": True,
                "activation_cpu_offload": False,
                "limit_all_gathers": True,
                "state_dict_type": "sharded",
            }
        },
    },
    "deepspeed": {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    "transformers": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
}


def prepare(folder: Path, quick: bool) -> None:
    """Import what takes long, once and not within the first attack's time."""
    import yaml  # noqa: F401

    import fsdp_utils.migration  # noqa: F401


def prepare_transformers(folder: Path, quick: bool) -> None:
    (folder / "model").mkdir()
    # what a folder may bring along, and what must never run
    (folder / "model" / "code.py").write_text(
        f"open({str(folder / 'canary')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    )
    verdict = _plan(folder, json.dumps(GOOD["transformers"]))
    if verdict.outcome not in ("survived", REFUSED):
        raise RuntimeError(f"the unchanged config: {verdict}")


def _bomb(chance: random.Random) -> str:
    """A few hundred bytes of YAML that stand for very much."""
    levels = chance.choice((8, 12, 30))
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def _text(chance: random.Random, good: dict[str, Any], canary: str, *, as_yaml: bool) -> bytes:
    """The config changed, in most cases as a tree."""
    import yaml

    kind = chance.random()
    if kind < 0.75 or (kind < 0.85 and not as_yaml):
        tree = mutate_tree(chance, good, canary)
        try:
            text = yaml.safe_dump(tree) if as_yaml else json.dumps(tree)
        except (RecursionError, TypeError, yaml.YAMLError):
            text = json.dumps(good)
        return text.encode(errors="surrogatepass")
    text = yaml.safe_dump(good) if as_yaml else json.dumps(good)
    if kind < 0.85:
        extra = (
            _bomb(chance),
            f'x: !!python/object/apply:os.system ["touch {canary}"]\n',
            "a: &a [*a]\n",
            "<<: [1]\n",
        )
        return (chance.choice(extra) + text).encode()
    return mutate_bytes(chance, text.encode())


def _translated(name: str, folder: Path, chance: random.Random) -> Verdict:
    from fsdp_utils import translate

    as_yaml = name == "accelerate" or chance.random() < 0.5
    path = folder / ("config.yaml" if as_yaml else "config.json")
    path.write_bytes(_text(chance, GOOD[name], str(folder / "canary"), as_yaml=as_yaml))

    def call() -> str:
        found = translate(path)
        str(found)
        return found.code()

    return judge(call, (ValueError,), _wrong_code)


def _wrong_code(code: str) -> str:
    """What is in the code that a config must not be able to write there."""
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        return f"the code is none: {error}"
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return f"the config has written code: {code[:300]}" if names & {"__import__", "exec", "eval"} else ""


def _planned(folder: Path, chance: random.Random) -> Verdict:
    good = dict(GOOD["transformers"])
    if chance.random() < 0.1:  # asks for code that lies beside it
        good["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
        good["model_type"] = chance.choice(("llama", "unheard_of"))
    return _plan(folder, _text(chance, good, str(folder / "canary"), as_yaml=False))


def _plan(folder: Path, text: str | bytes) -> Verdict:
    from fsdp_utils import plan

    (folder / "model" / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())

    def right(found: Any) -> str:
        str(found)
        return "" if 0 < found.peak_allocated_gib < 1e6 else f"a peak of {found.peak_allocated_gib} GiB"

    return judge(
        lambda: plan(folder / "model", world_size=4, batch_size=4, seq_len=16),
        (ValueError, ImportError),
        right,
    )


_translate: dict[str, Callable[[Path, random.Random], Verdict]] = {
    name: partial(_translated, name) for name in ("accelerate", "composer", "deepspeed")
}
CONFIGS = [
    *(Attack(f"configs of {name}", prepare, attack, 500, 40) for name, attack in _translate.items()),
    Attack("config.json of transformers", prepare_transformers, _planned, 500, 2),
]
