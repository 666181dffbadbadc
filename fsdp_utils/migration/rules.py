"""The tables of keys, tables/*.json: a row says what becomes of a key with certain values."""

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_utils.migration.translation import Row, Translation, TranslationError, shown

TABLES = Path(__file__).parent / "tables"
ANY = object()
COMMENTS = ("comment", "comments", "description", "note", "notes")
MASTERS = (
    "updates float32 weights, whatever dtype the model has; FSDP2 and DDP keep that dtype. So the code does "
    "model.float()"
)


class Said(NamedTuple):
    """The words on a key, whether they say why its setting is lost, and where it is documented."""

    words: str
    lost: bool = False
    source: str = ""


@dataclass(frozen=True)
class Rule:
    """One row of a table.

    A value is a literal, compared as text in any case; {"from": 2} or {"to": 1}, whole numbers; a section
    with values for some of its keys; or a list of these.
    """

    source: str  # where the key is documented
    value: Any = ANY
    when: Mapping[str, Any] = field(default_factory=dict)  # settings so far, or other keys of the config
    set: Mapping[str, Any] = field(default_factory=dict)  # settings; "{value}" is the number that matched
    say: str = ""  # what to write instead
    lost: str = ""  # in place of `say`, why there is no counterpart, or not for all that the key does
    refuse: str = ""  # in place of `say`, why the value is an error
    inside: tuple[str, ...] = ()  # the keys that are known inside the value, if that is a section


@functools.cache
def rules_of(framework: str, section: str) -> dict[str, list[Rule]]:
    """Read the rows for a section, by key, in the order in which the keys are read.

    A row with "as" stands for the rows of these keys in shared.json, with its own source.
    """
    table = json.loads((TABLES / f"{framework}.json").read_text(encoding="utf-8"))
    found: dict[str, list[Rule]] = {}
    for row in table[section]:
        keys, shared = row.pop("key"), row.pop("as", [])
        own = {"source": table["sources"].get(row.get("source"), ""), "inside": row.get("inside", ())}
        rows = [{**vars(rule), **own} for name in shared for rule in rules_of("shared", "keys")[name]]
        for key in keys if isinstance(keys, list) else [keys]:
            found.setdefault(key, []).extend(Rule(**one) for one in rows or [{**row, **own}])
    return found


def read_section(
    section: Mapping[str, Any],
    rules: Mapping[str, list[Rule]],
    translation: Translation,
    *,
    name: str = "",
    beside: Mapping[str, Any] | None = None,
) -> None:
    """Read a section's keys, with or without "fsdp_" before the name; `beside` has others for `when`."""
    prefix = f"{name}." if name else ""
    names = {key if key in rules else f"fsdp_{key}": key for key in section}
    known = {**(beside or {}), **{rule: section[key] for rule, key in names.items()}}
    for rule in [rule for rule in rules if rule in names]:
        key, value, rows = f"{prefix}{names[rule]}", section[names[rule]], rules[rule]
        try:
            said = _said(key, value, rule, rows, translation, known)
        except TranslationError as error:
            raise TranslationError(f"{key}: {error}") from None
        translation.rows.append(Row(key, value, said.words, not said.lost, said.source or rows[0].source))
        if rows[0].inside and isinstance(value, Mapping):
            _add_unknown(value, rows[0].inside, rows[0].inside, translation, f"{key}.", rows[0].source)
    read = {names[rule] for rule in rules if rule in names}
    _add_unknown(section, read, rules, translation, prefix, next(iter(rules.values()))[0].source)


def _said(
    key: str, value: Any, rule: str, rows: list[Rule], translation: Translation, known: Mapping[str, Any]
) -> Said:
    if value is None:
        return Said("nothing: it is not set")
    give = f"given={{'{key}': ...}}"
    if isinstance(value, str) and "${" in value:
        return Said(f"its value comes from outside this file. Give it: {give}", lost=True)
    if value == "auto" and rows[0].value != "auto" and translation.framework == "DeepSpeed":
        return Said(f"transformers' Trainer fills it in. Give its value: {give}", lost=True)
    if rule == "fsdp":
        return _options(value, translation)
    if rule == "fsdp_transformer_layer_cls_to_wrap":
        return _classes(value, translation)
    return apply_rules(value, rows, translation, known)


def _options(value: Any, translation: Translation) -> Said:
    """Read the strategy, and what else stands beside it: "full_shard auto_wrap offload"."""
    items = value.split() if isinstance(value, str) else [] if isinstance(value, bool) else value
    if not isinstance(items, list):
        raise TranslationError(f"expected true or words such as 'full_shard auto_wrap', found {shown(value)}")
    rules = rules_of("shared", "keys")
    rows = [
        (True, rules["offload"]) if str(item).lower() == "offload" else (item, rules["strategy"])
        for item in items
        if str(item).lower() != "auto_wrap"
    ]
    said = [apply_rules(given, row, translation).words for given, row in rows]
    return Said("; ".join(said) or "fully_shard on each block, then on the model")


def _classes(value: Any, translation: Translation) -> Said:
    names = value.split(",") if isinstance(value, str) else value
    # identifiers, and nothing else: the names go into the code that is written
    texts = [n.strip() if isinstance(n, str) else "" for n in (names if isinstance(names, list) else [None])]
    if not all(text.isidentifier() and len(text) < 200 for text in texts):
        raise TranslationError(f"expected names of classes with commas between them, found {shown(value)}")
    if translation.blocks == () or not texts:
        return Said("nothing: without TRANSFORMER_BASED_WRAP Accelerate does not look at it")
    translation.blocks = tuple(texts)
    return Said(f"fully_shard on each {', '.join(translation.blocks)}")


def apply_rules(
    value: Any, rows: list[Rule], translation: Translation, known: Mapping[str, Any] | None = None
) -> Said:
    """Find the first row for a value, make its settings, and return its words."""
    known = {**(known or {}), **vars(translation)}
    for row in rows:
        fits, found = _match(row.value, value)
        if not fits or not all(_match(expected, known.get(name))[0] for name, expected in row.when.items()):
            continue
        for name, setting in row.set.items():
            setting = tuple(setting) if isinstance(setting, list) else setting
            setattr(translation, name, found if setting == "{value}" else setting)
        words = row.say or row.lost or row.refuse
        words = words.replace("{value}", shown(value) if found is None else f"{found}")
        if row.refuse:
            raise TranslationError(words)
        if isinstance(found, int):
            words = words.replace("{less}", f"{found - 1}")
        said = _precision(translation) if "{precision}" in words else Said("")
        return Said(words.replace("{precision}", said.words), said.lost or bool(row.lost), row.source)
    is_switch = any(row.value is True for row in rows)
    if is_switch and str(value).lower() == "false":
        return Said("nothing: it is off")
    expected = [f"{row.value}" for row in rows if row.value is not ANY and not row.refuse]
    expected += ["False"] if is_switch else []
    raise TranslationError(f"expected one of {', '.join(dict.fromkeys(expected))}, found {shown(value)}")


def _match(pattern: Any, value: Any) -> tuple[bool, Any]:
    """Tell whether a value is one of a pattern's, and the literal or the number that it is."""
    if pattern is ANY:
        return True, None
    if isinstance(pattern, list):
        return next((found for one in pattern if (found := _match(one, value))[0]), (False, None))
    if isinstance(pattern, dict) and {"from", "to"} & set(pattern):
        number = whole_number(value)
        fits = number is not None and pattern.get("from", number) <= number <= pattern.get("to", number)
        return fits, number
    if isinstance(pattern, dict):
        section = value if isinstance(value, Mapping) else dict.fromkeys(pattern, ANY)
        found = [_match(one, section.get(name)) for name, one in pattern.items()]
        return all(fits for fits, _ in found), next((inner for _, inner in found), None)
    same = value is pattern if value is None else str(value).upper() == str(pattern).upper()
    return same, pattern


def whole_number(value: Any) -> int | None:
    """Return the whole number that a value is, or that a text shows; None for any other value."""
    text = str(value)[:20]
    return int(text) if text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 20 else None


def _add_unknown(
    section: Mapping[Any, Any], read: Any, known: Any, translation: Translation, prefix: str, source: str
) -> None:
    """Add a row for each key of a section that was not read."""
    for key, value in section.items():
        if key in read:
            continue
        close = ", ".join(difflib.get_close_matches(str(key)[:100], known))
        meant = f": is {close} meant?" if close else ""
        said = Said(f"no key of {translation.framework} that is known here{meant}", lost=True)
        if isinstance(key, str) and (key[:1] in ("_", "#", "/") or key.lower() in COMMENTS):
            said = Said("nothing: a comment")
        named = key if isinstance(key, str) and key.isidentifier() and len(key) <= 100 else shown(key)
        translation.rows.append(Row(f"{prefix}{named}", value, said.words, not said.lost, source))


def _precision(translation: Translation) -> Said:
    if translation.param_dtype is None:
        return Said("nothing: without mp_policy all stays as it is")
    # fp16's small gradients become 0 unless the loss is scaled
    scaler = "; torch.amp.GradScaler scales the loss" if translation.param_dtype == "float16" else ""
    masters = f". {translation.framework} {MASTERS}" if translation.masters else ""
    if translation.ddp:
        words = "DistributedDataParallel has no such policy: torch.autocast around the forward pass"
        return Said(f"{words}{scaler}{masters}", lost=True)
    dtypes = f"param_dtype=torch.{translation.param_dtype}, reduce_dtype=torch.{translation.reduce_dtype}"
    words = f"MixedPrecisionPolicy({dtypes}); buffers keep their dtype: cast them yourself"
    words += f"{scaler}, in your loop: fully_shard has none" if scaler else ""
    trained = " for each parameter that requires a gradient" if masters else ""
    return Said(f"{words}{masters}{trained}", lost=bool(scaler or masters))
