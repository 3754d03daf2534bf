"""Times of products are kept in a file, and measured where it lacks them. None is compared."""

import json
import math

import pytest
import torch

from lsq.config import QuantConfig
from lsq.native import tiles
from lsq.ops.packed_weight import PackedWeight
from lsq.quant.numbers import NUMBER_FORMATS, PRESETS
from lsq.serving.decoding_model import model_of
from lsq.serving.engine import Engine
from lsq.serving.stored_codes import format_of
from lsq.study import product_times as module
from lsq.study.product_times import Entry, Product, default_path, packed_as, product_times
from tests.ops.compare import refused
from tests.serving.models import small_model

FORMS = ("int8", "int4", "int2/row", "int6/row")
WANTED = [Product(form=form, rows=r, outputs=400, inputs=500) for form in FORMS for r in (1, 3)]
WANTED += [Product(form="ternary/row", rows=1, outputs=333, inputs=777)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "ROUNDS", 2)
    monkeypatch.setattr(module, "SECONDS", 0.0)


@pytest.fixture
def measured(monkeypatch) -> list[Product]:
    """What is measured, in order."""
    found, before = [], module._measured

    def measure(products, megabytes, memory):
        found.extend(products)
        return before(products, megabytes, memory)

    monkeypatch.setattr(module, "_measured", measure)
    return found


def test_every_product_is_measured_once(measured):
    told = []
    times = product_times(WANTED * 2, megabytes=1, progress=lambda *given: told.append(given))
    assert sorted(measured, key=str) == sorted(WANTED, key=str)
    assert told == [(1, 9), (9, 9)]
    found = [times.milliseconds(one.form, one.rows, one.outputs, one.inputs) for one in WANTED]
    assert all(each > 0 and math.isfinite(each) for each in found)
    again = product_times(reversed(WANTED), megabytes=1)
    assert again == times and len(measured) == len(WANTED)


def test_products_that_lack_are_measured(measured):
    few = product_times(WANTED[:3], megabytes=1)
    measured.clear()
    times = product_times(WANTED, megabytes=1)
    assert len(measured) == len(WANTED) - 3 and not set(measured) & set(WANTED[:3])
    assert all(times.times[one] == few.times[one] for one in WANTED[:3])


def test_megabytes_have_times_of_their_own(measured):
    product_times(WANTED[:1], megabytes=1)
    product_times(WANTED[:1], megabytes=2)
    product_times(WANTED[:1], megabytes=0.4)  # the least is 1
    assert measured == 2 * WANTED[:1]
    assert sorted(entry.megabytes for entry in module.read(default_path())) == [1, 2]


def test_an_interrupted_measurement_goes_on(measured):
    def stop(done, all):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        product_times(WANTED, megabytes=1, progress=stop)
    before = list(measured)
    assert 0 < len(before) < len(WANTED)
    measured.clear()
    product_times(WANTED, megabytes=1)
    assert sorted(before + measured, key=str) == sorted(WANTED, key=str)


def test_a_file_that_is_named(tmp_path, measured):
    path = tmp_path / "new" / "times.json"
    times = product_times(WANTED[:2], megabytes=1, path=path)
    assert not default_path().exists()
    entries = [Entry(**vars(one), megabytes=1, milliseconds=t) for one, t in times.times.items()]
    assert module.read(path) == entries
    product_times([], megabytes=1, path=path)
    assert module.read(path) == entries and len(measured) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: file.update(processor="another"), "processor is 'another'; here it is"),
        (lambda file: file.update(instructions="mmx"), "instructions is 'mmx'; here it is"),
        (lambda file: file.update(threads=65), "threads is 65; here it is"),
        (lambda file: file.update(library=1), "library is 1; here it is"),
        (lambda file: file.update(format=2), "format is 2; here it is 1"),
        (lambda file: file.pop("threads"), "has no field 'threads'"),
        (lambda file: file.update(entries={}), "entries is a dict; it must be a list"),
        (lambda file: file["entries"][0].update(rows=0), r"entries\[0\].rows is 0"),
        (lambda file: file["entries"][0].update(form=3), r"entries\[0\].form is 3"),
        (lambda file: file["entries"][0].update(milliseconds=-1), "milliseconds is -1"),
        (lambda file: file["entries"][0].update(milliseconds="1"), "milliseconds is '1'"),
        (lambda file: file["entries"][0].update(more=1), "unknown field 'more'"),
    ],
)
def test_other_files_are_named_and_written_anew(change, reason, measured, caplog):
    product_times(WANTED[:2], megabytes=1)
    path = default_path()
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with refused(f"{reason}.*delete the file"):
        module.read(path)
    measured.clear()
    product_times(WANTED[:1], megabytes=1)
    assert measured == WANTED[:1] and len(module.read(path)) == 1
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("not used: ") and str(path) in said


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"format": NaN}'])
def test_what_is_no_json_is_written_anew(content, measured):
    default_path().parent.mkdir(parents=True)
    default_path().write_bytes(content)
    product_times(WANTED[:1], megabytes=1)
    assert measured == WANTED[:1] and len(module.read(default_path())) == 1


def test_each_number_of_threads_has_a_file(measured):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            product_times(WANTED[:1], megabytes=1)
    finally:
        torch.set_num_threads(before)
    assert len(measured) == 2 and len(list(default_path().parent.iterdir())) == 2


@pytest.mark.parametrize(
    "form", ["nvfp4", "int4/group32", "float32", "nf4/row", "int8,*fc2*=int4", "int8,*fc2*=nvfp4"]
)
def test_formats_without_products_of_codes_are_refused(form, measured):
    wanted = [*WANTED, Product(form=form, rows=1, outputs=2, inputs=3)]
    with refused("as codes; allowed are 'int8', 'int4'") as error:
        product_times(wanted, megabytes=1)
    assert repr(form) in str(error.value) and not measured


def test_unknown_formats_are_refused():
    with refused("weight_format is 'int9/row'"):
        packed_as("int9/row", 2, 3)


def test_formats_are_those_that_models_keep_as_codes():
    for form in (*(f"{number}/row" for number in NUMBER_FORMATS), *PRESETS):
        try:
            fits = packed_as(form, 2, 3) is not None
        except ValueError:
            fits = False
        assert fits == (format_of(QuantConfig(weight_format=form)) is not None), form


@pytest.mark.parametrize(
    "form", ["int8", "int4", "int3/tensor", "int5/row", "ternary/row", "fp4-e2m1/row"]
)
def test_weights_are_packed_as_an_engine_packs_them(form):
    model = model_of(small_model(encoder_layers=0, decoder_layers=1, quant={"weight_format": form}))
    held = Engine(model)._projection["packed_weight"]
    made = packed_as(form, held.columns, held.inner)
    for name in PackedWeight.__annotations__:
        value, ours = getattr(held, name), getattr(made, name)
        if isinstance(value, torch.Tensor):
            assert ours.shape == value.shape, name
        else:
            assert ours == value, name
    assert (held.table is None) == (made.table is None)
    assert held.table is None or torch.equal(held.table, made.table)


def test_a_product_that_was_not_measured_is_named():
    times = product_times(WANTED[:1], megabytes=1)
    with refused(r"no time of 2 rows times a weight \[400, 500\] in int8; name this product"):
        times.milliseconds("int8", 2, 400, 500)


@pytest.mark.parametrize("megabytes", [-1, math.nan, math.inf, "8", True])
def test_wrong_megabytes(megabytes):
    with refused("megabytes is .*; it must be a finite number"):
        product_times(WANTED, megabytes=megabytes)


@pytest.mark.parametrize(
    "field", [{"rows": 0}, {"outputs": 1.5}, {"inputs": True}, {"form": ""}, {"form": None}]
)
def test_wrong_products(field):
    with refused(f"{next(iter(field))} is "):
        Product(**{"form": "int8", "rows": 1, "outputs": 2, "inputs": 3} | field)


def test_copies_fill_the_memory_one_after_another(monkeypatch):
    weight, memory = packed_as("int3/row", 100, 130), module._memory(1)
    copies = module._copies(weight, 1, memory)
    begins = [each.tiles.data_ptr() for each in copies]
    steps = {after - before for before, after in zip(begins, begins[1:], strict=False)}
    size = weight.tiles.nbytes
    assert all(begin % tiles.ALIGNMENT == 0 for begin in begins)
    assert len(steps) == 1 and size <= min(steps) < size + tiles.ALIGNMENT
    assert len(copies) * min(steps) == pytest.approx(10**6, abs=min(steps))
    end = memory.data_ptr() + memory.nbytes
    assert begins[0] >= memory.data_ptr() and begins[-1] + size <= end


def test_a_weight_beyond_the_memory_is_used_as_it_is():
    weight, memory = packed_as("int8", 3000, 1000), module._memory(1)
    (only,) = module._copies(weight, 1, memory)
    assert only is weight


def test_without_the_library_it_says_so(monkeypatch):
    monkeypatch.setattr(module.loader, "available", lambda: False)
    with refused("install g\\+\\+ and reinstall lsq"):
        product_times(WANTED, megabytes=1)
