"""Memory of tensors in a training step: kept for the backward pass, and at its peak."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from fairseq import checkpoint_utils, utils
from torch.profiler import ProfilerActivity, profile

import lsq.fairseq  # noqa: F401  (registers lsq's models, which checkpoints name)
from lsq.commands.logs import logging_to, quieten, silent_libraries
from lsq.memory.kept import nothing_kept


def saved_tensors(
    forward: Callable[[], torch.Tensor], parameters: Iterable[torch.Tensor]
) -> Counter:
    """Count the bytes that autograd keeps of `forward`, by "dtype [shape]", without parameters."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: Counter = Counter()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept[f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"] += (
                storage.nbytes()
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        root = forward()
    del root  # held until here: a new storage at a freed address would not be counted
    return kept


def traced_peak(run: Callable[[], object]) -> int:
    """Return the most bytes of PyTorch's CPU allocator during `run`, beyond the bytes before it."""
    with nothing_kept(), silent_libraries():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peak_on_gpu(run: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def step_memory(checkpoint: Path) -> dict[str, int]:
    """Measure the bytes of a step on the largest training batch: kept for backward, and peak."""
    quieten()
    with logging_to(Path(os.devnull)):
        (model,), config, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
        criterion = task.build_criterion(config.criterion)
        task.load_dataset("train")
        batches = task.get_batch_iterator(
            task.dataset("train"), max_tokens=config.dataset.max_tokens
        )
        batch = max(
            batches.next_epoch_itr(shuffle=False),
            key=lambda batch: batch["net_input"]["src_tokens"].numel() + batch["target"].numel(),
        )
    on_gpu = torch.cuda.is_available() and not config.common.cpu
    if on_gpu:
        model, batch = model.cuda(), utils.move_to_cuda(batch)
    model.train()

    def loss() -> torch.Tensor:
        return criterion(model, batch)[0]

    peak = peak_on_gpu if on_gpu else traced_peak
    with nothing_kept():  # as in the traced step, whose passes are prepared here
        loss().backward()  # makes the gradients
    kept = saved_tensors(loss, model.parameters()).total()
    return {"kept_bytes": kept, "peak_bytes": peak(lambda: loss().backward())}
