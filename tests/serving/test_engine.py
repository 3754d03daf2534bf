"""Engine: what the modules compute, word by word, whoever goes on from whom, on every library and
any number of threads."""

import random

import pytest
import torch
from torch.testing import assert_close

from lsq.layers.blocks import PackedSequences
from lsq.models.sparsity import choose
from lsq.native import loader, tiles
from lsq.native.sources import load as load_library
from lsq.ops.packed_project import PackedProject
from lsq.ops.project import Project
from lsq.ops.sparse_project import MOST_ROWS, SparseProject
from lsq.run.backends import backend
from lsq.serving.decoding_model import model_of
from lsq.serving.engine import Engine, Preparation, filled
from lsq.serving.step_programs import encoder_program
from tests.sampling import first
from tests.serving.models import EOS, MIX, PADDING, WHOLE_MIX, batch, small_model

TIME = 8
LEVELS = [
    level
    for level, needed in loader._REQUIRED.items()
    if needed <= loader.cpu_features() and (loader._FOLDER / f"libcpu_{level}.so").exists()
]
GATED = {"activation": "silu", "gated": True, "bias": False}
VARIANTS = [
    {},
    {"encoder_layers": 0, "tied": False},
    {"pre_norm": True, "shared": False, "embedding": {"layer_norm": True}},
    {"quant": {"weight_format": "int4"}, "encoder_layers": 1},
    {"activation": "gelu", "decoder_layers": 3},
    {"embedding": {"positions": "learned", "scale": 1.0}},
    {"quant": {"weight_granularity": "tensor", "bits": 5}},
    {"encoder_layers": 0, "pre_norm": True, "words": 50},
    GATED,
    GATED | {"quant": {"weight_format": "int4"}},
    GATED | {"quant": {"clips": "absmax", "bits": 7}},
    {"activation": "squared_relu", "encoder_layers": 0},
    {"quant": {"weight_format": "ternary/tensor"}},
    GATED | {"quant": {"weight_format": "int3/tensor"}},
    {"quant": {"weight_format": "int4/row"}, "encoder_layers": 0, "tied": False},
    {"quant": {"weight_format": "fp4-e2m1/row"}},
    {"quant": {"weight_format": "log3.0/tensor"}, "shared": False},
    {"quant": {"weight_format": MIX}, "shared": False},
    GATED | {"quant": {"weight_format": MIX, "clips": "learned"}, "encoder_layers": 0},
    {
        "quant": {
            "weight_format": WHOLE_MIX,
            "gradient_format": "int8,*fc2*=float32,decoder.layers.0.*=nvfp4",
        },
        "tied": False,
        "pre_norm": True,
    },
]


def sentences(source):
    return [row[row != PADDING] for row in source]


def hypotheses(count, words=37, seed=3, time=TIME):
    found = torch.randint(4, words, (count, time), generator=torch.Generator().manual_seed(seed))
    found[:, 0] = EOS
    return found


def all_steps(engine: Engine, source, target):
    """Log-probabilities [R, T, V] of what follows each word of the targets."""
    rows, steps = target.shape
    engine.begin(sentences(source), rows=rows, steps=steps)
    found = [engine.step_all(target[:, step], torch.arange(rows)) for step in range(steps)]
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_steps_are_those_of_the_modules(options, name):
    module, words = small_model(**options), options.get("words", 37)
    engine = Engine(model_of(module), backend(name))
    assert (engine.words, engine.longest) == (words, 64)
    source, target = batch(words), hypotheses(3, words)
    found = all_steps(engine, source, target)
    assert_close(found, module(source, target).log_softmax(2), rtol=0, atol=2e-5)


def test_a_model_that_has_just_stepped_is_rounded_under_its_new_weights():
    module = small_model()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    source, target = batch(), hypotheses(3, time=1)
    found = all_steps(Engine(model_of(module)), source, target)
    assert_close(found, module(source, target).log_softmax(2), rtol=0, atol=2e-5)


def test_hypotheses_may_go_on_from_any_other():
    """Rows fork, swap, die, and finish; the engine is asked for the best words alone."""
    module = small_model()
    engine, source = Engine(model_of(module)), batch()
    engine.begin(sentences(source), rows=6, steps=TIME)
    chance = torch.Generator().manual_seed(5)
    history, of = torch.full((3, 1), EOS), torch.arange(3)
    parents = torch.arange(3)
    for rows in (6, 6, 5, 3, 3, 1, 2):
        asked = torch.randint(0, 37, (len(history), 2), generator=chance)
        found = engine.step(history[:, -1], parents, top=5, wanted=asked)
        expected = module(source[of], history)[:, -1].log_softmax(1)
        best = expected.topk(5)
        assert torch.equal(found.words, best.indices)
        assert_close(found.log_probabilities, best.values, rtol=0, atol=2e-5)
        assert_close(found.wanted, expected.gather(1, asked), rtol=0, atol=2e-5)
        parents = torch.randint(0, len(history), (rows,), generator=chance)
        chosen = found.words[parents, torch.randint(0, 5, (rows,), generator=chance)]
        history, of = torch.cat([history[parents], chosen[:, None]], dim=1), of[parents]


def test_a_new_batch_forgets_the_one_before():
    model = model_of(small_model())
    engine = Engine(model)
    for lengths in ((4, 5), (30, 2, 17, 9, 9), (3,)):
        source, target = batch(lengths=lengths), hypotheses(len(lengths), time=3)
        own, fresh = (all_steps(each, source, target) for each in (engine, Engine(model)))
        assert torch.equal(own, fresh)


def test_many_rows():
    module = small_model(encoder_layers=1, decoder_layers=1)
    engine, source = Engine(model_of(module)), batch()
    engine.begin(sentences(source), rows=75, steps=2)
    of, history = torch.arange(75) % 3, hypotheses(75)
    engine.step(history[:, 0], of, top=1)
    found = engine.step_all(history[:, 1], torch.arange(75))
    expected = module(source[of], history[:, :2])[:, -1].log_softmax(1)
    assert_close(found, expected, rtol=0, atol=2e-5)
    sizes = [filled(rows) for rows in range(1, 513)]  # few sizes, to which rows are filled up
    assert all(size >= rows for rows, size in enumerate(sizes, 1)) and len(set(sizes)) == 17


def test_what_cannot_be_is_refused():
    engine = Engine(model_of(small_model()))
    source, every = sentences(batch()), torch.arange(3)
    for sources, rows, steps, words in [
        ([], 1, 1, "given 0 sentences"),
        (source, 0, 1, "0 rows"),
        (source, 3, 65, "at most 64 steps"),
        ([torch.ones(65, dtype=torch.int64)], 1, 1, "split long ones"),
        ([torch.tensor([37])], 1, 1, "from 0 to 36"),
        ([torch.ones(2)], 1, 1, "must be int64"),
    ]:
        with pytest.raises(ValueError, match=words):
            engine.begin(sources, rows=rows, steps=steps)
    engine.begin(source, rows=3, steps=1)
    for words, parents, top, message in [
        (every, every, 0, "top is 0"),
        (every, every, 38, "top is 38"),
        (every + 35, every, 1, "words lie between"),
        (every, every + 1, 1, "parents lie between 1 and 3"),
        (every[:2], every, 1, "given 2 words and 3 parents"),
        (torch.arange(4), torch.arange(4) % 3, 1, "from 1 to 3, the rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.step(words, parents, top=top)
    engine.step(every, every, top=1)
    with pytest.raises(ValueError, match="1 steps were taken"):
        engine.step(every, every, top=1)


def test_inference_mode_may_come_and_go():
    engine, found = Engine(model_of(small_model())), []
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            found.append(all_steps(engine, batch(), hypotheses(3, time=1)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_memory_depends_on_the_largest_batch_alone():
    engine, chance = Engine(model_of(small_model())), random.Random(1)

    def run(rows: int) -> int:
        """Take two steps; return the bytes that are kept."""
        engine.begin(sentences(batch(lengths=[5] * rows)), rows=rows, steps=2)
        words, parents = torch.full((rows,), EOS), torch.arange(rows)
        engine.step_all(words, parents)
        engine.step(words, parents, top=chance.randint(1, 30))
        kept = sum(tensor.nbytes for tensor in engine._tensors.values())
        return engine._preparation.blocks.bytes + kept

    before = run(70)
    assert max(run(chance.randint(1, 70)) for _ in range(60)) <= 1.5 * before


def test_memory_stays_while_anything_is_prepared_on_it(monkeypatch):
    """Ctrl-C may come between any two lines."""
    engine, source = Engine(model_of(small_model())), torch.tensor([5, EOS])
    engine.begin([source], rows=1, steps=2)
    engine.step(torch.tensor([EOS]), torch.tensor([0]), top=1)
    before = dict(engine._tensors)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._runs, "clear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.begin([source] * 8, rows=8, steps=40)
    assert all(engine._tensors[name] is tensor for name, tensor in before.items())


def drawn(chance: random.Random) -> dict:
    """Options of `small_model`."""
    heads = chance.choice([1, 2, 3, 4])
    return {
        "encoder_layers": chance.choice([0, 1, 2, 3]),
        "decoder_layers": chance.choice([1, 2]),
        "words": chance.randint(20, 90),
        "heads": heads,
        "hidden": 16 * heads * chance.choice([1, 2]),
        "feed_forward": 16 * chance.randint(1, 9),
        "activation": chance.choice(["relu", "gelu"]),
        "pre_norm": chance.random() < 0.5,
        "norm": chance.choice(["layer", "layer", "rms"]),
        "tied": chance.random() < 0.5,
        "shared": chance.random() < 0.5,
        "embedding": {
            "positions": chance.choice(["sinusoidal", "learned"]),
            "layer_norm": chance.random() < 0.3,
            "scale": chance.choice([None, 1.0]),
        },
        "quant": {
            "weight_format": chance.choice(["int8", "int8", "int4"]),
            "weight_granularity": chance.choice(["channel", "tensor"]),
            "bits": chance.choice([8, 8, 6]),
        },
    }


@pytest.mark.parametrize("seed", first(range(40), 0, 10))
def test_any_shape_on_any_library(seed, monkeypatch, request):
    chance = random.Random(seed)
    options, before = drawn(chance), torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    request.addfinalizer(tiles.usable.cache_clear)  # the instructions of the last library
    lengths = [chance.randint(2, 40) for _ in range(chance.choice([1, 3, 37]))]
    source = batch(options["words"], lengths, seed)
    target = hypotheses(len(lengths), options["words"], seed, time=5)
    for level in LEVELS:
        library = load_library(loader._FOLDER / f"libcpu_{level}.so", "cpu")
        monkeypatch.setattr(loader, "library", lambda library=library: library)
        tiles.usable.cache_clear()
        torch.set_num_threads(chance.choice([1, 2, 3]))
        module = small_model(**options)
        found = all_steps(Engine(model_of(module)), source, target)
        # where sums are added up in another order, a code that lies on a border may differ
        differences = (found - module(source, target).log_softmax(2)).abs().amax(2)
        # a code of 6 bits is four times as far from the next
        largest = 0.1 if options["quant"]["bits"] == 8 else 0.4
        assert differences.median() < 2e-5 and differences.max() < largest, (level, options)


def test_weights_are_packed_once_and_temporary_tensors_share_memory():
    model, cpu = model_of(small_model(encoder_layers=4)), backend("cpu")
    preparation = Preparation(model, cpu)
    program = encoder_program(model.architecture, PackedSequences(rows=16, count=2), cpu)
    inputs = {
        one.name: cpu.allocate(one.shape, one.dtype)
        for one in program.inputs
        if one.name in ("tokens", "positions", "cu_seqlens")
    }
    found = [preparation.calls(program, inputs) for _ in range(2)]
    (first, tensors), (second, _) = found
    packed = [
        [call.weight for call, _ in calls if isinstance(call, PackedProject)]
        for calls in (first, second)
    ]
    assert len(packed[0]) == 4 * 4 + 2 and not any(isinstance(call, Project) for call, _ in first)
    assert all(one.tiles is other.tiles for one, other in zip(*packed, strict=True))
    temporary = [tensors[virtual] for virtual in tensors if virtual.role == "temporary"]
    assert len({one.untyped_storage().data_ptr() for one in temporary}) < len(temporary) / 2


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        ("ternary/row", 2),
        ("int3/tensor", 3),
        ("int4/row", 4),
        ("fp4-e2m1/row", 4),
        ("int6/row", 8),
    ],
)
def test_narrow_weights_are_packed_in_their_bits(form, bits):
    model = model_of(small_model(quant={"weight_format": form}))
    name = next(name for name in model.tensors if name.endswith(".codes"))
    codes = model.tensors[name]
    packed = Preparation(model, backend("cpu")).weight(name.removesuffix(".codes"), codes.shape[1])
    assert packed.bits == bits and torch.equal(packed.codes(), codes)
    if bits < 8:  # 144 outputs become 160, and 48 inputs 64 if the width is odd
        assert packed.tiles.numel() == 160 * (64 if bits % 2 else 48) * bits // 8


def test_each_weight_of_a_mix_is_packed_in_its_bits():
    model = model_of(small_model(quant={"weight_format": MIX}))
    preparation = Preparation(model, backend("cpu"))
    for name, inner, bits in (
        ("decoder.layers.1.feed_forward.fc2_weight", 96, 8),
        ("encoder.layers.0.self_attn.qkv_weight", 48, 3),
        ("decoder.layers.0.feed_forward.fc1_weight", 48, 2),
        ("encoder.layers.1.feed_forward.fc1_weight", 48, 4),
    ):
        packed = preparation.weight(name, inner)
        assert packed.bits == bits and torch.equal(packed.codes(), model.codes(name, inner)), name


def test_sparse_weights_are_packed_as_such():
    model = model_of(small_model())
    first, second, *_ = (name for name in model.tensors if name.endswith(".codes"))
    codes = model.tensors[first]
    codes *= choose(codes.int().abs())
    preparation = Preparation(model, backend("cpu"))
    packed, other = (
        preparation.weight(name.removesuffix(".codes"), model.tensors[name].shape[1])
        for name in (first, second)
    )
    assert packed.sparse == tiles.vectorised() and torch.equal(packed.codes(), codes)
    assert not other.sparse


def test_few_rows_read_sparse_weights_where_none_are_packed():
    model, place = model_of(small_model(encoder_layers=1)), backend("reference")
    names = (name for name in model.tensors if name.endswith("1_weight.codes"))
    sparse = [model.tensors[name] for name in names if name.startswith("encoder")]
    for codes in sparse:
        codes *= choose(codes.int().abs())
    preparation = Preparation(model, place)
    for rows, wanted in ((MOST_ROWS, len(sparse)), (MOST_ROWS + 1, 0)):
        program = encoder_program(model.architecture, PackedSequences(rows=rows, count=2), place)
        inputs = {one.name: torch.zeros(one.shape, dtype=one.dtype) for one in program.inputs}
        calls, _ = preparation.calls(program, inputs)
        assert sum(isinstance(call, SparseProject) for call, _ in calls) == wanted, rows
    assert sparse
