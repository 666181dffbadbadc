"""torchrun ... -m fsdp_utils.train: see `fsdp_utils.train.loop`."""

import faulthandler
import sys

from fsdp_utils._commands import run
from fsdp_utils.train.loop import main

code = 1
try:
    code = run(main)
finally:
    if code in (1, 2):  # a process group that lost a rank, or a save, can hold up the end of a process
        faulthandler.dump_traceback_later(60.0, exit=True)
sys.exit(code)
