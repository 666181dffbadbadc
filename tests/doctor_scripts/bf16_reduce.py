"""Gradients are summed in bfloat16: without reduce_dtype, FSDP1 reduces in the dtype of the parameters."""

import torch
from common import Decoder, run, start, train, with_fsdp1
from torch.distributed.fsdp import MixedPrecision


def main(faulty: bool) -> None:
    start()
    if faulty:
        precision = MixedPrecision(param_dtype=torch.bfloat16)
    else:
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(with_fsdp1(Decoder(), mixed_precision=precision, use_orig_params=True), limit=1.0)


run(main)
