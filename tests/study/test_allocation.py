"""Formats under a budget: against brute force, groups of a real model, patterns, bad budgets."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lsq
from lsq.config import QuantConfig
from lsq.study import Allocator, Budget, Groups, groups_of, sensitivity
from lsq.study.costs import Cost, Costs, TensorCosts
from lsq.study.modelled import joules
from tests.ops.compare import refused

FORMATS = {"int8/row": 8.5, "int4/row": 4.25, "int3/row": 3.5, "int2/row": 2.125}


def costs_of(names=("a", "b", "c", "d", "e", "f"), seed=1, **changes) -> Costs:
    """Random costs that fall with the bits of a format."""
    random = torch.Generator().manual_seed(seed)

    def cost(bits: float) -> Cost:
        size = 4 ** -(bits - 4) * torch.rand(1, generator=random).item()
        given = {"cost": 0.5 * size - 1e-4, "second": 2 * size, "first": 0.0, "error": 0.1}
        return Cost(bits=bits, divergence=size, **given)

    tensors = [
        TensorCosts(
            name=name,
            kind="weight",
            shape=(32, 8 * number),
            values=256 * number,
            rows=18,
            transposed=False,
            formats={form: cost(bits) for form, bits in FORMATS.items()},
        )
        for number, name in enumerate(names, 1)
    ]
    fields = {"about": {}, "weights": "1", "clip": "mse", "formats": tuple(FORMATS), "loss": 1.0}
    return Costs(
        **{**fields, "count": 9.0, "samples": 3, "tensors": tuple(tensors), "finished": True},
        **changes,
    )


def of_weights(*groups: tuple[str, ...]) -> Groups:
    return Groups(weights=groups, inputs=())


def brute(costs: Costs, bits: float, groups, rule=lambda cost: cost.divergence) -> float:
    tensors = {tensor.name: tensor for tensor in costs.tensors}
    values = sum(tensor.values for tensor in costs.tensors)
    best = math.inf
    for forms in itertools.product(FORMATS, repeat=len(groups)):
        pairs = [(tensors[n], f) for g, f in zip(groups, forms, strict=True) for n in g]
        taken = sum(tensor.formats[form].bits * tensor.values for tensor, form in pairs)
        if taken <= bits * values * (1 + 1e-12):
            best = min(best, sum(rule(tensor.formats[form]) for tensor, form in pairs))
    return best


@pytest.mark.parametrize("bits", [2.125, 2.6, 3.0, 4.0, 5.5, 8.5])
@pytest.mark.parametrize("rule", ["divergence", "loss", "second"])
def test_the_formats_are_those_of_brute_force(bits, rule):
    costs = costs_of()
    found = Allocator(costs=costs, rule=rule).run(Budget(bits=bits))
    attribute = {"loss": "cost"}.get(rule, rule)
    each = [(tensor.name,) for tensor in costs.tensors]
    expected = brute(costs, bits, each, lambda cost: getattr(cost, attribute))
    assert found.cost == pytest.approx(expected, rel=1e-9) and found.bits <= bits * (1 + 1e-9)
    greedy = Allocator(costs=costs, rule=rule, method="greedy").run(Budget(bits=bits))
    assert greedy.cost >= found.cost - 1e-12 and greedy.bits <= bits * (1 + 1e-9)


def test_weights_of_a_group_have_one_format():
    costs, groups = costs_of(), [("a", "c", "f"), ("b",), ("d", "e")]
    found = Allocator(costs=costs, groups=of_weights(*groups)).run(Budget(bits=3.2))
    assert found.cost == pytest.approx(brute(costs, 3.2, groups), rel=1e-9)
    assert [one.part.names for one in found.chosen] == groups
    assert found.cost > Allocator(costs=costs).run(Budget(bits=3.2)).cost


def test_bytes_and_bits_are_the_same_budget():
    search = Allocator(costs=costs_of())
    by_bits = search.run(Budget(bits=3.0))
    assert search.run(Budget(bytes=by_bits.bits * by_bits.values / 8 * (1 + 1e-9))) == by_bits
    assert search.run(Budget(bits=8.0, bytes=by_bits.values * 3 / 8)) == by_bits
    assert by_bits.bytes == math.ceil(by_bits.bits * by_bits.values / 8)


def test_patterns_keep_bits():
    free = Allocator(costs=costs_of()).run(Budget(bits=3.0))
    kept = Allocator(costs=costs_of(), at_least={"[af]": 4, "b": 3}).run(Budget(bits=3.0))
    bits = {name: one.bits for one in kept.chosen for name in one.part.names}
    assert bits["a"] >= 4 and bits["f"] >= 4 and bits["b"] >= 3 and kept.cost >= free.cost
    with refused("no tensor is called 'head'"):
        Allocator(costs=costs_of(), at_least={"head": 4})
    with refused("a must have at least 9 bits.*up to 8.500"):
        Allocator(costs=costs_of(), at_least={"a": 9}).run(Budget(bits=8))
    with refused("give a number, 0 or more"):
        Allocator(costs=costs_of(), at_least={"a": math.nan})


def test_a_front_falls_and_lies_below_uniform_formats():
    search = Allocator(costs=costs_of())
    front, uniform = search.front(), search.uniform()
    assert list(uniform) == list(FORMATS)
    bits, costs = [one.bits for one in front], [one.cost for one in front]
    assert bits == sorted(bits) and costs == sorted(costs, reverse=True)
    for form, one in uniform.items():
        assert search.run(Budget(bits=one.bits * (1 + 1e-9))).cost <= one.cost
        assert set(one.of("weight").values()) == {form} and one.bits == FORMATS[form]
    assert bits[0] == pytest.approx(2.125) and bits[-1] == pytest.approx(8.5)


def with_activations(costs: Costs) -> Costs:
    """The same costs for inputs, of 9 words with 2 rows each."""
    activations = tuple(
        replace(one, kind="activation", values=18 * one.inputs) for one in costs.tensors
    )
    return replace(costs, tensors=(*costs.tensors, *activations))


@pytest.mark.parametrize("operations", [5, 9, 16, 30])
def test_weights_and_their_input_share_bit_operations(operations):
    """Two weights read one input; the third reads another, and the last one is int8."""
    costs = costs_of("abcd")
    tensors = tuple(one for one in with_activations(costs).tensors if one.name != "d")
    costs = replace(costs, tensors=tensors)
    groups = Groups(weights=(("a",), ("b",), ("c",)), inputs=(("a", "b"), ("c",)))
    search = Allocator(costs=costs, groups=groups, activations=True)
    sizes = {one.name: one.values for one in tensors if one.kind == "weight"}
    budget = Budget(operations=operations * 2 * sum(sizes.values()), bits=4.5)
    found = search.run(budget)

    every, best = {one.name: one.formats for one in tensors}, math.inf
    for a, b, c, of_ab, of_c in itertools.product(FORMATS, repeat=5):
        pairs = [("a", a, of_ab), ("b", b, of_ab), ("c", c, of_c)]
        bits = sum(sizes[name] * FORMATS[one] for name, one, _ in pairs)
        taken = sum(2 * sizes[n] * FORMATS[one] * FORMATS[other] for n, one, other in pairs)
        if bits <= 4.5 * sum(sizes.values()) and taken <= budget.operations:
            forms = [("a", a), ("b", b), ("c", c), ("a", of_ab), ("b", of_ab), ("c", of_c)]
            best = min(best, sum(every[name][form].divergence for name, form in forms))
    assert found.cost == pytest.approx(best, rel=1e-9) and found.fits(budget)
    inputs = found.of("activation")
    assert inputs.keys() == {"a", "b", "c"} and inputs["a"] == inputs["b"]
    quant = found.quant
    assert quant.weight_format == found.weight_format
    assert quant.activation_format.startswith("int8,a=")
    pair = "int8/row int2/row"
    taken = search.uniform()[pair].takes["operations"]
    assert taken == pytest.approx(2 * sum(sizes.values()) * 8.5 * 2.125)


def test_milliseconds_are_a_budget():
    """Times that fall with the bits, with a part that all formats have."""

    def milliseconds(form: str, outputs: int, inputs: int) -> float:
        return 0.01 + outputs * inputs * FORMATS[form] * 1e-6

    costs = costs_of("abc")
    search = Allocator(costs=costs, milliseconds=milliseconds)
    sizes = [one.values for one in costs.tensors]
    for most in (0.034, 0.036, 0.04):
        best = math.inf
        for forms in itertools.product(FORMATS, repeat=3):
            taken = sum(0.01 + n * FORMATS[one] * 1e-6 for n, one in zip(sizes, forms, strict=True))
            pairs = zip(costs.tensors, forms, strict=True)
            if taken <= most:
                best = min(best, sum(one.formats[form].divergence for one, form in pairs))
        found = search.run(Budget(milliseconds=most))
        assert found.cost == pytest.approx(best, rel=1e-9)
        assert found.takes["milliseconds"] <= most
    with refused("is 0.03 milliseconds of products, but the formats take .* of products at least"):
        search.run(Budget(milliseconds=0.03))
    with refused("a budget of milliseconds needs times of products"):
        Allocator(costs=costs).run(Budget(milliseconds=1.0))


def test_operations_are_not_told_where_products_were_not_seen():
    costs = costs_of("ab")
    tensors = (costs.tensors[0], replace(costs.tensors[1], rows=0))
    search = Allocator(costs=replace(costs, tensors=tensors))
    assert search.run(Budget(bits=4.0)).takes.keys() == {"bits", "joules"}
    with refused("no product with b was seen in the measurement"):
        search.run(Budget(operations=1e9))


def test_joules_are_those_of_the_model():
    costs = costs_of("ab")
    search = Allocator(costs=costs, rows=3)
    uniform = search.uniform()
    for form, bits in FORMATS.items():
        expected = sum(joules(3, 32, one.inputs, bits, 8) for one in costs.tensors)
        assert uniform[form].takes["joules"] == pytest.approx(expected, rel=1e-9)
    budget = Budget(joules=uniform["int3/row"].takes["joules"], rows=3)
    assert search.run(budget).takes["joules"] <= budget.joules
    with refused("rows is 0; it must be a whole number above 0"):
        Budget(bits=3, rows=0)


def test_some_of_the_formats():
    some = Allocator(costs=costs_of(), formats=["int8/row", "int3/row"])
    assert set(some.run(Budget(bits=4.0)).of("weight").values()) == {"int8/row", "int3/row"}
    assert list(some.uniform()) == ["int8/row", "int3/row"]
    for formats in (["nvfp4"], []):
        with refused("measured were int8/row, int4/row"):
            Allocator(costs=costs_of(), formats=formats)


@pytest.mark.parametrize(
    "budget, message",
    [
        ({}, "there is no budget"),
        (
            {"bits": 2.0},
            "the budget is 2.000 bits of a value or 1,344 bytes, but the formats take 2.125 bits of"
            " a value or 1,428 bytes at least; give a larger budget, or measure smaller formats",
        ),
        ({"bytes": 1000}, "give a larger budget"),
        (
            {"operations": 1000},
            "is 1000 bit operations of an item, but the formats take 1.828e.05 bit",
        ),
        ({"bits": -1.0}, "it must be a number above 0"),
        ({"bits": math.nan}, "it must be a number above 0"),
        ({"bits": 0.0}, "it must be a number above 0"),
    ],
)
def test_budgets_that_cannot_be_kept_are_refused(budget, message):
    with refused(message):
        Allocator(costs=costs_of()).run(Budget(**budget))


def test_what_is_refused():
    with refused("rule is 'kl'; allowed: 'divergence', 'loss', 'second'"):
        Allocator(costs=costs_of(), rule="kl")
    with refused("method is 'sat'; allowed: 'exact', 'greedy'"):
        Allocator(costs=costs_of(), method="sat")
    with refused("a measurement that was stopped"):
        Allocator(costs=replace(costs_of(), finished=False))
    with refused("no weight that was measured, such as a, is rounded in this model, which has oth"):
        Allocator(costs=costs_of(), groups=of_weights(("other",)))
    with refused("no activations were measured"):
        Allocator(costs=costs_of(), activations=True)
    lost = [
        replace(
            one,
            formats={form: replace(cost, divergence=None) for form, cost in one.formats.items()},
        )
        for one in costs_of().tensors
    ]
    with refused("fewer bits in at_least, or measure smaller formats"):
        Allocator(costs=costs_of(), at_least={"*": 4}).run(Budget(bits=3))
    with refused('a: the costs have no divergence in any format.*an estimate has "second" alone'):
        Allocator(costs=replace(costs_of(), tensors=tuple(lost))).run(Budget(bits=4))


def llama(vocabulary: int = 96) -> nn.Module:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def test_groups_are_those_of_the_converted_model():
    model = llama()
    before = {name: type(module) for name, module in model.named_modules()}
    found = groups_of(model, minimum_width=16)
    assert {name: type(module) for name, module in model.named_modules()} == before
    layer = "model.layers.0."
    joined = tuple(f"{layer}self_attn.{one}_proj.weight" for one in "qkv")
    assert joined in found.weights and joined in found.inputs
    fed = tuple(f"{layer}mlp.{one}_proj.weight" for one in ("gate", "up"))
    assert fed in found.inputs and (f"{layer}mlp.down_proj.weight",) in found.weights
    head = ("lm_head.weight",)
    odd = llama(vocabulary=90)  # no multiple of 16, which int4 wants
    assert head in groups_of(odd, ["int8", "int3/row"], minimum_width=16).weights
    assert head not in groups_of(odd, ["int8", "int4"], minimum_width=16).weights
    meta = groups_of(copy.deepcopy(model).to("meta"), minimum_width=16)
    assert meta == found


def test_an_allocation_converts_a_model():
    """From measured costs to a model, whose weights have the formats."""
    model, words = llama(), torch.randint(96, (4, 12), generator=torch.Generator().manual_seed(2))

    def loss(model, batch):
        logits = model(batch).logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum")
        return total, float(len(logits)), logits

    groups = groups_of(model, minimum_width=16)
    formats = ["int8/row", "int4/row", "int2/row"]
    costs = sensitivity(model, loss, [words], formats=formats, activations=False)
    search = Allocator(costs=costs, groups=groups, at_least={"*layers.1.mlp.down*": 8})
    found = search.run(Budget(bits=4.0))
    assert found.unrounded == ("model.embed_tokens.weight",) and not found.unmeasured
    report = lsq.convert(model, QuantConfig(weight_format=found.weight_format), minimum_width=16)
    assert report.converted
    assert math.isfinite(model(words, labels=words).loss)
    partly = replace(costs, tensors=tuple(one for one in costs.tensors if "mlp" in one.name))
    some = Allocator(costs=partly, groups=groups).run(Budget(bits=4.0))
    assert "lm_head.weight" in some.unmeasured
    lsq.convert(llama(), QuantConfig(weight_format=some.weight_format), minimum_width=16)
    # the products of queries, keys and values are one
    partly = replace(costs, tensors=tuple(one for one in costs.tensors if "k_proj" not in one.name))
    some = Allocator(costs=partly, groups=groups).run(Budget(bits=4.0))
    assert sum("self_attn" in name for name in some.unmeasured) == 6
    lsq.convert(llama(), QuantConfig(weight_format=some.weight_format), minimum_width=16)


def test_tables_name_each_weight():
    found = Allocator(costs=costs_of(), groups=of_weights(("a", "b"), ("c",))).run(Budget(bits=3.0))
    lines = found.table("github").splitlines()
    assert "a, b" in lines[2] and lines[-1].split("|")[1].strip() == "all"
    assert found.unrounded == ("d", "e", "f")
