"""Training over slow links: workers update on their own, and exchange what they changed now and
then.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105): each worker takes K steps of its own optimizer.
Its *outer gradient* is the shared weights of the last round less its weights now. The mean of all
workers' outer gradients updates the shared weights, with which all go on.

Codes travel in two hops by the codecs of lsq.dist.two_hop, and what rounding leaves out is added to
the next round, in both hops. Clips of lsq's layers, tensors of fewer than 16 values and buffers
travel as they are.
"""

import hashlib
import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from lsq.config import require_choice, require_model, require_positive, require_whole
from lsq.config.checks import require_share
from lsq.dist import replicas, roll_call
from lsq.dist.agreement import gather_text, require_same
from lsq.dist.collectives import all_gather, all_to_all, average, small_positions, take_out
from lsq.dist.config import BLOCK
from lsq.dist.two_hop import CODECS, Codec, lean
from lsq.ops.gradient_messages import MessageLayout
from lsq.run.shards import is_shard

MODES = {"float": None, "int8": CODECS["int8"], "int4": lean(4, 4.5)}
"""Mode -> its codec; None: floats."""


class LocalUpdates:
    """Lets the workers of a training update on their own, and join their updates every K steps.

    Make it in every process, after `lsq.convert` and the process group; the training loop gets one
    line. torchrun starts the workers:

        model = torch.nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(model.parameters())
        local = LocalUpdates(model, every=50, mode="int8")
        for batch in batches:  # of this worker
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step()

    After a round all workers have the same weights, clips and buffers, bit for bit; each keeps the
    state of its own optimizer.

    Args:
        model: all its parameters that train lie on one device. DistributedDataParallel may wrap it,
            if `group` has one worker of each node. Beside weights of bfloat16 or codes
            (lsq.train_codes), float32 keeps what their rounding leaves out of a round.
        every: K, steps of the optimizer between two exchanges.
        mode: what outer gradients travel as: "float", "int8" (8.1 bits) or "int4" (4 and 4.5 bits,
            lsq.ops.lean_messages).
        learning_rate, momentum: of the outer update. 1 and 0 take the mean of all workers' weights;
            the paper has 0.7 and Nesterov's momentum 0.9. Clips take the mean in any case.
        group: the workers; None: all processes.

    Attributes:
        rounds: exchanges so far.
        steps: steps of the optimizer since the last exchange.
        bytes_sent: bytes that this worker has sent, but for clips and what the network adds.

    Raises:
        ValueError: an argument is out of range or differs between processes, there is no process
            group, or a parameter that trains cannot be exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        mode: str = "int8",
        learning_rate: float = 1.0,
        momentum: float = 0.0,
        group: ProcessGroup | None = None,
    ):
        require_model(model)
        require_whole("every", every)
        require_choice("mode", mode, MODES)
        require_positive("learning_rate", learning_rate)
        require_share("momentum", momentum)
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ValueError(
                "there is no process group; start the workers by torchrun, and call"
                " torch.distributed.init_process_group before LocalUpdates"
            )
        self.model, self.every, self.mode = model, every, mode
        self.learning_rate, self.momentum = learning_rate, momentum
        self.group = distributed.group.WORLD if group is None else group
        self.rounds = self.steps = self.bytes_sent = 0
        named = self._trained()
        self._parameters, self._device = list(named.values()), _device(named)
        self._rounded = any(
            type(one) is not nn.Parameter or one.dtype != torch.float32 for one in self._parameters
        )
        """Whether the model rounds the shared weights (codes, bfloat16): steps begin at others."""
        self._shapes = {name: list(one.shape) for name, one in named.items()}
        self._form = self._shapes | {"outer momentum": momentum > 0}
        options = {"every": every, "mode": mode, "rate": learning_rate, "momentum": momentum}
        frozen = {  # as codes, to which nothing can write
            name: f"codes {_digest([one.float()])[:8]}"
            for name, one in model.named_parameters()
            if not (one.requires_grad or type(one) is nn.Parameter or is_shard(one))
        }
        require_same(
            "options and parameters of LocalUpdates",
            options | self._shapes | frozen,
            self.group,
            self._device,
        )
        if self._device.type == "cpu" and self.group is distributed.group.WORLD:
            roll_call.register()
        self._shared = self._begun = self._flat()
        self._velocity = torch.zeros_like(self._shared) if momentum else None
        workers, sizes = self.group.size(), [one.numel() for one in self._parameters]
        coded = MODES[mode] is not None and workers > 1
        pairs = zip(sizes, sizes, strict=True) if coded else ()
        self._small = small_positions(pairs, self._device)
        length = -(-len(self._shared) // (workers * BLOCK)) * BLOCK
        self._errors = self._shared.new_zeros(workers + 1 if coded else 0, length)
        """What rounding leaves out of each worker's part of this worker's change, and in the last
        row of the mean that this worker owns."""
        self._begin_together([self._shared, *_plain(model.state_dict()).values()])

    def step(self) -> bool:
        """Count a step of the optimizer; the K-th exchanges weights. Return whether it did.

        Call it after `optimizer.step()`. Raises RankLost or ExchangeFailed if a worker is gone, and
        FloatingPointError on all workers if one has diverged. Then weights, and all that
        `state_dict` returns, are as before the exchange; clips and buffers may be new already.
        """
        self.steps += 1
        if self.steps < self.every:
            return False
        try:
            self._exchange()
        except RuntimeError as error:
            roll_call.raise_named(error)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what an exact resumption needs beside the states of the model and the optimizer.

        Each worker saves its own. Tensors are not copied.
        """
        return {
            "rounds": self.rounds,
            "steps": self.steps,
            "bytes_sent": self.bytes_sent,
            "form": self._form,
            "worker": [self.group.rank(), self.group.size()],
            "shared": self._shared,
            "begun": self._begun,
            "velocity": self._velocity,
            "errors": self._errors,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load what `state_dict` returned; None: this worker is new. Every worker calls it, after
        its model and optimizer have loaded.

        If all workers are at the same step of the same round, each goes on exactly. Else all begin
        with the model of the worker that has done most rounds, as it was after its last one.
        Rounding errors are kept if the number of workers and this worker's rank are the same.
        """
        if state is not None:
            self._take(state)
        self._begin_together(self._outer())

    def _take(self, state: dict[str, Any]) -> None:
        given, own = state["form"], self._form
        for name in {**own, **given}:
            if given.get(name) != own.get(name):
                raise ValueError(
                    f"{name} is {given.get(name)} in the state of LocalUpdates, and {own.get(name)}"
                    " here; give the state that was saved with this model and this momentum"
                )
        self.rounds, self.steps = state["rounds"], state["steps"]
        self.bytes_sent = state["bytes_sent"]
        self._shared.copy_(state["shared"])
        self._begun = state["begun"].to(self._shared, copy=True) if self._rounded else self._shared
        if self._velocity is not None:
            self._velocity.copy_(state["velocity"])
        same = state["worker"] == [self.group.rank(), self.group.size()]
        if same and state["errors"].shape == self._errors.shape:  # without codes there are none
            self._errors.copy_(state["errors"])
        else:
            self._errors.zero_()

    def _trained(self) -> dict[str, Tensor]:
        """Return the parameters to exchange, by name."""
        modules = replicas.modules_in(self.model)
        clips = {id(clip) for one in modules for clip in one.clips().values()}
        return {
            name: one
            for name, one in self.model.named_parameters()
            if one.requires_grad and id(one) not in clips
        }

    def _flat(self) -> Tensor:
        return torch.cat([one.detach().float().flatten() for one in self._parameters])

    def _outer(self) -> list[Tensor]:
        return [self._shared] if self._velocity is None else [self._shared, self._velocity]

    @torch.no_grad()
    def _begin_together(self, compared: list[Tensor]) -> None:
        """Give all workers the state of the one with most rounds, unless the number of steps and
        the tensors `compared` are the same everywhere."""
        own = json.dumps([self.rounds, self.steps, _digest(compared)])
        texts = gather_text(own, self.group, self._device)
        if len(set(texts)) == 1:
            return
        rounds = [json.loads(text)[0] for text in texts]
        self.rounds, self.steps = max(rounds), 0
        state = _plain(self.model.state_dict())
        others = [one for name, one in state.items() if name not in self._shapes]
        self._send([*self._outer(), *others], rounds.index(self.rounds))
        self.model.load_state_dict(state, strict=False)
        self._errors.zero_()
        self._write()

    @torch.no_grad()
    def _exchange(self) -> None:
        known = set(map(id, self._parameters))
        others = [name for name, one in self._trained().items() if id(one) not in known]
        if others:
            raise ValueError(
                f"parameters train that LocalUpdates does not know ({', '.join(others[:4])}"
                f"{', ...' if len(others) > 4 else ''}): make it after the model has its last"
                " parameters (lsq.convert, lsq.train_codes, requires_grad_)"
            )
        replicas.take_largest(self.model, self.group)
        replicas.average_learned(self.model, self.group)
        self._send(list(self.model.buffers()), 0)
        change, errors = self._begun - self._flat(), self._errors
        small = None if self._small is None else take_out(change, self._small)
        if len(self._errors):
            change, errors = self._mean_of_codes(change)
        else:
            self._average(change)
        if small is not None:
            self._average(small)
            change.index_copy_(0, self._small, small)
        if not change.isfinite().all():
            raise FloatingPointError(
                f"round {self.rounds + 1}: the mean of all workers' changes is not finite, as one"
                " of them has diverged; the shared weights are those of the round before: go on"
                " from a checkpoint, with a lower learning rate"
            )
        self._errors = errors
        if self._velocity is not None:
            self._velocity.mul_(self.momentum).add_(change)
            change.add_(self._velocity, alpha=self.momentum)
        self._shared.sub_(change, alpha=self.learning_rate)
        self.rounds, self.steps = self.rounds + 1, 0
        self._write()

    def _write(self) -> None:
        """Give the model the shared weights, and clips that do not learn the values for them."""
        values = self._shared.split([one.numel() for one in self._parameters])
        for value, one in zip(values, self._parameters, strict=True):
            one.copy_(value.view_as(one))
        self._begun = self._flat() if self._rounded else self._shared
        for module in replicas.modules_in(self.model):
            module.bring_clips_up()

    def _mean_of_codes(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of `change` [n] over the workers, and the errors of this round."""
        codec, (*errors, own_error) = MODES[self.mode], self._errors
        given = torch.stack(errors)
        given.view(-1)[: len(change)] += change
        first, second = (make(given.numel(), len(given)) for make in (codec.first, codec.second))
        sent = _pack(codec, given, first)
        received = torch.empty_like(sent)
        all_to_all(received, sent, self.group).wait()
        mean = own_error + _unpack(codec, received, first).mean(0, keepdim=True)
        own = _pack(codec, mean, second)
        every = own.new_empty(len(given), second.message_bytes)
        all_gather(every, own, self.group).wait()
        self._count(sent.numel() + every.numel())
        result = _unpack(codec, every, second).view(-1)[: len(change)]
        errors = given - _unpack(codec, sent, first), mean - _unpack(codec, own, second)
        return result, torch.cat(errors)

    def _average(self, values: Tensor) -> None:
        average([values], self.group)
        self._count(2 * values.nbytes)

    def _count(self, exchanged: int) -> None:
        """Count the bytes of an exchange, without this worker's own part."""
        workers = self.group.size()
        self.bytes_sent += exchanged * (workers - 1) // workers

    def _send(self, tensors: list[Tensor], source: int) -> None:
        """Give all workers the tensors of one of them."""
        if not tensors or self.group.size() == 1:
            return
        joined = _bytes(tensors).to(self._device)
        distributed.broadcast(joined, group=self.group, group_src=source)
        if self.group.rank() == source:
            self.bytes_sent += joined.numel() * (self.group.size() - 1)
        for one, value in zip(tensors, joined.split([one.nbytes for one in tensors]), strict=True):
            one.copy_(value.clone().view(one.dtype).view(one.shape))


def _pack(codec: Codec, values: Tensor, layout: MessageLayout) -> Tensor:
    """Return messages uint8 [S, M] of values [S, L]; `layout` may be that of more shards."""
    given = _on_its_device(codec, values)
    data = given.new_empty(len(values), layout.message_bytes, dtype=torch.uint8)
    own = replace(layout, values=values.numel(), shards=len(values))
    codec.pack(given.view(1, -1), own, data)
    return data.to(values.device)


def _unpack(codec: Codec, data: Tensor, layout: MessageLayout) -> Tensor:
    given = _on_its_device(codec, data)
    values = given.new_empty(len(data), layout.length, dtype=torch.float32)
    own = replace(layout, values=values.numel(), shards=len(data))
    codec.unpack(given, own, values.view(-1))
    return values.to(data.device)


def _on_its_device(codec: Codec, tensor: Tensor) -> Tensor:
    return tensor.cpu() if codec is MODES["int4"] else tensor  # CUDA has no kernels for it


def _plain(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state dict without codes of frozen weights, which never change."""
    return {name: one for name, one in state.items() if type(one) is Tensor}


def _bytes(tensors: list[Tensor]) -> Tensor:
    return torch.cat([one.detach().reshape(-1).contiguous().view(torch.uint8) for one in tensors])


def _digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(_bytes(tensors).cpu().numpy()).hexdigest()


def _device(parameters: dict[str, Tensor]) -> torch.device:
    """Return the device of the parameters that train. Raises ValueError: there is none, or one
    cannot be exchanged."""
    devices = {one.device for one in parameters.values()}
    if len(devices) != 1:
        raise ValueError(
            f"the parameters that train lie on {len(devices)} devices"
            f" ({', '.join(sorted(map(str, devices)))}); LocalUpdates needs one, with all of them"
        )
    for name, one in parameters.items():
        if is_shard(one) or not one.is_floating_point():
            what = "a shard" if is_shard(one) else str(one.dtype)
            raise ValueError(
                f"parameter {name} is {what}; LocalUpdates exchanges whole tensors of floats: wrap"
                " the model in DistributedDataParallel or in nothing"
            )
    return devices.pop()
