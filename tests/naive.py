"""GLOBE at theta = 0 written down from its definition: dense, slow and obvious; shares no code with the package.

Every pair of a target and a source gets all of its input columns and all of its basis vectors by name, one sum after
the other. It serves as the reference of the fast evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def flat(nested: Mapping[str, Any] | None, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": x}} as {"a.b": x}."""
    out: dict[str, Any] = {}
    for name, value in (nested or {}).items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return out


def smooth_log(x: Tensor) -> Tensor:
    """(1 - exp(-x)) log(1 + x)."""
    return -torch.expm1(-x) * torch.log1p(x)


def face_geometry(points: Tensor, cells: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centroids, normals and measures, face by face."""
    centroids, normals, measures = [], [], []
    for cell in cells:
        corners = [points[i] for i in cell]
        if len(corners) == 2:
            e = corners[1] - corners[0]
            across, measure = torch.stack([-e[1], e[0]]), e.norm()
        else:
            across = torch.linalg.cross(corners[1] - corners[0], corners[2] - corners[0])
            measure = across.norm() / 2
        centroids.append(sum(corners) / len(corners))
        normals.append(across / across.norm() if across.norm() > 0 else torch.zeros_like(across))
        measures.append(measure)
    return torch.stack(centroids), torch.stack(normals), torch.stack(measures)


def network(state: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any], x: Tensor) -> Tensor:
    """The kernel's network on complete input columns."""
    pade = config.get("network_type", "pade") == "pade"
    prefix += ".network.combined_mlp.layers" if pade else ".network.0.layers"
    n_linear = len(config["hidden_layer_sizes"]) + 1
    for i in range(n_linear):
        weight, bias = state[f"{prefix}.{2 * i}.weight"], state[f"{prefix}.{2 * i}.bias"]
        x = x @ weight.to(x).T + bias.to(x)
        if i < n_linear - 1:
            x = silu(x)
    if not pade:
        return torch.tanh(x)
    n_outputs = x.shape[-1] // 2
    p, q = x[..., :n_outputs], x[..., n_outputs:]
    beta = config.get("self_regularization_beta") or 0.0
    return torch.sign(p) * p**2 / (1 + q**2 + beta * p**2)


def kernel(
    state: Mapping[str, Tensor],
    prefix: str,
    config: Mapping[str, Any],
    r: Tensor,
    global_scalars: dict[Any, Tensor],
    global_vectors: dict[str, Tensor],
    source_scalars: dict[str, Tensor],
    source_vectors: dict[str, Tensor],
    output_ranks: dict[str, int],
) -> dict[str, Tensor]:
    """Contribution of every (target, source) pair; r is (T, S, D), source data are (S,) and (S, D)."""
    n_targets, n_sources, dims = r.shape
    eps = torch.tensor(config.get("smoothing_radius", 1e-8), dtype=torch.float32).to(r)

    def per_pair(x: Tensor) -> Tensor:
        return x.expand(n_targets, n_sources, *x.shape[1:])

    vectors = [global_vectors[name].expand(n_targets, n_sources, dims) for name in sorted(global_vectors)]
    n_global = len(vectors)
    vectors += [per_pair(source_vectors[name]) for name in sorted(source_vectors)]
    vectors.append(r)
    m = [torch.sqrt((v**2).sum(dim=-1) + eps**2) for v in vectors]
    u = [v / length.unsqueeze(-1) for v, length in zip(vectors, m, strict=True)]

    columns = [global_scalars[key].expand(n_targets, n_sources) for key in sorted(global_scalars, key=str)]
    columns += [per_pair(source_scalars[name]) for name in sorted(source_scalars)]
    last = len(vectors) - 1
    columns += [smooth_log(m[i]) for i in [*range(n_global), last, *range(n_global, last)]]
    for degree in range(1, config["n_spherical_harmonics"] + 1):
        for i in range(len(vectors)):
            for k in range(i + 1, len(vectors)):
                cosine = (u[i] * u[k]).sum(dim=-1)
                legendre = torch.special.legendre_polynomial_p(cosine, degree)
                columns.append(smooth_log(m[i] * m[k]) * legendre)
    out = network(state, prefix, config, torch.stack(columns, dim=-1))
    m_r, u_r = m[last], u[last]
    out = out * (-torch.expm1(-(m_r**2)) / (m_r**2 + 1) ** ((dims - 1) / 2)).unsqueeze(-1)

    fields: dict[str, Tensor] = {}
    at = 0
    for name in sorted(output_ranks):
        if output_ranks[name] == 0:
            fields[name] = out[..., at]
            at += 1
            continue
        field = out[..., at, None] * u_r
        at += 1
        for k in range(last):
            e_k = -u[k] + (u[k] * u_r).sum(dim=-1, keepdim=True) * u_r
            field = field + smooth_log(m[k]).unsqueeze(-1) * (out[..., at, None] * u[k] + out[..., at + 1, None] * e_k)
            at += 2
        fields[name] = field
    assert at == out.shape[-1]
    return fields


def forward(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    prediction_points: Tensor,
    boundary_meshes: Mapping[str, Mapping[str, Any]],
    reference_lengths: Mapping[str, Tensor],
    global_data: Mapping[str, Any] | None,
) -> dict[str, Tensor]:
    """All output fields at the prediction points; meshes as {type: {points, cells, cell_data, measure_weights}}."""
    names = config["reference_length_names"]
    conditions = flat(global_data)
    ranks = flat(config.get("global_data_ranks"))
    global_scalars: dict[Any, Tensor] = {
        ("global_scalars", name): conditions[name] for name, rank in ranks.items() if rank == 0
    }
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            key = ("global_scalars", "log_reference_length_ratios", f"{first}_{second}")
            global_scalars[key] = torch.log(reference_lengths[first] / reference_lengths[second])
    global_vectors = {name: conditions[name] for name, rank in ranks.items() if rank == 1}

    reference_area = torch.tensor(config.get("reference_area", 1.0), dtype=torch.float32).to(prediction_points)
    faces: dict[str, dict[str, Any]] = {}
    for kind, mesh in boundary_meshes.items():
        centroids, normals, measures = face_geometry(mesh["points"], mesh["cells"])
        if mesh.get("measure_weights") is not None:
            measures = measures * mesh["measure_weights"]
        data = flat(mesh["cell_data"])
        declared = flat(config["boundary_source_data_ranks"][kind])
        faces[kind] = {
            "centroids": centroids,
            "areas": measures / reference_area,
            "scalars": {f"physical.{name}": data[name] for name, rank in declared.items() if rank == 0},
            "vectors": {"normals": normals}
            | {f"physical.{name}": data[name] for name, rank in declared.items() if rank == 1},
            "strengths": {name: torch.ones_like(measures) for name in names},
        }

    def hyperlayer(layer: int, targets: Tensor, output_ranks: dict[str, int]) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for kind, face in faces.items():
            for name in names:
                scale = state[f"kernel_layers.{layer}.{kind}.log_scalefactors.{name}"].to(targets)
                r = (targets[:, None, :] - face["centroids"][None]) / (reference_lengths[name] * torch.exp(scale))
                fields = kernel(
                    state,
                    f"kernel_layers.{layer}.{kind}.kernels.{name}",
                    config,
                    r,
                    global_scalars,
                    global_vectors,
                    face["scalars"],
                    face["vectors"],
                    output_ranks,
                )
                weight = face["strengths"][name] * face["areas"]
                for field, value in fields.items():
                    shaped = weight if value.ndim == 2 else weight[:, None]
                    total[field] = total.get(field, 0) + (value * shaped).sum(dim=1)
        return total

    latent_ranks = {f"latent.scalars.{i}": 0 for i in range(config["n_latent_scalars"])}
    latent_ranks |= {f"latent.vectors.{i}": 1 for i in range(config["n_latent_vectors"])}
    latent_ranks |= {f"strengths.{name}": 0 for name in names}
    c = config.get("latent_compression_scale")
    eps = torch.tensor(config.get("smoothing_radius", 1e-8), dtype=torch.float32).to(prediction_points)
    n_layers = config["n_communication_hyperlayers"]
    for layer in range(n_layers):
        outputs = {kind: hyperlayer(layer, face["centroids"], latent_ranks) for kind, face in faces.items()}
        for kind, face in faces.items():
            for name, value in outputs[kind].items():
                if c is not None and latent_ranks[name] == 0:
                    value = c * torch.asinh(value / c)
                elif c is not None:
                    m = torch.sqrt((value**2).sum(dim=-1, keepdim=True) + eps**2)
                    value = value * c * torch.asinh(m / c) / m
                if name.startswith("strengths."):
                    face["strengths"][name.removeprefix("strengths.")] = value
                else:
                    face["vectors" if latent_ranks[name] else "scalars"][name] = value

    output_ranks = flat(config["output_field_ranks"])
    fields = hyperlayer(n_layers, prediction_points, output_ranks)
    calibrated = {}
    for i, name in enumerate(sorted(output_ranks)):
        value = fields[name] * state[f"final_field_transforms.{i}.weight"].to(prediction_points).squeeze()
        if output_ranks[name] == 0:
            value = value + state[f"final_field_transforms.{i}.bias"].to(prediction_points)
        calibrated[name] = value
    return calibrated
