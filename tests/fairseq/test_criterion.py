"""The criterion: the numbers of fairseq's own, for lsq_transformer."""

import pytest
from fairseq import criterions

from tests.fairseq.comparison import assert_same_loss
from tests.sampling import first

OWN, FAIRSEQ = "lsq_label_smoothed_cross_entropy", "label_smoothed_cross_entropy"
VARIANTS = {
    "plain": "",
    "accuracy": "--report-accuracy",
    "prefix": "--ignore-prefix-size 2 --report-accuracy",
    "sentences": "--sentence-avg --label-smoothing 0.0",
}


@pytest.mark.parametrize("mode", ["float", "int8"])
@pytest.mark.parametrize("name", first(VARIANTS, 2))
def test_equals_that_of_fairseq(parse, build, batch, name, mode):
    given = f"{VARIANTS[name]} --lsq-mode {mode}"
    assert_same_loss(parse, build, batch, [FAIRSEQ, OWN], given)


@pytest.mark.parametrize(
    "given, reduce, said", [("--arch transformer", True, "this one"), ("", False, "reduce=False")]
)
def test_what_it_does_not_compute_is_refused(build, parse, batch, given, reduce, said):
    task, model = build(given)
    criterion = criterions.build_criterion(parse(given), task)
    with pytest.raises(ValueError, match=f"use label_smoothed_cross_entropy for {said}"):
        criterion(model, batch(task), reduce=reduce)
