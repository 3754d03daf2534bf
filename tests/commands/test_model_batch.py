"""Batches of text for models of fairseq and of transformers, and what is refused."""

import math
import sys

import pytest
import torch

from lsq.commands import model_batch
from lsq.commands.model_batch import BatchOptions
from tests.commands.conftest import WORDS, write_pairs

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
SHAPE = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "max_position_embeddings": 32}


def load(path, texts=(), **options):
    return model_batch.load(BatchOptions(model=path, text=list(texts), **options))


@pytest.fixture
def folder(tmp_path):
    """folder(model): it with a tokenizer of a few words."""

    def folder(model):
        names = ["<pad>", "</s>", "<unk>", "<mask>", *WORDS]
        vocabulary = {word: number for number, word in enumerate(names)}
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        special = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
        special = {f"{name}_token": word for name, word in special.items()}
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
        model.save_pretrained(tmp_path / "model")
        made.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return folder


@pytest.fixture
def texts(tmp_path):
    return write_pairs(tmp_path, "text", 30, 5)


def bert(kind: str = "BertForMaskedLM"):
    return getattr(transformers, kind)(transformers.BertConfig(**SHAPE))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def t5():
    sizes = {"vocab_size": 40, "d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=2, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def test_a_run_and_its_validation_data(output, texts):
    few, more = (load(output, words=words) for words in (20, 60))
    for batch in (few, more):
        first, second = batch.loss(), batch.loss()
        assert torch.equal(first, second) and first.requires_grad and 0 < first < 10
        assert not batch.model.training
    assert int(few.description.split()[0]) < int(more.description.split()[0])
    # in int8, sums are rounded by the clips of their batch
    total, words = check_parts(more, tolerance=0.02)
    assert words == int(more.description.split()[2])
    assert float(more.loss()) != pytest.approx(total / words)  # which is smoothed
    with pytest.raises(ValueError, match="takes the validation data of its training, so leave it"):
        load(output, texts, words=50)
    assert model_batch._spread([10] * 8, 40) == [0, 2, 4, 6]
    assert model_batch._spread([10] * 3, 1000) == [0, 1, 2] and model_batch._spread([10], 1) == [0]


@pytest.mark.parametrize("make, files", [(llama, 1), (bert, 1), (t5, 2)])
def test_models_of_transformers(folder, texts, make, files):
    """The losses of sentences add up."""
    torch.manual_seed(2)
    model = make()
    batch = load(folder(model), texts[:files], words=60)
    assert type(batch.model) is type(model)
    assert torch.equal(batch.loss(), batch.loss()) and math.isfinite(batch.loss())
    assert 30 < int(batch.description.split()[2]) < 120
    total, words = check_parts(batch, tolerance=1e-4)
    assert total / words == pytest.approx(float(batch.loss()), rel=1e-4)
    if make is bert:
        assert batch.losses([len(batch.lengths) - 1])[1] == 0  # no word of it is masked


@torch.no_grad()
def check_parts(batch, tolerance: float) -> tuple[float, float]:
    """Losses of sentences by themselves, of two parts and of all together; returns the last."""
    numbers = list(range(len(batch.lengths)))
    total, words, logits = batch.losses(numbers)
    assert len(logits) == words
    for parts in ([[number] for number in numbers], [numbers[::2], numbers[1::2]]):
        found = [batch.losses(part) for part in parts]
        losses, counts, predictions = zip(*found, strict=True)
        assert sum(map(float, losses)) == pytest.approx(float(total), rel=tolerance)
        assert sum(counts) == words > 0
        likeliest = torch.cat([one.log_softmax(1).amax(1) for one in predictions if len(one)])
        together = logits.log_softmax(1).amax(1)
        torch.testing.assert_close(likeliest.sort()[0], together.sort()[0], rtol=0, atol=1e-2)
    return float(total), words


def test_what_is_refused(folder, texts, tmp_path):
    path = folder(bert("BertModel"))
    for given, options, message in (
        ((), {}, "has no data in it; give --text FILE"),
        (texts[:1], {}, "of the architecture BertModel, of which no loss on plain text is known"),
        (texts[:1], {"data": tmp_path}, "leave --data out"),
    ):
        with pytest.raises(ValueError, match=message):
            load(path, given, words=40, **options)
    with pytest.raises(ValueError, match="file.s.; give sentences, and their translations"):
        load(folder(t5()), texts[:1], words=40)
    path = folder(llama())
    with pytest.raises(ValueError, match="--text has 2 files; a LlamaForCausalLM reads one"):
        load(path, texts, words=40)
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{path}: "):
        load(path, texts[:1], words=40)
