"""Generation by lsq's search behind the interface of fairseq's generator.

B sentences, S words of the longest source, P words of the longest prefix.
"""

import json
import logging
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from lsq.fairseq.model import LSQModel
from lsq.layers.module import ProgramModule
from lsq.run.backends import Backend, backend
from lsq.serving import Engine, Hypothesis, SearchOptions, Steps, Symbols, search
from lsq.serving.architecture import check_codes
from lsq.serving.decoding_model import model_of
from lsq.serving.steps import FairseqSteps
from lsq.serving.subwords import Words

logger = logging.getLogger(__name__)

SAME = """
    beam max_len_a max_len_b min_len temperature no_repeat_ngram_size sampling sampling_topk
    sampling_topp
""".split()
FIELDS = {name: name for name in SAME} | {"length_penalty": "lenpen", "unk_penalty": "unkpen"}
"""Field of SearchOptions -> fairseq's name for it."""
OTHERS = """
    print_alignment score_reference match_source_len diversity_rate diverse_beam_groups constraints
    prefix_allowed_tokens_fn
""".split()
"""Options that lsq's search does not have."""


def obstacle(models: Sequence[nn.Module], args: Any, given: dict[str, Any]) -> str | None:
    """Return why fairseq's generator is needed, or None if lsq's search will do. `args` are
    fairseq's options of a generation, `given` further arguments of its generator, by name."""
    if (option := obstacle_of_options(args)) is not None:
        return option
    for name, value in given.items():
        if value is not None and name != "lm_weight":
            return "--lm-path" if name == "lm_model" else name
    try:
        FairseqSteps(*models)
    except ValueError as error:
        return str(error)
    return None


def obstacle_of_options(args: Any) -> str | None:
    """Return an option of a generation that lsq's search does not have; None if it has all."""
    for name in OTHERS:
        value = getattr(args, name, None)
        if value not in (None, False, -1):
            return f"--{name.replace('_', '-')} {value}"
    if _rewards_unknown(args):
        return f"--unkpen {args.unkpen}"
    if getattr(args, "sampling_topk", -1) > 0 and getattr(args, "sampling_topp", -1.0) > 0:
        return "--sampling-topk and --sampling-topp together"
    return None


def _rewards_unknown(args: Any) -> bool:
    """Return whether --unkpen is below 0; False if it is no number, which `options_of` refuses."""
    penalty = getattr(args, "unkpen", 0)
    return isinstance(penalty, int | float) and penalty < 0


def options_of(args: Any) -> SearchOptions:
    """Make SearchOptions, with `nbest` equal to `beam`, of fairseq's options of a generation;
    ValueError if a value is out of its range, or two do not go together."""
    given = {own: getattr(args, theirs) for own, theirs in FIELDS.items() if hasattr(args, theirs)}
    for name in ("sampling_topk", "sampling_topp"):
        if given.get(name, -1) <= 0:
            given[name] = -1
    if _rewards_unknown(args):  # see obstacle_of_options
        del given["unk_penalty"]
    beam = given.setdefault("beam", SearchOptions.beam)
    return SearchOptions(
        **given, nbest=beam, normalize_scores=not getattr(args, "unnormalized", False)
    )


def evaluation_of_task(task: Any) -> SearchOptions | None:
    """Return the options by which --eval-bleu translates the validation set; None without it."""
    if not getattr(task, "eval_bleu", False):
        return None
    args = Namespace(**json.loads(task.eval_bleu_args or "{}"))
    if (option := obstacle_of_options(args)) is not None:
        logger.warning(
            "the training translates its validation set with %s, which lsq's search leaves out",
            option,
        )
    return replace(options_of(args), nbest=1)


def engine_backend(models: Sequence[nn.Module]) -> Backend | None:
    """Return the backend of the layers of `models` if the int8 engine can decode there, else None.
    It decodes one model of lsq whose weights can all be kept as codes, and whose layers share one
    backend, with compiled loops or kernels."""
    if len(models) != 1 or not isinstance(models[0], LSQModel):
        return None
    modules = [module for module in models[0].modules() if isinstance(module, ProgramModule)]
    rounded = {module.quant for module in modules if module.quant.quantized}
    try:
        for quant in rounded:
            check_codes(quant)
    except ValueError:
        return None
    backends = {module.target for module in modules}
    usable = rounded and len(backends) == 1 and backend("reference") not in backends
    return backends.pop() if usable else None


def steps_of(models: Sequence[nn.Module], target: Backend | None = None) -> Steps:
    """Make the int8 engine if it can decode `models`, else their own incremental steps. The engine
    runs on `target`, or by default where the layers compute. ValueError: clips were never measured,
    or models need their own steps on another `target` than the CPU."""
    own = engine_backend(models)
    if own is not None:
        return Engine(model_of(models[0]), target or own)
    if target not in (None, backend("cpu")):
        raise ValueError(
            f"only models in int8 are translated on {target.name}; translate on the CPU"
        )
    return FairseqSteps(*models)


class LSQGenerator:
    """Replacement of fairseq's SequenceGenerator for options `args` without an `obstacle`. It puts
    the models into eval mode, as fairseq does. ValueError: an option is out of its range."""

    def __init__(self, models: Sequence[nn.Module], dictionary: Dictionary, args: Any):
        self.options = options_of(args)
        self.dictionary = dictionary
        self.symbols_to_strip_from_output = {dictionary.eos()}
        self.models = models
        for model in models:
            model.eval()
        self._steps: Steps | None = None

    def forget_weights(self) -> None:
        """Drop the int8 engine, which has packed the weights; call this when they change."""
        self._steps = None

    @torch.no_grad()
    def generate(
        self,
        models: Any,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: None = None,
        bos_token: int | None = None,
    ) -> list[list[dict[str, Tensor]]]:
        """Return the hypotheses of each sentence of a batch, as fairseq's generator returns them.

        Args:
            models: ignored, as in fairseq.
            sample: a batch of fairseq's with src_tokens int64 [B, S].
            prefix_tokens: int64 [B, P], words that the hypotheses begin with, filled with padding.
            bos_token: the word before every hypothesis; None: the end of a sentence.
        """
        if constraints is not None:
            raise ValueError(
                "lsq's search knows no constraints; give --constraints when the generator is built"
            )
        end, padding, unknown = (getattr(self.dictionary, name)() for name in ("eos", "pad", "unk"))
        start = end if bos_token is None else bos_token
        symbols = Symbols(start=start, padding=padding, end=end, unknown=unknown)
        sources = without(sample["net_input"]["src_tokens"], padding)
        prefixes = None if prefix_tokens is None else without(prefix_tokens, padding)
        drawn = torch.default_generator  # fairseq's generator draws from it, too
        if sources and sources[0].is_cuda:
            drawn = torch.cuda.default_generators[sources[0].device.index]
        if self._steps is None:
            self._steps = steps_of(self.models)
        results = search(
            self._steps, sources, self.options, prefixes, symbols=symbols, generator=drawn
        )
        return [[as_fairseq(hypothesis) for hypothesis in sentence] for sentence in results]


def words_of(dictionary: Dictionary) -> Words:
    special = {"beginning": dictionary.bos(), "padding": dictionary.pad()}
    special |= {"end": dictionary.eos(), "unknown": dictionary.unk()}
    return Words(symbols=dictionary.symbols, **special)


def without_words(end: int, device: torch.device) -> dict[str, Tensor]:
    """Return the hypothesis of an empty line, `end` alone, as fairseq's generator has it."""
    words = torch.tensor([end], device=device)
    return as_fairseq(Hypothesis(words=words, score=0.0, word_scores=torch.zeros(1, device=device)))


def without(rows: Tensor, padding: int) -> list[Tensor]:
    """Return the rows of int64 [B, S] without padding."""
    return [row[row != padding] for row in rows]


def as_fairseq(hypothesis: Hypothesis) -> dict[str, Tensor]:
    """Return a hypothesis as fairseq's generator has it; lsq keeps no attention."""
    return {
        "tokens": hypothesis.words,
        "score": torch.tensor(hypothesis.score),
        "attention": torch.empty(0),
        "alignment": torch.empty(0),
        "positional_scores": hypothesis.word_scores,
    }
