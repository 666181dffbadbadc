"""Tables of results: HTML for a page, aligned text for a terminal and for tests."""

from collections.abc import Sequence
from html import escape


class Table:
    """Rows under a head.

    Args:
        head: The names of the columns, with their units.
        rows: One sequence of values for each row, as long as the head. Integers are written with separators
            of thousands; other numbers as they are, so round them first.
        note: A sentence below the table.
    """

    def __init__(
        self, head: Sequence[str], rows: Sequence[Sequence[str | int | float]], *, note: str = ""
    ) -> None:
        for row in rows:
            if len(row) != len(head):
                raise ValueError(
                    f"Table: expected {len(head)} values in each row, as in the head, found {len(row)}."
                )
        self.head, self.note = list(head), note
        self.rows = [[f"{value:,}" if type(value) is int else str(value) for value in row] for row in rows]
        columns = zip(*rows, strict=True) if rows else [[""] for _ in head]
        self._numeric = [all(isinstance(value, int | float) for value in column) for column in columns]

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
