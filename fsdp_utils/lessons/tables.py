"""Tables of results: HTML for a page, aligned text for a terminal and for tests."""

from collections.abc import Sequence
from html import escape


class Table:
    """Rows under a head, with a note below. Integers get separators of thousands; round others before."""

    def __init__(
        self, head: Sequence[str], rows: Sequence[Sequence[str | int | float]], *, note: str = ""
    ) -> None:
        self.head, self.note = list(head), note
        self.rows = [[f"{value:,}" if type(value) is int else str(value) for value in row] for row in rows]
        columns = zip(head, *rows, strict=True)
        self._numeric = [all(isinstance(one, int | float) for one in values) for _, *values in columns]

    def __repr__(self) -> str:
        lines = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for line in lines:
            cells = zip(line, widths, self._numeric, strict=True)
            justified = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells]
            text.append("  ".join(justified).rstrip())
        return "\n".join([*text, *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return "".join(
                f'<{tag} style="text-align: {"right" if right else "left"}">{escape(cell)}</{tag}>'
                for cell, right in zip(cells, self._numeric, strict=True)
            )

        body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in self.rows)
        note = f"\n<p>{escape(self.note)}</p>" if self.note else ""
        head = f"<thead><tr>{line(self.head, 'th')}</tr></thead>"
        return f"<table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table>{note}"
