"""Plan a training, or search for the fewest GPUs that it takes.

    python -m fsdp_utils.planner MODEL --world-size 64 --batch-size 64 --seq-len 4096
    python -m fsdp_utils.planner MODEL --search 8 16 32 64 --seq-len 4096 --tokens-per-s 100000

MODEL is a folder with a config.json, or a model id of the hub. All numbers are those of a simulation. Exits
with 1 if nothing fits, and with 2 if the question cannot be answered.
"""

import gc
import json
import os
import sys

from fsdp_utils._commands import new_parser
from fsdp_utils.planner.gpus import GPUS

# what the choices mean, by option, the default first; `fsdp_utils.planner.plan` says more
CHOICES = {
    "--strategy": {
        "full": "parameters, gradients and optimizer state are sharded over all ranks",
        "grad_op": "parameters stay whole from forward to backward",
        "hybrid": "sharded within a host, with a copy on each host",
    },
    "--api": {"fsdp2": "fully_shard", "fsdp1": "FullyShardedDataParallel"},
    "--precision": {
        "bf16": "fp32 parameters, computes and reduces in bf16",
        "bf16_reduce_fp32": "the same, and reduces in fp32",
        "pure_bf16": "all in bf16",
        "pure_bf16_reduce_fp32": "all in bf16 but the reduction",
        "fp32": "all in fp32",
    },
    "--checkpointing": {
        "none": "activations are kept",
        "full": "each block's are computed again in backward",
        "selective": "each block's, but for those of costly operators",
        "every_2": "those of one block in two",
        "every_3": "of one in three",
        "every_4": "of one in four",
    },
    "--optimizer": {
        "adamw": "AdamW, fused",
        "adamw_bf16": "AdamW whose state takes 2 bytes for each number",
        "adamw_8bit": "AdamW whose state takes 1 byte",
        "adamw_one_by_one": "AdamW with foreach=False",
        "sgd": "no state",
        "sgd_momentum": "one number for each parameter",
    },
    "--attention": {
        "sdpa": "scaled_dot_product_attention",
        "flash": "FlashAttention-2",
        "flash1": "FlashAttention-1",
        "flash3": "FlashAttention-3",
        "eager": "with the whole matrix of scores",
    },
    "--loss": {
        "full": "logits of all tokens, and a copy of them in fp32",
        "shifted": "one more copy, without the last token",
        "half": "cross entropy in the dtype of computation",
        "compiled": "in one kernel, without a copy",
        "chunked": "of an eighth of the tokens, computed again in backward",
        "fused": "in chunks, with their gradients computed in forward",
    },
    "--held-output": {
        "none": "the loop holds nothing of the output when the next forward pass begins",
        "logits": "it still holds the logits",
        "logits_and_cache": "and each block's keys and values",
        "fp32_logits": "logits that the model returns in fp32",
        "fp32_logits_and_cache": "these, and keys and values",
    },
}
SEARCHED = ("--strategy", "--checkpointing")  # --search tries several


def main(arguments: list[str]) -> int:
    # here: as a command, what torch is made of is loaded after the collector is switched off
    from fsdp_utils.planner.planning import plan
    from fsdp_utils.planner.searching import search

    parser = new_parser("fsdp_utils.planner", __doc__)
    parser.add_argument(
        "model", metavar="MODEL", help="a folder with a config.json, or a model id of the hub"
    )
    parser.add_argument("--world-size", type=int, metavar="RANKS", help="ranks, one on each GPU")
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="SAMPLES",
        help="samples in a step, of all ranks; without it --search tries 1, 2, 4 and 8 for each rank",
    )
    parser.add_argument("--seq-len", type=int, metavar="TOKENS", help="tokens of a sample, if it has any")
    parser.add_argument(
        "--gpu",
        default="H100",
        help=f"{', '.join(GPUS)}, or the numbers of another one as a JSON object: "
        '{"name": "mine", "usable_gib": 23.5, "memory_gb_s": 936, "half_tflops": 71, "fp32_tflops": 35.6, '
        '"link": "PCIe", "link_gb_s": 32, "host_link_gb_s": 32, "network_gb_s": 12.5} (default: H100)',
    )
    for flag, choices in CHOICES.items():
        words = "; ".join(f"{name}: {text}" for name, text in choices.items())
        first = next(iter(choices))
        default = f"{first}, or what --search finds" if flag in SEARCHED else first
        parser.add_argument(
            flag,
            default=None if flag in SEARCHED else first,
            metavar="NAME",
            help=f"{words} (default: {default})",
        )
    parser.add_argument("--micro-batches", type=int, default=1, metavar="COUNT", help="gradient accumulation")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="RANKS", help="GPUs that share each unit"
    )
    for flag, text in {
        "--no-sync": "reduce gradients in the last micro-batch alone",
        "--compiled": "each block by torch.compile",
        "--activation-offload": "what blocks keep for backward lies on the host",
        "--offload": "parameters, gradients and optimizer's state lie on the host",
    }.items():
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument("--ranks-per-host", type=int, default=8, metavar="RANKS", help="default: 8")
    parser.add_argument(
        "--search", type=int, nargs="+", metavar="RANKS", help="the fewest of these that will do"
    )
    for rate in ("tokens", "samples"):
        parser.add_argument(
            f"--{rate}-per-s",
            type=float,
            metavar="RATE",
            help=f"{rate} of all ranks to be reached, with --search",
        )
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
        for rate in ("tokens", "samples"):
            if f"{rate}_per_s" in given:
                parser.error(f"expected --{rate}-per-s with --search alone: a plan shows its {rate}/s")
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
