"""A figure that its script moves in a browser, and that stands still where scripts do not run."""

import base64
import json
from html import escape
from importlib.resources import files
from typing import Any, ClassVar


class Interactive:
    """A figure that a notebook shows as HTML with a script, or as a PNG where scripts do not run.

    The script draws from `data`, whose "id" is that of the place on the page; `text` describes the picture.
    """

    SCRIPT: ClassVar[tuple[str, str]]  # package and file of a function, which is called with the data

    def __init__(self, data: dict[str, Any], text: str, picture: bytes) -> None:
        self.data, self._text, self._picture = data, text, picture

    def __repr__(self) -> str:
        return self._text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        picture = base64.b64encode(self._picture).decode()
        return {"text/html": self._html(picture), "image/png": picture, "text/plain": repr(self)}

    def _html(self, picture: str) -> str:
        package, file = self.SCRIPT
        script = files(package).joinpath(file).read_text(encoding="utf-8")
        # "</" would end the script
        data = json.dumps(self.data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
        still = f'<img alt="{escape(self._text)}" src="data:image/png;base64,{picture}">'
        place = f'<div data-{file.removesuffix(".js")}="{self.data["id"]}">{still}</div>'
        return f"{place}\n<script>{script.rstrip()}({data});</script>"
