from fsdp_utils.precision.bf16 import Bf16Support as Bf16Support
from fsdp_utils.precision.bf16 import bf16_support as bf16_support
