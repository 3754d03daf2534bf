"""Statistics of rounded tensors: clips, shares of clipped values, codes in use."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from lsq import quant
from lsq.config import require_model
from lsq.layers.module import ProgramModule
from lsq.ops.calibration import integer_bits
from lsq.ops.fake_quantize import FakeQuantize
from lsq.ops.project import Project
from lsq.program.operation import Operation
from lsq.program.values import Coded
from lsq.quant import Format
from lsq.quant.numbers import ScaledFormat


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """Statistics of one rounded tensor in one forward pass."""

    kind: str
    clip: float
    """The mean over output channels."""
    clipped_share: float
    """Share of elements outside the clip, 0 to 1."""
    zero_share: float
    """Share of elements whose code, or decoded value, is 0."""
    largest_code: int | None
    """None: the tensor has no integer codes with one scale for each clip."""
    bits: int | None


class Observer(Protocol):
    """Sees each operation that a module has run and, in passes with a backward, its weights."""

    def __call__(self, declared: Operation, operation: Operation) -> None: ...

    def weights(self, module: ProgramModule, tensors: Mapping[str, Tensor]) -> None: ...


def program_modules(model: nn.Module) -> dict[str, ProgramModule]:
    """Return modules of lsq in `model` by path; TypeError if it is no torch.nn.Module."""
    require_model(model)
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, ProgramModule)}


def quantized_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, clip) of rounded tensors; "a.input" is the name with clip "a.input_clip"."""
    seen: set[int] = set()
    for path, module in program_modules(model).items():
        for name, clip in module.clips().items():
            if id(clip) not in seen:
                seen.add(id(clip))
                yield _tensor_name(path, name), clip


@contextmanager
def observe(model: nn.Module) -> Iterator[dict[str, TensorStatistics]]:
    """Collect statistics of the last forward pass in this context: name -> TensorStatistics."""
    statistics: dict[str, TensorStatistics] = {}
    modules = program_modules(model)
    observers = {module: _Statistics(module, path, statistics) for path, module in modules.items()}
    with observing(observers):
        yield statistics


@contextmanager
def observing(observers: Mapping[ProgramModule, Observer]) -> Iterator[None]:
    """Let observers see passes of their modules in this context; then restore the former ones."""
    before = {module: module._observer for module in observers}
    for module, observer in observers.items():
        module._observer = observer
    try:
        yield
    finally:
        for module, observer in before.items():
            module._observer = observer


class InputSquares:
    """Sums squares of the inputs of a module's products, as the products read them."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.rows: dict[str, int] = {}

    def __call__(self, declared: Operation, operation: Operation) -> None:
        if not isinstance(operation, Project):
            return
        name, x = declared.weight.values.name, operation.x
        floats = x.floats if x.coded is None else x.coded.decode()
        self.sums[name] = self.sums.get(name, 0) + floats.detach().double().square().sum(0)
        self.rows[name] = self.rows.get(name, 0) + len(floats)

    def weights(self, module: ProgramModule, tensors: Mapping[str, Tensor]) -> None:
        pass

    def mean(self, name: str) -> Tensor:
        """Return E[x²] of the K inputs of a weight, float32 [K]."""
        return (self.sums[name] / max(1, self.rows[name])).float()


class _Statistics:
    def __init__(self, module: ProgramModule, path: str, statistics: dict[str, TensorStatistics]):
        self._module, self._path, self._statistics = module, path, statistics

    def __call__(self, declared: Operation, operation: Operation) -> None:
        rounding = operation.rounding()
        if rounding is None:
            return
        by_row = isinstance(rounding, Coded) and rounding.by_row
        if isinstance(rounding, FakeQuantize):
            codes, form = rounding.out, rounding.form if rounding.given else None
        else:
            codes, form = rounding.codes, None if by_row else rounding.format
        if by_row:
            outside = 0
        elif rounding.clipped is None:
            unrounded = operation.unrounded(self._module.target.run)
            outside = int((unrounded.abs() > rounding.clip).sum())
        else:
            outside = int(quant.unpack_bits(rounding.clipped, codes.numel()).sum())
        self._note(declared.rounding().clip.name, "activation", rounding.clip, codes, form, outside)

    def weights(self, module: ProgramModule, tensors: Mapping[str, Tensor]) -> None:
        for name, declared in module.declared.items():
            codes, decoded = tensors.get(name + ".codes"), tensors.get(name + ".decoded")
            if declared.clip is None or codes is decoded is None:
                continue
            weight, clip = tensors[name].detach(), tensors[declared.clip].detach()
            weight = weight.t() if declared.in_out else weight
            form = module.quant.weight_form(name)
            if codes is None:
                codes = decoded
            else:
                codes = form.unpack(codes, weight.shape[1])[: weight.shape[0]]
            outside = int((weight.abs() > clip[:, None]).sum())
            self._note(declared.clip, "weight", clip, codes, form, outside)

    def _note(
        self,
        clip_name: str,
        kind: str,
        clip: Tensor,
        codes: Tensor,
        form: Format | ScaledFormat | None,
        outside: int,
    ) -> None:
        """`codes`: values for a ScaledFormat. `form`: None if scales do not come from the clip."""
        bits = None if form is None else integer_bits(form)
        if isinstance(form, ScaledFormat) and bits is not None:
            codes = (codes / clip.view(-1, 1) * form.number.largest).round().nan_to_num()
        self._statistics[_tensor_name(self._path, clip_name)] = TensorStatistics(
            kind=kind,
            clip=clip.mean().item(),
            clipped_share=outside / codes.numel(),
            zero_share=(codes == 0).sum().item() / codes.numel(),
            largest_code=None if bits is None else int(codes.abs().max()),
            bits=bits,
        )


def _tensor_name(path: str, clip_name: str) -> str:
    return (f"{path}." if path else "") + clip_name.removesuffix("_clip")
