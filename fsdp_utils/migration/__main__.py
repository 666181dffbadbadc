"""Translate a config of Accelerate, transformers, axolotl, Composer or DeepSpeed to FSDP2.

    python -m fsdp_utils.migration default_config.yaml
    python -m fsdp_utils.migration ds_config.json --given bf16.enabled=true

Prints what became of each key (! has no counterpart in FSDP2), then the Python to write. Exits with 2 if the
file cannot be translated.
"""

import argparse
import json
import sys
from typing import Any

from fsdp_utils._commands import new_parser, run
from fsdp_utils.migration.frameworks import translate
from fsdp_utils.migration.translation import TranslationError


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, or 2 where there is no translation."""
    parser = new_parser("fsdp_utils.migration", __doc__)
    parser.add_argument("file", metavar="FILE", help="the config: .json, .yaml or .yml")
    text = 'a value that the file leaves open ("auto", ${...}), by the key in the table; may be repeated'
    options: dict[str, Any] = {"type": _setting, "default": [], "metavar": "KEY=VALUE", "help": text}
    parser.add_argument("--given", action="append", **options)
    parser.add_argument("--code", action="store_true", help="print the Python alone")
    asked = parser.parse_args(arguments)
    try:
        found = translate(asked.file, given=dict(asked.given))
    except (TranslationError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(found.code() if asked.code else f"{found}\n\n{found.code()}", end="")
    return 0


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, found {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


if __name__ == "__main__":
    sys.exit(run(main))
