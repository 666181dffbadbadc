"""Plan a training of the model whose config.json lies in FOLDER.

    python -m fsdp_utils.planner FOLDER --world-size 64 --batch-size 64 --seq-len 4096

All numbers are those of a simulation. `fsdp_utils.plan` takes more options, and other models. Exits with 1 if
the training does not fit, and with 2 if the question cannot be answered.
"""

import gc
import os
import sys

from fsdp_utils._commands import new_parser
from fsdp_utils.planner.gpus import GPUS


def main(arguments: list[str]) -> int:
    # here: as a command, what torch is made of is loaded after the collector is switched off
    from fsdp_utils.planner.planning import plan

    parser = new_parser("fsdp_utils.planner", __doc__)
    parser.add_argument("model", metavar="FOLDER", help="a folder with a config.json")
    for name, kind, text in (
        ("world-size", int, "ranks, one on each GPU"),
        ("batch-size", int, "samples in a step, of all ranks and micro-batches together"),
        ("seq-len", int, "tokens of a sample, if it has any"),
        ("gpu", str, f"{', '.join(GPUS)} (default: H100)"),
        ("strategy", str, "full, grad_op or hybrid (default: full)"),
        ("checkpointing", str, "full or selective (default: none)"),
        ("micro-batches", int, "gradient accumulation"),
    ):
        parser.add_argument(f"--{name}", type=kind, required=name in ("world-size", "batch-size"), help=text)
    parser.add_argument("--fp32", action="store_true", help="compute in the model's dtype instead of in bf16")
    parser.add_argument("--compiled", action="store_true", help="each block by torch.compile")
    parser.add_argument("--offload", action="store_true", help="shards and optimizer state lie on the host")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    if given.pop("fp32"):
        given["mp_policy"] = None
    try:
        planned = plan(given.pop("model"), **given)
    except (ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    print(planned)
    return 0 if planned.fits else 1


if __name__ == "__main__":
    # The answer is to come within seconds, and most of these go into loading torch and transformers.
    gc.disable()  # nearly all that is made is kept until the end: there is little to collect
    sys.modules.setdefault("scipy", None)  # pyright: ignore -- "not installed": for losses of detection alone
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to take all modules down in order takes a second
