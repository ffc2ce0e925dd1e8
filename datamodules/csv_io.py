"""Small CSV files of named numbers, checked at the door."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable
from pathlib import Path


def read_row(path: str | os.PathLike[str], required: Iterable[str]) -> dict[str, float]:
    """The numbers of a CSV file that has a header and one row.

    Headers and values may carry blanks; headers may differ in case.

    Args:
        path: the file.
        required: names of columns that must be there.

    Returns:
        {name in lower case: number}, of all columns that hold a finite number.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no or several rows, a required column is missing, or what it holds is no finite number.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a CSV file with the columns {list(required)}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not readable as CSV ({error})") from error
    lines = [line for line in lines if any(line)]
    if len(lines) != 2:
        raise ValueError(f"{path}: expected a header and one row, found {max(0, len(lines) - 1)} rows")
    header = [name.lstrip("#").strip().lower() for name in lines[0]]
    row = {}
    for name, text in zip(header, lines[1], strict=False):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            row[name] = number
    for name in required:
        if name.lower() not in header:
            raise ValueError(f"{path}: column {name!r} is missing; found {lines[0]}")
        if name.lower() not in row:
            place = header.index(name.lower())
            found = lines[1][place] if place < len(lines[1]) else ""
            raise ValueError(f"{path}: column {name!r} holds {found!r}, expected a finite number")
    return row
