"""plan and search from the command line.

    python -m fsdp_utils.planner MODEL --world-size 64 --batch-size 64 --seq-len 4096
    python -m fsdp_utils.planner MODEL --search 8 16 32 64 --seq-len 4096 --tokens-per-s 100000

MODEL is a folder with a config.json, or a model id of the hub. All numbers are those of a simulation. Exits
with 1 if nothing fits, and with 2 if the question cannot be answered.
"""

import argparse
import gc
import json
import os
import sys

from fsdp_utils.planner.gpus import GPUS


def main(arguments: list[str]) -> int:
    # here: as a command, what torch is made of is loaded after the collector is switched off
    from fsdp_utils.planner.planning import plan
    from fsdp_utils.planner.searching import search
    from fsdp_utils.planner.simulated_rank import (
        APIS,
        ATTENTION,
        CHECKPOINTING,
        HELD_OUTPUTS,
        LOSSES,
        OPTIMIZERS,
        PRECISIONS,
        STRATEGIES,
    )

    parser = argparse.ArgumentParser(
        prog="python -m fsdp_utils.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--world-size", type=int, help="ranks")
    parser.add_argument(
        "--batch-size", type=int, help="samples in a step, of all ranks; --search tries several without it"
    )
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--gpu", default="H100", help=", ".join(GPUS))
    parser.add_argument("--strategy", help=f"{', '.join(STRATEGIES)}; full, or what --search finds")
    parser.add_argument("--api", default="fsdp2", help=", ".join(APIS))
    parser.add_argument("--precision", default="bf16", help=", ".join(PRECISIONS))
    parser.add_argument("--checkpointing", help=f"{', '.join(CHECKPOINTING)}; none, or what --search finds")
    parser.add_argument("--optimizer", default="adamw", help=", ".join(OPTIMIZERS))
    parser.add_argument("--attention", default="sdpa", help=", ".join(ATTENTION))
    parser.add_argument("--loss", default="full", help=", ".join(LOSSES))
    parser.add_argument(
        "--held-output", default="none", help=f"until the next forward pass: {', '.join(HELD_OUTPUTS)}"
    )
    parser.add_argument("--micro-batches", type=int, default=1, help="gradient accumulation")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share each unit")
    for flag, text in {
        "--no-sync": "reduce gradients in the last micro-batch alone",
        "--compiled": "each block by torch.compile",
        "--activation-offload": "what blocks keep for backward lies on the host",
        "--offload": "parameters, gradients and optimizer's state lie on the host",
    }.items():
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument(
        "--search", type=int, nargs="+", metavar="RANKS", help="the fewest of these that will do"
    )
    parser.add_argument("--tokens-per-s", type=float, help="to be reached, with --search")
    parser.add_argument("--json", action="store_true", help="for programs, and without progress")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    model, worlds = given.pop("model"), given.pop("search", None)
    as_json = given.pop("json")
    try:
        if worlds:
            if "world_size" in given:
                parser.error(
                    "expected --world-size or --search, found both: --search takes the numbers of ranks"
                )
            if "strategy" in given:
                given["strategies"] = [given.pop("strategy")]
            if "checkpointing" in given:
                given["checkpointing"] = [given["checkpointing"]]
            result = search(model, world_sizes=worlds, progress=not as_json, **given)
            print(json.dumps(result.to_dict()) if as_json else result)
            return 0 if result.best else 1
        if "tokens_per_s" in given:
            parser.error("expected --tokens-per-s with --search alone: a plan shows its tokens/s")
        if "world_size" not in given or "batch_size" not in given:
            parser.error("expected --world-size and --batch-size, or --search")
        planned = plan(model, **given)
    except (ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(planned.to_dict()) if as_json else planned)
    return 0 if planned.fits else 1


if __name__ == "__main__":
    # The answer is to come within seconds, and most of these go into loading torch and transformers.
    gc.disable()  # nearly all that is made is kept until the end: there is little to collect
    sys.modules.setdefault("scipy", None)  # pyright: ignore -- "not installed": for losses of detection alone
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to take all modules down in order takes a second
