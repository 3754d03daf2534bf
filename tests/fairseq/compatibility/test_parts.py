"""Contents of checkpoints that are sound as files and would make fairseq fail in its own words."""

import pytest
import torch
from fairseq import checkpoint_utils

FAIRSEQ = "--arch transformer --criterion label_smoothed_cross_entropy --task translation"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"model": {"w": [1.0]}}, "TypeError: w is of type list and no tensor"),
        ({"model": {"w": torch.ones(2, 2).to_sparse()}}, "TypeError: model.w is a sparse tensor"),
        (
            {"model": {"w": torch.zeros(1).expand(2**33)}},
            "ValueError: model.w has fewer values than its shape",
        ),
        ({"task_state": "x"}, "TypeError: task_state is of type str"),
        (
            {"last_optimizer_state": {"param_groups": [{"lr": [1]}]}},
            r"ValueError: lr of the optimizer is .1.",
        ),
        (
            {"last_optimizer_state": {"param_groups": [{"betas": [0.9, 2**64]}]}},
            "ValueError: betas of the optimizer",
        ),
        (
            {
                "last_optimizer_state": {
                    "state": {7: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(())}}
                }
            },
            "ValueError: the moments of parameter 7 have other types or shapes than one another",
        ),
        ({"last_optimizer_state": 3}, "TypeError: last_optimizer_state is of type int"),
        (
            {"optimizer_history": [{"best_loss": 1.0, "num_updates": "3"}]},
            "ValueError: num_updates is 3",
        ),
        ({"extra_state": {"train_iterator": {"epoch": 1.5}}}, "ValueError: epoch is 1.5"),
        (
            {"extra_state": {"train_iterator": {"iterations_in_epoch": -1}}},
            "ValueError: iterations_in_epoch is -1",
        ),
    ],
)
def test_parts_of_other_types_are_named(train, tmp_path, parts, said):
    torch.save(train(tmp_path, f"{FAIRSEQ} --max-update 1") | parts, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=rf"other.pt is not a checkpoint of fairseq's \({said}"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "other.pt"))
