"""Moments of Adam as 8-bit codes in optimizer states, and those of others as ours."""

import torch
from torch import Tensor

from lsq.ops.compact_adam import Moment
from lsq.quant import compact
from lsq.run.shards import as_shard, local

FIRST, SECOND, SCALE = "exp_avg", "exp_avg_sq", "_scale"
BITSANDBYTES_BLOCK = 256


def matrix(tensor: Tensor) -> Tensor:
    """Return a view [N, K] of a tensor of two or more dimensions."""
    return tensor.flatten(1)


def zeros(parameter: Tensor, bits: int) -> dict[str, Tensor]:
    """Return both moments, of 0, as a state holds them."""
    own, state = local(parameter), {}
    rows, columns, device = len(own), parameter.numel() // len(parameter), own.device
    if bits == 32:
        for name in (FIRST, SECOND):
            state[name] = torch.zeros(own.shape, dtype=torch.float32, device=device)
    for name, zero in ((FIRST, compact.ZERO), (SECOND, 0)) if bits == 8 else ():
        blocks = compact.blocks_of(columns)
        state[name] = torch.full((rows, columns), zero, dtype=torch.uint8, device=device)
        state[name + SCALE] = torch.zeros(rows, blocks, dtype=torch.float32, device=device)
    return {name: as_shard(one, parameter) for name, one in state.items()}


def moment(state: dict[str, Tensor], name: str) -> Moment:
    """Return a moment as a step takes it."""
    if name + SCALE in state:
        return Moment(codes=local(state[name]), scale=local(state[name + SCALE]))
    return Moment(floats=matrix(local(state[name])))


def with_bits(state: dict[str, Tensor], parameter: Tensor, bits: int) -> dict[str, Tensor]:
    """Return a state with moments of so many bits, whichever it has."""
    given = 8 if FIRST + SCALE in state else 32
    if given == bits:
        return state
    others = {name: one for name, one in state.items() if not name.startswith(FIRST)}
    parts = {name: local(one) for name, one in state.items() if name not in others}
    if bits == 32:
        first = compact.decode_first(parts[FIRST], parts[FIRST + SCALE])
        second = compact.decode_second(parts[SECOND], parts[SECOND + SCALE]).square()
        shape = local(parameter).shape
        made = {FIRST: first.view(shape), SECOND: second.view(shape)}
    else:
        made = {}
        for name, values, encode in (
            (FIRST, parts[FIRST], compact.encode_first),
            (SECOND, parts[SECOND].sqrt(), compact.encode_second),
        ):
            made[name], made[name + SCALE] = encode(matrix(values.float()))
    return others | {name: as_shard(one, parameter) for name, one in made.items()}


def check_codes(parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Raise ValueError unless codes of moments fit their parameter."""
    rows, columns = len(parameter), parameter.numel() // len(parameter)
    wanted = {"": (rows, columns), SCALE: (rows, compact.blocks_of(columns))}
    for name in (FIRST, SECOND):
        for part, shape in wanted.items():
            found = state.get(name + part)
            if found is None or tuple(found.shape) != shape:
                raise ValueError(
                    f"the state {name + part} of a parameter {tuple(parameter.shape)} is"
                    f" {None if found is None else tuple(found.shape)}; it must be {shape}: load a"
                    " state of the same parameters in the same order"
                )


def of_bitsandbytes(state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """Return the float state of a parameter from one of bitsandbytes: its Adam8bit has a table of
    values, and a scale for each 256 values in a row; its Adam has floats."""
    found = {"step": state["step"]}
    for name, number in ((FIRST, 1), (SECOND, 2)):
        values = state[f"state{number}"]
        if f"qmap{number}" in state:
            decoded = state[f"qmap{number}"].float()[values.flatten().long()]
            scales = state[f"absmax{number}"].float()
            scales = scales.repeat_interleave(BITSANDBYTES_BLOCK)
            values = decoded * scales[: len(decoded)]
        found[name] = values.float().view(parameter.shape)
    return found


def as_bitsandbytes(state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """Return a state as Adam8bit of bitsandbytes has it, rounded to the nearest of its values."""
    state = with_bits(state, parameter, 32)
    found = {"step": state["step"]}
    for name, number, signed in ((FIRST, 1, True), (SECOND, 2, False)):
        table = dynamic_table(signed)
        values = state[name].flatten()
        pad = -len(values) % BITSANDBYTES_BLOCK
        blocks = torch.nn.functional.pad(values, (0, pad)).view(-1, BITSANDBYTES_BLOCK)
        scale = blocks.abs().amax(1)
        relative = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        middles = (table[1:] + table[:-1]) / 2
        codes = torch.bucketize(relative, middles).to(torch.uint8).flatten()[: len(values)]
        found[f"state{number}"] = codes.view(parameter.shape)
        found[f"qmap{number}"], found[f"absmax{number}"] = table, scale
    return found


def dynamic_table(signed: bool) -> Tensor:
    """Return the 256 values of bitsandbytes' dynamic format, ascending (Dettmers et al. 2022,
    "8-bit Optimizers via Block-wise Quantization", section 2): powers of ten with the more linear
    fractions the larger they are."""
    values = [0.0, 1.0]
    for exponent in range(7):
        fractions = 2 ** (exponent + (0 if signed else 1))
        borders = torch.linspace(0.1, 1, fractions + 1, dtype=torch.float64)
        middles = 10.0 ** (exponent - 6) * (borders[1:] + borders[:-1]) / 2
        values += middles.tolist()
        values += (-middles).tolist() if signed else []
    return torch.tensor(sorted(values), dtype=torch.float32)
