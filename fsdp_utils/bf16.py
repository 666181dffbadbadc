"""python -m fsdp_utils.bf16: can this machine train in bf16? See `fsdp_utils.precision.bf16`."""

import sys

from fsdp_utils.precision.bf16 import Bf16Support, bf16_support, main

__all__ = ["Bf16Support", "bf16_support"]

if __name__ == "__main__":
    sys.exit(main())
