"""`lsq doctor`: what it finds, says and advises."""

import dataclasses
import json
import re

import pytest
import torch

import lsq
from lsq.commands import doctor

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
    monkeypatch.setattr(
        doctor.gemm, "untuned_product", lambda a, b: (a.float() @ b.float().t()).int()
    )
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


def test_text_names_everything(found):
    shown = doctor.text(found)
    library = found.host_library or "plain"
    for part in (
        found.cpu,
        library,
        doctor.kernel_name(),
        found.packages["torch"],
        *doctor.REQUIRED,
    ):
        assert part in shown


@pytest.mark.parametrize(
    "fault, said, path",
    [
        (None, "(used)", "GPU: matrix products by cuBLASLt"),
        ("it is too old", "(NOT USED, see below)", "CPU: matrix"),
    ],
)
def test_text_says_whether_a_gpu_is_used(found, fault, said, path):
    shown = doctor.text(
        dataclasses.replace(found, gpus=("Example GPU, sm_90, 80 GiB",), gpu_fault=fault)
    )
    assert f"Example GPU, sm_90, 80 GiB {said}" in shown and re.search(rf"int8 path +{path}", shown)
    assert ("* The GPU cannot be used: it is too old" in shown) is (fault is not None)


@pytest.fixture
def sound(found) -> doctor.Report:
    """A report that leaves nothing to be done."""
    return dataclasses.replace(
        found,
        product=dataclasses.replace(
            found.product, exact=True, int8_milliseconds=1.0, float32_milliseconds=4.0
        ),
        gpus=(),
        host_library="C++ host library, AVX2",
        packages=GOOD_PACKAGES,
        cpu_features=("AVX2", "AVX-512 VNNI"),
        faults={},
    )


def test_advice_is_empty_when_all_is_well(sound):
    assert sound.advice == () and sound.healthy
    assert "Nothing to do." in doctor.text(sound)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host_library": None}, "apt install g++"),
        ({"packages": GOOD_PACKAGES | {"safetensors": None}}, "pip install safetensors"),
        ({"cpu_features": ("AVX2",)}, "no int8 dot-product instructions"),
        (
            {"product": SLOW},
            "int8 products take 1.5 times as long as those of float32 here. Run this again",
        ),
        (
            {"faults": {"launcher": "libruntime.so is damaged"}},
            "The launcher cannot be used: libruntime.so is damaged",
        ),
    ],
)
def test_advice(sound, change, words):
    (advice,) = dataclasses.replace(sound, **change).advice
    assert words in advice


def test_how_fast_the_cpu_is_does_not_matter_beside_a_gpu(sound):
    assert (
        dataclasses.replace(sound, product=SLOW, gpus=("Example GPU",), gpu_fault=None).advice == ()
    )


def test_extras_are_listed(sound):
    packages = GOOD_PACKAGES | {
        "transformers": "5.1",
        "uvicorn": "0.30",
        "starlette": "1.0",
        "prometheus-client": "2",
    }
    shown = doctor.text(dataclasses.replace(sound, packages=packages))
    for line in (
        r"extra fairseq +not installed: fairseq-fixed \(for training in fairseq\)",
        r"extra huggingface +transformers 5.1; not installed: accelerate \(for models of Hugging"
        r" Face\)",
        r"extra serve +uvicorn 0.30, starlette 1.0, prometheus-client 2 \(for translations over"
        r" HTTP, `lsq serve`\)",
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
    without = dataclasses.replace(found, gpus=(), cuda=cuda)
    assert re.search(
        rf"^GPU +none that torch can use .*{words}", doctor.text(without), re.MULTILINE
    )


def test_run_prints_text_or_json(found, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "report", lambda: found)
    assert doctor.run([]) == (0 if found.healthy else 1)
    assert capsys.readouterr().out == doctor.text(found) + "\n"
    doctor.run(["--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["cpu"] == found.cpu and printed["product"]["exact"] == found.product.exact
    assert printed["healthy"] == found.healthy


def test_run_fails_when_a_package_is_missing(found, monkeypatch, capsys):
    broken = dataclasses.replace(found, packages=found.packages | {"numpy": None})
    monkeypatch.setattr(doctor, "report", lambda: broken)
    assert doctor.run([]) == 1
    assert "MISSING" in capsys.readouterr().out


@pytest.fixture
def stale(monkeypatch, tmp_path):
    """The C++ sources are no longer those that the libraries were built from."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "later.cpp").write_text("// another signature")
    monkeypatch.setattr(doctor.loader.sources.sources, "FOLDER", tmp_path)
    doctor.loader.library.cache_clear()
    yield
    doctor.loader.library.cache_clear()


def test_a_stale_library_is_reported_with_its_remedy(stale, capsys):
    assert doctor.run([]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"C\+\+ library +UNUSABLE", printed)
    assert re.search(
        r"\* The C\+\+ library cannot be used: .* was built from other .*make library", printed
    )
    assert "The C++ library is missing" not in printed


def test_names_and_values_stand_apart(found):
    packages = dict.fromkeys(found.packages, "13.5.37")
    shown = doctor.text(dataclasses.replace(found, packages=packages, cores=1, threads=1))
    for name in doctor.REQUIRED:
        assert re.search(rf"^{name} +13\.5\.37$", shown, re.MULTILINE)
    assert ", 1 core, 1 torch thread\n" in shown
    assert ", 2 cores, 3 torch threads\n" in doctor.text(
        dataclasses.replace(found, cores=2, threads=3)
    )
