"""Label-smoothed cross-entropy that leaves projection, softmax and loss to one operation of the
model."""

from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import BaseFairseqModel
from torch import Tensor

from lsq.fairseq.paddings import BATCH


@register_criterion(
    "lsq_label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig
)
class LSQLabelSmoothedCrossEntropyCriterion(LabelSmoothedCrossEntropyCriterion):
    """The same loss, options and log as fairseq's label_smoothed_cross_entropy, without storing
    logits.

    M words of the batch, H hidden, V vocabulary.
    """

    def forward(
        self, model: BaseFairseqModel, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """(loss summed over the batch, sample size that divides its gradient, what to log).

        Raises:
            ValueError: the model does not compute a loss, or `reduce` is off.
        """
        if not reduce:
            raise ValueError(
                "lsq_label_smoothed_cross_entropy only has sums; use label_smoothed_cross_entropy"
                " for reduce=False"
            )
        if not getattr(model, "computes_loss", False):
            raise ValueError(
                "lsq_label_smoothed_cross_entropy needs a model that computes its own loss, such as"
                " lsq_transformer; "
                "use label_smoothed_cross_entropy for this one"
            )
        target = self._target(sample["target"])
        loss, nll_loss, features = model(
            **sample["net_input"],
            target=target,
            label_smoothing=self.eps,
            paddings=sample.get(BATCH),
        )
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.data,
            "nll_loss": nll_loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            tokens = sample["net_input"].get(
                "prev_output_tokens", sample["net_input"]["src_tokens"]
            )
            words = tokens.ne(self.padding_idx)
            correct, total = self._accuracy(model, features, target[words])
            logging_output["n_correct"], logging_output["total"] = correct, total
        return loss, sample_size, logging_output

    def _target(self, target: Tensor) -> Tensor:
        """target int64 [B, T] with the first `ignore_prefix_size` words turned into padding, which
        does not count."""
        if self.ignore_prefix_size == 0:
            return target
        target = target.clone()
        target[:, : self.ignore_prefix_size] = self.padding_idx
        return target

    @torch.no_grad()
    def _accuracy(
        self, model: BaseFairseqModel, features: Tensor, target: Tensor
    ) -> tuple[int, int]:
        """(words predicted right, words) for features [M, H], target int64 [M]; makes the logits
        [M, V] once more."""
        counted = target.ne(self.padding_idx)
        predicted = model.decoder.output_layer(features.detach()).argmax(dim=1)
        return int((predicted.eq(target) & counted).sum()), int(counted.sum())
