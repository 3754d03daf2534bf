"""`lsq doctor`: what it finds, says and advises."""

import dataclasses
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
FAST = dataclasses.replace(SLOW, int8_milliseconds=0.5)
SOUND = doctor.Report(
    cpu="Example CPU",
    cores=2,
    threads=3,
    product=FAST,
    gpus=(),
    cuda=None,
    gpu_fault="torch sees no GPU",
    host_library="C++ host library, AVX2",
    packages=GOOD_PACKAGES,
    cpu_features=("AVX2", "AVX-512 VNNI"),
    faults={},
)


def changed(**changes) -> doctor.Report:
    return dataclasses.replace(SOUND, **changes)


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


def saturating(a, b):
    """As CPUs without int8 dot products: one side shifted to unsigned, pairs added in 16 bits."""
    shifted, signed = a.int()[:, None] + 128, b.int()[None]
    pairs = shifted[..., ::2] * signed[..., ::2] + shifted[..., 1::2] * signed[..., 1::2]
    return (pairs.clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * signed.sum(-1)).int()


def test_products_are_exact_here_and_wrong_ones_are_noticed(monkeypatch):
    checked = doctor.check_product((41, 48, 2048), repeats=1)
    assert checked.exact and checked.speedup > 0
    in_float32 = lambda a, b: (a.float() @ b.float().t()).int()  # noqa: E731
    for product, shape in ((in_float32, (48, 48, 2048)), (saturating, (16, 16, 64))):
        monkeypatch.setattr(doctor.gemm, "untuned_product", product)
        assert not doctor.check_product(shape, repeats=1).exact


def test_report_of_this_machine(lsq):
    found = doctor.report()
    assert found.cores >= 1 and found.threads >= 1
    # which may say +cu130 where the package does not
    assert torch.__version__.startswith(found.packages["torch"])
    assert found.healthy == all(found.packages[name] for name in doctor.REQUIRED)
    status, shown, said = lsq("doctor")
    assert (status, said) == (0 if found.healthy else 1, "")
    for part in (found.cpu, found.host_library or "plain", doctor.kernel_name(), *doctor.REQUIRED):
        assert part in shown


def test_text(monkeypatch):
    monkeypatch.setattr(doctor.tiles, "usable", lambda: ("amx", "plain"))
    there = {"transformers": "5.1", "uvicorn": "0.30", "starlette": "1.0", "prometheus-client": "2"}
    shown = doctor.text(changed(packages=GOOD_PACKAGES | there))
    for line in (
        rf"lsq +{re.escape(lsq.__version__)}, Python 3.*",
        "CPU +Example CPU; cores: 2, torch threads: 3",
        "GPU +none that torch can use .it is built for the CPU alone.",
        r"int8 path +CPU: matrix products by lsq's tiles \(amx\), the loops .* by the C.. library",
        "int8 product +exact; 1 x 1 x 1 in 0.50 ms, 4.0 times as fast as float32",
        "safetensors +1.0",
        r"extra fairseq +not installed: fairseq-fixed \(for training in fairseq\)",
        r"extra huggingface +transformers 5.1; not installed: accelerate \(for models of Hug.*",
        r"extra serve +uvicorn 0.30, starlette 1.0, prometheus-client 2 \(for translations over .*",
        "Nothing to do.",
    ):
        assert re.search(f"^{line}$", shown, re.MULTILINE), (line, shown)
    assert "built for CUDA 13.0" in doctor.text(changed(cuda="13.0"))
    for usable, named in (((), "oneDNN"), (("plain",), "tiles (plain)")):
        monkeypatch.setattr(doctor.tiles, "usable", lambda usable=usable: usable)
        assert named in doctor.text(SOUND)


GPU = "Example GPU, sm_90, 80 GiB"


@pytest.mark.parametrize(
    ("fault", "said", "path"),
    [(None, "(used)", "GPU: matrix products by cuB"), ("too old", "(NOT USED, see below)", "CPU:")],
)
def test_text_says_whether_a_gpu_is_used(fault, said, path):
    shown = doctor.text(changed(gpus=(GPU,), gpu_fault=fault))
    assert f"{GPU} {said}" in shown and re.search(rf"int8 path +{path}", shown)
    assert ("* The GPU cannot be used: too old" in shown) is (fault is not None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"host_library": None}, "apt install g++"),
        ({"packages": GOOD_PACKAGES | {"safetensors": None}}, "pip install safetensors"),
        ({"cpu_features": ("AVX2",)}, "no int8 dot-product instructions"),
        ({"product": SLOW}, "int8 products take 1.5 times as long as those of float32 here. Run"),
        ({"product": SLOW, "gpus": (GPU,), "gpu_fault": None}, None),
        ({"faults": {"launcher": "it is damaged"}}, "The launcher cannot be used: it is damaged"),
    ],
)
def test_advice(change, words):
    report = changed(**change)
    assert len(report.advice) == (words is not None) and (not words or words in report.advice[0])
    assert report.healthy == (not change.keys() & {"packages", "faults"})


def test_wrong_products_come_first_and_fail(monkeypatch, lsq):
    wrong = dataclasses.replace(FAST, exact=False)
    packages = GOOD_PACKAGES | {"numpy": None}
    broken = changed(product=wrong, host_library=None, cpu_features=(), packages=packages)
    assert "do not train in int8" in broken.advice[0] and len(broken.advice) == 3
    monkeypatch.setattr(doctor, "report", lambda: broken)
    status, printed, _ = lsq("doctor")
    assert status == 1 and "MISSING" in printed and "WRONG" in printed


@pytest.fixture
def stale(monkeypatch, tmp_path):
    """The C++ sources are no longer those that the libraries were built from."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "later.cpp").write_text("// another signature")
    monkeypatch.setattr(doctor.loader.sources, "FOLDER", tmp_path)
    doctor.loader.library.cache_clear()
    yield
    doctor.loader.library.cache_clear()


def test_a_stale_library_is_reported_with_its_remedy(stale, lsq):
    status, printed, _ = lsq("doctor")
    assert status == 1 and re.search(r"C\+\+ library +UNUSABLE", printed)
    advice = r"\* The C\+\+ library cannot be used: .* was built from other .*make library"
    assert re.search(advice, printed) and "The C++ library is missing" not in printed
