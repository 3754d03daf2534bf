"""What options may be: fairseq's defaults are, and what it fails on is refused by name."""

import dataclasses

import pytest
from fairseq.dataclass import configs
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY

from lsq.commands import generate, limits, train


def defaults():
    """(name, default) of every option that fairseq has as a dataclass's field."""
    found = [made for made in vars(configs).values() if dataclasses.is_dataclass(made)]
    for registry in (
        *(each["dataclass_registry"] for each in REGISTRIES.values()),
        TASK_DATACLASS_REGISTRY,
    ):
        found += registry.values()
    for made in filter(None, [*found, *MODEL_DATACLASS_REGISTRY.values()]):
        for field in dataclasses.fields(made):
            default = field.default_factory() if callable(field.default_factory) else field.default
            yield from (
                (field.name, value)
                for value in (default if isinstance(default, list) else [default])
            )


def test_every_default_of_fairseqs_is_in_range():
    found = [(name, value) for name, value in defaults() if name in limits.RANGES]
    numbers = [(name, value) for name, value in found if isinstance(value, (int, float))]
    assert len(numbers) > 100 and {name for name, _ in found} == set(limits.RANGES)
    assert [pair for pair in numbers if not limits.RANGES[pair[0]].holds(pair[1])] == []


def test_what_is_in_no_range():
    assert not any(allowed.holds(float("nan")) for allowed in limits.RANGES.values())
    outside = {limits.COUNTS: (0, -1, 2**22 + 1), limits.NOT_NEGATIVES: (-1, float("inf"))}
    outside |= {limits.SCALES: (-1e30, 1e30), limits.INTERVALS: (0,), limits.NUMBERS_KEPT: (-5,)}
    for names, values in outside.items():
        for name in names.split():
            assert not any(map(limits.RANGES[name].holds, values)), name


TRAININGS = """
--max-tokens 0 | --max-tokens is 0; it must be from 1 to 4194304
--max-tokens 99999999999999 | --max-tokens is 99999999999999; it must be
--update-freq 1,0 | --update-freq is 0; it must be
--update-freq [] | --update-freq has no value; give at least one
--lr -1 | --lr is -1.0; it must be at least 0 and finite
--clip-norm nan | --clip-norm is nan; it must be at least 0
--log-interval 0 | --log-interval is 0; it must be at least 1
--required-batch-size-multiple 0 | --required-batch-size-multiple is 0; it must be from 1
--num-batch-buckets 2 | --num-batch-buckets is 2; it must be 0: fairseq's buckets fail
--keep-last-epochs -5 | --keep-last-epochs is -5; it must be at least 0 and finite, or -1 for none
--max-source-positions -1 | --max-source-positions is -1; it must be from 1
--encoder-layers -1 | --encoder-layers is -1; it must be from 0 to 1000
--label-smoothing nan | --label-smoothing is nan; it must be at least 0 and below 1
--optimizer adam --adam-betas nonsense | --adam-betas is 'nonsense'; it must be two numbers
--optimizer adam --adam-betas 0.9 | --adam-betas is '0.9'
--lr-scheduler inverse_sqrt --warmup-updates 0 | --warmup-updates is 0; --lr-scheduler
--lr-scheduler polynomial_decay | --lr-scheduler polynomial_decay needs --total-num-update
--criterion ctc | --criterion ctc is not for --task lsq_translation; use one of adaptive_loss,
"""


@pytest.mark.parametrize("row", TRAININGS.strip().split("\n"))
def test_trainings_that_would_fail_later(prepared, row):
    options, message = row.split(" | ")
    with pytest.raises(ValueError) as refused:
        train.run([str(prepared.data), "--max-tokens", "100", *options.split()])
    assert str(refused.value).startswith(message)


def test_usual_trainings_pass(prepared):
    for options in (
        "--optimizer adam --adam-betas (0.9,0.98) --clip-norm 0 --lr 0.1,0.2 --update-freq 2,1"
        " --keep-last-epochs -1",
        "--lr-scheduler inverse_sqrt --warmup-updates 1 --max-update 0 --log-interval 999999999"
        " --seed 0",
        "--lr-scheduler polynomial_decay --total-num-update 10 --criterion"
        " label_smoothed_cross_entropy",
    ):
        train.parse_training([str(prepared.data), "--max-tokens", "100", *options.split()])


TRANSLATIONS = """
--beam 0 | --beam is 0; it must be from 1
--nbest 9 | --nbest is 9, but --beam 5 finds no more; give --beam 9
--sampling --nbest 3 --beam 2 | --sampling draws --beam (2) translations of each sentence and keeps
--sampling --nbest 5 --sampling-topk 0 | --sampling-topk is 0; it must be from 1
--sampling --nbest 5 --sampling-topp 2 | --sampling-topp is 2.0; it must be above 0 and at most 1
--constraints | --constraints needs constraints beside each sentence
--retain-iter-history | --retain-iter-history is for models that refine translations step by step
--max-len-b -1 | --max-len-b is -1; it must be at least 1, and at least --min-len
--max-len-b 5 --min-len 6 | --max-len-b is 5; it must be at least 1, and at least --min-len
--max-len-a nan | --max-len-a is nan; it must be at least 0 and finite
--lenpen nan | --lenpen is nan; it must be from -100 to 100
--temperature 0 | --temperature is 0.0; it must be from 1e-3 to 1e6
--diverse-beam-groups 2 | --beam is 5; it must be a multiple of --diverse-beam-groups
--diversity-rate -0.5 | --diversity-rate is -0.5; it must be from 0 to 1e6, or -1 for none
--seed -1 | --seed is -1; it must be from 0 to 4294967295
--model-overrides nonsense | --model-overrides is 'nonsense'; it must be names and values
--model-overrides {1:2} | --model-overrides is '{1:2}'
"""


@pytest.mark.parametrize("row", TRANSLATIONS.strip().split("\n"))
def test_translations_that_would_fail_later(prepared, row):
    options, message = row.split(" | ")
    with pytest.raises(ValueError) as refused:
        generate.run([str(prepared.data), "--path", "checkpoint.pt", "--cpu", *options.split()])
    assert str(refused.value).startswith(message)
