"""Models of lsq as checkpoints of fairseq's own: loaded by fairseq, beside what they were made
from."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from torch import nn
from torch.testing import assert_close

from lsq.fairseq import float_checkpoint
from lsq.fairseq.float_checkpoint import Languages
from lsq.serving.decoding_model import model_of
from tests.fairseq.test_language_model import SHORT as SHORT_LM
from tests.fairseq.test_language_model import TINY as TINY_LM

VARIANTS = [
    "",
    "--share-all-embeddings --encoder-normalize-before --decoder-normalize-before --activation-fn"
    " gelu",
    "--encoder-learned-pos --decoder-learned-pos --layernorm-embedding --no-scale-embedding"
    " --max-source-positions 50",
]
LANGUAGE_MODELS = [
    "",
    "--share-decoder-input-output-embed --decoder-normalize-before --no-decoder-final-norm"
    " --add-bos-token",
]


def trained(model, *inputs):
    """`model` in eval mode after a training pass, with norms and biases that are not as they
    begin."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.train()(*inputs)
    return model.eval()


def loaded(path, data):
    """What fairseq makes of a file."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], {"data": str(data)}
    )
    return model.eval(), task


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """A trained model, and what it is made of."""

    model: nn.Module
    args: Namespace
    inputs: tuple
    languages: Languages
    data: Path

    def write(self, folder: Path, updates: int = 0) -> Path:
        """The checkpoint."""
        path = folder / "model.pt"
        float_checkpoint.write(path, self.model, vars(self.args), self.languages, updates=updates)
        return path


def made_of(args: Namespace, data: Path) -> Made:
    """A model after a training pass."""
    task = tasks.setup_task(args)

    def sentences(length: int) -> torch.Tensor:
        return torch.randint(4, len(task.target_dictionary), (3, length))

    inputs, languages = (sentences(7),), Languages()
    if args.task == "lsq_translation":
        languages = Languages(source="xx", target="yy")
        inputs = (*inputs, torch.tensor([7, 7, 7]), sentences(5))
    model = trained(task.build_model(args), *inputs)
    return Made(model=model, args=args, inputs=inputs, languages=languages, data=data)


@pytest.fixture
def translation(parse, toy):
    return lambda arguments: made_of(parse(arguments), toy)


@pytest.fixture
def language_model(corpus):
    def language_model(arguments: str) -> Made:
        given = [str(corpus), *TINY_LM, *SHORT_LM, *arguments.split()]
        return made_of(options.parse_args_and_arch(options.get_training_parser(), given), corpus)

    return language_model


def compare(folder: Path, make, arguments: str, kind: type) -> tuple[nn.Module, nn.Module, object]:
    """Load what is written of a float model, which computes the same, and of an int8 model, which
    computes nearly so; return ours in int8, theirs, and their task."""
    made = make(f"{arguments} --lsq-mode float")
    theirs, _ = loaded(made.write(folder), made.data)
    assert type(theirs) is kind
    assert_close(theirs(*made.inputs)[0], made.model(*made.inputs)[0], rtol=1e-5, atol=1e-5)
    made = make(arguments)
    theirs, task = loaded(made.write(folder), made.data)
    expected, found = (model(*made.inputs)[0] for model in (made.model, theirs))
    assert 0 < (found - expected).square().mean() / expected.square().mean() < 1e-2
    return made.model, theirs, task


@pytest.mark.parametrize("arguments", VARIANTS)
@torch.no_grad()
def test_a_translation_model(tmp_path, translation, arguments):
    model, theirs, task = compare(tmp_path, translation, arguments, TransformerModel)
    assert type(task).__name__ == "TranslationTask"
    tensors = model_of(model).tensors
    name = "decoder.layers.1.feed_forward.fc1_weight"
    weight = tensors[name + ".codes"] * tensors[name + ".scale"][:, None]
    assert torch.equal(theirs.decoder.layers[1].fc1.weight, weight)
    for side in ("encoder", "decoder"):
        one, other = (getattr(each, side).embed_tokens.weight for each in (theirs, model))
        assert torch.equal(one, other)


@pytest.mark.parametrize("arguments", LANGUAGE_MODELS)
@torch.no_grad()
def test_a_language_model(tmp_path, language_model, arguments):
    *_, task = compare(tmp_path, language_model, arguments, TransformerLanguageModel)
    assert type(task).__name__ == "LanguageModelingTask"


def test_pytorch_takes_it_without_registered_types(tmp_path, translation):
    path = translation("").write(tmp_path, updates=7)
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        state = torch.load(path)
    finally:
        torch.serialization.add_safe_globals(registered)
    assert state["optimizer_history"][-1]["num_updates"] == 7
    assert state["cfg"]["model"]["arch"] == "transformer"


def test_a_model_that_was_never_trained_is_refused(tmp_path, parse):
    args = parse("")
    model = tasks.setup_task(args).build_model(args)
    with pytest.raises(ValueError, match="clips that have been measured"):
        float_checkpoint.write(tmp_path / "model.pt", model.eval(), vars(args), Languages())
