"""The implementations behind one interface, each in a process of its own: ``python sides.py NAME``, one JSON a line.

Names: ``ours``, ``compiled`` (ours with ``compile: true``) and ``reference`` (PhysicsNeMo's GLOBE; run it by the
Python of an environment that holds ``nvidia-physicsnemo``). A line {"call": method, …arguments} is answered by a
line, the method's result or {"error": text}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cases
import torch
from measure import bare_products, record_products, timed
from torch import Tensor

HERE = Path(__file__).resolve().parent


class Side:
    """One implementation with one problem at a time; subclasses know its calls."""

    def __init__(self) -> None:
        self.model: Any = None
        self.works: dict[str, Callable[[], Any]] = {}
        self.points: Tensor | None = None

    # What a subclass knows

    def build(self, config: dict[str, Any]) -> Any:
        """A model with these arguments."""
        raise NotImplementedError

    def inputs(self, geometry: cases.Geometry) -> Any:
        """The geometry in the implementation's own types."""
        raise NotImplementedError

    def plans(self) -> Any:
        """Build all trees and plans of the problem."""
        raise NotImplementedError

    def predict(self) -> dict[str, Tensor]:
        """The fields, trees and plans built anew."""
        raise NotImplementedError

    def pure_works(self, n_points: int, theta: float) -> dict[str, Callable[[], Any]]:
        """Calls on one boundary alone: "tree", "aggregate" (of the normals) and "plan" of all faces with all faces."""
        raise NotImplementedError

    # The calls

    def set_up(self, dims: int, n_faces: int, state: str, threads: int = 2, seed: int = 0, **changes: Any) -> dict:
        """Take a problem. The first side writes its weights to ``state``, the others read them.

        Args:
            dims, n_faces: see ``cases.make``; ``n_points`` and ``n_floor`` among the changes go there too.
            state: the file.
            threads: of torch.
            seed: of the weights.
            changes: of the configuration.
        """
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        sizes = {name: changes.pop(name) for name in ("n_points", "n_floor") if name in changes}
        config, geometry = cases.make(dims, n_faces, **sizes)
        self.model = self.build({**config, **changes})
        if os.path.exists(state):
            found = self.model.load_state_dict(torch.load(state, weights_only=True), strict=False)
            unmatched = [key for key in (*found.missing_keys, *found.unexpected_keys) if not key.endswith("._one")]
            assert not unmatched, f"the weights do not fit: {unmatched}"
        else:
            torch.save(self.model.state_dict(), state)
        self.geometry, self.given = geometry, self.inputs(geometry)
        self.works = {"plans": self.plans, "forward": self._forward, "step": self._step}
        return {"torch": torch.__version__}

    def set_up_boundary(self, n_faces: int, theta: float = 1.0, threads: int = 2) -> dict:
        """Take the closed body alone, for its tree and plan."""
        torch.set_num_threads(threads)
        self.works = self.pure_works(n_faces, theta)
        return {}

    def time(self, work: str) -> dict:
        """Do a work once: "plans", "forward", "step", "tree", "aggregate", "plan"."""
        return timed(self.works[work])

    def save_fields(self, file: str) -> dict:
        """Write the predicted fields."""
        with torch.no_grad():
            torch.save({name: value.clone() for name, value in self.predict().items()}, file)
        return {}

    def count(self, work: str) -> dict:
        """Operations of a work."""
        from syncs import count_operations

        with one_thread(), count_operations() as found:
            self.works[work]()
        return {"dispatched": found.n_dispatched, "data_dependent": len(found.syncs), "rows_added": found.rows_added}

    def _forward(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.predict()

    def _step(self) -> None:
        self.model.train().zero_grad(set_to_none=True)
        sum(field.square().mean() for field in self.predict().values()).backward()


class Ours(Side):
    """This project."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.compiled = compiled

    def build(self, config: dict[str, Any]) -> Any:
        from globe_lightning import GLOBE

        return GLOBE(**config, **({"compile": True} if self.compiled else {}))

    def inputs(self, geometry: cases.Geometry) -> tuple[Any, ...]:
        from globe_lightning import BoundaryMesh

        meshes = {kind: BoundaryMesh(*mesh) for kind, mesh in geometry.meshes.items()}
        return geometry.points, meshes, geometry.lengths, geometry.conditions

    def plans(self) -> Any:
        points, meshes, lengths, conditions = self.given
        return self.model.build_plans(points, meshes, reference_lengths=lengths, global_data=conditions)

    def predict(self) -> dict[str, Tensor]:
        from globe_lightning.fields import flatten_data

        return flatten_data(self.model(*self.given))

    def pure_works(self, n_points: int, theta: float) -> dict[str, Callable[[], Any]]:
        from globe_lightning import BoundaryMesh
        from globe_lightning.tree.cluster_tree import build_forest
        from globe_lightning.tree.opening_rule import OpeningRule
        from globe_lightning.tree.plan import build_plan
        from globe_lightning.tree.prefix_sums import range_means

        mesh = BoundaryMesh(*cases.closed_body(n_points))
        points, (normals, areas) = mesh.centroids, mesh.normals_and_areas()
        forest = build_forest([points])

        def aggregate() -> None:
            # As the model does: the mean point and the mean data of every node.
            data = torch.cat([points, normals], dim=1).index_select(0, forest.order)
            range_means(data, areas.index_select(0, forest.order), forest.start, forest.end)

        return {
            "tree": lambda: build_forest([points]),
            "aggregate": aggregate,
            "plan": lambda: build_plan(forest, forest, OpeningRule(theta)),
        }

    def count(self, work: str) -> dict:
        """Operations of a work; those of a step in chunks as large as on a GPU, too."""
        from globe_lightning.memory import GPU_CHUNK_BYTES

        found = super().count(work)
        if work == "step":
            kept, self.model.chunk_bytes = self.model.chunk_bytes, GPU_CHUNK_BYTES
            found["dispatched_in_gpu_chunks"] = super().count(work)["dispatched"]
            self.model.chunk_bytes = kept
        return found

    def evaluations(self) -> dict:
        """Kernel evaluations by layer kind, and how many targets there are."""
        plans = self.plans()
        n_faces = plans.forest.n_points
        return {**plans.n_evaluations, "faces": n_faces, "nodes": plans.forest.n_nodes}

    def set_up_products(self) -> dict:
        """Record the matrix products of the forward pass and of a step that recomputes nothing; time them bare."""
        from globe_lightning.memory import chunk_budget

        kept, way = self.model.chunk_bytes, self.model.compile_pairs
        # One thread sees all products, as torch's operations; the chunks stay those of every thread.
        self.model.chunk_bytes = (kept or chunk_budget("cpu")) // torch.get_num_threads()
        self.model.compile_pairs = False
        with one_thread():
            forward = record_products(self._forward)
            step = record_products(self._step)
            again = record_products(self.predict) if self.model.use_gradient_checkpointing else Counter()
        self.model.chunk_bytes, self.model.compile_pairs = kept, way
        # The backward pass computes the products of pairs again (to keep them would take too much memory), but not
        # those of sources, which all branches share: their stride along the branches is zero.
        step.subtract({layouts: times for layouts, times in again.items() if layouts[0][1][0]})
        self.works |= {"forward_products": bare_products(forward), "step_products": bare_products(step)}
        return {"forward": sum(forward.values()), "step": sum(step.values())}


class Reference(Side):
    """PhysicsNeMo's GLOBE."""

    def build(self, config: dict[str, Any]) -> Any:
        from physicsnemo.experimental.models.globe.model import GLOBE

        return GLOBE(**config)

    def inputs(self, geometry: cases.Geometry) -> tuple[Any, ...]:
        from physicsnemo.mesh import Mesh
        from tensordict import TensorDict

        meshes = {kind: Mesh(points=points, cells=faces) for kind, (points, faces) in geometry.meshes.items()}
        conditions = TensorDict(geometry.conditions) if geometry.conditions else None
        return geometry.points, meshes, geometry.lengths, conditions

    def plans(self) -> Any:
        points, meshes = self.given[:2]
        trees, _, plans = self.model._build_trees_and_plans(meshes)
        size = sum(mesh.n_cells for mesh in meshes.values())
        return plans, [self.model._build_prediction_plans(trees, chunk) for chunk in points.split(size)]

    def predict(self) -> dict[str, Tensor]:
        return dict(self.model(*self.given).point_data.items(True, True))

    def pure_works(self, n_points: int, theta: float) -> dict[str, Callable[[], Any]]:
        from physicsnemo.mesh import Mesh
        from physicsnemo.mesh.spatial.cluster_tree import ClusterTree
        from tensordict import TensorDict

        vertices, faces = cases.closed_body(n_points)
        mesh = Mesh(points=vertices, cells=faces)
        points, normals, areas = mesh.cell_centroids, mesh.cell_normals, mesh.cell_areas
        tree = ClusterTree.from_points(points, leaf_size=1, areas=areas)
        data = TensorDict({"normals": normals}, batch_size=[len(points)])
        return {
            "tree": lambda: ClusterTree.from_points(points, leaf_size=1, areas=areas),
            "aggregate": lambda: tree.compute_source_aggregates(points, areas, data),
            "plan": lambda: tree.find_dual_interaction_pairs(target_tree=tree, theta=theta),
        }


@contextmanager
def one_thread() -> Iterator[None]:
    """All work in the calling thread, where dispatching modes see it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


SIDES: dict[str, Callable[[], Side]] = {
    "ours": Ours,
    "compiled": lambda: Ours(compiled=True),
    "reference": Reference,
}


def serve(name: str) -> None:
    """Answer calls from standard input until it ends."""
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no answer
    side = SIDES[name]()
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = getattr(side, arguments.pop("call"))(**arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


class Worker:
    """A side in a process of its own.

    Args:
        name: "ours", "compiled" or "reference".
        python: the interpreter.
    """

    def __init__(self, name: str, python: str = sys.executable) -> None:
        self.name = name
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": os.pathsep.join(
                [str(HERE.parent.parent), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
            ),
        }
        self._process = subprocess.Popen(
            [python, str(HERE / "sides.py"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the side.

        Raises:
            RuntimeError: it failed, or its process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": method, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process ended; its messages stand above"}
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {method}({arguments}): {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    serve(sys.argv[1])
