import json
import random
from contextlib import nullcontext
from dataclasses import fields

import pytest

from lsq.serving import SearchOptions
from lsq.serving.http.requests import Limits, parse
from tests.fuzz import trial
from tests.fuzz.mutations import mutated_bytes, mutated_json, mutated_text

DEFAULTS = SearchOptions(beam=3, max_len_b=40)


def parsed(**given: object) -> tuple[list[str], list[str], SearchOptions]:
    return parse(json.dumps(given).encode(), DEFAULTS)


@trial.counts(300)
def test_a_request_is_taken_or_refused(count):
    """Whatever becomes of its bytes."""
    given = {"text": ["a", "b \u00e9"], "prefix": ["", "c"], "beam": 4, "nbest": 2}
    body = json.dumps(given | {"temperature": 0.5}).encode()

    def attempt(chance: random.Random) -> trial.Outcome:
        mutated = chance.choice([mutated_bytes, mutated_text, mutated_json])(body, chance)
        return trial.outcome(lambda: parse(mutated, DEFAULTS))

    worked, refused = trial.survey("request", count, attempt)
    assert worked and refused > count / 10


def test_one_line_or_several():
    assert parsed(text="a") == (["a"], [""], DEFAULTS)
    given = {"beam": 4, "nbest": 2, "length_penalty": 2, "sampling": True}
    options = SearchOptions(beam=4, nbest=2, length_penalty=2.0, sampling=True, max_len_b=40)
    assert parsed(text=["a", "b"], prefix=["", "c"], **given) == (["a", "b"], ["", "c"], options)
    assert parsed(text=[])[0] == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, 'no "text"'),
        ({"text": 1}, '"text" must be a string or a list of strings'),
        ({"text": ["a", None]}, '"text" must be'),
        ({"text": "a", "prefix": ["b", "c"]}, "1 lines but 2 prefixes"),
        ({"text": "a", "prefix": {}}, '"prefix" must be'),
        ({"text": "a", "beams": 3}, "'beams'; it may have text, prefix, beam,"),
        ({"text": "a", "beam": 2.0}, "beam is 2.0; it must be of type int"),
        ({"text": "a", "beam": True}, "beam is true; it must be of type int"),
        ({"text": "a", "beam": 0}, "beam is 0; it must be a whole number of at least 1"),
        ({"text": "a", "nbest": 4}, "nbest is 4 and beam 3"),
        ({"text": "a", "sampling": 1}, "sampling is 1; it must be of type bool"),
        ({"text": "a", "temperature": "1"}, 'temperature is "1"; it must be of type float'),
        ({"text": "a", "temperature": float("nan")}, "temperature is nan"),
        ({"text": "a", "temperature": 10**400}, "temperature is too large"),
        ({"text": "a", "length_penalty": [1] * 10_000}, r"length_penalty is \[1, 1.* it must be"),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(ValueError, match=message) as refused:
        parsed(**given)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'"text"', b"\xff", b"{" * 10**5, b'{"text": "a"', b"1" * 9999]
)
def test_what_is_no_request(body):
    with pytest.raises(ValueError, match='send e.g. {"text"'):
        parse(body, DEFAULTS)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_are_above_zero(value):
    for field in fields(Limits):
        with pytest.raises(ValueError, match=f"{field.name} is {value}"):
            Limits(**{field.name: value})


@pytest.mark.parametrize(
    ("beam", "a", "b", "message"),
    [
        (4, 0.0, 100, None),
        (5, 0.0, 100, "beam is 5; this service takes 4 at most"),
        (4, 0.0, 101, "with this max_len_a of 0, max_len_b may be 100"),
        (4, 2.0, 60, None),
        (4, 2.0, 61, "with this max_len_a of 2, max_len_b may be 60"),
        (4, 1e308, 0, "max_len_b may be 0"),
    ],
)
def test_what_options_may_allow(beam, a, b, message):
    limits, options = Limits(beam=4, words=100), SearchOptions(beam=beam, max_len_a=a, max_len_b=b)
    refused = pytest.raises(ValueError, match=message) if message else nullcontext()
    with refused:
        limits.check(options, longest_source=20)
