"""The configurations that tests train with are those that fairseq makes."""

import hydra
import pytest
from fairseq.dataclass import utils
from hydra import experimental

from tests import configurations


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--criterion label_smoothed_cross_entropy --lr 0.5,0.25 --update-freq 2,1 --adam-betas"
        " '(0.8,0.9)'",
    ],
)
def test_they_are_those_of_fairseq(parse, monkeypatch, options):
    args = parse(options)
    assert utils.compose is configurations.compose
    quick = [utils.convert_namespace_to_omegaconf(args) for _ in range(2)]
    monkeypatch.setattr(utils, "initialize", experimental.initialize)
    monkeypatch.setattr(utils, "compose", experimental.compose)
    theirs = utils.convert_namespace_to_omegaconf(args)
    assert (
        theirs == quick[0] == quick[1]
        and hydra.core.global_hydra.GlobalHydra.instance().is_initialized() is False
    )
