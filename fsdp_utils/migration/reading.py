"""Read a section of a config key by key: each key gets a row, and no value is guessed."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from fsdp_utils.migration.translation import HOST, Row, Translation
from fsdp_utils.migration.values import TranslationError, named, shown

DTYPES = {
    "no": "float32",
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}


class Same(str):
    """What to write instead of a setting."""


class Lost(str):
    """Why nothing can be written instead of it."""


Words = Same | Lost


class Key(NamedTuple):
    """What to do with a key.

    Args:
        read: `read(value, translation)` notes the setting and returns what to write instead.
        source: where the key is documented.
        inside: the keys that the value may have, if it is a section that `read` takes as a whole.
    """

    read: Callable[[Any, Translation], Words]
    source: str
    inside: Collection[str] = ()


def read_section(
    section: Any, keys: Mapping[str, Key], translation: Translation, *, name: str = "", framework: str
) -> None:
    """Read each key of a section, and add a row for it to the translation.

    A comment, a key that is unknown, and a value that has to come from outside the file get a row too.

    Args:
        section: the settings.
        keys: all keys that are known, in the order in which they are read.
        translation: where settings and rows are put.
        name: of the section, "" for the config itself.
        framework: whose section it is, for the rows.

    Raises:
        TranslationError: a value is none of those that its key may have.
    """
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise TranslationError(f"{name}: expected a section with keys, found {shown(section)}")
    prefix = f"{name}." if name else ""
    for key, (read, source, inside) in keys.items():
        if key not in section:
            continue
        value = section[key]
        try:
            words = _without_reading(value, f"{prefix}{key}") or read(value, translation)
        except TranslationError as error:
            raise TranslationError(f"{prefix}{key}: {error}") from None
        translation.rows.append(Row(f"{prefix}{key}", value, str(words), isinstance(words, Same), source))
        if inside and isinstance(value, Mapping):
            _add_unknown(value, inside, translation, f"{prefix}{key}.", framework, source)
    source = next((key.source for key in keys.values()), "")
    _add_unknown(section, keys, translation, prefix, framework, source)


def _without_reading(value: Any, name: str) -> Words | None:
    """What to say of a value that is not set, or has to come from outside the file; None for any other."""
    if value is None:
        return Same("nothing: it is not set")
    if isinstance(value, str) and "${" in value:
        return Lost(f"its value comes from outside this file. Give it: given={{'{name}': ...}}")
    return None


def _add_unknown(
    section: Mapping[Any, Any],
    known: Collection[str],
    translation: Translation,
    prefix: str,
    framework: str,
    source: str,
) -> None:
    """Add a row for each key of a section that is not known."""
    for key, value in section.items():
        if key in known:
            continue
        if isinstance(key, str) and (key[:1] in ("_", "#", "/") or key.lower() in COMMENTS):
            words: Words = Same("nothing: a comment")
        else:
            close = ", ".join(difflib.get_close_matches(str(key)[:100], known, n=3))
            words = Lost(f"no key of {framework} that is known here{f': is {close} meant?' if close else ''}")
        row = Row(f"{prefix}{named(key)}", value, str(words), isinstance(words, Same), source)
        translation.rows.append(row)


COMMENTS = ("comment", "comments", "description", "note", "notes")


def fixed(words: Words, source: str) -> Key:
    """A key of which the same is to be said, whatever its value."""
    return Key(lambda value, translation: words, source)


def if_on(words: Words, source: str) -> Key:
    """A switch of which something is to be said only when it is on."""
    return Key(lambda value, translation: words if is_on(value) else Same("nothing: it is off"), source)


def is_on(value: Any) -> bool:
    """A switch, which some files write as text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise TranslationError(f"expected true or false, found {shown(value)}")


def number(value: Any) -> int:
    """A whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TranslationError(f"expected a whole number, found {shown(value)}")


def at_least_one(value: Any) -> int:
    """A number of ranks."""
    if number(value) < 1:
        raise TranslationError(f"expected a whole number from 1 on, found {shown(value)}")
    return value


def one_of(value: Any, names: tuple[str, ...]) -> str:
    """The value in upper case, if it is one of the names."""
    if str(value).upper() not in names:
        raise TranslationError(f"expected one of {', '.join(names)}, found {shown(value)}")
    return str(value).upper()


def dtype(value: Any) -> str:
    """PyTorch's name for the dtype that a framework calls so."""
    if not isinstance(value, str) or value not in DTYPES:
        raise TranslationError(f"expected one of {', '.join(DTYPES)}, found {shown(value)}")
    return DTYPES[value]


OUTSIDE = (
    "not part of fully_shard: the code gives the mesh its dimension, and takes a plan for parallelize_module "
    "(tp_plan). The ranks that share a layer read the same batch"
)
NOT_IN_CODE = "not part of fully_shard, and left out of the code: all ranks share the data. "


def tensor_parallel(size: Any, translation: Translation) -> Words:
    """How many ranks share each layer."""
    if at_least_one(size) == 1:
        return Same("nothing: 1 is no dimension")
    if translation.ddp:
        return Lost(f"{NOT_IN_CODE}parallelize_module over one more dimension of the mesh, before DDP")
    translation.tensor_parallel = size
    return Lost(OUTSIDE)


# --- settings that several frameworks have, under one name or another -----------------------------

# FSDP1's, in the order of the numbers by which Accelerate names them too
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def strategy(value: Any, translation: Translation) -> Words:
    """One of FSDP1's strategies, by name or by number.

    Source: https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md
    """
    by_number = {str(number): name for number, name in enumerate(STRATEGIES, start=1)}
    name = one_of(by_number.get(str(value), str(value).lstrip("_")), STRATEGIES)
    if name == "NO_SHARD":
        translation.ddp = True
        return Same("DistributedDataParallel: fully_shard always shards, and NO_SHARD is deprecated")
    words = reshard(name in ("FULL_SHARD", "HYBRID_SHARD"), translation)
    if name.startswith("HYBRID"):
        translation.shard_size = translation.shard_size or HOST
        return Same(f"a 2-D mesh (copies, ranks that share one) and {words}")
    return words


def reshard(on: bool, translation: Translation) -> Same:
    """Whether units are freed after forward. If not, a step of several micro-batches can gather once."""
    translation.reshard_after_forward = on
    kept = (
        "; to accumulate gradients, set_requires_gradient_sync(last) and set_reshard_after_backward(last) "
        "for each micro-batch, with last=True for the last of a step only"
    )
    return Same(f"reshard_after_forward={on}{'' if on else kept}")


def precision(param: str, reduce: str, translation: Translation) -> Words:
    """Computing in `param` and adding up gradients in `reduce`."""
    if param == reduce == "float32":
        return Same("nothing: without mp_policy all stays as it is")
    # fp16's small gradients become 0 unless the loss is scaled
    scaler = "; torch.amp.GradScaler scales the loss" if param == "float16" else ""
    translation.param_dtype, translation.reduce_dtype = param, reduce
    masters = f". {translation.framework} {MASTERS}" if translation.masters else ""
    if translation.ddp:
        words = "DistributedDataParallel has no such policy: torch.autocast around the forward pass"
        return Lost(f"{words}{scaler}{masters}{', and for the buffers beside it' if masters else ''}")
    dtypes = f"param_dtype=torch.{param}, reduce_dtype=torch.{reduce}"
    words = f"MixedPrecisionPolicy({dtypes}); buffers keep their dtype: cast them yourself{scaler}"
    words += ", in your loop: fully_shard has none" if scaler else ""
    return Lost(f"{words}{masters}") if scaler or masters else Same(words)


MASTERS = (
    "updates float32 weights, whatever dtype the model has; FSDP2 and DDP keep that dtype. So the code does "
    "model.float() for each parameter that requires a gradient"
)


def backward_prefetch(value: Any, translation: Translation) -> Words:
    """FSDP1's, by name or by number. FSDP2 does as BACKWARD_PRE unless it is given lists of modules."""
    by_number = dict(zip("123", PREFETCHES, strict=True))
    found = one_of(by_number.get(str(value), value), (*PREFETCHES, "NONE"))
    if found == "BACKWARD_PRE":
        return Same("nothing: by default as BACKWARD_PRE")
    by_default = "FSDP2 prefetches as BACKWARD_PRE: the same gradients, one more unit gathered in backward"
    if found == "BACKWARD_POST":
        return Lost(f"no counterpart: {by_default}")
    return Same(f"unit.set_modules_to_backward_prefetch([unit]) for each unit. Without it {by_default}")


PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")


def offload(on: bool, translation: Translation, *, pin_memory: bool = True) -> Words:
    """Parameters, gradients and optimizer state in host memory."""
    if not on:
        return Same("nothing: not offloaded")
    if translation.ddp:
        return Lost("DistributedDataParallel does not offload")
    translation.offload, translation.pin_memory = True, pin_memory
    pinned = "" if pin_memory else "pin_memory=False"
    return Same(f"CPUOffloadPolicy({pinned}), for parameters, gradients and optimizer state")


def checkpointing(value: Any, translation: Translation) -> Words:
    """Each block's activations computed again in backward."""
    translation.checkpointing = is_on(value)
    return Same(
        "checkpoint_wrapper around each block, before fully_shard" if is_on(value) else "nothing: it is off"
    )


def state_dict(value: Any, translation: Translation) -> Words:
    """FULL, SHARDED or LOCAL, with or without _STATE_DICT."""
    by_number = {"1": "FULL", "2": "LOCAL", "3": "SHARDED"}
    name = by_number.get(str(value), str(value).upper().removesuffix("_STATE_DICT"))
    kind = one_of(name, ("FULL", "SHARDED", "LOCAL"))
    translation.state_dict = "full" if kind == "FULL" else "sharded"
    if kind == "FULL":
        return Same("get_state_dict with StateDictOptions(full_state_dict=True, cpu_offload=True)")
    if kind == "LOCAL":
        return Lost(
            "no flat parameters, so no local state dict: get_state_dict and DCP, sharded by parameter"
        )
    return Same("get_state_dict and torch.distributed.checkpoint.save")
