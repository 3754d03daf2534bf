"""lsq's search in the place of fairseq's generator: the same lines, and a word where fairseq's is
needed."""

import json
import logging
from argparse import Namespace

import pytest
import torch
from fairseq.dataclass.configs import GenerationConfig
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask

from lsq.fairseq import generator
from lsq.fairseq.device import use
from lsq.fairseq.generator import LSQGenerator, engine_backend, evaluation_of_task, options_of
from lsq.run.backends import backend
from lsq.serving import SearchOptions
from tests.sampling import first


def found_by(task, model, sample, args, kind, **prefix):
    """Hypotheses of a generator of this kind."""
    owner = type(task) if kind is LSQGenerator else FairseqTask
    generates = owner.build_generator(task, [model], args)
    assert type(generates) is kind
    torch.manual_seed(1)
    return task.inference_step(generates, [model], sample, **prefix)


def words_of(found: list[list[dict]]) -> list[list[list[int]]]:
    return [[each["tokens"].tolist() for each in sentence] for sentence in found]


SEARCHES = [
    {"diverse_beam_groups": 0},
    {"beam": 1, "unnormalized": True},
    {"lenpen": 0.5, "unkpen": 1.0, "min_len": 3},
]
DRAWN = [{"sampling": True, "sampling_topk": 4}, {"sampling": True, "beam": 2}]
"""In int8 the modules draw from fairseq's generator themselves, and the engine does not."""
MIX = "int4,*fc2*=int8,*qkv*=int3/row,decoder.layers.0.*=int2/row"


@pytest.mark.parametrize(
    "mode, given",
    [
        *first((("int8", given) for given in SEARCHES), 2),
        (f"int8 --lsq-weight-format {MIX}", SEARCHES[0]),
        *first((("float", given) for given in DRAWN), 1),
        *(pytest.param("float", given, marks=pytest.mark.thorough) for given in SEARCHES),
    ],
)
def test_what_is_generated_is_what_fairseq_generates(build, batch, mode, given):
    task, model = build(f"--lsq-mode {mode}")
    assert (engine_backend([model]) is not None) == (mode != "float")
    sample, args = batch(task), Namespace(**{"max_len_b": 9, **given})
    model(**sample["net_input"])
    for prefix in (None, sample["target"][:, :2]):
        kinds = (SequenceGenerator, LSQGenerator)
        theirs, ours = (
            found_by(task, model, sample, args, kind, prefix_tokens=prefix) for kind in kinds
        )
        assert words_of(ours) == words_of(theirs)
        for expected, actual in zip(theirs, ours, strict=True):
            for one, other in zip(expected, actual, strict=True):
                assert one.keys() == other.keys()
                for name in ("score", "positional_scores"):
                    torch.testing.assert_close(other[name], one[name], rtol=0, atol=1e-5)


@pytest.mark.thorough
def test_the_engine_decodes_where_the_layers_compute(build, batch):
    task, model = build("--lsq-mode int8")
    sample, args = batch(task), Namespace(beam=2, max_len_b=3)
    model(**sample["net_input"])
    found = []
    for place in (None, backend("emulated")):
        use(model, place)
        assert engine_backend([model]) is (place or backend("cpu"))
        found.append(found_by(task, model, sample, args, LSQGenerator))
    use(next(model.children()), None)  # the encoder
    assert engine_backend([model]) is None
    assert words_of(found[0]) == words_of(found[1])


@pytest.mark.parametrize(
    "given, extra, named",
    [
        ({"match_source_len": True}, {}, "--match-source-len True"),
        ({"diversity_rate": 0.5}, {}, "--diversity-rate 0.5"),
        ({"diverse_beam_groups": 2, "beam": 4}, {}, "--diverse-beam-groups 2"),
        ({"unkpen": -1.0}, {}, "--unkpen -1.0"),
        ({"constraints": "ordered"}, {}, "--constraints ordered"),
        ({"score_reference": True}, {}, "--score-reference True"),
        ({"sampling": True, "sampling_topk": 3, "sampling_topp": 0.5}, {}, "--sampling-topk and"),
        ({}, {"extra_gen_cls_kwargs": {"lm_model": True, "lm_weight": 0.5}}, "--lm-path"),
        ({}, {"seq_gen_cls": SequenceGenerator}, "seq_gen_cls"),
    ],
)
def test_fairseq_generates_where_the_search_cannot(build, caplog, given, extra, named):
    task, model = build()
    kind = SequenceScorer if given.get("score_reference") else SequenceGenerator
    if "extra_gen_cls_kwargs" in extra:
        extra["extra_gen_cls_kwargs"]["lm_model"] = model
    with caplog.at_level(logging.INFO):
        assert type(task.build_generator([model], Namespace(**given), **extra)) is kind
    assert f"generating by fairseq's generator, because of {named}" in caplog.text


def test_what_the_search_does_not_take_is_refused(build, batch):
    with pytest.raises(ValueError, match="temperature is 0"):
        options_of(Namespace(temperature=0))
    with pytest.raises(ValueError, match="they need sampling"):
        options_of(Namespace(sampling_topk=3))
    with pytest.raises(ValueError, match="unk_penalty is None; it must be of type float"):
        evaluation_of_task(Namespace(eval_bleu=True, eval_bleu_args='{"unkpen": null}'))
    task, model = build()
    extra = {"lm_model": None, "lm_weight": 0.5}  # a weight without a model
    found = task.build_generator([model], Namespace(), extra_gen_cls_kwargs=extra)
    assert type(found) is LSQGenerator
    with pytest.raises(ValueError, match="knows no constraints"):
        found.generate([model], batch(task), constraints=torch.ones(1))


def test_validation_translates_with_the_weights_of_the_moment(build, batch):
    task, model = build(
        ["--eval-bleu", "--eval-bleu-args", json.dumps({"beam": 2, "max_len_b": 9})]
    )
    sample = batch(task)
    model(**sample["net_input"])
    found = []
    for factor in (1, -1):
        with torch.no_grad():
            model.decoder.output_projection.weight.mul_(factor)
        model.eval()
        task.begin_valid_epoch(1, model)
        found.append(words_of(task.inference_step(task.sequence_generator, [model], sample)))
    assert isinstance(task.sequence_generator, LSQGenerator) and found[0] != found[1]


def test_a_training_says_how_it_translates(build, caplog):
    given = {"beam": 2, "max_len_b": 9, "lenpen": 0.6, "unnormalized": True}
    for arguments, expected in (
        ([], None),
        (["--eval-bleu"], SearchOptions()),
        (
            ["--eval-bleu", "--eval-bleu-args", json.dumps(given)],
            SearchOptions(beam=2, max_len_b=9, length_penalty=0.6, normalize_scores=False),
        ),
    ):
        assert evaluation_of_task(build(arguments)[0].cfg) == expected
    assert "leaves out" not in caplog.text
    other = Namespace(eval_bleu=True, eval_bleu_args='{"beam": 3, "match_source_len": true}')
    assert evaluation_of_task(other) == SearchOptions(beam=3)
    assert "with --match-source-len True, which lsq's search leaves out" in caplog.text


@pytest.mark.parametrize("kind", [LSQGenerator, SequenceGenerator])
def test_empty_lines_have_one_hypothesis_without_words(build, batch, kind):
    """Whether lsq searches or fairseq; and the other lines have what they have without them."""
    task, model = build()
    sample, args = batch(task), Namespace(beam=2, max_len_b=9)
    net_input, words = sample["net_input"], task.source_dictionary
    model(**net_input)
    before = found_by(task, model, sample, args, kind)
    source = net_input["src_tokens"]
    source[1:3] = words.pad()
    source[1:3, -1] = words.eos()
    source[2, -3:-1] = words.unk()
    after = found_by(task, model, sample, args, kind)
    expected = words_of(before)
    expected[1] = expected[2] = [[words.eos()]]
    assert words_of(after) == expected
    (empty,) = after[1]
    assert empty.keys() == before[0][0].keys() and empty["positional_scores"].tolist() == [0.0]


def test_every_option_of_generation_is_known():
    """One that a newer fairseq has is looked at before it is passed over."""
    ignored = """
        nbest unnormalized no_early_stop no_beamable_mm replace_unk sacrebleu prefix_size print_step
        lm_path lm_weight retain_iter_history retain_dropout retain_dropout_modules decoding_format
        no_seed_provided eos_token beam_mt max_len_a_mt max_len_b_mt lenpen_mt iter_decode_max_iter
        iter_decode_eos_penalty iter_decode_force_max_iter iter_decode_with_beam
        iter_decode_with_external_reranker diverse_beam_strength
    """
    names = {name for name in GenerationConfig.__dataclass_fields__ if not name.startswith("_")}
    assert names <= {*generator.FIELDS.values(), *generator.OTHERS, *ignored.split()}
