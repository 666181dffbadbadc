"""Translate a config of Accelerate, transformers, axolotl, Composer or DeepSpeed to FSDP2.

    python -m fsdp_utils.migration default_config.yaml
    python -m fsdp_utils.migration ds_config.json --given bf16.enabled=true

Prints what became of each key (! has no counterpart in FSDP2), then the Python to write. Exits with 2 if the
file cannot be translated.
"""

import sys

from fsdp_utils._commands import new_parser, run
from fsdp_utils.migration.frameworks import translate
from fsdp_utils.migration.translation import TranslationError


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, or 2 where there is no translation."""
    parser = new_parser("fsdp_utils.migration", __doc__)
    parser.add_argument("file", metavar="FILE", help="the config: .json, .yaml or .yml")
    text = 'a value that the file leaves open ("auto", ${...}), by the key in the table; may be repeated'
    parser.add_argument("--given", action="append", default=[], metavar="KEY=VALUE", help=text)
    parser.add_argument("--code", action="store_true", help="print the Python alone")
    options = parser.parse_args(arguments)
    try:
        found = translate(options.file, given=dict(text.partition("=")[::2] for text in options.given))
    except (TranslationError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(found.code() if options.code else f"{found}\n\n{found.code()}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
