"""torchrun ... -m fsdp_utils.train: see `fsdp_utils.train.loop`."""

import sys

from fsdp_utils._commands import run
from fsdp_utils.train.loop import main

sys.exit(run(main))
