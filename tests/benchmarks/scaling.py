"""How this project's work grows with the number of faces, and what bounds its memory.

    python tests/benchmarks/scaling.py --out runs/scaling

On the car-like body without target expansion at theta 1: evaluations a target; rows added into buffers beside
evaluations and nodes; the exponent with which time of plan and forward pass grows; results with half of the memory for
a chunk of pairs. Writes ``<out>.json``.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from sides import Worker

CHUNK_BYTES = 64 << 20


def main(args: list[str] | None = None) -> dict[str, Any]:
    """Measure, write, return what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counted", nargs="*", type=int, default=[10_000, 100_000], metavar="FACES")
    parser.add_argument("--timed", nargs="*", type=int, default=[4000, 32_000], metavar="FACES")
    parser.add_argument("--floor", type=int, default=19)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="scaling")
    a = parser.parse_args(args)
    out: dict[str, Any] = {"evaluations_per_target": {}, "seconds": {}}
    folder = Path(a.out).parent
    folder.mkdir(parents=True, exist_ok=True)
    state = f"{a.out}.weights.pt"
    Path(state).unlink(missing_ok=True)
    common = {"dims": 3, "state": state, "threads": a.threads, "n_floor": a.floor, "expand_far_targets": False}
    worker = Worker("ours")
    try:
        for n_faces in a.counted:
            worker.call("set_up", n_faces=n_faces, **common)
            found = worker.call("evaluations")
            out["evaluations_per_target"][n_faces] = found["communication"] / found["faces"]
        for n_faces in a.timed:
            worker.call("set_up", n_faces=n_faces, **common)
            if n_faces == a.timed[0]:
                worker.call("time", work="forward")
                out["rows"] = {**worker.call("count", work="forward"), **worker.call("evaluations")}
            # Of the processor: whatever else the machine does disturbs it less.
            out["seconds"][n_faces] = worker.call("time", work="forward")["cpu_seconds"]
        (n_few, few), (n_many, many) = list(out["seconds"].items())[:: len(a.timed) - 1]
        out["exponent"] = math.log(many / few) / math.log(n_many / n_few)
        peaks = []
        for share in (1.0, 0.5):
            worker.call("set_up", n_faces=a.timed[0], chunk_bytes=int(share * CHUNK_BYTES), **common)
            peaks.append(worker.call("time", work="step")["peak_mb"])
            worker.call("save_fields", file=f"{a.out}.{share}.pt")
        full, half = (torch.load(f"{a.out}.{share}.pt", weights_only=True) for share in (1.0, 0.5))
        out["chunks"] = {
            "peak_mb": peaks,
            "difference": max(float((half[key] - value).norm() / value.norm()) for key, value in full.items()),
        }
    finally:
        worker.close()
        for file in folder.glob(f"{Path(a.out).name}.*.pt"):
            file.unlink()
    Path(f"{a.out}.json").write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(out, indent=1))
    return out


if __name__ == "__main__":
    main()
