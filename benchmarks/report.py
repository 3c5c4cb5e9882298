"""Rows of measurements as CSV and as a Markdown table. It needs nothing but Python."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def shown(value: Any) -> str:
    """Return a cell of the table: numbers with as many digits as they are worth."""
    if not isinstance(value, float):
        return str(value).replace("|", "/")
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table, without columns that are empty in all of them."""
    names = [name for name in columns(rows) if any(row.get(name, "") != "" for row in rows)]
    lines = [names, ["---"] * len(names), *([shown(row.get(name, "")) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def columns(rows: Sequence[Row]) -> list[str]:
    """Return the names of all columns, in the order in which they first come."""
    return list(dict.fromkeys(name for row in rows for name in row))


def write(rows: Sequence[Row], path: Path, caption: str = "", summary: Sequence[Row] = ()) -> None:
    """Write rows to the CSV file `path`, and a table of them, or of their summary, to the .md file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns(rows))
        writer.writeheader()
        writer.writerows(rows)
    path.with_suffix(".md").write_text(f"{caption}\n\n{table(summary or rows)}".lstrip())


def spread(values: Sequence[float]) -> str:
    """Return the median of some ratios, and the smallest and the largest, as a cell."""
    return f"{statistics.median(values):.3f} ({min(values):.2f} to {max(values):.2f})"
