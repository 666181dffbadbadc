"""Tables of results: HTML for a page, aligned text for a terminal and for tests."""

from collections.abc import Sequence
from html import escape

Value = str | int | float


class Table:
    """Rows under a head.

    Args:
        head: the names of the columns, with their units.
        rows: one sequence of values for each row, as long as the head. Integers are written with separators
            of thousands; other numbers as they are, so round them first.
        note: a sentence below the table.
    """

    def __init__(self, head: Sequence[str], rows: Sequence[Sequence[Value]], *, note: str = "") -> None:
        for row in rows:
            if len(row) != len(head):
                raise ValueError(
                    f"Table: expected {len(head)} values in each row, as in the head, found {len(row)}."
                )
        self.head = list(head)
        self.rows = [[f"{value:,}" if type(value) is int else str(value) for value in row] for row in rows]
        self.note = note
        self._numeric = [
            bool(rows) and all(isinstance(row[column], int | float) for row in rows)
            for column in range(len(head))
        ]

    def __repr__(self) -> str:
        lines = [self.head, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        text = [
            "  ".join(
                cell.rjust(width) if numeric else cell.ljust(width)
                for cell, width, numeric in zip(line, widths, self._numeric, strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*text, *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        aligned = ["right" if numeric else "left" for numeric in self._numeric]

        def line(cells: Sequence[str], tag: str) -> str:
            return "".join(
                f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
                for cell, side in zip(cells, aligned, strict=True)
            )

        body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in self.rows)
        note = f"\n<p>{escape(self.note)}</p>" if self.note else ""
        head = f"<thead><tr>{line(self.head, 'th')}</tr></thead>"
        return f"<table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table>{note}"
