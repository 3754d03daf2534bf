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


def test_model_without_a_loss_of_its_own(build, parse, batch):
    given = "--arch transformer"
    task, model = build(given)
    with pytest.raises(ValueError, match="use label_smoothed_cross_entropy for this one"):
        criterions.build_criterion(parse(given), task)(model, batch(task))


def test_losses_of_single_words_are_refused(build, parse, batch):
    task, model = build("")
    with pytest.raises(ValueError, match="use label_smoothed_cross_entropy for reduce=False"):
        criterions.build_criterion(parse(""), task)(model, batch(task), reduce=False)


@pytest.mark.parametrize("criterion", [OWN, FAIRSEQ])
def test_trains_and_validates(train, tmp_path, criterion):
    options = f"--criterion {criterion} --report-accuracy --max-update 2 --max-tokens-valid 200"
    state = train(tmp_path, options)
    assert state["optimizer_history"][-1]["num_updates"] == 2
