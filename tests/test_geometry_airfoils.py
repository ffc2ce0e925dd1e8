"""Airfoils from coordinates: every order and format gives one outline, every fault is found and mended."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from datamodules.airfoil_shape import REPAIRS, as_loop, examine_airfoil, read_coordinates, resampled
from datamodules.probes import airfoil_grid, distance_to_outline, inside_outline
from datamodules.shape_report import ShapeError, ShapeReport


def naca(thickness=0.12, camber=0.02, n=61, tail=-0.1036) -> tuple[np.ndarray, np.ndarray]:
    """Upper and lower side of a NACA 24xx section from nose to tail; ``tail`` -0.1015 leaves it open."""
    x = (1 - np.cos(np.linspace(0, np.pi, n))) / 2
    half = 5 * thickness * np.polynomial.polynomial.polyval(x, [0, -0.1260, -0.3516, 0.2843, tail])
    half += 5 * thickness * 0.2969 * np.sqrt(x)
    p = 0.4
    line = np.where(x < p, camber / p**2 * (2 * p * x - x**2), camber / (1 - p) ** 2 * (1 - 2 * p + 2 * p * x - x**2))
    return np.stack([x, line + half], axis=1), np.stack([x, line - half], axis=1)


UPPER, LOWER = naca()
SELIG = np.concatenate([UPPER[::-1], LOWER[1:]])
SELIG[0] = SELIG[-1] = (1.0, 0.0)


def report(**options) -> ShapeReport:
    return ShapeReport("wing.dat", REPAIRS, **options)


def lines(rows, separator=" ") -> str:
    return "".join(f"{x:.8f}{separator}{y:.8f}\n" for x, y in rows)


LEDNICER = f"NACA 2412\n {len(UPPER)}. {len(LOWER)}.\n\n" + lines(UPPER) + "\n" + lines(LOWER)
TURNED = np.concatenate([SELIG[30:-1], SELIG[:31]])


@pytest.mark.parametrize(
    ("name", "text", "order"),
    [
        ("a.dat", "NACA 2412\n" + lines(SELIG), "Selig"),
        ("b.dat", LEDNICER, "Lednicer"),
        ("c.dat", lines(UPPER) + lines(LOWER), "Lednicer"),  # neither counts nor a blank line
        ("d.csv", "x,y\n" + lines(SELIG, ","), "Selig"),
        ("e.csv", "x; y\n" + lines(SELIG, "; "), "Selig"),
        ("f.dat", "2412\n" + lines(SELIG[::-1]), "Selig"),  # clockwise, a name that is a number
        ("g.txt", "\ufeff# made by hand\n# x y z\n" + lines(np.c_[SELIG][:, :2]).replace("\n", " 0.0\n"), "Selig"),
        ("h.dat", lines(TURNED), "does not start at the trailing edge"),
    ],
)
def test_formats_and_orders_give_one_outline(tmp_path, name, text, order):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    found = report()
    outline = examine_airfoil(read_coordinates(path)[0], found)
    start = np.linalg.norm(outline - outline[0], axis=1)
    assert order in str(found) and start[-1] == 0
    np.testing.assert_allclose(outline[1:-1], SELIG[1:-1], atol=2e-8)
    assert not found.names("warning") and not found.names("error")


def test_header_lines_are_counted(tmp_path):
    path = tmp_path / "a.dat"
    path.write_text("A name\nanother line of 3 words\n" + lines(SELIG))
    assert read_coordinates(path)[1] == "2 header lines"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line holds two numbers"),
        ("name\n" + lines(SELIG[:20]) + "oops\n" + lines(SELIG[20:]), "line 22: expected two numbers, found 'oops'"),
        (lines(SELIG[:20]) + "1 2 3 4\n", "line 21: .* found 4"),
        (lines(SELIG[:20]) + "1 2 3\n", "some lines hold two numbers, others three"),
        (lines(SELIG[:5]), "5 points, expected an airfoil's outline"),
        (lines(SELIG) + "nan 0\n", "1 points are NaN"),
        (lines(SELIG[:80]), "chords apart"),
        (lines(np.random.default_rng(0).permutation(SELIG)), "crosses itself|chords apart"),
    ],
)
def test_files_that_are_no_airfoil(tmp_path, text, message):
    path = tmp_path / "a.dat"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        examine_airfoil(read_coordinates(path)[0], report())


def test_absent_and_binary_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected airfoil coordinates"):
        read_coordinates(tmp_path / "none.dat")
    (tmp_path / "b.dat").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="not a text file"):
        read_coordinates(tmp_path / "b.dat")


def test_chord_is_refused_mended_or_accepted():
    far = SELIG * 100 + np.array([3.0, -2.0])
    with pytest.raises(ShapeError, match=r"a chord of 100 \(per cent\?\)(.|\n)*--repair chord(.|\n)*--accept chord"):
        examine_airfoil(far, report())
    found = report(repair=["chord"])
    np.testing.assert_allclose(examine_airfoil(far, found), SELIG, atol=1e-3)
    assert found.names("mended") == ["chord"]
    np.testing.assert_allclose(examine_airfoil(far, report(accept=["chord"])), far)
    moved = report(repair=["all"])
    np.testing.assert_allclose(examine_airfoil(SELIG + np.array([0.5, 0.0]), moved), SELIG, atol=1e-3)


def test_incidence_of_the_file_is_found_and_mended():
    angle = np.radians(5.0)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    turned = SELIG @ turn.T  # nose up by 5 degrees about the nose
    found = report()
    np.testing.assert_allclose(examine_airfoil(turned, found), turned)
    assert found.names("warning") == ["incidence"] and "inclined by 5.0" in str(found)
    mended = report(repair=["incidence"])
    np.testing.assert_allclose(examine_airfoil(turned, mended), SELIG, atol=1e-3)


def test_an_open_trailing_edge_stays_open_or_gets_a_base():
    upper, lower = naca(tail=-0.1015)
    rows = np.concatenate([upper[::-1], lower[1:]])
    found = report()
    outline = examine_airfoil(rows, found)
    assert found.names("warning") == ["trailing_edge"] and (outline[0] != outline[-1]).any()
    outline = examine_airfoil(rows, report(repair=["trailing_edge"]))
    assert (outline[0] == outline[-1]).all() and len(outline) == len(rows) + 1


def test_few_points_are_resampled_onto_the_same_shape():
    upper, lower = naca(n=25)
    rows = np.concatenate([upper[::-1], lower[1:]])
    found = report()
    assert len(examine_airfoil(rows, found)) == len(rows) and found.names("warning") == ["points"]
    outline = examine_airfoil(rows, report(repair=["points"]))
    assert len(outline) == 201
    fine = np.concatenate([side for side in naca(n=4000)])
    distance = np.array([np.linalg.norm(fine - point, axis=1).min() for point in outline])
    assert distance.max() < 1e-3 and np.median(distance) < 2e-4
    assert len(examine_airfoil(rows, report(), n_segments=90)) == 91


def test_resampling_keeps_the_ends_and_refines_the_edges():
    outline = resampled(SELIG, 160)
    assert (outline[0] == SELIG[0]).all() and (outline[-1] == SELIG[-1]).all() and len(outline) == 161
    steps = np.linalg.norm(np.diff(outline, axis=0), axis=1)
    assert steps[0] < 0.3 * steps[40] and steps[80] < 0.3 * steps[40] and steps.min() > 0


def test_repeated_points_are_left_out():
    found = report()
    rows = np.repeat(SELIG, 2, axis=0)
    np.testing.assert_allclose(examine_airfoil(rows, found), SELIG)
    assert f"{len(SELIG)} points" in str(found)


def test_unknown_repairs_are_refused():
    with pytest.raises(ValueError, match=r"repair: expected names among chord.* found \['kord'\]"):
        report(repair=["kord"])
    with pytest.raises(ValueError, match="accept"):
        report(accept=["up"])


def test_as_loop_drops_the_nose_that_both_sides_share():
    loop, order = as_loop(np.concatenate([UPPER, LOWER]), "a")
    assert order.startswith("Lednicer") and len(loop) == len(UPPER) + len(LOWER) - 1


def test_grid_around_an_airfoil():
    outline = SELIG[:-1]
    grid = airfoil_grid(outline)
    assert (grid.points[: len(outline)] == outline).all()
    others = grid.points[len(outline) :]
    assert not inside_outline(others, outline).any() and distance_to_outline(others, outline).min() > 1e-4
    middles = np.asarray(grid.mesh.cell_centers().points)[:, :2]
    assert not inside_outline(middles, outline).any()
    # Nothing is left out of the box but the airfoil.
    x, y = outline.T
    area = abs((x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2)
    sizes = grid.mesh.compute_cell_sizes(length=False, volume=False).cell_data["Area"]
    assert np.sum(sizes) == pytest.approx(18 - area, rel=1e-3)


def test_distance_to_an_outline_against_dense_points():
    points = np.random.default_rng(0).uniform(-0.5, 1.5, (50, 2))
    dense = np.concatenate([np.linspace(a, b, 200) for a, b in itertools.pairwise(SELIG)])
    brute = np.linalg.norm(points[:, None] - dense, axis=-1).min(axis=1)
    np.testing.assert_allclose(distance_to_outline(points, SELIG[:-1]), brute, atol=2e-4)


def test_files_of_the_folder_are_untouched(tmp_path: Path):
    path = tmp_path / "a.dat"
    path.write_text(lines(SELIG))
    examine_airfoil(read_coordinates(path)[0], report(repair=["all"]))
    assert path.read_text() == lines(SELIG)
