"""Small models with fairseq's interface, of random weights, and what fairseq's own generator finds
with them."""

import math
import random
from argparse import Namespace

import torch
from fairseq import search as strategies
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel, transformer_legacy
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator
from torch.nn.utils.rnn import pad_sequence

from lsq.fairseq.language_model import LSQTransformerLanguageModel, base_architecture
from lsq.fairseq.model import LSQTransformerModel
from lsq.serving import Hypothesis, SearchOptions

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
    elif options.diverse_beam_groups != -1:
        strategy = strategies.DiverseBeamSearch(
            WORDS, options.diverse_beam_groups, options.diverse_beam_strength
        )
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
