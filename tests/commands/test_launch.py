from argparse import Namespace

import pytest
from torch.distributed.run import parse_args

from lsq.commands.launch import ONE_MACHINE, check_precision, fill_in, torchrun_command


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n): PyTorch sees n of them."""

    def gpus(count: int) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    gpus(0)
    return gpus


def options(**given) -> Namespace:
    """What fairseq's parser makes of no options, on a machine without GPUs."""
    defaults = {
        "cpu": False,
        "tpu": False,
        "distributed_world_size": None,
        "distributed_rank": 0,
        "distributed_init_method": None,
        "distributed_no_spawn": False,
        "distributed_backend": "nccl",
        "distributed_port": -1,
        "device_id": 0,
    }
    return Namespace(**(defaults | given))


def torchrun(rank: int, world_size: int, local_rank: int | None = None) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank if local_rank is None else local_rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_torchrun_on_the_cpu(gpus):
    args = options()
    fill_in(args, torchrun(1, 2))
    assert args.distributed_world_size == 2 and args.distributed_rank == 1 and args.device_id == 1
    assert args.distributed_init_method == "lsq://" and args.distributed_no_spawn
    assert args.distributed_backend == "gloo"


def test_torchrun_on_the_second_machine_of_eight_gpus(gpus):
    gpus(8)
    args = options()
    fill_in(args, torchrun(11, 16, local_rank=3))
    assert args.distributed_world_size == 16 and args.distributed_rank == 11 and args.device_id == 3
    assert args.distributed_backend == "nccl"


def test_torchrun_with_one_process_trains_alone(gpus):
    gpus(4)
    args = options()
    fill_in(args, torchrun(0, 1))
    assert args.distributed_world_size == 1 and args.distributed_init_method is None


def test_contradiction_with_torchrun(gpus):
    with pytest.raises(
        ValueError, match="--distributed-world-size 3 contradicts torchrun, which started 2"
    ):
        fill_in(options(distributed_world_size=3), torchrun(0, 2))


def test_more_processes_than_gpus(gpus):
    gpus(1)
    with pytest.raises(ValueError, match="sees only 1 GPUs; lower --nproc-per-node"):
        fill_in(options(), torchrun(1, 2))
    args = options(cpu=True)
    fill_in(args, torchrun(1, 2))
    assert args.distributed_backend == "gloo"


def test_launch_that_would_train_nothing(gpus):
    with pytest.raises(
        ValueError, match="would train nothing; start 2 processes with torchrun --nproc-per-node 2"
    ):
        fill_in(options(distributed_world_size=2), {})


def test_processes_started_by_hand(gpus):
    args = options(
        distributed_world_size=2,
        distributed_no_spawn=True,
        distributed_init_method="tcp://localhost:1",
    )
    fill_in(args, {})
    assert (
        args.distributed_init_method == "tcp://localhost:1" and args.distributed_backend == "gloo"
    )


def test_one_process_on_the_cpu(gpus):
    for count in (0, 8):
        gpus(count)
        args = options(cpu=True)
        fill_in(args, {})
        assert args.distributed_world_size == 1 and torchrun_command(args, []) is None


def test_one_process_for_each_gpu(gpus):
    gpus(1)
    args = options()
    fill_in(args, {})
    assert args.distributed_world_size == 1 and torchrun_command(args, []) is None
    gpus(2)
    args = options()
    fill_in(args, {})
    assert args.distributed_world_size == 2
    command = torchrun_command(args, ["data", "--lr", "1"])
    assert command[3:] == [
        *ONE_MACHINE,
        *"--nproc-per-node 2 -m lsq.commands.cli train".split(),
        "data",
        "--lr",
        "1",
    ]


def test_one_machine_needs_no_names():
    """torchrun's --standalone means localhost, and then the host's name, for which there may be no
    address."""
    found = parse_args([*ONE_MACHINE, "script"])
    assert (found.rdzv_backend, found.rdzv_endpoint, found.local_addr) == (
        "c10d",
        "127.0.0.1:0",
        "127.0.0.1",
    )
    assert not found.standalone


def test_fairseqs_own_ways_to_start_several_machines_stay(gpus):
    gpus(8)
    for given in ({"distributed_port": 9218}, {"distributed_init_method": "tcp://host:1"}):
        args = options(distributed_world_size=16, **given)
        fill_in(args, {})
        assert args.distributed_world_size == 16 and torchrun_command(args, []) is None


@pytest.mark.parametrize("option", ["fp16", "amp"])
def test_precision_without_gpu(gpus, option):
    with pytest.raises(ValueError, match=f"--{option} needs a GPU, but PyTorch sees no GPU here"):
        check_precision(options(**{option: True}))
    gpus(1)
    check_precision(options(**{option: True}))
    with pytest.raises(ValueError, match=f"--{option} needs a GPU, but --cpu is given"):
        check_precision(options(cpu=True, **{option: True}))


def test_bfloat16_runs_anywhere(gpus):
    check_precision(options(bf16=True))


def test_tpu(gpus):
    with pytest.raises(ValueError, match="--tpu is not supported"):
        check_precision(options(tpu=True))


@pytest.mark.parametrize("option", ["fp16", "amp"])
def test_what_is_advised_suits_the_architecture(gpus, option):
    """lsq's models take neither --fp16 nor --bf16."""
    with pytest.raises(ValueError, match="leave it out or use --bf16"):
        check_precision(options(arch="transformer", **{option: True}))
    for count in (0, 1):
        gpus(count)
        with pytest.raises(
            ValueError, match=f"--{option} is given, but lsq_transformer_wmt_en_de computes in"
        ):
            check_precision(options(arch="lsq_transformer_wmt_en_de", **{option: True}))
    gpus(0)
    with pytest.raises(
        ValueError
    ) as refused:  # a checkpoint is translated with, of whatever architecture
        check_precision(options(**{option: True}))
    assert "bf16" not in str(refused.value)
