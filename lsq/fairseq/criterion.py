"""Label-smoothed cross-entropy by one operation of the model."""

from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import BaseFairseqModel
from torch import Tensor

from lsq.fairseq.model import PADDINGS


@register_criterion(
    "lsq_label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig
)
class LSQLabelSmoothedCrossEntropyCriterion(LabelSmoothedCrossEntropyCriterion):
    """Loss, options and log of fairseq's label_smoothed_cross_entropy; no logits are stored."""

    def forward(
        self, model: BaseFairseqModel, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return (loss summed over the batch, sample size that divides its gradient, values to
        log). ValueError: the model does not compute a loss, or `reduce` is off."""
        if not reduce:
            raise ValueError(
                "lsq_label_smoothed_cross_entropy only has sums; use label_smoothed_cross_entropy"
                " for reduce=False"
            )
        if not getattr(model, "computes_loss", False):
            raise ValueError(
                "lsq_label_smoothed_cross_entropy needs a model that computes its own loss, such as"
                " lsq_transformer; use label_smoothed_cross_entropy for this one"
            )
        target = sample["target"]
        if self.ignore_prefix_size:  # as padding it does not count
            target = target.clone()
            target[:, : self.ignore_prefix_size] = self.padding_idx
        loss, nll_loss, features = model(
            **sample["net_input"],
            target=target,
            label_smoothing=self.eps,
            paddings=sample.get(PADDINGS),
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
            net_input = sample["net_input"]
            tokens = net_input.get("prev_output_tokens", net_input["src_tokens"])
            words = target[tokens.ne(self.padding_idx)]
            counted = words.ne(self.padding_idx)
            with torch.no_grad():  # computes the logits once more
                best = model.decoder.output_layer(features.detach()).argmax(dim=1)
            logging_output["n_correct"] = int((best.eq(words) & counted).sum())
            logging_output["total"] = int(counted.sum())
        return loss, sample_size, logging_output
