"""fairseq-hydra-train: options in groups of a YAML file, and the same training as
fairseq-train's."""

import json
from pathlib import Path

import hydra
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.initialize import hydra_init
from fairseq_cli import hydra_train
from omegaconf import OmegaConf

import lsq
from lsq.fairseq import options
from lsq.fairseq.checkpoint import options_in, quantization
from lsq.fairseq.compatibility import checkpoints
from lsq.fairseq.model import LSQTransformerModel
from tests.fairseq.comparison import assert_equal_states

USER_DIR = Path(lsq.__file__).parent / "fairseq" / "user_dir" / "lsq_fairseq"
SIDE = {"embed_dim": 32, "ffn_embed_dim": 48, "attention_heads": 4, "layers": 2}
NESTED = {"encoder": SIDE, "decoder": SIDE, "dropout": 0.1}
FLAT = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE.items()}
FLAT |= {"dropout": 0.1}
TRANSLATION = {"_name": "lsq_translation", "source_lang": "xx", "target_lang": "yy"}


@pytest.fixture
def train_by_hydra(toy, tmp_path):
    """train_by_hydra(save folder, model, updates, **groups) as fairseq-hydra-train with a file of
    groups.

    Returns the last checkpoint's state.
    """

    def train_by_hydra(folder, model: dict, updates: int, **groups: dict) -> dict:
        common = {"user_dir": str(USER_DIR), "cpu": True, "no_progress_bar": True}
        given = {
            "common": common | {"log_interval": 1, "reset_logging": False},
            "task": TRANSLATION | {"data": str(toy)},
            "model": model,
            "criterion": {"_name": "lsq_label_smoothed_cross_entropy", "label_smoothing": 0.1},
            "optimizer": {"_name": "lsq_adam"},
            "lr_scheduler": {"_name": "fixed"},
            "dataset": {"max_tokens": 120, "num_workers": 0, "disable_validation": True},
            "optimization": {"max_update": updates, "lr": [0.003]},
            "checkpoint": {"save_dir": str(folder), "no_epoch_checkpoints": True},
        }
        file = tmp_path / "training.yaml"
        file.write_text(json.dumps(given | groups))
        hydra_init("training")
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.1"):
            configuration = hydra.compose("training")
        try:
            hydra_train._hydra_main(configuration)
        finally:
            checkpoints.release_folder()
        return torch.load(folder / "checkpoint_last.pt")

    return train_by_hydra


@pytest.mark.parametrize("updates", [[1], pytest.param([2, 3], marks=pytest.mark.thorough)])
def test_it_trains_as_fairseq_train_does(train, train_by_hydra, toy, tmp_path, updates):
    """Also where it is started again."""
    expected = train(
        tmp_path / "one", f"--max-update {updates[-1]} --optimizer lsq_adam --lsq-bits 7"
    )
    model = {"_name": "lsq_transformer", **NESTED, "lsq_bits": 7}
    for until in updates:
        found = train_by_hydra(tmp_path / "other", model, until)
    assert found["optimizer_history"][-1]["num_updates"] == updates[-1]
    assert_equal_states(found["model"], expected["model"])
    kept = options_in(tmp_path / "other" / "checkpoint_last.pt", "model")
    assert quantization(kept).bits == 7 and kept["encoder_ffn_embed_dim"] == 48
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(tmp_path / "other" / "checkpoint_last.pt")], {"data": str(toy)}
    )
    assert_equal_states(models[0].state_dict(), expected["model"])


OTHER_LOSS = {"criterion": {"_name": "label_smoothed_cross_entropy"}}
WMT = {"_name": "lsq_transformer_wmt_en_de", **FLAT}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (WMT, {"optimizer": {"_name": "adam"}}),
        (WMT, OTHER_LOSS),
        ({"_name": "transformer", **NESTED}, OTHER_LOSS),
        (WMT, {"lr_scheduler": {"_name": "inverse_sqrt", "warmup_updates": 4}}),
    ],
)
def test_other_parts(train_by_hydra, tmp_path, model, groups):
    found = train_by_hydra(tmp_path / "save", model, 2, **groups)
    assert found["optimizer_history"][-1]["num_updates"] == 2
    clips = any(name.endswith("_clip") for name in found["model"])
    assert clips == model["_name"].startswith("lsq_")


@pytest.mark.thorough
@pytest.mark.parametrize("criterion", ["lsq_label_smoothed_cross_entropy", "cross_entropy"])
def test_a_language_model(train_by_hydra, corpus, tmp_path, criterion):
    model = {name: one for name, one in FLAT.items() if "encoder" not in name}
    model["_name"] = "lsq_transformer_lm"
    task = {"_name": "lsq_language_modeling", "data": str(corpus), "tokens_per_sample": 16}
    groups = {"criterion": {"_name": criterion}, "task": task | {"sample_break_mode": "eos"}}
    found = train_by_hydra(tmp_path / "save", model, 2, **groups)
    assert found["cfg"]["model"]["max_target_positions"] == 16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"lsq_bitz": 4},
            r"model\.lsq_bitz is no option of lsq_transformer \(near is lsq_bits\); leave it out",
        ),
        ({"encoder": {"width": 3}}, r"model\.encoder_width is no option of lsq_transformer"),
    ],
)
def test_unknown_options_are_refused(given, message):
    configuration = OmegaConf.create({"model": {"_name": "lsq_transformer", **given}})
    with (
        pytest.raises(ValueError, match=message),
        options.as_namespace(configuration.model, LSQTransformerModel),
    ):
        pass


def test_all_options_are_kept_with_what_a_model_sets():
    model = {"_name": "lsq_transformer", "encoder": {"layers": 1}, "quant_noise": {"pq": 0.1}}
    groups = {"common": {"fp16": True}, "checkpoint": {"save_dir": "there"}}
    root = OmegaConf.create(groups | {"model": model | {"lsq_from": "x.pt"}})
    OmegaConf.set_struct(root, True)
    with options.as_namespace(
        root.model, LSQTransformerModel, OmegaConf.create({"tokens": 5})
    ) as args:
        assert (args.fp16, args.save_dir, args.tokens) == (True, "there", 5)
        assert (args.encoder_layers, args.quant_noise_pq) == (1, 0.1)
        args.lsq_from, args.lsq_bits = None, 4
    assert OmegaConf.to_container(root.model) == {
        "_name": "lsq_transformer",
        "encoder_layers": 1,
        "quant_noise_pq": 0.1,
        "lsq_from": None,
        "lsq_bits": 4,
        "fp16": True,
        "save_dir": "there",
        "tokens": 5,
    }
