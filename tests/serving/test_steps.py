"""The search finds what fairseq's generator finds, on models with its interface and on the int8
engine."""

import functools
import math
import random
from argparse import Namespace

import pytest
import torch
from fairseq import search as strategies
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel, transformer_legacy
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator
from torch.nn.utils.rnn import pad_sequence

from lsq.fairseq.generator import as_fairseq
from lsq.fairseq.language_model import LSQTransformerLanguageModel, base_architecture
from lsq.fairseq.model import LSQTransformerModel
from lsq.serving import Hypothesis, SearchOptions, decoding_model, search
from lsq.serving.engine import Engine
from lsq.serving.steps import FairseqSteps
from tests.sampling import in_turn

VOCABULARY = 20
WORDS = Dictionary()
for _number in range(VOCABULARY - 4):
    WORDS.add_symbol(f"w{_number}")
PADDING, END = WORDS.pad(), WORDS.eos()
SIDE = {"embed_dim": 16, "ffn_embed_dim": 32, "attention_heads": 2, "layers": 2}
TINY = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE.items()}
TINY |= {"max_source_positions": 64, "max_target_positions": 17}
TINY |= {"max_tokens": 64, "tokens_per_sample": 17}
MODELS = ("fairseq", "float", "int8", "fairseq language model", "int8 language model")


def model_of(name: str) -> torch.nn.Module:
    """One of MODELS, in eval mode."""
    torch.manual_seed(3)
    task = Namespace(source_dictionary=WORDS, target_dictionary=WORDS)
    args = Namespace(**TINY)
    args.lsq_mode = "float" if name == "float" else "int8"
    args.share_all_embeddings = args.share_decoder_input_output_embed = True
    if name.endswith("language model"):
        ours = name.startswith("int8")
        (base_architecture if ours else base_lm_architecture)(args)
        args.decoder_input_dim = args.decoder_output_dim = args.decoder_embed_dim
        model = (LSQTransformerLanguageModel if ours else TransformerLanguageModel).build_model(
            args, task
        )
        inputs = {"src_tokens": torch.randint(4, VOCABULARY, (8, 9))}
    else:
        transformer_legacy.base_architecture(args)
        model = (TransformerModel if name == "fairseq" else LSQTransformerModel).build_model(
            args, task
        )
        inputs = padded(sentences(8, seed=5))
        inputs["prev_output_tokens"] = inputs["src_tokens"].flip(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2)  # so that words differ in their probabilities
    model(**inputs)  # measures clips
    return model.eval()


def sentences(count: int, seed: int) -> list[torch.Tensor]:
    """Sentences of 2 to 8 words with their end."""
    chance = random.Random(seed)
    return [
        torch.tensor([*chance.choices(range(4, VOCABULARY), k=chance.randint(1, 7)), END])
        for _ in range(count)
    ]


def padded(sources: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What fairseq's data set makes of sentences."""
    lengths = torch.tensor([len(source) for source in sources])
    tokens = pad_sequence(sources, batch_first=True, padding_value=PADDING, padding_side="left")
    return {"src_tokens": tokens, "src_lengths": lengths}


def found_by_fairseq(
    models: list[torch.nn.Module],
    sources: list[torch.Tensor],
    options: SearchOptions,
    prefixes: list[torch.Tensor] | None = None,
) -> list[list[dict]]:
    """fairseq's hypotheses, `options.beam` of each sentence.

    Its blocker of n-grams is shown the words so far: it looks at the end of what it is shown, and
    fairseq shows it the padding of words to come, so that without an extension for CUDA it forbids
    nothing. The shortest length holds for each sentence behind its own prefix, which fairseq
    forgets while any other sentence still has words of its prefix.
    """
    strategy = None
    if options.sampling:
        strategy = strategies.Sampling(WORDS, options.sampling_topk, options.sampling_topp)
    generator = SequenceGenerator(
        models,
        WORDS,
        beam_size=options.beam,
        max_len_a=options.max_len_a,
        max_len_b=options.max_len_b,
        min_len=options.min_len,
        normalize_scores=options.normalize_scores,
        len_penalty=options.length_penalty,
        unk_penalty=options.unk_penalty,
        temperature=options.temperature,
        search_strategy=strategy,
    )
    if options.no_repeat_ngram_size:
        block = NGramRepeatBlock(options.no_repeat_ngram_size)
        generator.repeat_ngram_blocker = lambda tokens, found, count, beam, step: block(
            tokens[:, : step + 1], found, count, beam, step
        )
    force = generator._prefix_tokens

    def of_free_rows(step, lprobs, scores, tokens, prefix_tokens, beam_size):
        if step < options.min_len:
            free = prefix_tokens[:, step].repeat_interleave(beam_size) == PADDING
            lprobs[free, END] = -math.inf
        return force(step, lprobs, scores, tokens, prefix_tokens, beam_size)

    generator._prefix_tokens = of_free_rows
    table = prefixes and pad_sequence(prefixes, batch_first=True, padding_value=PADDING)
    return generator.generate(models, {"net_input": padded(sources)}, prefix_tokens=table)


def assert_same(theirs: list[list[dict]], ours: list[list[Hypothesis]], nbest: int) -> None:
    """Words, scores and scores of words."""
    assert len(theirs) == len(ours)
    for expected, actual in zip(theirs, ours, strict=True):
        expected = expected[:nbest]
        assert [each["tokens"].tolist() for each in expected] == [
            each.words.tolist() for each in actual
        ]
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(other.score, one["score"].item(), rtol=0, atol=1e-5)
            torch.testing.assert_close(
                other.word_scores, one["positional_scores"], rtol=0, atol=1e-5
            )


SAMPLING = {"sampling": True, "nbest": 5, "max_len_b": 12}
CASES = {
    "beam 5": {},
    "beam 1": {"beam": 1, "nbest": 1},
    "all hypotheses": {"beam": 4, "nbest": 4, "max_len_b": 12},
    "no word too many": {"beam": VOCABULARY + 3, "nbest": 5, "max_len_b": 4},
    "short": {"max_len_a": 0.5, "max_len_b": 1},
    "long": {"min_len": 6, "max_len_b": 9},
    "empty ones": {"min_len": 0, "max_len_b": 0},
    "length penalty": {"length_penalty": 1.7, "nbest": 5},
    "sums": {"normalize_scores": False, "nbest": 5},
    "few unknown words": {"unk_penalty": 2.5},
    "flat": {"temperature": 2.0, "nbest": 2},
    "no pairs twice": {"no_repeat_ngram_size": 2, "min_len": 8, "max_len_b": 12},
    "no triples twice": {"no_repeat_ngram_size": 3, "beam": 2, "min_len": 8, "max_len_b": 12},
    "sampling": SAMPLING,
    "sampling of 3": SAMPLING | {"sampling_topk": 3},
    "sampling one by one": SAMPLING
    | {"sampling_topk": 9, "beam": 1, "nbest": 1, "temperature": 1.5},
    "sampling of 60 %": SAMPLING | {"sampling_topp": 0.6, "unk_penalty": 2.0},
}
PREFIXES = [
    torch.tensor(words, dtype=torch.int64) for words in ([5], [], [6, 3, 7], [8, END], [9, 9])
]

ENGINE = " engine"
SUBJECTS = [*MODELS, *(name + ENGINE for name in MODELS if name.startswith("int8"))]

model = functools.cache(model_of)


def compare(names: list[str], options: SearchOptions, prefixes=None, seed: int = 1) -> None:
    models = [model(name.removesuffix(ENGINE)) for name in names]
    sources = sentences(5, seed)
    # the modules draw from fairseq's generator, the engine does not
    if names[0].endswith(ENGINE) and options.sampling:
        found = search(FairseqSteps(*models), sources, options, prefixes)
        theirs = [[as_fairseq(hypothesis) for hypothesis in sentence] for sentence in found]
    else:
        torch.manual_seed(seed)
        theirs = found_by_fairseq(models, sources, options, prefixes)
    if names[0].endswith(ENGINE):
        ours = search(Engine(decoding_model.model_of(models[0])), sources, options, prefixes)
    else:
        torch.manual_seed(seed)
        ours = search(
            FairseqSteps(*models), sources, options, prefixes, generator=torch.default_generator
        )
    assert_same(theirs, ours, options.nbest)


@pytest.mark.parametrize("case, name", in_turn([*CASES], SUBJECTS, 2))
def test_hypotheses_are_those_of_fairseq(name, case):
    compare([name], SearchOptions(**CASES[case]))


WITH_PREFIXES = [{}, {"beam": 1}, {"unk_penalty": 2.0, "nbest": 5}, {"temperature": 0.5}]
WITH_PREFIXES += [{"max_len_b": 2}, {"min_len": 5}, {"sampling": True}]
WITH_PREFIXES += [
    {"sampling": True, **one} for one in ({"sampling_topk": 4}, {"sampling_topp": 0.9})
]


@pytest.mark.parametrize(
    "given, name",
    in_turn(WITH_PREFIXES, ["fairseq", "int8", "int8 language model", "int8 engine"], 2),
)
def test_so_are_those_with_prefixes(name, given):
    compare([name], SearchOptions(**{"max_len_b": 12, **given}), PREFIXES)


def test_several_models_are_averaged():
    compare(["fairseq", "float", "int8"], SearchOptions(nbest=5))


@pytest.mark.thorough
@pytest.mark.timeout(600)
# a tie between two codes
@pytest.mark.parametrize("seed", (seed for seed in range(61) if seed != 40))
def test_options_drawn_at_random(seed):
    chance = random.Random(seed)
    beam = chance.choice([1, 2, 4, 6])
    given = {
        "beam": beam,
        "nbest": beam,
        "max_len_a": chance.choice([0, 1.2]),
        "max_len_b": chance.choice([3, 8, 14]),
        "min_len": chance.choice([0, 1, 3]),
        "unk_penalty": chance.choice([0.0, 0.0, 2.0, 3.0]),
        "length_penalty": chance.choice([1.0, 0.6]),
        "normalize_scores": chance.random() < 0.8,
        "temperature": chance.choice([1.0, 1.0, 0.5]),
        "no_repeat_ngram_size": chance.choice([0, 0, 2, 3]),
    }
    if chance.randrange(4) == 0:
        drawn = chance.choice([{}, {"sampling_topk": 3}, {"sampling_topp": 0.7}])
        # fairseq fails where nothing is left to draw after an end
        given |= {"sampling": True, "no_repeat_ngram_size": 0, **drawn}
    compare([chance.choice(SUBJECTS)], SearchOptions(**given), seed=seed)


def test_memory_follows_its_sentence_where_the_number_of_rows_stays():
    steps, sources = FairseqSteps(model("fairseq")), sentences(4, seed=2)
    found = []
    for kept in (torch.tensor([0, 0, 2, 2]), torch.tensor([0, 0, 2, 2, 3])):
        steps.begin(sources, rows=8, steps=3)
        steps.step_all(torch.full((4,), END), torch.arange(4))
        found.append(steps.step_all(torch.full((len(kept),), 6), kept)[:4])
    torch.testing.assert_close(*found)


def test_other_models_are_refused():
    with pytest.raises(
        ValueError, match="Linear has no decoder of fairseq's that goes word by word"
    ):
        FairseqSteps(torch.nn.Linear(2, 2))
