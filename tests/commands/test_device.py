"""--lsq-device: what is chosen, what is refused, and what is said."""

from argparse import Namespace

import pytest

from lsq.commands import device
from lsq.commands.device import choose
from lsq.fairseq import device as of_fairseq
from tests.commands.test_launch import gpus  # noqa: F401


@pytest.fixture
def gpu(gpus, monkeypatch):  # noqa: F811
    """gpu(fault): PyTorch sees one, with which that is wrong; None: it works."""

    def gpu(fault: str | None) -> None:
        gpus(1)
        for module in (device, of_fairseq):
            monkeypatch.setattr(module, "gpu_fault", lambda: fault)

    return gpu


def options(**given) -> Namespace:
    return Namespace(**{"cpu": False, "lsq_device": None, "lsq_activations": None, **given})


def chosen(ours: bool = True, **given) -> bool:
    """Whether fairseq is told to keep to the CPU."""
    args = options(**given)
    choose(args, ours)
    return args.cpu


def test_a_gpu_that_works_is_used(gpu):
    gpu(None)
    assert not chosen() and not chosen(lsq_device="cuda") and not chosen(lsq_activations="bfloat16")
    assert chosen(cpu=True) and chosen(lsq_device="cpu") and chosen(lsq_device="emulator")


def test_a_gpu_that_does_not_work_is_not_used_and_that_is_said(gpu, caplog):
    gpu("it is too old")
    assert (
        chosen() and "the GPU stays unused, layers compute on the CPU: it is too old" in caplog.text
    )
    with pytest.raises(ValueError, match="--lsq-device cuda: it is too old"):
        chosen(lsq_device="cuda")


def test_no_gpu(gpus):  # noqa: F811
    assert not chosen()  # fairseq finds out by itself
    with pytest.raises(
        ValueError, match="--lsq-device cuda: there is no GPU 0 that PyTorch can use"
    ):
        chosen(lsq_device="cuda")


def test_contradictions(gpu):
    gpu(None)
    with pytest.raises(
        ValueError, match="--lsq-device cuda: --cpu was given, too; leave one of them out"
    ):
        chosen(cpu=True, lsq_device="cuda")
    for given in ({"cpu": True}, {"lsq_device": "cpu"}):
        with pytest.raises(
            ValueError, match="--lsq-activations bfloat16 is for cuda and the emulator"
        ):
            chosen(lsq_activations="bfloat16", **given)
    assert chosen(lsq_activations="float32", lsq_device="cpu")


def test_no_compiler_for_the_emulator(gpus, monkeypatch):  # noqa: F811
    def refuse(*arguments):
        raise RuntimeError("the C++ compiler cannot be run")

    monkeypatch.setattr(of_fairseq, "backend", refuse)
    with pytest.raises(ValueError, match="--lsq-device emulator: the C.. compiler cannot be run"):
        chosen(lsq_device="emulator")


def test_models_of_fairseq(gpu, gpus):  # noqa: F811
    gpu("it is too old")  # for lsq
    assert not chosen(ours=False) and not chosen(ours=False, lsq_device="cuda")
    assert chosen(ours=False, lsq_device="cpu") and chosen(ours=False, cpu=True)
    with pytest.raises(ValueError, match="--lsq-device emulator: only models of lsq take it"):
        chosen(ours=False, lsq_device="emulator")
    with pytest.raises(
        ValueError, match="--lsq-device cuda --lsq-activations bfloat16: only models of lsq"
    ):
        chosen(ours=False, lsq_device="cuda", lsq_activations="bfloat16")
    with pytest.raises(ValueError, match="--lsq-device cuda: --cpu was given, too"):
        chosen(ours=False, lsq_device="cuda", cpu=True)
    gpus(0)
    with pytest.raises(ValueError, match="--lsq-device cuda: PyTorch sees no GPU here"):
        chosen(ours=False, lsq_device="cuda")
    assert not chosen(ours=False)


def test_what_another_command_is_given():
    assert device.asked(options()) == {}
    assert device.asked(options(lsq_device="emulator")) == {"--lsq-device": "emulator"}
    both = options(lsq_device="cuda", lsq_activations="float32")
    assert device.asked(both) == {"--lsq-device": "cuda", "--lsq-activations": "float32"}


def test_tasks_of_fairseq_have_no_such_options(gpu):
    gpu("it is too old")
    args = Namespace(cpu=False)
    choose(args, ours=True)
    assert args.cpu
