"""Draw the picture of README.md: what each rank holds of one FSDP unit, from one step to the next.

python tools/draw_picture.py
"""

import sys
from pathlib import Path

from fsdp_utils.lessons import plots

PICTURE = Path(__file__).resolve().parent.parent / "notebooks" / "one_unit.png"


def main() -> int:
    picture = plots.life_of_a_unit(4).data
    assert isinstance(picture, bytes)
    PICTURE.write_bytes(picture)
    print(f"{PICTURE.name}: {PICTURE.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
