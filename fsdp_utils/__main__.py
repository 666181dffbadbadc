"""All command lines of fsdp_utils. `python -m fsdp_utils COMMAND --help` explains one."""

import argparse
import json
import runpy
import sys

from fsdp_utils._commands import COMMANDS, new_parser


def main(arguments: list[str] | None = None) -> int:
    """List the commands, or run one in this process; return 0."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{text}" for name, (_, text) in COMMANDS.items()]
    parser = new_parser("fsdp_utils", __doc__, epilog="\n".join(["commands:", *lines]))
    parser.add_argument("--json", action="store_true", help="list the commands as JSON")
    parser.add_argument("command", nargs="?", metavar="COMMAND", choices=COMMANDS, help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the command takes")
    options = parser.parse_args(arguments)
    if options.command is not None:
        if options.json:
            parser.error(f"--json lists the commands; for {options.command} it stands behind the command")
        module, _ = COMMANDS[options.command]
        sys.argv = [sys.argv[0], *options.arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif options.json:
        print(
            json.dumps({name: {"module": module, "help": text} for name, (module, text) in COMMANDS.items()})
        )
    else:
        parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
