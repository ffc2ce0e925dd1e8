"""Airfoils from lists of coordinates: Selig and Lednicer order, .dat and .csv, checked and mended.

An outline is (n, 2) float64 [chords], from the trailing edge over the upper side to the leading edge and back along the
lower side, counterclockwise. If its first point is not its last, a straight base closes it.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from datamodules.shape_report import ShapeReport

SUFFIXES = (".dat", ".csv", ".txt")
REPAIRS = ("chord", "incidence", "trailing_edge", "points")
FEW_POINTS, FINE_POINTS = 100, 200  # fewer segments than the first are worth resampling, to the second
LEAST_POINTS = 10
EVEN_SHARE = 0.15  # how evenly a resampled outline's points stand
MAX_INCIDENCE = 1.0  # of the chord line in the file [degrees]


def read_coordinates(path: Path) -> tuple[np.ndarray, str]:
    """The pairs of numbers of a coordinate file, (n, 2), and what stands around them, in words.

    Columns are separated by blanks, commas, semicolons or tabs; a third column is left out if it is constant. Lines of
    text ahead of the numbers are headers; blank lines count for nothing.

    Raises:
        FileNotFoundError: no such file.
        ValueError: text among the numbers, rows of other lengths, or no numbers; the message names the line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected airfoil coordinates ({', '.join(SUFFIXES)})")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file ({error}); expected two columns of coordinates, x and y") from error
    rows: list[list[float]] = []
    headers = 0
    for number, line in enumerate(lines, 1):
        words = [word for word in re.split(r"[\s,;]+", line.strip()) if word]
        if not words:
            continue
        try:
            values = [float(word) for word in words]
        except ValueError:
            if rows:
                raise ValueError(f"{path}, line {number}: expected two numbers, found {line.strip()[:60]!r}") from None
            headers += 1
            continue
        if len(values) not in (2, 3):
            if not rows:  # a name made of digits
                headers += 1
                continue
            raise ValueError(f"{path}, line {number}: expected two numbers, x and y, found {len(values)}")
        rows.append(values)
    if not rows:
        raise ValueError(f"{path}: no line holds two numbers; expected airfoil coordinates, x and y a line")
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{path}: some lines hold two numbers, others three; expected x and y on each")
    array = np.array(rows)
    if array.shape[1] == 3:
        if np.ptp(array[:, 2]) > 0:
            raise ValueError(f"{path}: three columns, of which the third varies; expected x and y, or z constant")
        array = array[:, :2]
    return array, f"{headers} header lines" if headers != 1 else "one header line"


def as_loop(rows: np.ndarray, name: str) -> tuple[np.ndarray, str]:
    """The outline as one list that runs around the body, from rows in Selig's or Lednicer's order.

    Lednicer's files give how many points the upper and the lower side have, then both from the leading to the trailing
    edge; Selig's run from the trailing edge around the leading edge and back. A list that starts elsewhere is turned.

    Returns:
        The rows around the body, in either direction, and the order in words.

    Raises:
        ValueError: there are too few rows, or some are NaN or infinite.
    """
    counts = rows[0]
    counted = (counts >= 2).all() and (counts == counts.round()).all() and counts.sum() == len(rows) - 1
    if counted:
        rows = rows[1:]
    if len(rows) < LEAST_POINTS:
        raise ValueError(f"{name}: {len(rows)} points, expected an airfoil's outline, {LEAST_POINTS} points at least")
    if not np.isfinite(rows).all():
        raise ValueError(f"{name}: {(~np.isfinite(rows)).any(axis=1).sum()} points are NaN or infinite")
    x = rows[:, 0]
    length = np.ptp(x)
    jump = int(counts[0]) if counted else int(np.argmin(np.diff(x))) + 1
    back = x[jump - 1] - x[jump] if 0 < jump < len(x) else 0.0
    if counted or (length > 0 and back > 0.9 * length and x[0] - x.min() < 0.1 * length):
        first, second = rows[:jump], rows[jump:]
        if (first[0] == second[0]).all():
            second = second[1:]
        return np.concatenate([first[::-1], second]), "Lednicer order"
    end = int(np.argmax(x))
    if (rows[0] == rows[-1]).all() and length > 0 and x.max() - x[0] > 0.1 * length:
        return np.concatenate([rows[end:-1], rows[: end + 1]]), "a list that does not start at the trailing edge"
    return rows, "Selig order"


def examine_airfoil(rows: np.ndarray, report: ShapeReport, n_segments: int | None = None) -> np.ndarray:
    """The outline (see the module) of coordinates in any of the known orders, checked and mended.

    Args:
        rows: coordinates as the file has them, (n, 2).
        report: takes what is found; knows what to mend.
        n_segments: resample to that many segments, whatever the file has.

    Raises:
        ShapeError: something was found that was neither mended nor accepted.
        ValueError: this is no outline.
    """
    name = report.shape
    loop, order = as_loop(np.asarray(rows, dtype=np.float64), name)
    report.note("order", f"{len(rows)} rows in {order}")
    repeated = np.flatnonzero((np.diff(loop, axis=0) == 0).all(axis=1))
    if len(repeated):
        report.note("duplicates", f"{len(repeated)} points that repeat the one before were left out")
        loop = np.delete(loop, repeated + 1, axis=0)
    if _enclosed(loop) < 0:
        report.note("direction", "the points ran clockwise (lower side first); they were reversed")
        loop = loop[::-1]
    if np.linalg.norm(loop[0] - loop[-1]) <= 1e-6 * np.ptp(loop[:, 0]):
        loop = np.concatenate([loop[:-1], loop[:1]])  # closed but for rounding
    _refuse_crossings(loop, name)

    gap = float(np.linalg.norm(loop[0] - loop[-1]))
    tail = (loop[0] + loop[-1]) / 2
    nose = loop[np.argmax(np.linalg.norm(loop - tail, axis=1))]
    chord = float(np.linalg.norm(tail - nose))
    if gap > 0.2 * chord:
        raise ValueError(
            f"{name}: the first and the last point are {gap / chord:.2f} chords apart; expected an outline that starts "
            f"and ends at the trailing edge (Selig), or both sides from the leading edge (Lednicer)"
        )
    # Chords and angles of clean files are off by rounding and by the leading point's place.
    if abs(chord - 1) > 0.01:
        guess = {100: " (per cent?)", 1000: " (millimeters?)"}.get(round(chord / 10) * 10, "")
        found = f"a chord of {chord:.4g}{guess}, expected 1: models are trained on a chord of 1 m"
        remedy = "scale to a chord of 1 with the leading edge at (0, 0)"
        if report.fault("chord", found, remedy):
            loop, tail, nose = (loop - nose) / chord, (tail - nose) / chord, nose * 0.0
            gap /= chord
    elif np.abs(nose).max() > 0.01 and report.warn(
        "chord", f"the leading edge is at ({nose[0]:.3g}, {nose[1]:.3g})", "move it to (0, 0)"
    ):
        loop, tail, nose = loop - nose, tail - nose, nose * 0.0
    angle = float(np.degrees(np.arctan2(*(tail - nose)[::-1])))
    if abs(angle) > MAX_INCIDENCE and report.warn(
        "incidence",
        f"the chord line is inclined by {-angle:.2f} degrees beside the angle of attack",
        "turn it onto the x axis about the leading edge",
    ):
        c, s = np.cos(np.radians(angle)), np.sin(np.radians(angle))
        loop = (loop - nose) @ np.array([[c, -s], [s, c]]) + nose
    base = gap > 0 and report.warn(
        "trailing_edge", f"open by {gap:.2g} chords at the trailing edge", "close it with a straight base"
    )
    n = len(loop) - 1
    if n_segments is not None:
        report.note("points", f"{n} segments, resampled to {n_segments}")
        loop = resampled(loop, n_segments)
    elif n < FEW_POINTS and report.warn(
        "points",
        f"{n} segments; models are trained on 160 and more",
        f"resample to {FINE_POINTS} along a spline through the points",
    ):
        loop = resampled(loop, FINE_POINTS)
    if base:
        loop = np.concatenate([loop, loop[:1]])
    report.refuse()
    return loop


def resampled(loop: np.ndarray, n_segments: int) -> np.ndarray:
    """An outline of so many segments along a cubic spline through the points, finest at both edges, (n+1, 2).

    The spline's parameter is the length along the polygon; on each side the new points stand at steps that are a
    mixture of equal ones and of those of a cosine.
    """
    from vtkmodules.vtkCommonComputationalGeometry import vtkCardinalSpline

    length = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(loop, axis=0), axis=1))])
    nose = int(np.argmax(np.linalg.norm(loop - (loop[0] + loop[-1]) / 2, axis=1)))

    def steps(n: int) -> np.ndarray:
        even = np.arange(n + 1) / n
        return EVEN_SHARE * even + (1 - EVEN_SHARE) * (1 - np.cos(np.pi * even)) / 2

    upper = n_segments // 2
    wanted = np.concatenate(
        [
            length[nose] * steps(upper)[:-1],
            length[nose] + (length[-1] - length[nose]) * steps(n_segments - upper),
        ]
    )
    out = np.empty((n_segments + 1, 2))
    for column, values in enumerate(loop.T):
        spline = vtkCardinalSpline()
        for at, value in zip(length, values, strict=True):
            spline.AddPoint(at, value)
        out[:, column] = [spline.Evaluate(at) for at in wanted]
    out[0], out[-1] = loop[0], loop[-1]
    return out


def _enclosed(loop: np.ndarray) -> float:
    """The enclosed area, positive if the loop runs counterclockwise."""
    x, y = (loop - loop[0]).T
    return float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2)


def _refuse_crossings(loop: np.ndarray, name: str) -> None:
    """Raise a ValueError if two segments of the outline cross."""
    start, end = loop[:-1], loop[1:]

    def side(a: np.ndarray, b: np.ndarray, p: np.ndarray) -> np.ndarray:
        return (b[..., 0] - a[..., 0]) * (p[..., 1] - a[..., 1]) - (b[..., 1] - a[..., 1]) * (p[..., 0] - a[..., 0])

    for i in range(len(start) - 2):
        later = slice(i + 2, None)
        a, b, c, d = start[i], end[i], start[later], end[later]
        apart = (side(a, b, c) * side(a, b, d) < 0) & (side(c, d, a) * side(c, d, b) < 0)
        if apart.any():
            j = i + 2 + int(np.argmax(apart))
            raise ValueError(
                f"{name}: the outline crosses itself near ({a[0]:.4g}, {a[1]:.4g}), between points {i + 1} and {j + 1} "
                f"of its order around the body; expected one closed outline of one airfoil, in order"
            )
