"""GLOBE: hyperlayers of learnable Green's-function-like kernels between boundary faces and target points.

Sharpe, "GLOBE: Accurate and Generalizable PDE Surrogates using Domain-Inspired Architectures and Equivariances",
arXiv:2511.15856. Communication hyperlayers evaluate at the faces and emit the strengths and latents of the next one;
the last hyperlayer evaluates the output fields at the prediction points.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from globe_lightning.fields import FieldLayout, flatten_data
from globe_lightning.mesh import BoundaryMesh
from globe_lightning.models.boundaries import Boundary, sort_boundaries
from globe_lightning.models.interactions import evaluate_plan
from globe_lightning.models.kernel import SourceVectors
from globe_lightning.models.multiscale import MultiscaleKernel, SourceTable, module_key
from globe_lightning.models.outputs import FieldCalibration, calibrate, compress
from globe_lightning.models.plan_cache import PlanCache
from globe_lightning.models.plans import PlanAhead, Planner, Plans, PredictionPlan, require_fitting
from globe_lightning.models.targets import Targets, face_targets, point_targets
from globe_lightning.tree.opening_rule import OpeningRule
from globe_lightning.tree.plan import InteractionPlan
from globe_lightning.tree.prefix_sums import range_means, range_sums
from globe_lightning.validation import NumberChecks, check_conditions, check_geometry


class GLOBE(nn.Module):
    """A neural surrogate of boundary-driven PDEs.

    Translation-equivariant always; equivariant to rotations and reflections at ``theta = 0`` (the boxes of the tree
    follow the axes); covariant with the units of length. A face does not act on itself: r = 0 contributes nothing.
    Coincident faces are exact pairs at any ``theta``, k^2 of them for k faces in one place.

    Args:
        n_spatial_dims: dimension D of the space, 2 or 3.
        output_field_ranks: predicted fields, {name: 0 scalar | 1 vector}; may nest.
        boundary_source_data_ranks: {boundary type: {name: rank} of its per-face data}.
        reference_length_names: named lengths, one kernel branch each; the order counts.
        reference_area: by which face areas are divided [m^2; m in 2D].
        global_data_ranks: per-sample data, {name: rank}.
        n_communication_hyperlayers: L.
        n_latent_scalars, n_latent_vectors: latents that the faces exchange.
        smoothing_radius: eps of all magnitudes.
        hidden_layer_sizes: of every kernel's network.
        n_spherical_harmonics: H, the highest degree of the Legendre polynomials.
        theta: opening angle of the tree; 0 is exact.
        target_size_weight: weight a of the target node's size in the opening rule (a D_T + D_S) < theta gap; above 1
            fewer targets share an evaluation: smoother fields, more evaluations.
        leaf_size: largest number of points of a tree's leaf.
        network_type: "pade" or "mlp".
        initial_amplitude: size of a fresh Pade kernel's outputs. Best so that strengths stay near one from layer to
            layer: about one over the sum of the face areas, over the reference area, that act on a face.
        self_regularization_beta: bounds the Pade network by 1/beta; None leaves it unbounded.
        latent_compression_scale: C of the compression C asinh(t/C) of strengths and latents; None for none.
        expand_far_targets: evaluate far pairs at every target by itself: smoother fields, many more evaluations.
        far_field_order: 0 or 1. A far pair acts on all targets of a node alike (0), or by an affine field through its
            values at a few points of the node (1): nearly the accuracy of ``expand_far_targets`` for a fraction of its
            evaluations.
        max_far_targets: most targets that share the evaluation of a far pair; a larger node's are evaluated in parts.
            None for no limit; "auto": with ``far_field_order`` 1 the 128th part of the targets of a tree, but at least
            64; else no limit.
        use_gradient_checkpointing: recompute pair temporaries in the backward pass: memory for time.
        tree_build_device: where trees and plans are built, e.g. "cpu"; None for the sample's own device.
        chunk_bytes: what the temporaries of all pairs in flight may take; None for the device's default, see
            ``memory``.
        plan_cache_bytes: what the plans of samples that come again may take, see ``plan_cache``; 0 keeps none.
        compile: "network": on a CPU the networks of pairs by C++, compiled for its processor at the first use, where
            there is a C++ compiler (see ``fused_network``). True: the whole kernel by ``torch.compile``, too: faster
            after the first step; needs a C++ compiler on a CPU. False: torch's operations alone.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    reference_area: Tensor
    smoothing_radius: Tensor

    def __init__(
        self,
        *,
        n_spatial_dims: int,
        output_field_ranks: Mapping[str, Any],
        boundary_source_data_ranks: Mapping[str, Mapping[str, Any]],
        reference_length_names: Sequence[str],
        reference_area: float = 1.0,
        global_data_ranks: Mapping[str, Any] | None = None,
        n_communication_hyperlayers: int = 2,
        n_latent_scalars: int = 12,
        n_latent_vectors: int = 6,
        smoothing_radius: float = 1e-8,
        hidden_layer_sizes: Sequence[int] = (64, 64, 64),
        n_spherical_harmonics: int = 4,
        theta: float = 1.0,
        target_size_weight: float = 1.0,
        leaf_size: int = 1,
        network_type: str = "pade",
        self_regularization_beta: float | None = None,
        latent_compression_scale: float | None = None,
        expand_far_targets: bool = False,
        far_field_order: int = 0,
        max_far_targets: int | Literal["auto"] | None = "auto",
        use_gradient_checkpointing: bool = True,
        tree_build_device: str | None = None,
        initial_amplitude: float = 1.0,
        chunk_bytes: int | None = None,
        plan_cache_bytes: int = 256 << 20,
        compile: bool | Literal["network"] = "network",
    ) -> None:
        super().__init__()
        _require(n_spatial_dims in (2, 3), "n_spatial_dims", n_spatial_dims, "2 or 3")
        _require(len(boundary_source_data_ranks) > 0, "boundary_source_data_ranks", "none", "at least one type")
        _require(len(reference_length_names) > 0, "reference_length_names", "none", "at least one length")
        _require(
            len(set(reference_length_names)) == len(reference_length_names),
            "reference_length_names",
            list(reference_length_names),
            "different names",
        )
        _require(reference_area > 0, "reference_area", reference_area, "a positive area")
        _require(n_communication_hyperlayers >= 0, "n_communication_hyperlayers", n_communication_hyperlayers, ">= 0")
        _require(n_latent_scalars >= 0, "n_latent_scalars", n_latent_scalars, ">= 0")
        _require(n_latent_vectors >= 0, "n_latent_vectors", n_latent_vectors, ">= 0")
        _require(smoothing_radius > 0, "smoothing_radius", smoothing_radius, "a positive number")
        _require(all(size > 0 for size in hidden_layer_sizes), "hidden_layer_sizes", hidden_layer_sizes, "sizes > 0")
        _require(len(hidden_layer_sizes) > 0, "hidden_layer_sizes", "none", "at least one hidden layer")
        _require(n_spherical_harmonics >= 0, "n_spherical_harmonics", n_spherical_harmonics, ">= 0")
        _require(initial_amplitude > 0, "initial_amplitude", initial_amplitude, "a positive number")
        _require(leaf_size >= 1, "leaf_size", leaf_size, ">= 1")
        _require(chunk_bytes is None or chunk_bytes > 0, "chunk_bytes", chunk_bytes, "None or a positive number")
        _require(plan_cache_bytes >= 0, "plan_cache_bytes", plan_cache_bytes, ">= 0")
        beta, scale = self_regularization_beta, latent_compression_scale
        _require(beta is None or beta >= 0, "self_regularization_beta", beta, "None or >= 0")
        _require(scale is None or scale > 0, "latent_compression_scale", scale, "None or a positive number")

        self.n_spatial_dims = n_spatial_dims
        self.reference_length_names = list(reference_length_names)
        self.n_communication_hyperlayers = n_communication_hyperlayers
        most = None if max_far_targets == "auto" and not far_field_order else max_far_targets
        rule = OpeningRule(float(theta), expand_far_targets, float(target_size_weight), far_field_order, most)
        self.theta, self.target_size_weight = rule.theta, rule.target_size_weight
        self.expand_far_targets, self.far_field_order = expand_far_targets, far_field_order
        self.max_far_targets, self.leaf_size = most, leaf_size
        self.latent_compression_scale = latent_compression_scale
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self.chunk_bytes, self.compile_pairs = chunk_bytes, compile
        self.plan_cache = PlanCache(plan_cache_bytes)
        self.tree_build_device = None if tree_build_device is None else torch.device(tree_build_device)
        self.register_buffer("reference_area", torch.tensor(reference_area, dtype=torch.float32))
        self.register_buffer("smoothing_radius", torch.tensor(smoothing_radius, dtype=torch.float32), persistent=False)

        self.output_layout = FieldLayout(output_field_ranks, n_spatial_dims, "output_field_ranks")
        _require(self.output_layout.n_columns > 0, "output_field_ranks", "none", "at least one field")
        self.global_layout = FieldLayout(global_data_ranks, n_spatial_dims, "global_data_ranks")
        self.source_layouts = {
            str(kind): FieldLayout(ranks, n_spatial_dims, f"boundary_source_data_ranks[{kind!r}]")
            for kind, ranks in boundary_source_data_ranks.items()
        }
        latent_ranks: dict[str, int] = {f"latent.scalars.{i}": 0 for i in range(n_latent_scalars)}
        latent_ranks |= {f"latent.vectors.{i}": 1 for i in range(n_latent_vectors)}
        strength_ranks = {f"strengths.{name}": 0 for name in self.reference_length_names}
        self.latent_layout = FieldLayout({**latent_ranks, **strength_ranks}, n_spatial_dims)

        layers = []
        self._layer_sources: list[dict[str, FieldLayout]] = []
        for layer in range(n_communication_hyperlayers + 1):
            outputs = self.output_layout if layer == n_communication_hyperlayers else self.latent_layout
            sources = {
                kind: FieldLayout(
                    {
                        "normals": 1,
                        **{f"physical.{name}": rank for name, rank in layout.ranks.items()},
                        **(latent_ranks if layer else {}),
                    },
                    n_spatial_dims,
                )
                for kind, layout in self.source_layouts.items()
            }
            self._layer_sources.append(sources)
            layers.append(
                nn.ModuleDict(
                    {
                        module_key(kind): MultiscaleKernel(
                            self.reference_length_names,
                            n_spatial_dims=n_spatial_dims,
                            output_field_ranks=outputs.ranks,
                            source_data_ranks=sources[kind].ranks,
                            global_data_ranks=self.global_layout.ranks,
                            hidden_layer_sizes=tuple(hidden_layer_sizes),
                            n_spherical_harmonics=n_spherical_harmonics,
                            network_type=network_type,
                            self_regularization_beta=self_regularization_beta,
                            initial_amplitude=initial_amplitude,
                        )
                        for kind in self.source_layouts
                    }
                )
            )
        self.kernel_layers = nn.ModuleList(layers)
        self._start_strengths()
        self.final_field_transforms = nn.ModuleList(FieldCalibration(r) for r in self.output_layout.ranks.values())

    def _start_strengths(self) -> None:
        """Let strengths start positive like those of the first layer: else each layer starts near zero."""
        names = self.latent_layout.scalars
        strengths = [i for i, name in enumerate(names) if name.startswith("strengths.")]
        layers: Any = self.kernel_layers
        for layer in layers[:-1]:
            for multiscale in layer.values():
                for kernel in multiscale.kernels.values():
                    kernel.start_positive(strengths)

    def _apply(self, fn: Any, recurse: bool = True) -> GLOBE:
        radius = self.smoothing_radius
        super()._apply(fn, recurse)
        # Its square underflows in 16-bit formats.
        if self.smoothing_radius.dtype.itemsize < 4:
            self.smoothing_radius = radius.to(self.smoothing_radius.device)
        return self

    @property
    def geometry_dtype(self) -> torch.dtype:
        """Precision of coordinates, features and sums: the parameters', but float32 at least."""
        return torch.promote_types(self.parameter_dtype, torch.float32)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Precision of the parameters."""
        return next(self.parameters()).dtype

    @torch.no_grad()
    def build_plans(
        self,
        prediction_points: Float[Tensor, "n dims"],
        boundary_meshes: Mapping[str, BoundaryMesh],
        prediction_chunk_size: int | Literal["auto"] | None = "auto",
        *,
        reference_lengths: Mapping[str, Any] | None = None,
        global_data: Mapping[str, Any] | TensorDictBase | None = None,
        ahead: Plans | None = None,
        geometry_key: str | None = None,
    ) -> Plans:
        """Check a sample and build its trees and interaction plans, never under autocast.

        Args:
            prediction_points: (n, D) [m].
            boundary_meshes: {boundary type: faces}.
            prediction_chunk_size: points that share one plan: "auto" as many as there are faces in total, None all,
                or a number.
            reference_lengths, global_data: checked along with the geometry if given; plans do not depend on them.
            ahead: plans of :meth:`plan_ahead` for this sample: it is checked alone.
            geometry_key: of the sample, if its plans may be kept (``sample.geometry_key``).

        Raises:
            TypeError, ValueError: something of the sample does not fit; see ``validation``.
        """
        meshes = self._checked_meshes(prediction_points, boundary_meshes, reference_lengths, global_data)
        if ahead is not None:
            return ahead
        planner = self._planner(prediction_points.device)
        return self.plan_cache.get(
            self._plan_key(geometry_key, planner, prediction_chunk_size),
            lambda: planner.plan_sample(meshes, prediction_points, prediction_chunk_size),
        )

    def _plan_key(self, geometry_key: str | None, *others: Any) -> Any:
        """Under which plans are kept; None if they are not to be, or are nothing but numbers, as at theta 0."""
        return (geometry_key, *others) if geometry_key is not None and self.theta else None

    def plan_ahead(self, prediction_chunk_size: int | Literal["auto"] | None = "auto") -> PlanAhead:
        """What plans samples on a CPU before the model sees them, in another process too."""
        planner = replace(self._planner(torch.device("cpu")), build_device=torch.device("cpu"))
        return PlanAhead(planner, list(self.source_layouts), prediction_chunk_size)

    @property
    def opening_rule(self) -> OpeningRule:
        """The rule that ``theta``, ``expand_far_targets`` and their like make up, as they are now."""
        return OpeningRule(
            self.theta, self.expand_far_targets, self.target_size_weight, self.far_field_order, self.max_far_targets
        )

    def _planner(self, device: torch.device) -> Planner:
        build = self.tree_build_device or device
        return Planner(self.opening_rule, self.leaf_size, build, device, self.geometry_dtype)

    def _checked_meshes(
        self,
        prediction_points: Float[Tensor, "n dims"],
        boundary_meshes: Mapping[str, BoundaryMesh],
        reference_lengths: Mapping[str, Any] | None,
        global_data: Mapping[str, Any] | TensorDictBase | None,
    ) -> dict[str, BoundaryMesh]:
        """Check a sample; the meshes that have faces, in the order of the declared types."""
        boundary_meshes = _as_dict(boundary_meshes)
        checks = NumberChecks(self.geometry_dtype)
        check_geometry(checks, prediction_points, boundary_meshes, self.source_layouts, self.n_spatial_dims)
        if reference_lengths is not None:
            check_conditions(checks, reference_lengths, self.reference_length_names, global_data, self.global_layout)
        checks.judge()
        kinds = [kind for kind in self.source_layouts if kind in boundary_meshes and boundary_meshes[kind].n_faces]
        if sum(boundary_meshes[kind].n_faces for kind in kinds) == 1 and self.n_communication_hyperlayers:
            warnings.warn(
                "boundary_meshes: one face in all; a face does not act on itself, so that the communication "
                "layers pass on nothing and every prediction is its field's constant offset",
                stacklevel=3,
            )
        return {kind: boundary_meshes[kind] for kind in kinds}

    def forward(
        self,
        prediction_points: Float[Tensor, "n dims"],
        boundary_meshes: Mapping[str, BoundaryMesh],
        reference_lengths: Mapping[str, Any],
        global_data: Mapping[str, Any] | TensorDictBase | None = None,
        prediction_chunk_size: int | Literal["auto"] | None = "auto",
        plans: Plans | None = None,
    ) -> TensorDict:
        """Predict the output fields at points.

        Args:
            prediction_points: (n, D) [m]; cast to the model's precision, as everything else.
            boundary_meshes: {boundary type: faces}; a declared type may be missing and contributes nothing.
            reference_lengths: {name: positive number or scalar tensor [m]}.
            global_data: {name: scalar () or vector (D,)}, as declared.
            prediction_chunk_size: see :meth:`build_plans`; ignored if ``plans`` are given.
            plans: of :meth:`build_plans` for exactly these points and meshes; then the forward and backward pass
                hold no data-dependent operation. Built (and the inputs checked) here if None.

        Returns:
            The fields, nested as declared, batch size (n,): scalars (n,), vectors (n, D).
        """
        boundary_meshes = _as_dict(boundary_meshes)
        if plans is None:
            plans = self.build_plans(
                prediction_points,
                boundary_meshes,
                prediction_chunk_size,
                reference_lengths=reference_lengths,
                global_data=global_data,
            )
        else:
            require_fitting(plans, prediction_points, boundary_meshes)
        device = prediction_points.device
        assert plans.prediction is not None, "checked by require_fitting"
        use_nodes = plans.prediction.plan.uses_source_nodes
        tables = self._communicate(boundary_meshes, reference_lengths, global_data, plans, device, use_nodes)
        packed = self._evaluate_chunk(prediction_points, plans.prediction, tables)
        if not prediction_points.shape[0]:
            # No points: empty fields, of which every parameter still has a gradient.
            packed = packed + _nothing(self).to(packed.dtype)
        with torch.autocast(device.type, enabled=False):
            return calibrate(packed, self.output_layout, self.final_field_transforms)

    @torch.no_grad()
    def predict_chunks(
        self,
        prediction_points: Float[Tensor, "n dims"],
        boundary_meshes: Mapping[str, BoundaryMesh],
        reference_lengths: Mapping[str, Any],
        global_data: Mapping[str, Any] | TensorDictBase | None = None,
        prediction_chunk_size: int | Literal["auto"] | None = "auto",
        pointwise: bool = True,
        geometry_key: str | None = None,
    ) -> Iterator[TensorDict]:
        """The fields at points, chunk after chunk, without gradients and in bounded memory.

        The communication layers are evaluated once; the plan of a chunk lives while that chunk is evaluated, unless it
        is kept.

        Args:
            prediction_points, boundary_meshes, reference_lengths, global_data, prediction_chunk_size: those of
                :meth:`forward`.
            pointwise: let every point decide alone which faces act on it as one: a prediction then depends on its own
                point only, whatever the chunks and whoever else is asked. Else the fields are those of
                :meth:`forward` with the same chunks. No difference at ``theta = 0``.
            geometry_key: of the sample, if its plans may be kept (``sample.geometry_key``).

        Yields:
            The fields of the next points, in their order.
        """
        device = prediction_points.device
        boundary_meshes = _as_dict(boundary_meshes)
        meshes = self._checked_meshes(prediction_points, boundary_meshes, reference_lengths, global_data)
        planner = self._planner(device)
        cache, key = self.plan_cache, partial(self._plan_key, geometry_key, planner)
        plans, forest = cache.get(key("faces"), lambda: planner.plan_faces(meshes))
        tables = self._communicate(boundary_meshes, reference_lengths, global_data, plans, device, self.theta > 0)
        for first, last in planner.chunks(prediction_points.shape[0], forest.n_points, prediction_chunk_size):
            build = partial(planner.plan_points, prediction_points, first, last, forest, pointwise)
            chunk = cache.get(key(first, last, pointwise), build)
            packed = self._evaluate_chunk(prediction_points, chunk, tables)
            # Left before yielding: the caller's own autocast is in force while it holds the fields.
            with torch.autocast(device.type, enabled=False):
                fields = calibrate(packed, self.output_layout, self.final_field_transforms)
            yield fields

    def _communicate(
        self,
        boundary_meshes: Mapping[str, BoundaryMesh],
        reference_lengths: Mapping[str, Any],
        global_data: Mapping[str, Any] | TensorDictBase | None,
        plans: Plans,
        device: torch.device,
        use_nodes: bool,
    ) -> list[SourceTable]:
        """Evaluate the communication layers: the sources of the last one.

        Args:
            boundary_meshes, reference_lengths, global_data: those of :meth:`forward`.
            plans: those of the sample; its prediction plans are not looked at.
            device: the sample's.
            use_nodes: whether the last layer refers to nodes.
        """
        dtype = self.geometry_dtype
        autocast = torch.is_autocast_enabled(device.type)
        product_dtype = torch.get_autocast_dtype(device.type) if autocast else self.parameter_dtype
        lengths = {
            name: torch.as_tensor(reference_lengths[name], device=device, dtype=dtype).reshape(1)
            for name in self.reference_length_names
        }
        conditions = {
            name: value.to(device=device, dtype=dtype).reshape(self.global_layout.shape(name))
            for name, value in flatten_data(global_data).items()
        }
        with torch.autocast(device.type, enabled=False):
            boundaries = sort_boundaries(
                boundary_meshes, self.source_layouts, plans, self.reference_area.to(dtype), use_nodes
            )
            targets = face_targets(plans, boundaries)
            latents: Tensor | None = None
            for layer in range(self.n_communication_hyperlayers):
                tables = self._tables(layer, plans, boundaries, latents, lengths, conditions, product_dtype)
                out = self._evaluate(layer, plans.communication, targets, tables, self.latent_layout)
                latents = compress(out, self.latent_layout, self.latent_compression_scale, self.smoothing_radius)
            return self._tables(
                self.n_communication_hyperlayers, plans, boundaries, latents, lengths, conditions, product_dtype
            )

    def _evaluate_chunk(
        self, points: Float[Tensor, "n dims"], chunk: PredictionPlan, tables: list[SourceTable]
    ) -> Float[Tensor, "chunk columns"]:
        """The last layer at the points of a chunk, packed, in the order of the points."""
        with torch.autocast(points.device.type, enabled=False):
            own = points[chunk.first : chunk.last].to(self.geometry_dtype).index_select(0, chunk.order)
            targets = point_targets(chunk.plan, own, len(tables))
            out = self._evaluate(self.n_communication_hyperlayers, chunk.plan, targets, tables, self.output_layout)
            return torch.zeros_like(out).index_copy(0, chunk.order, out)

    def _tables(
        self,
        layer: int,
        plans: Plans,
        boundaries: list[Boundary],
        latents: Tensor | None,
        lengths: dict[str, Tensor],
        conditions: dict[str, Tensor],
        product_dtype: torch.dtype,
    ) -> list[SourceTable]:
        """The sources of every type as a layer sees them: points, and nodes with averaged data."""
        tables = []
        for boundary in boundaries:
            n, n_dims = boundary.n_points, self.n_spatial_dims
            layout = self._layer_sources[layer][boundary.kind]
            fields = dict(boundary.fields)
            strengths = {name: torch.ones_like(boundary.areas) for name in self.reference_length_names}
            if latents is not None:
                own = latents[boundary.first_point : boundary.first_point + n]
                named = dict(zip(self.latent_layout.scalars, own.unbind(1), strict=False))
                rest = own[:, len(self.latent_layout.scalars) :].reshape(n, -1, n_dims)
                named |= dict(zip(self.latent_layout.vectors, rest.unbind(1), strict=True))
                strengths = {name: named.pop(f"strengths.{name}") for name in self.reference_length_names}
                fields |= named
            columns = [fields[name].unsqueeze(1) for name in layout.scalars]
            columns += [fields[name] for name in layout.vectors]
            data = torch.cat(columns, dim=1)
            weights = torch.stack([strengths[name] * boundary.areas for name in self.reference_length_names], dim=1)
            positions = boundary.positions
            if boundary.n_nodes:
                data = torch.cat([data, range_means(data, boundary.areas, boundary.start, boundary.end)])
                of_nodes = range_sums(weights, boundary.start, boundary.end).to(weights.dtype)
                weights = torch.cat([weights, of_nodes])
                positions = torch.cat([positions, boundary.node_positions])
            n_rows = positions.shape[0]
            scalars = data[:, : len(layout.scalars)].t().contiguous()
            parts = [conditions[name].expand(n_rows, 1, n_dims) for name in self.global_layout.vectors]
            parts.append(data[:, len(layout.scalars) :].reshape(n_rows, -1, n_dims))
            vectors = SourceVectors.of(torch.cat(parts, dim=1), self.smoothing_radius.to(data.dtype))
            kernel: MultiscaleKernel = self.kernel_layers[layer][module_key(boundary.kind)]  # type: ignore[index]
            tables.append(
                kernel.source_table(
                    boundary.kind,
                    positions,
                    kernel.global_scalars(conditions, lengths, data.dtype),
                    scalars,
                    vectors,
                    weights.t(),
                    lengths,
                    product_dtype,
                )
            )
        return tables

    def _evaluate(
        self,
        layer: int,
        plan: InteractionPlan,
        targets: Targets,
        tables: list[SourceTable],
        layout: FieldLayout,
    ) -> Tensor:
        """A hyperlayer's outputs at the target points, packed [scalars | vectors]."""
        checkpointing = self.use_gradient_checkpointing and torch.is_grad_enabled()
        smoothing = self.smoothing_radius.to(self.geometry_dtype)
        out = evaluate_plan(
            plan,
            targets,
            tables,
            layout.n_columns,
            smoothing,
            checkpointing,
            self.chunk_bytes,
            self.compile_pairs,
        )
        if not torch.is_grad_enabled():
            return out
        # Kernels of types that this sample lacks get a gradient of zero, so that DDP needs no search for them.
        for kind in set(self.source_layouts) - {table.kind for table in tables}:
            out = out + _nothing(self.kernel_layers[layer][module_key(kind)]).to(out.dtype)  # type: ignore[index]
        return out


def _require(condition: bool, argument: str, found: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, found {found}")


def _as_dict(boundary_meshes: Mapping[str, BoundaryMesh] | TensorDictBase) -> dict[str, BoundaryMesh]:
    """A dict of meshes; the items of a TensorDict are wrapped, its entries by key are not."""
    return {str(kind): boundary_meshes[kind] for kind in boundary_meshes.keys()}  # noqa: SIM118


def _nothing(module: nn.Module) -> Tensor:
    """A zero of which every parameter of a module has a gradient (of zero)."""
    return torch.stack([parameter.sum() * 0 for parameter in module.parameters()]).sum()
