"""Time this project and the reference on the same geometry, configuration and weights, alternately, in one run.

    python tests/benchmarks/compare.py --reference ref/bin/python --out runs/benchmark

``ref`` is an environment that holds torch and ``nvidia-physicsnemo`` 2.2.2; without ``--reference`` only this project
is timed. Writes ``<out>.md``, a table, and ``<out>.json``, every single measurement, anew after each case. Nothing else
should run.

A case is DIMS:FACES or DIMS:FACES:THETA, e.g. 3:2000 (a car-like body, theta 1, expanded targets) or 2:500 (an
airfoil, exact). Each quantity is taken from all sides in turn, again and again until ``--repetitions`` or ``--seconds``
a case are reached, once at least; the table shows medians. Memory is how far the peak rises above what was held
before. Forward pass and training step include all trees and plans; each side has done a forward pass before, which is
not timed. Operations are counted in one more step of each side, which ``--no-count`` leaves out where it would take
too long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sides import Worker

WORKS = ("plans", "forward", "forward_products", "step", "step_products")
PRODUCTS = tuple(work for work in WORKS if work.endswith("_products"))
PURE_WORKS = {"tree": 1_000_000, "aggregate": 1_000_000, "plan": 100_000}
"""Works on a boundary alone, and at most how many faces they are timed with."""


def arguments(args: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", metavar="PYTHON", help="interpreter that holds the reference")
    parser.add_argument("--cases", nargs="*", default=["3:500", "3:1000", "3:2000", "2:500", "2:1000"])
    parser.add_argument("--boundaries", nargs="*", type=int, default=[16_000, 100_000, 1_000_000], metavar="FACES")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="time it compiled, too")
    parser.add_argument("--count", action=argparse.BooleanOptionalAction, default=True, help="count operations, too")
    parser.add_argument("--out", default="benchmark")
    # Small stand-ins for a quick trial of the script itself.
    parser.add_argument("--points", type=int, help="prediction points; as many as faces in 3D, 2048 in 2D, if not set")
    parser.add_argument("--floor", type=int, default=19, help="cells along each side of the floors")
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> dict[str, Any]:
    """Measure, write both files, return what the JSON holds."""
    a = arguments(args)
    names = ["ours", *(["compiled"] if a.compile else []), *(["reference"] if a.reference else [])]
    workers = {name: Worker(name, a.reference if name == "reference" else sys.executable) for name in names}
    out: dict[str, Any] = {"machine": machine(a.threads), "cases": [], "boundaries": []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            warm_up(workers, a, f"{folder}/state.pt")
            for i, case in enumerate(a.cases):
                out["cases"].append(measure_case(workers, case, a, Path(folder, str(i))))
                write(out, a.out)
        for n_faces in a.boundaries:
            out["boundaries"].append(measure_boundary(workers, n_faces, a))
            write(out, a.out)
    finally:
        for worker in workers.values():
            worker.close()
    print(table(out))
    return out


def write(out: dict[str, Any], to: str) -> None:
    """The table and the measurements so far, so that a later case that fails loses none."""
    Path(to).parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(out, indent=1) + "\n"), (".md", table(out))):
        beside = Path(f"{to}{suffix}.part")
        beside.write_text(text, encoding="utf-8")
        beside.replace(f"{to}{suffix}")


def machine(threads: int) -> str:
    """What the figures were taken on."""
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return f"{cpu}, {threads} threads, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} before"


def warm_up(workers: dict[str, Worker], a: argparse.Namespace, state: str) -> None:
    """Let every side import and start what it needs."""
    for worker in workers.values():
        worker.call("set_up", dims=3, n_faces=96, n_points=9, n_floor=2, state=state, threads=a.threads)
        worker.call("time", work="step")


def measure_case(workers: dict[str, Worker], case: str, a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All quantities of a case from all sides."""
    folder.mkdir()
    dims, n_faces, *rest = case.split(":")
    changes: dict[str, Any] = {"theta": float(rest[0])} if rest else {}
    if a.points:
        changes["n_points"] = a.points
    if dims == "3":
        changes["n_floor"] = a.floor
    for worker in workers.values():
        state = str(folder / "state.pt")
        worker.call("set_up", dims=int(dims), n_faces=int(n_faces), state=state, threads=a.threads, **changes)
        # The first pass of any side takes longer than those after it; compiling takes longer still.
        for work in ("forward", "step") if worker.name == "compiled" else ("forward",):
            worker.call("time", work=work)
    ours = workers["ours"]
    ours.call("set_up_products")
    times = repeat({work: {"ours": ours} if work in PRODUCTS else workers for work in WORKS}, a, case)
    evaluations = ours.call("evaluations")
    counts = {}
    if a.count:
        for name, worker in workers.items():
            if name != "compiled":  # dispatching modes see nothing of compiled code
                counts[name] = {work: worker.call("count", work=work) for work in ("plans", "step")}
    for name, worker in workers.items():
        worker.call("save_fields", file=str(folder / f"{name}.pt"))
    return {
        "case": case,
        "times": times,
        "evaluations": evaluations,
        "counts": counts,
        "differences": {name: difference(folder, name) for name in workers if name != "ours"},
    }


def measure_boundary(workers: dict[str, Worker], n_faces: int, a: argparse.Namespace) -> dict[str, Any]:
    """Tree, aggregation and plan of one boundary from both sides."""
    both = {name: worker for name, worker in workers.items() if name != "compiled"}
    for worker in both.values():
        worker.call("set_up_boundary", n_faces=n_faces, threads=a.threads)
        worker.call("time", work="tree")
    works = {work: both for work, largest in PURE_WORKS.items() if n_faces <= largest}
    return {"faces": n_faces, "times": repeat(works, a, f"{n_faces} faces")}


def repeat(works: dict[str, dict[str, Worker]], a: argparse.Namespace, what: str) -> dict[str, Any]:
    """Every work by each of its sides in turn, {work: {side: [measurements]}}."""
    found: dict[str, Any] = {work: {name: [] for name in workers} for work, workers in works.items()}
    start = time.perf_counter()
    for repetition in range(a.repetitions):
        for work, workers in works.items():
            for name, worker in workers.items():
                found[work][name].append(worker.call("time", work=work))
                seconds = found[work][name][-1]["seconds"]
                print(f"{what}: {work} {name} {seconds:.3f} s", file=sys.stderr, flush=True)
        elapsed = time.perf_counter() - start
        if elapsed + elapsed / (repetition + 1) > a.seconds:
            break
    return found


def difference(folder: Path, name: str) -> float:
    """Relative L2 difference of a side's fields from ours, of the worst field."""
    ours, theirs = (torch.load(folder / f"{side}.pt", weights_only=True) for side in ("ours", name))
    assert set(ours) == set(theirs)
    errors = [(theirs[key] - value).norm() / (value - value.mean(dim=0)).norm() for key, value in ours.items()]
    return float(torch.stack(errors).max())


# The table

QUANTITIES = (
    ("plans", "seconds", "trees and plans [s]"),
    ("forward", "seconds", "forward pass [s]"),
    ("step", "seconds", "training step [s]"),
    ("step", "peak_mb", "peak memory of a step [MB]"),
    ("tree", "seconds", "tree [s]"),
    ("aggregate", "seconds", "aggregation of normals [s]"),
    ("plan", "seconds", "plan [s]"),
)

COUNTS = {
    "dispatched": "dispatched operations of {}",
    "dispatched_in_gpu_chunks": "dispatched operations of {}, chunks of a GPU's size",
    "data_dependent": "data-dependent operations of {}",
}


def table(out: dict[str, Any]) -> str:
    """All results as Markdown."""
    works = [case["times"]["step"] for case in out["cases"]] + [own["times"]["tree"] for own in out["boundaries"]]
    sides = list(dict.fromkeys(name for work in works for name in work))
    rows = []
    for case in out["cases"]:
        dims, n_faces, *_ = case["case"].split(":")
        label = f"{dims}D, {n_faces} faces"
        rows += measured_rows(label, case["times"], sides)
        for work in ("plans", "step"):
            where = "trees and plans" if work == "plans" else "a step"
            counted = {side: found[work] for side, found in case["counts"].items()}
            for key, name in COUNTS.items():
                if key in counted.get("ours", {}):
                    # The reference has no chunks: its one number stands beside both of ours.
                    values = {side: found.get(key, found["dispatched"]) for side, found in counted.items()}
                    rows.append(row(label, name.format(where), values, sides))
        for work in ("forward", "step"):
            bare = median(case["times"][f"{work}_products"]["ours"], "seconds")
            of = {name: median(case["times"][work][name], "seconds") / bare for name in sides if name != "reference"}
            cells = [f"{of[name]:.2f}x" if name in of else "" for name in sides]
            rows.append(
                [label, f"{work} over its bare matrix products ({bare:.3g} s)", *cells, *[""] * (len(sides) - 1)]
            )
        counts = case["evaluations"]
        total = f"{counts['communication']:,} + {counts['prediction']:,}"
        rows.append([label, f"evaluations a branch: {total}", *[""] * (2 * len(sides) - 1)])
        apart = ", ".join(f"{name} {value:.1e}" for name, value in case["differences"].items())
        rows.append([label, f"difference from ours: {apart}", *[""] * (2 * len(sides) - 1)])
    for found in out["boundaries"]:
        rows += measured_rows(f"body of {found['faces']:,} faces", found["times"], sides)
    head = ["case", "quantity", *sides, *(f"{sides[-1]} / {name}" for name in sides[:-1])]
    lines = [head, ["---"] * len(head), *rows]
    return f"{out['machine']}\n\n" + "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def measured_rows(label: str, times: dict[str, Any], sides: list[str]) -> list[list[str]]:
    """The rows of what was timed."""
    return [
        row(label, name, {side: median(found, key) for side, found in times[work].items()}, sides)
        for work, key, name in QUANTITIES
        if work in times
    ]


def median(measurements: list[dict[str, float]], key: str) -> float:
    """Median of a key; of memory the largest, for whoever finds memory at hand needs no more."""
    values = [one[key] for one in measurements]
    return max(values) if key == "peak_mb" else statistics.median(values)


def row(label: str, name: str, values: dict[str, float], sides: list[str]) -> list[str]:
    """A row with the last side's value over each other's."""
    cells = [number(values[side]) if side in values else "" for side in sides]
    last = values.get(sides[-1])
    ratios = [f"{last / values[s]:.1f}x" if last is not None and values.get(s) else "" for s in sides[:-1]]
    return [label, name, *cells, *ratios]


def number(value: float) -> str:
    """Three digits, or a whole number."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
