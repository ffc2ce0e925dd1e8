"""GlobeLightningModule: the GLOBE network with its plans, loss, metrics and optimizers, under Lightning."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor, nn
from tqdm.auto import tqdm

from globe_lightning.bad_batches import BadBatchError, all_finite, describe
from globe_lightning.fields import flatten_data, flatten_ranks
from globe_lightning.losses import complete_scales, field_losses
from globe_lightning.metrics import RunningMean, TargetVariances
from globe_lightning.models.globe import GLOBE
from globe_lightning.optim import (
    TRAINING_ARGUMENTS,
    PlateauSchedule,
    StepSchedule,
    build_optimizer,
    check_training_arguments,
)
from globe_lightning.plain_values import plain
from globe_lightning.provenance import provenance
from globe_lightning.sample import Sample, SampleSchema
from globe_lightning.stage_metrics import StageMetrics
from globe_lightning.training_sums import pack_sums, restore_sums

MONITOR, MONITOR_MODE = "val/loss", "min"
"""The metric that says which checkpoint is best, and whether less or more of it is better."""

SCHEMA_ARGUMENTS = tuple(item.name for item in dataclasses.fields(SampleSchema))
"""The constructor arguments that describe the data."""

NETWORK_ARGUMENTS = tuple(inspect.signature(GLOBE).parameters)
"""The constructor arguments that are GLOBE's own."""

SCHEMA_KEY, PROGRESS_KEY = "sample_schema", "training_progress"
"""Where a checkpoint keeps the schema of the samples that its model fits, and sums that training has gathered."""

GEOMETRY_KEY = "geometry_arguments"
"""Where a checkpoint keeps how its training's data module prepared a case's geometry: {argument: plain value}."""

PROVENANCE_KEY = "provenance"
"""Where a checkpoint keeps what is known of its training's data and hardware."""

_log = logging.getLogger(__name__)


class GlobeLightningModule(pl.LightningModule):
    """GLOBE under Lightning: one case is one step.

    The arguments are plain values, so that a checkpoint can be loaded by itself:
    ``GlobeLightningModule.load_from_checkpoint(path)``.

    Args:
        n_spatial_dims: 2 or 3.
        output_field_ranks: the fields to predict, {name: 0 scalar or 1 vector}; may nest.
        boundary_source_data_ranks: {boundary type: {per-face data: rank}}.
        reference_length_names: one branch of every kernel each, in this order.
        reference_area: what face areas are divided by [m^2, or m in 2D].
        global_data_ranks: per-sample data, {name: rank}.
        n_communication_hyperlayers: number of layers between boundary faces before the last layer.
        n_latent_scalars: latent scalars that every face carries between layers.
        n_latent_vectors: latent vectors that every face carries between layers.
        smoothing_radius: softening of the length of vectors.
        hidden_layer_sizes: widths of the kernels' hidden layers.
        n_spherical_harmonics: degree up to which angles between vectors are expanded.
        theta: opening angle; 0 evaluates every pair.
        target_size_weight: weight of the target node's size in the opening rule; above 1 smoother and slower.
        leaf_size: most points in a leaf of a tree.
        network_type: "pade" (rational) or "mlp".
        self_regularization_beta: bounds the rational network's outputs by 1/beta; None for no bound.
        latent_compression_scale: where latents and strengths bend from linear to logarithmic; None for nowhere.
        expand_far_targets: evaluate each target of a far pair by itself.
        far_field_order: 0: a far pair acts on all targets of a node alike; 1: by an affine field over the node.
        max_far_targets: most targets that share the evaluation of a far pair; null for no limit; "auto": with
            ``far_field_order`` 1 the 128th part of the targets of a tree, but at least 64; else no limit.
        use_gradient_checkpointing: recompute kernels in the backward pass instead of storing them.
        tree_build_device: where trees and plans are built, "cpu" or "cuda"; None where the sample is; "workers": those
            of training by the data loader's workers, so that a step finds them ready.
        initial_amplitude: size of a fresh Pade kernel's outputs; about one over the sum of the face areas, over the
            reference area, that act on a face.
        chunk_bytes: what the temporaries of all pairs in flight may take; None for the device's default (64 MiB on
            a CPU, 4 GiB on a GPU).
        plan_cache_bytes: what trees and plans of samples that come again unchanged, as those of validation, may take;
            0 keeps none.
        compile: "network": on a CPU the networks of pairs in C++, where there is a compiler; True: the whole kernel of
            a pair by ``torch.compile``, too: faster after the first step; False: torch's operations alone.
        loss_scales: {field: error that counts as large}; 1 for fields not named.
        optimizer: "muon" (Muon for matrices, RAdam for the rest), "radam" or "adamw".
        lr: learning rate.
        weight_decay: decoupled weight decay.
        schedule: "plateau" lowers the learning rate when the train loss stalls; "cosine" follows half a cosine over
            the whole training; "constant".
        warmup_steps: optimizer steps of linear warm-up (cosine and constant schedules).
        plateau_factor: what the learning rate is multiplied with on a plateau.
        plateau_patience_steps: optimizer steps without improvement that make a plateau.
        plateau_threshold: relative improvement that counts.
        min_lr_factor: floor of the learning rate, as a fraction of ``lr`` (plateau and cosine).
        prediction_chunk_size: prediction points evaluated at once; "auto" as many as there are boundary faces, None
            all of them.
        pointwise_prediction: validate, test and predict by the pointwise rule: every point decides alone which faces
            act on it as one, and its prediction depends on no other point. Else by the rule of training.
        max_bad_batches: optimizer steps left out for a loss or gradient that is not finite, over the whole training,
            before it stops with an error.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    def __init__(
        self,
        n_spatial_dims: int,
        output_field_ranks: dict[str, Any],
        boundary_source_data_ranks: dict[str, dict[str, Any]],
        reference_length_names: list[str],
        reference_area: float = 1.0,
        global_data_ranks: dict[str, Any] | None = None,
        n_communication_hyperlayers: int = 2,
        n_latent_scalars: int = 12,
        n_latent_vectors: int = 6,
        smoothing_radius: float = 1e-8,
        hidden_layer_sizes: Sequence[int] = (64, 64, 64),
        n_spherical_harmonics: int = 4,
        theta: float = 1.0,
        target_size_weight: float = 1.0,
        leaf_size: int = 1,
        network_type: Literal["pade", "mlp"] = "pade",
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
        loss_scales: dict[str, float] | None = None,
        optimizer: Literal["muon", "radam", "adamw"] = "muon",
        lr: float = 1e-3,
        weight_decay: float = 1e-4,
        schedule: Literal["plateau", "cosine", "constant"] = "plateau",
        warmup_steps: int = 0,
        plateau_factor: float = 0.5,
        plateau_patience_steps: int = 1600,
        plateau_threshold: float = 1e-3,
        min_lr_factor: float = 1 / 64,
        prediction_chunk_size: int | Literal["auto"] | None = "auto",
        pointwise_prediction: bool = True,
        max_bad_batches: int = 10,
    ) -> None:
        values = {name: plain(value) for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self.save_hyperparameters(values)
        check_training_arguments(**{name: values[name] for name in TRAINING_ARGUMENTS})
        if (tree_build_device or "cpu").partition(":")[0] not in ("cpu", "cuda", "workers"):
            raise ValueError(f"tree_build_device: expected cpu, cuda, workers or null, found {tree_build_device!r}")
        if prediction_chunk_size not in ("auto", None) and int(prediction_chunk_size) < 1:
            raise ValueError(f"prediction_chunk_size: expected auto, null or 1 or more, found {prediction_chunk_size}")
        if max_bad_batches < 0:
            raise ValueError(f"max_bad_batches: expected 0 or more, found {max_bad_batches}")
        self.schema = SampleSchema(**{name: values[name] for name in SCHEMA_ARGUMENTS if values[name] is not None})
        self.field_ranks = flatten_ranks(output_field_ranks, "output_field_ranks")
        network = {name: values[name] for name in NETWORK_ARGUMENTS}
        if tree_build_device == "workers":
            network["tree_build_device"] = None
        self.network = GLOBE(**network)
        self._start_at_scales(complete_scales(loss_scales, list(self.field_ranks)))
        self.geometry_arguments: dict[str, Any] = {}  # how the training's data module prepares a geometry
        self.latest_prediction: dict[str, Tensor] | None = None
        self.latest_mesh: tuple[str, Any] | None = None  # of the callbacks that write a predicted case
        self.skipped_steps = 0
        self._since_step: list[tuple[Sample, Tensor]] = []  # the cases of the next optimizer step, with their losses
        self._restored_progress: dict[str, Any] | None = None
        self.configure_losses()
        self.configure_metrics()

    # Configuration

    @torch.no_grad()
    def _start_at_scales(self, scales: dict[str, float]) -> None:
        """Let each field's calibration start at the field's scale in the loss: a sensible size from the first step."""
        transforms: Any = self.network.final_field_transforms
        for name, transform in zip(self.field_ranks, transforms, strict=True):
            transform.weight.fill_(scales[name])

    def configure_losses(self) -> None:
        """Set the scale of every field's loss."""
        self.loss_scales = complete_scales(self.hparams["loss_scales"], list(self.field_ranks))

    def configure_metrics(self) -> None:
        """Create the metrics: running means in training, errors by case in validation and test."""
        self.train_means = nn.ModuleList(RunningMean() for _ in ("total", *self.field_ranks))
        self.target_variances = TargetVariances(self.field_ranks, self.schema.n_spatial_dims)
        self.stage_metrics = nn.ModuleDict(
            {stage: StageMetrics(self.field_ranks, self.schema.n_spatial_dims) for stage in ("val", "test")}
        )

    def configure_optimizers(self) -> Any:
        """The optimizer with its schedule."""
        h = self.hparams
        optimizer = build_optimizer(h["optimizer"], self.network.parameters(), h["lr"], h["weight_decay"])
        if h["schedule"] == "plateau":
            plateau = PlateauSchedule(
                optimizer, h["plateau_factor"], h["plateau_patience_steps"], h["min_lr_factor"], h["plateau_threshold"]
            )
            schedule: dict[str, Any] = {"scheduler": plateau, "interval": "epoch"}
        else:
            if h["schedule"] == "cosine" and self.trainer.max_epochs == self.trainer.max_steps == -1:
                raise ValueError("schedule: cosine needs an end of training; set trainer.max_epochs or max_steps")
            schedule = {
                "scheduler": StepSchedule(optimizer, h["warmup_steps"], None, h["min_lr_factor"]),
                "interval": "step",
            }
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a schedule by the number of optimizer steps done; a plateau's also by the epoch's mean train loss."""
        if isinstance(scheduler, PlateauSchedule):
            # Lightning's own monitor is of no use: it does not step such a schedule in the epoch of a resumption.
            mean: Any = self.train_means[0]
            scheduler.step(mean.compute(), self.trainer.global_step)
        else:
            if self.hparams["schedule"] == "cosine":
                # Not asked earlier: Lightning would make the loaders before it restores how far they were.
                scheduler.total_steps = int(self.trainer.estimated_stepping_batches)
            scheduler.step(self.trainer.global_step)

    def setup(self, stage: str) -> None:
        """Compare the data module's schema with the model's; in training note how it prepares a case's geometry.

        Raises:
            ValueError: the schemas differ; the message lists how.
        """
        module: Any = getattr(self.trainer, "datamodule", None)
        data = getattr(module, "schema", None)
        if isinstance(data, SampleSchema):
            self._refuse_differences(data, "the data module's samples do not fit the model")
        if stage == "fit" and hasattr(module, "geometry_arguments"):
            self.geometry_arguments = plain(module.geometry_arguments())
        if stage == "fit" and hasattr(module, "plan_ahead"):
            # None takes back what another model has left there.
            module.plan_ahead = self.network.plan_ahead(self.hparams["prediction_chunk_size"]) if self._ahead else None

    def teardown(self, stage: str) -> None:
        """Let go of the plans that were kept."""
        self.network.plan_cache.clear()

    @property
    def _ahead(self) -> bool:
        """Whether the plans of training come with its samples."""
        return bool(self.hparams["tree_build_device"] == "workers")

    def _refuse_differences(self, other: SampleSchema, what: str) -> None:
        lines = self.schema.differences(other)
        if lines:
            raise ValueError(f"{what}:\n  " + "\n  ".join(lines))

    # Prediction

    @torch.no_grad()
    def build_plans(self, sample: Sample) -> Any:
        """Trees and interaction plans of a sample, in full precision, on ``tree_build_device`` or built ahead.

        Raises:
            ValueError: a number of the sample is unusable; the message names the case, what and how many.
        """
        with torch.autocast(sample.prediction_points.device.type, enabled=False):
            try:
                return self.network.build_plans(
                    sample.prediction_points,
                    sample.boundary_meshes,
                    self.hparams["prediction_chunk_size"],
                    reference_lengths=sample.reference_lengths,
                    global_data=sample.global_data,
                    ahead=sample.plans if self._ahead else None,
                    geometry_key=sample.geometry_key,
                )
            except (TypeError, ValueError) as error:
                raise type(error)(f"case {sample.case!r}: {error}") from error

    def forward(self, sample: Sample) -> TensorDict:
        """The predicted fields at the sample's points: scalars (n,), vectors (n, D), nested as declared."""
        plans = self.build_plans(sample)
        return self.network(
            sample.prediction_points,
            sample.boundary_meshes,
            sample.reference_lengths,
            sample.global_data,
            prediction_chunk_size=self.hparams["prediction_chunk_size"],
            plans=plans,
        )

    @torch.no_grad()
    def predict_fields(
        self,
        sample: Sample,
        device: torch.device | str | None = None,
        progress: bool = False,
        pointwise: bool | None = None,
    ) -> dict[str, Tensor]:
        """The predicted fields at all points of a sample, evaluated chunk by chunk in bounded memory.

        Args:
            sample: any number of points.
            device: where the fields are gathered; None where the sample is.
            progress: show a bar over the points.
            pointwise: see ``GLOBE.predict_chunks``; ``pointwise_prediction`` if None.

        Returns:
            {flattened field name: values}, scalars (n,) and vectors (n, D).

        Raises:
            ValueError: a number of the sample is unusable; the message names the case, what and how many.
        """
        n, like = sample.prediction_points.shape[0], sample.prediction_points
        chunks = self.network.predict_chunks(
            like,
            sample.boundary_meshes,
            sample.reference_lengths,
            sample.global_data,
            self.hparams["prediction_chunk_size"],
            self.hparams["pointwise_prediction"] if pointwise is None else pointwise,
            sample.geometry_key,
        )
        dtype, where = self.network.geometry_dtype, device or like.device
        fields = {
            name: torch.empty(n, *self.network.output_layout.shape(name), dtype=dtype, device=where)
            for name in self.field_ranks
        }
        first = 0
        # A short case shows none: the bar waits a second.
        bar = tqdm(total=n, desc=sample.case, unit="point", unit_scale=True, leave=False, delay=1, disable=not progress)
        with bar:
            try:
                for chunk in chunks:
                    last = first + chunk.batch_size[0]
                    for name, value in flatten_data(chunk).items():
                        fields[name][first:last] = value
                    bar.update(last - first)
                    first = last
            except (TypeError, ValueError) as error:
                raise type(error)(f"case {sample.case!r}: {error}") from error
        return fields

    # Training

    def training_step(self, sample: Sample, batch_idx: int = 0) -> Tensor:
        """The loss of one case."""
        truth = flatten_data(sample.targets)
        losses = self._losses(sample, flatten_data(self(sample)), truth)
        total = torch.stack(list(losses.values())).sum()
        self.target_variances.update(truth)
        for mean, (name, loss) in zip(self._means(), {"": total, **losses}.items(), strict=True):
            mean(loss)
            full = f"train/loss/{name}" if name else "train/loss"
            self.log(full, mean, on_step=True, on_epoch=True, prog_bar=True, batch_size=1)
        self.log("train/lr", self.optimizers().param_groups[0]["lr"], batch_size=1)  # type: ignore[union-attr]
        self._since_step.append((sample, total.detach()))
        return total

    def _losses(self, sample: Sample, prediction: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, Tensor]:
        try:
            return field_losses(prediction, truth, self.loss_scales)
        except ValueError as error:
            raise ValueError(f"case {sample.case!r}: {error}") from error

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Leave the step out, in all processes, if a loss or the gradient of one is not finite."""
        parameters = list(self.network.parameters())
        good = all_finite([*(p.grad for p in parameters), *(loss for _, loss in self._since_step)])
        if not self.trainer.strategy.reduce_boolean_decision(bool(good)):
            for parameter in parameters:
                parameter.grad = None  # without a gradient an optimizer leaves parameter and state alone
            self.skipped_steps += 1
            for sample, _ in self._since_step:
                fault = self._fault_of(sample)
                if fault is not None:
                    _log.warning("step %d is left out: %s", self.trainer.global_step, fault)
        self._since_step = []

    def _fault_of(self, sample: Sample) -> str | None:
        """What is not finite of a case; evaluated anew, so that good steps pay nothing for it."""
        truth, parameters = flatten_data(sample.targets), dict(self.network.named_parameters())
        with torch.enable_grad(), self.trainer.precision_plugin.train_step_context():
            prediction = flatten_data(self(sample))
            losses = self._losses(sample, prediction, truth)
            total = torch.stack(list(losses.values())).sum()
        gradients = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True)
        return describe(sample.case, losses, prediction, truth, dict(zip(parameters, gradients, strict=True)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log how many steps were left out, and stop when they are too many.

        Raises:
            BadBatchError: more than ``max_bad_batches``.
        """
        self.log("train/skipped", float(self.skipped_steps), batch_size=1)
        if self.skipped_steps > self.hparams["max_bad_batches"]:
            raise BadBatchError(
                f"{self.skipped_steps} steps were left out up to step {self.trainer.global_step}, because a loss or "
                f"gradient was not finite (max_bad_batches is {self.hparams['max_bad_batches']}); the log names the "
                "cases. If they are always the same, mend their data; else lower model.lr, or clip gradients "
                "(trainer.gradient_clip_val=1), and go on from the last checkpoint with a larger model.max_bad_batches"
            )

    # Validation, test, prediction

    def validation_step(self, sample: Sample, batch_idx: int = 0) -> None:
        """Add a case to the validation metrics."""
        self._evaluate(sample, "val")

    def test_step(self, sample: Sample, batch_idx: int = 0) -> None:
        """Add a case to the test metrics."""
        self._evaluate(sample, "test")

    def on_predict_start(self) -> None:
        """Silence Lightning's remark on steps that return nothing: that is the intention."""
        warnings.filterwarnings("ignore", message="predict returned None")

    def predict_step(self, sample: Sample, batch_idx: int = 0) -> None:
        """Predict a case and leave it in ``latest_prediction`` for the callbacks; nothing is collected."""
        self.latest_prediction = self._predict_off_device(sample)

    def _predict_off_device(self, sample: Sample) -> dict[str, Tensor]:
        """The fields of a case that may have millions of points, in the machine's memory; the sample follows there."""
        trainer = self.trainer
        progress = trainer.is_global_zero and trainer.progress_bar_callback is not None
        prediction = self.predict_fields(sample, device="cpu", progress=progress)
        sample.to("cpu")
        return prediction

    def _evaluate(self, sample: Sample, stage: str) -> None:
        prediction = self._predict_off_device(sample) if stage == "test" else self.predict_fields(sample)
        self.latest_prediction = prediction
        self._metrics_of(stage).add_case(
            sample, prediction, self._losses(sample, prediction, flatten_data(sample.targets))
        )

    def _metrics_of(self, stage: str) -> StageMetrics:
        metrics = self.stage_metrics[stage]
        assert isinstance(metrics, StageMetrics)
        return metrics

    def latest_case_metrics(self) -> dict[str, float]:
        """Losses and field errors of the case that ``test_step`` saw last, {"<field>/<metric>": value}."""
        return self._metrics_of("test").latest_case()

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self._log_metrics("test")

    def on_predict_epoch_end(self) -> None:
        """Let go of the last prediction."""
        self.latest_prediction = None

    def _log_metrics(self, stage: str) -> None:
        self.latest_prediction = None
        values = self._metrics_of(stage).take(self.target_variances.compute() if self.target_variances.known else {})
        for name in [name for name, value in values.items() if not bool(torch.isfinite(value))]:
            rank_zero_warn(f"{stage}/{name} is not finite: the network's prediction is not; logged as infinite")
            values[name] = torch.full_like(values[name], torch.inf)
        for name, value in values.items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "loss", batch_size=1)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store schema, geometry arguments and provenance, as plain values, and what all processes have gathered."""
        checkpoint[SCHEMA_KEY] = self.schema.arguments()
        checkpoint[GEOMETRY_KEY] = self.geometry_arguments
        sums: Any = self.target_variances.sums
        if self._trainer is not None:
            mine: Any = pack_sums(self._means(), self.target_variances)
            others: Any = self.all_gather(mine)
            gathered = others.reshape(-1, len(mine))
            checkpoint[PROGRESS_KEY] = {"sums": gathered.cpu(), "skipped_steps": self.skipped_steps}
            checkpoint[PROVENANCE_KEY] = provenance(self._trainer)
            sums = gathered.sum(dim=0)[-sums.numel() :].reshape(sums.shape).cpu()
        checkpoint["state_dict"]["target_variances.sums"] = sums

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of a model of other data; take over how a geometry is prepared.

        Raises:
            ValueError: the schemas differ; the message lists how.
        """
        self.geometry_arguments = dict(checkpoint.get(GEOMETRY_KEY, {}))
        if SCHEMA_KEY in checkpoint:
            stored = SampleSchema(**checkpoint[SCHEMA_KEY])
            self._refuse_differences(
                stored, "the checkpoint was trained on other data ('the data' below) than declared"
            )
        self._restored_progress = checkpoint.get(PROGRESS_KEY)

    def on_train_start(self) -> None:
        """Take up the sums of the training that is resumed; one that starts from its weights alone has none."""
        progress, self._restored_progress = self._restored_progress, None
        if progress is None or not self.trainer.fit_loop.is_resuming:
            return
        self.skipped_steps = progress["skipped_steps"]
        world, rank = self.trainer.world_size, self.trainer.global_rank
        restore_sums(progress["sums"], rank, world, self._means(), self.target_variances)

    def _means(self) -> list[RunningMean]:
        return [mean for mean in self.train_means if isinstance(mean, RunningMean)]
