"""Where a training computes, which process it is, what is refused and what is said."""

from argparse import Namespace

import pytest
from torch.distributed.run import parse_args

from lsq.commands import launch
from lsq.commands.launch import ONE_MACHINE, check_precision, fill_in, torchrun_command
from lsq.fairseq import device as of_fairseq


@pytest.fixture
def gpus(monkeypatch):

    def gpus(count: int) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    gpus(0)
    return gpus


def options(**given) -> Namespace:
    distributed = {"world_size": None, "rank": 0, "init_method": None, "no_spawn": False}
    distributed |= {"backend": "nccl", "port": -1}
    defaults = {f"distributed_{name}": value for name, value in distributed.items()}
    defaults |= {"cpu": False, "tpu": False, "device_id": 0}
    return Namespace(**(defaults | {"lsq_device": None, "lsq_activations": None} | given))


def torchrun(rank: int, world_size: int, local_rank: int | None = None) -> dict[str, str]:
    local = rank if local_rank is None else local_rank
    numbers = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local)}
    return numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


TCP, ANOTHER = "tcp://localhost:1", {"distributed_port": 9218}
BY_HAND = {"distributed_no_spawn": True, "distributed_init_method": TCP}


@pytest.mark.parametrize(
    ("seen", "given", "environment", "size", "rank", "device", "method", "backend"),
    [
        (0, {}, torchrun(1, 2), 2, 1, 1, "lsq://", "gloo"),
        (1, {"cpu": True}, torchrun(1, 2), 2, 1, 1, "lsq://", "gloo"),
        (8, {}, torchrun(11, 16, local_rank=3), 16, 11, 3, "lsq://", "nccl"),  # second machine
        (4, {}, torchrun(0, 1), 1, 0, 0, None, "nccl"),  # trains alone
        (0, {"distributed_world_size": 2, **BY_HAND}, {}, 2, 0, 0, TCP, "gloo"),
        (0, {"cpu": True}, {}, 1, 0, 0, None, "gloo"),
        (8, {"cpu": True}, {}, 1, 0, 0, None, "gloo"),
        (1, {}, {}, 1, 0, 0, None, "nccl"),
        # fairseq's own ways to start several machines
        (8, {"distributed_world_size": 16, **ANOTHER}, {}, 16, 0, 0, None, "nccl"),
        (
            8,
            {"distributed_world_size": 16, "distributed_init_method": TCP},
            {},
            16,
            0,
            0,
            TCP,
            "nccl",
        ),
    ],
)
def test_processes(gpus, seen, given, environment, size, rank, device, method, backend):
    gpus(seen)
    args = options(**given)
    fill_in(args, environment)
    found = args.distributed_world_size, args.distributed_rank, args.device_id
    assert found == (size, rank, device)
    assert (args.distributed_init_method, args.distributed_backend) == (method, backend)
    assert torchrun_command(args, []) is None


@pytest.mark.parametrize(
    ("seen", "size", "environment", "message"),
    [
        (0, 3, torchrun(0, 2), "--distributed-world-size 3 contradicts torchrun, which started 2"),
        (0, 2, {}, "would train nothing; start 2 processes with torchrun --nproc-per-node 2"),
        (1, None, torchrun(1, 2), "sees only 1 GPUs; lower --nproc-per-node"),
    ],
)
def test_contradictions(gpus, seen, size, environment, message):
    gpus(seen)
    with pytest.raises(ValueError, match=message):
        fill_in(options(distributed_world_size=size), environment)


def test_one_process_for_each_gpu(gpus):
    gpus(2)
    args = options()
    fill_in(args, {})
    assert args.distributed_world_size == 2
    command = torchrun_command(args, ["data", "--lr", "1"])
    started = "--nproc-per-node 2 -m lsq.commands.cli train data --lr 1".split()
    assert command[3:] == [*ONE_MACHINE, *started]


def test_one_machine_needs_no_names():
    """torchrun's --standalone means localhost, which may have no address."""
    found = parse_args([*ONE_MACHINE, "script"])
    addresses = (found.rdzv_backend, found.rdzv_endpoint, found.local_addr)
    assert addresses == ("c10d", "127.0.0.1:0", "127.0.0.1") and not found.standalone


@pytest.mark.parametrize("option", ["fp16", "amp"])
def test_precision(gpus, option):
    """Advice suits the architecture: lsq's models take neither --fp16 nor --bf16."""
    given = {option: True}
    for more, message in (
        ({"arch": "transformer"}, f"--{option} needs a GPU, but PyTorch sees no GPU .*use --bf16"),
        ({"arch": "lsq_transformer_wmt_en_de"}, f"--{option} is given, but lsq_transformer_wmt"),
        ({}, f"--{option} needs a GPU, but PyTorch sees no GPU here; leave it out$"),
    ):
        with pytest.raises(ValueError, match=message):
            check_precision(options(**more, **given))
    gpus(1)
    check_precision(options(**given))
    with pytest.raises(ValueError, match=f"--{option} needs a GPU, but --cpu is given"):
        check_precision(options(cpu=True, **given))
    with pytest.raises(ValueError, match="computes in int8 and float32"):
        check_precision(options(arch="lsq_transformer_wmt_en_de", **given))
    gpus(0)
    check_precision(options(bf16=True))
    with pytest.raises(ValueError, match="--tpu is not supported"):
        check_precision(options(tpu=True))


# The device


@pytest.fixture
def gpu(gpus, monkeypatch):
    """gpu(fault): PyTorch sees one, with which that is wrong; None: it works."""

    def gpu(fault: str | None) -> None:
        gpus(1)
        for module in (launch, of_fairseq):
            monkeypatch.setattr(module, "gpu_fault", lambda: fault)

    return gpu


def chosen(ours: bool = True, **given) -> bool:
    args = options(**given)
    launch.choose_device(args, ours)
    return args.cpu


CONTRADICTION = "--lsq-device cuda: --cpu was given, too; leave one of them out"


def test_a_gpu_that_works_is_used(gpu):
    gpu(None)
    assert not chosen() and not chosen(lsq_device="cuda") and not chosen(lsq_activations="bfloat16")
    assert chosen(cpu=True) and chosen(lsq_device="cpu") and chosen(lsq_device="emulator")
    assert chosen(lsq_activations="float32", lsq_device="cpu")
    unfit = "--lsq-activations bfloat16 is for cuda and the emulator"
    for given, message in (
        ({"cpu": True, "lsq_device": "cuda"}, CONTRADICTION),
        ({"cpu": True, "lsq_activations": "bfloat16"}, unfit),
        ({"lsq_device": "cpu", "lsq_activations": "bfloat16"}, unfit),
    ):
        with pytest.raises(ValueError, match=message):
            chosen(**given)


def test_a_gpu_that_does_not_work_is_not_used_and_that_is_said(gpu, caplog):
    """Tasks of fairseq's own have no such options."""
    gpu("it is too old")
    assert chosen()
    assert "the GPU stays unused, layers compute on the CPU: it is too old" in caplog.text
    with pytest.raises(ValueError, match="--lsq-device cuda: it is too old"):
        chosen(lsq_device="cuda")
    args = Namespace(cpu=False)
    launch.choose_device(args, ours=True)
    assert args.cpu


def test_no_gpu(gpus, monkeypatch):
    assert not chosen()  # fairseq finds out by itself
    with pytest.raises(ValueError, match="--lsq-device cuda: there is no GPU 0 that PyTorch can"):
        chosen(lsq_device="cuda")

    def refuse(*arguments):
        raise RuntimeError("the C++ compiler cannot be run")

    monkeypatch.setattr(of_fairseq, "backend", refuse)
    with pytest.raises(ValueError, match="--lsq-device emulator: the C.. compiler cannot be run"):
        chosen(lsq_device="emulator")


def test_models_of_fairseq(gpu, gpus):
    gpu("it is too old")  # for lsq
    assert not chosen(ours=False) and not chosen(ours=False, lsq_device="cuda")
    assert chosen(ours=False, lsq_device="cpu") and chosen(ours=False, cpu=True)
    both = {"lsq_device": "cuda", "lsq_activations": "bfloat16"}
    words = {"--lsq-device": "cuda", "--lsq-activations": "bfloat16"}
    assert launch.device_options(options(**both)) == words and not launch.device_options(options())
    for given, message in (
        ({"lsq_device": "emulator"}, "--lsq-device emulator: only models of lsq take it"),
        (both, "--lsq-device cuda --lsq-activations bfloat16: only models of lsq"),
        ({"lsq_device": "cuda", "cpu": True}, CONTRADICTION),
    ):
        with pytest.raises(ValueError, match=message):
            chosen(ours=False, **given)
    gpus(0)
    with pytest.raises(ValueError, match="--lsq-device cuda: PyTorch sees no GPU here"):
        chosen(ours=False, lsq_device="cuda")
    assert not chosen(ours=False)
