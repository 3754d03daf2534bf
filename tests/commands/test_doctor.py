"""`lsq doctor`: what it finds, says and advises; every CUDA operation of training against its
reference."""

import dataclasses
import json
import re
import shutil

import pytest
import torch

import lsq
from lsq.commands import doctor
from lsq.emulator import build
from lsq.ops.rounding import Round
from lsq.ops.sums import PartialSums
from lsq.run import backends, cuda

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

GOOD_PACKAGES = dict.fromkeys(doctor.REQUIRED, "1.0") | {
    name: None for extra in doctor.EXTRAS.values() for name in extra.packages
}


SLOW = doctor.ProductCheck(
    exact=True, shape=(1, 1, 1), int8_milliseconds=3.0, float32_milliseconds=2.0
)


@pytest.fixture(scope="module")
def found() -> doctor.Report:
    return doctor.report()


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"sse2", "avx2", "avx512f", "avx512_vnni"}, ("AVX2", "AVX-512", "AVX-512 VNNI")),
        ({"asimd", "i8mm", "asimddp"}, ("Arm dot product", "Arm int8 matrix multiply")),
        (set(), ()),
    ],
)
def test_cpu_features_have_names(monkeypatch, flags, names):
    monkeypatch.setattr(doctor.processor, "cpu_features", lambda: frozenset(flags))
    assert doctor.report().cpu_features == names


def test_installed_version():
    assert doctor.installed_version("pytest") == pytest.__version__
    assert doctor.installed_version("no-such-package-of-this-name") is None


def test_product_is_exact_here():
    checked = doctor.check_product((41, 48, 2048), repeats=1)
    assert checked.exact and checked.speedup > 0


def test_product_check_notices_float32_sums(monkeypatch):
    product = lambda a, b: (a.float() @ b.float().t()).int()  # noqa: E731
    monkeypatch.setattr(doctor.gemm, "untuned_product", product)
    assert not doctor.check_product((48, 48, 2048), repeats=1).exact


def test_product_check_notices_saturation(monkeypatch):
    """CPUs without int8 dot products shift one side to unsigned and add pairs of products in 16
    bits."""

    def saturating(a, b):
        shifted, signed = a.int()[:, None] + 128, b.int()[None]
        pairs = shifted[..., ::2] * signed[..., ::2] + shifted[..., 1::2] * signed[..., 1::2]
        return pairs.clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * signed.sum(-1)

    monkeypatch.setattr(doctor.gemm, "untuned_product", lambda a, b: saturating(a, b).int())
    assert not doctor.check_product((16, 16, 64), repeats=1).exact


@pytest.mark.parametrize(
    ("usable", "named"),
    [((), "oneDNN"), (("plain",), "tiles (plain)"), (("amx", "plain"), "tiles (amx)")],
)
def test_what_multiplies_is_named(usable, named, found, monkeypatch):
    monkeypatch.setattr(doctor.tiles, "usable", lambda: usable)
    assert named in doctor.text(found)


def test_report_of_this_machine(found):
    assert found.version == lsq.__version__
    assert found.cores >= 1 and found.threads >= 1
    # which may say +cu130 where the package does not
    assert torch.__version__.startswith(found.packages["torch"])
    assert found.healthy == all(found.packages[name] for name in doctor.REQUIRED)
    shown = doctor.text(found)
    for part in (found.cpu, found.host_library or "plain", doctor.kernel_name(), *doctor.REQUIRED):
        assert part in shown


@pytest.mark.parametrize(
    "fault, said, path",
    [
        (None, "(used)", "GPU: matrix products by cuBLASLt"),
        ("it is too old", "(NOT USED, see below)", "CPU: matrix"),
    ],
)
def test_text_says_whether_a_gpu_is_used(found, fault, said, path):
    gpus = ("Example GPU, sm_90, 80 GiB",)
    shown = doctor.text(dataclasses.replace(found, gpus=gpus, gpu_fault=fault))
    assert f"Example GPU, sm_90, 80 GiB {said}" in shown and re.search(rf"int8 path +{path}", shown)
    assert ("* The GPU cannot be used: it is too old" in shown) is (fault is not None)


@pytest.fixture
def sound(found) -> doctor.Report:
    """A report that leaves nothing to be done."""
    times = {"int8_milliseconds": 1.0, "float32_milliseconds": 4.0}
    return dataclasses.replace(
        found,
        product=dataclasses.replace(found.product, exact=True, **times),
        gpus=(),
        host_library="C++ host library, AVX2",
        packages=GOOD_PACKAGES,
        cpu_features=("AVX2", "AVX-512 VNNI"),
        faults={},
    )


def test_advice_is_empty_when_all_is_well(sound):
    assert sound.advice == () and sound.healthy
    assert "Nothing to do." in doctor.text(sound)


FAULTY = {"faults": {"launcher": "libruntime.so is damaged"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host_library": None}, "apt install g++"),
        ({"packages": GOOD_PACKAGES | {"safetensors": None}}, "pip install safetensors"),
        ({"cpu_features": ("AVX2",)}, "no int8 dot-product instructions"),
        ({"product": SLOW}, "int8 products take 1.5 times as long as those of float32 here. Run"),
        (FAULTY, "The launcher cannot be used: libruntime.so is damaged"),
    ],
)
def test_advice(sound, change, words):
    (advice,) = dataclasses.replace(sound, **change).advice
    assert words in advice


def test_how_fast_the_cpu_is_does_not_matter_beside_a_gpu(sound):
    on_gpu = dataclasses.replace(sound, product=SLOW, gpus=("Example GPU",), gpu_fault=None)
    assert on_gpu.advice == ()


def test_extras_are_listed(sound):
    there = {"transformers": "5.1", "uvicorn": "0.30", "starlette": "1.0", "prometheus-client": "2"}
    shown = doctor.text(dataclasses.replace(sound, packages=GOOD_PACKAGES | there))
    huggingface = "transformers 5.1; not installed: accelerate"
    for line in (
        r"extra fairseq +not installed: fairseq-fixed \(for training in fairseq\)",
        rf"extra huggingface +{huggingface} \(for models of Hugging Face\)",
        r"extra serve +uvicorn 0.30, starlette 1.0, prometheus-client 2 \(for translations over .*",
    ):
        assert re.search(f"^{line}$", shown, re.MULTILINE), shown


def test_wrong_products_come_first_and_fail(sound):
    wrong = dataclasses.replace(sound.product, exact=False)
    broken = dataclasses.replace(sound, product=wrong, host_library=None, cpu_features=())
    assert "do not train in int8" in broken.advice[0] and len(broken.advice) == 2
    assert not broken.healthy


@pytest.mark.parametrize(
    "cuda, words", [("13.0", "built for CUDA 13.0"), (None, "built for the CPU alone")]
)
def test_without_a_gpu_it_says_what_torch_is_built_for(found, cuda, words):
    shown = doctor.text(dataclasses.replace(found, gpus=(), cuda=cuda))
    assert re.search(rf"^GPU +none that torch can use .*{words}", shown, re.MULTILINE)


def test_run_prints_text_or_json(found, monkeypatch, lsq):
    monkeypatch.setattr(doctor, "report", lambda: found)
    assert lsq("doctor") == (0 if found.healthy else 1, doctor.text(found) + "\n", "")
    printed = json.loads(lsq("doctor", "--json")[1])
    assert printed["cpu"] == found.cpu and printed["product"]["exact"] == found.product.exact
    assert printed["healthy"] == found.healthy
    broken = dataclasses.replace(found, packages=found.packages | {"numpy": None})
    monkeypatch.setattr(doctor, "report", lambda: broken)
    status, printed, _ = lsq("doctor")
    assert status == 1 and "MISSING" in printed


@pytest.fixture
def stale(monkeypatch, tmp_path):
    """The C++ sources are no longer those that the libraries were built from."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "later.cpp").write_text("// another signature")
    monkeypatch.setattr(doctor.loader.sources.sources, "FOLDER", tmp_path)
    doctor.loader.library.cache_clear()
    yield
    doctor.loader.library.cache_clear()


def test_a_stale_library_is_reported_with_its_remedy(stale, lsq):
    status, printed, _ = lsq("doctor")
    assert status == 1 and re.search(r"C\+\+ library +UNUSABLE", printed)
    advice = r"\* The C\+\+ library cannot be used: .* was built from other .*make library"
    assert re.search(advice, printed) and "The C++ library is missing" not in printed


def test_names_and_values_stand_apart(found):
    packages = dict.fromkeys(found.packages, "13.5.37")
    shown = doctor.text(dataclasses.replace(found, packages=packages, cores=1, threads=1))
    for name in doctor.REQUIRED:
        assert re.search(rf"^{name} +13\.5\.37$", shown, re.MULTILINE)
    assert ", 1 core, 1 torch thread\n" in shown
    shown = doctor.text(dataclasses.replace(found, cores=2, threads=3))
    assert ", 2 cores, 3 torch threads\n" in shown


# The emulator


@needs_compiler
def test_every_operation_agrees(lsq):
    status, shown, _ = lsq("doctor", "--emulate")
    assert status == 0
    names = {operation.name for program in doctor.trained() for operation in program.operations}
    layers = "Project ProjectWeightGradient Attention AttentionGradient Embed RoundGradient"
    assert names >= set(layers.split()) | {"Rotate", "RotateGradient", "Gated", "GatedGradient"}
    assert names >= {"StartScales", "FinishSums"}, "the programs are those of a GPU"
    names.add("RoundWeight")
    assert all(f"\n{name} " in "\n" + shown for name in names)
    assert "DIFFERS" not in shown and "none differ from their references" in shown


@needs_compiler
def test_one_that_is_wrong_is_named(monkeypatch, lsq):
    programs = doctor.trained()
    program = next(one for one in programs if any(o.name == "Round" for o in one.operations))
    monkeypatch.setattr(Round, "cuda", lambda self: [])
    monkeypatch.setattr(doctor, "trained", lambda: [program])
    status, shown, _ = lsq("doctor", "--emulate")
    assert status == 1
    assert [line.split()[0] for line in shown.splitlines() if "DIFFERS" in line] == ["Round"]


def test_of_sums_that_are_left_in_parts_totals_are_compared():
    parts = torch.randn(2, 8)
    sums = {parts: PartialSums.of(parts, 4, (torch.empty(4),))}
    for change, same in (0.0, True), (1.0, False):
        found = torch.stack([parts[1] + change, parts[0]])
        ((one, other),) = doctor._comparable([parts], [found], [parts], sums)
        assert one.shape == (4,) and torch.allclose(one, other) == same


def test_differences():
    for found, wanted, difference in (
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([1.0, float("nan")], [1.0, 2.0], float("inf")),
    ):
        assert doctor._of_floats(torch.tensor(found), torch.tensor(wanted)) == difference
    for found, difference in (([1, 2], 0.0), ([2, 2], 1.0), ([1, 1], float("inf"))):
        codes = [torch.tensor(values, dtype=torch.int8) for values in (found, [1, 3])]
        assert doctor._of_integers(*codes) == difference


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch, lsq):
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    caches = backends._on_gpu, cuda.emulated_device, build._compiler_version
    for cached in caches:
        cached.cache_clear()
    status, _, said = lsq("doctor", "--emulate")
    assert status == 1 and said.count("\n") == 1
    assert said.startswith("lsq doctor: the C++ compiler '/nonexistent/compiler'")
    for cached in caches:
        cached.cache_clear()
