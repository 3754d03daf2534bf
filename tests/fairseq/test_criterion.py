"""The criterion: the numbers of fairseq's own, for lsq_transformer."""

import pytest
import torch
from fairseq import criterions

from tests.sampling import first

OWN, FAIRSEQ = "lsq_label_smoothed_cross_entropy", "label_smoothed_cross_entropy"
VARIANTS = {
    "plain": "",
    "accuracy": "--report-accuracy",
    "prefix": "--ignore-prefix-size 2 --report-accuracy",
    "sentences": "--sentence-avg --label-smoothing 0.0",
}


@pytest.fixture
def run(parse, build, batch):
    """run(criterion, options, mode) -> (loss, sample size, logging output, gradient of the source's
    words)."""

    def run(name: str, options: str, mode: str):
        torch.manual_seed(5)
        given = f"{options} --criterion {name} --lsq-mode {mode} --lsq-backward float"
        task, model = build(given)
        criterion = criterions.build_criterion(parse(given), task)
        sample = batch(task)
        model.eval()
        criterion(model, sample)
        loss, sample_size, logging_output = criterion(model, sample)
        loss.backward()
        return loss.detach(), sample_size, logging_output, model.encoder.embed_tokens.weight.grad

    return run


@pytest.mark.parametrize("mode", ["float", "int8"])
@pytest.mark.parametrize("name", first(VARIANTS, 2))
def test_equals_that_of_fairseq(run, name, mode):
    ours, theirs = run(OWN, VARIANTS[name], mode), run(FAIRSEQ, VARIANTS[name], mode)
    torch.testing.assert_close(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    assert ours[2].keys() == theirs[2].keys()
    for key, value in theirs[2].items():
        torch.testing.assert_close(torch.as_tensor(ours[2][key]), torch.as_tensor(value))
    bound = 1e-4 * theirs[3].abs().max().item()
    torch.testing.assert_close(ours[3], theirs[3], rtol=0, atol=bound)


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
