"""The ranking model: embeddings -> HSTU encoder -> head -> one loss a target.

A batch's path: ``FeatureEmbeddings`` looks ids up, ``HSTUEncoder`` turns events into one state a labelled item,
``PredictionHead`` turns each state into logits. Two kinds of labels (RankingArgs): several tasks, each a bit of the
label's mask; or, with one task and a last layer of k > 1, one of k classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from genrec.configs.schema import ConfigError, ExperimentConfig, RankingArgs
from genrec.data.batch import Batch
from genrec.data.format import DatasetMetadata
from genrec.hstu.encoder import HSTUEncoder
from genrec.hstu.precision.region import fp8_region
from genrec.hstu.preprocessor import DTYPES, HSTUInputs
from genrec.model.embedding import FeatureEmbeddings
from genrec.model.features import feature_layout
from genrec.model.heads import PredictionHead
from genrec.model.losses import class_loss, label_bits, multi_task_loss
from genrec.model.table_specs import embedding_tables, feature_dim


@dataclass(frozen=True)
class RankingOutput:
    """What the model says of N targets, in the batch's order.

    loss_per_target: (N,) float32, tasks weighted and summed. logits: (N, tasks or k) float32. labels: (N,) as given.
    """

    loss_per_target: Tensor
    logits: Tensor
    labels: Tensor


class RankingModel(nn.Module):
    """Predicts the label of each labelled item of a batch.

    dtype_str is the dtype of activations between layers, and of weights where they are used. Parameters themselves
    stay float32 and are cast at use: an optimizer step smaller than bfloat16's 8 bits is not lost, gradients are
    accumulated, clipped and summed over ranks in float32, and one checkpoint serves every dtype. Losses are float32.
    Every parameter takes part in every backward, also of a batch without users or targets, as DDP needs.

    Args:
        metadata: of the prepared dataset; None for synthetic data.
        sharded: names of the tables that are to be sharded.
        device: where parameters are made; torch.device("meta") makes none.

    Raises:
        ConfigError: more tasks than the dataset has label bits, or fewer classes than it has.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        metadata: DatasetMetadata | None = None,
        sharded: Collection[str] = (),
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        assert config.ranking is not None, "a ranking run has RankingArgs"
        self.args = check_labels(config.ranking, metadata)
        self.dtype = DTYPES[config.network.dtype_str]
        self.positive_class = _positive_class(self.args, metadata)
        layout = feature_layout(config, metadata)
        network = config.network
        with device if device is not None else torch.device("cpu"):
            self.embeddings = FeatureEmbeddings(
                embedding_tables(config, metadata),
                layout=layout,
                init_std=network.embedding_init_std,
                item_feature_scale=network.item_feature_scale,
                sharded=sharded,
                seed=config.trainer.seed,
                device=device,
            )
            item_dim = feature_dim(layout.item, layout=layout, network=network)
            contexts = layout.contextual
            context_dim = feature_dim(contexts[0], layout=layout, network=network) if contexts else None
            self.encoder = HSTUEncoder(
                network,
                item_dim=item_dim,
                action_dim=None if layout.action is None else item_dim,
                context_dim=context_dim,
                max_seqlen_tokens=layout.max_num_tokens,
                precision=config.mixed_precision,
                l2_norm=self.args.l2_norm,
            )
            self.head = PredictionHead(
                network.hidden_size,
                layer_sizes=tuple(self.args.prediction_head_arch),
                activation=self.args.prediction_head_act_type,
                bias=self.args.prediction_head_bias,
                layernorm=self.args.head_layernorm,
                dropout_rate=self.args.head_dropout,
                zero_init=self.args.head_zero_init,
                precision=config.mixed_precision,
            )

    @property
    def num_tasks(self) -> int:
        """Columns of ``scores`` and ``binary_labels``."""
        return self.args.num_tasks

    def forward(self, batch: Batch) -> RankingOutput:
        """Logits and loss of each labelled item, ``batch.labels`` long."""
        inputs = _cast(self.embeddings(batch), self.dtype)
        with fp8_region():
            states = self.encoder(inputs, num_labelled=batch.num_labelled, num_states=batch.labels.shape[0])
            logits = self.head(states)
        return RankingOutput(loss_per_target=self._loss(logits, batch.labels), logits=logits, labels=batch.labels)

    def scores(self, output: RankingOutput) -> Tensor:
        """(N, num_tasks) float64 probabilities of a positive; of k classes, P(class >= positive_class).

        float64, because in float32 all logits beyond 17 become the same 1.0.
        """
        logits = output.logits.detach().double()
        if self.args.is_k_class:
            return logits.softmax(dim=1)[:, self.positive_class :].sum(dim=1, keepdim=True)
        return logits.sigmoid()

    def binary_labels(self, labels: Tensor) -> Tensor:
        """(N,) labels -> (N, num_tasks) int64: 1 where positive, what ``scores`` predicts."""
        if self.args.is_k_class:
            return (labels >= self.positive_class).long().unsqueeze(1)
        return label_bits(labels, self.num_tasks)

    def hits(self, output: RankingOutput) -> Tensor:
        """(N, num_tasks) bool: whether the likeliest class is the label, or each bit is on the right side of 0.5."""
        if self.args.is_k_class:
            return (output.logits.argmax(dim=1) == output.labels).unsqueeze(1)
        return (output.logits > 0) == label_bits(output.labels, self.num_tasks).bool()

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.args.is_k_class:
            return class_loss(logits, labels)
        return multi_task_loss(logits, labels, self.args.task_weights or (1.0,) * self.num_tasks)


def check_labels(args: RankingArgs, metadata: DatasetMetadata | None) -> RankingArgs:
    """``args``, if the dataset has labels for its tasks or no more classes than it. Raises ConfigError."""
    width = args.prediction_head_arch[-1]
    if metadata is None:
        return args
    if args.is_k_class and width < metadata.num_actions:
        raise ConfigError(
            f"RankingArgs.prediction_head_arch ends in {width} classes, but dataset {metadata.name!r} has"
            f" {metadata.num_actions}"
        )
    if not args.is_k_class and args.num_tasks > len(metadata.label_bits):
        raise ConfigError(
            f"RankingArgs.num_tasks is {args.num_tasks}, but dataset {metadata.name!r} has {len(metadata.label_bits)}"
            f" label bits ({', '.join(name for name, _ in metadata.label_bits)})"
        )
    return args


def _positive_class(args: RankingArgs, metadata: DatasetMetadata | None) -> int:
    """The least positive class; of synthetic classes, which mean nothing, the upper half is positive."""
    return metadata.positive_class if metadata is not None else args.prediction_head_arch[-1] // 2


def _cast(inputs: HSTUInputs, dtype: torch.dtype) -> HSTUInputs:
    return dataclasses.replace(
        inputs,
        item=inputs.item.to(dtype),
        action=None if inputs.action is None else inputs.action.to(dtype),
        context=None if inputs.context is None else inputs.context.to(dtype),
    )
