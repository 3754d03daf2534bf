"""Declarations of values and operations; lsq/native/declarations.py says what they mean in C++.

One class stands for an operation of a program, with virtual tensors, and for one call, with real
tensors. `bind` makes the second from the first.
"""

import dataclasses
import functools
import struct
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Annotated, Generic, Self, TypeVar

import torch

from lsq.native import declarations, loader

T = TypeVar("T")
N = TypeVar("N")


class In(Generic[T]):
    """Marks a field that the operation reads."""


class Out(Generic[T]):
    """Marks a field that the operation writes."""


class Array(Generic[T, N]):
    """Marks a field of up to N values: a list in Python, an array in C++."""


class Host(Generic[T]):
    """Marks a field that only Python knows."""


Activations = Annotated[torch.Tensor, torch.float32, torch.bfloat16]
"""float32; on a GPU it may be bfloat16."""
Floats = Annotated[torch.Tensor, torch.float32]
Codes = Annotated[torch.Tensor, torch.int8]
"""Codes of any format."""
Bits = Annotated[torch.Tensor, torch.uint8]
"""One bit for each element: element i is bit i % 8 of byte i // 8."""
Offsets = Annotated[torch.Tensor, torch.int32]
"""First row of each sequence, and the end of the last (cu_seqlens)."""
Integers = Annotated[torch.Tensor, torch.int32]
"""Sums of products of codes; numbers of nodes or tiles, below a bound in Operation.limits."""
Indices = Annotated[torch.Tensor, torch.int64]
"""Whole numbers from 0 up to the bound in Operation.limits."""
Key = Annotated[torch.Tensor, torch.int64]
"""[1], the key of random numbers (lsq.quant.random)."""
Bytes = Annotated[torch.Tensor, torch.uint8]
"""Memory with a layout of its own."""
AnyFloats = Annotated[torch.Tensor, torch.float32, torch.bfloat16]
"""float32 or bfloat16 on every device; a size of the operation tells C++ which (launch.FLOATS)."""

Parameters = Annotated[torch.Tensor, torch.float32, torch.bfloat16]
"""float32; on the CPU it may be bfloat16, and a size of the holder tells C++ which."""

KINDS: dict[str, tuple[torch.dtype, ...]] = {
    kind: globals()[kind].__metadata__ for kind in declarations.TENSORS
}
"""Kinds of tensors: name -> dtypes that they may have."""


class size(property):
    """Marks a property that C++ sees as int64_t."""


class factor(property):
    """Marks a property that C++ sees as float."""


def extent(axis: int, *names: str) -> size:
    """Declare a size that is read off a tensor: `rows = extent(0, "x")`. It is the length along
    `axis` of the first named tensor that is not None, else 0. A name may have dots."""
    paths = [name.split(".") for name in names]

    def find(holder: "Declared") -> int:
        found = (attribute(holder, path) for path in paths)
        return next((tensor.shape[axis] for tensor in found if tensor is not None), 0)

    return size(find)


Path = tuple[str | int, ...]
"""Names of fields and indices in arrays that lead to a tensor."""


def attribute(holder, path: Path):
    """Return the end of a path from `holder`; None where it, or a value on the way, is missing."""
    for part in path:
        if holder is None:
            return None
        if isinstance(part, int):
            holder = holder[part] if part < len(holder) else None
        else:
            holder = getattr(holder, part)
    return holder


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor field of a declaration or of a value in it; in `_layout` any field."""

    path: Path
    kind: str
    written: bool
    optional: bool
    """Whether the tensor, or a value that holds it, may be missing."""
    may_miss: bool
    """Whether the tensor may be None although its holder is present."""
    where: str
    """Class and field in messages."""
    offset: int
    """Offset in the struct, in bytes."""

    @property
    def name(self) -> str:
        """Dotted name: "sums0.parts" for the path ("sums", 0, "parts")."""
        return "".join(str(x) if isinstance(x, int) else f".{x}" for x in self.path)[1:]

    def of(self, holder: "Declared"):
        return attribute(holder, self.path)

    def owner(self, holder: "Declared") -> "Declared":
        """Return the operation or value in `holder` that has the tensor as a field."""
        return attribute(holder, self.path[:-1])


class Declared:
    """A class whose annotated fields are its signature; optional fields default to None."""

    fields: tuple[declarations.Field, ...]
    may_hide = ()
    """Attributes that a subclass may hide by a field."""

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if cls.__module__ == __name__ or "fields" in vars(cls):
            return
        marked = [name for name, value in vars(cls).items() if isinstance(value, size | factor)]
        base = cls.__base__
        for name in (*cls.__annotations__, *marked):
            if hasattr(base, name) and name not in base.may_hide:
                raise ValueError(
                    f"{cls.__name__}.{name} would hide {base.__name__}.{name}; call it something"
                    " else"
                )
        parsed = (
            declarations.parse(cls.__name__, name, text)
            for name, text in cls.__annotations__.items()
        )
        fields = [field for field in parsed if field is not None]
        for field in fields:
            if field.optional and field.name not in vars(cls):
                setattr(cls, field.name, None)
        dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)
        kinds = {name: declarations.MARKS[type(vars(cls)[name]).__name__] for name in marked}
        fields += [declarations.Field(name, kind, derived=True) for name, kind in kinds.items()]
        cls.fields = tuple(fields)
        cls._given = tuple((one.name, cls._kind_of(one.name)) for one in dataclasses.fields(cls))
        nearby = vars(sys.modules[cls.__module__]).items()
        types = {name: one for name, one in nearby if isinstance(one, type)} | {
            name: one for name, one in _values().items() if one is not cls
        }
        declarations.check(
            declarations.Declaration(cls.__name__, base.__name__, cls.fields),
            {name: one.__base__.__name__ for name, one in types.items()},
        )

    @classmethod
    @functools.cache
    def leaves(cls) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in _layout(cls, written=False)[0] if leaf.kind in KINDS)

    def bind(self, resolve: Callable) -> Self:
        """Return a copy with resolve(tensor) for every tensor."""
        bound = object.__new__(type(self))
        values = bound.__dict__
        for name, kind in self._given:
            value = getattr(self, name)
            if kind and value is not None:
                if kind == _TENSOR:
                    value = resolve(value)
                elif kind == _VALUE:
                    value = value.bind(resolve)
                else:
                    value = [element.bind(resolve) for element in value]
            values[name] = value
        return bound

    def attributes(self) -> dict[str, object]:
        """Return everything but tensors, by dotted names like those of leaves."""
        found = {}
        for name, kind in self._given:
            value = getattr(self, name)
            if kind == _PLAIN or (kind == _VALUE and value is None):
                found[name] = value
            elif kind == _VALUE:
                found |= {f"{name}.{end}": one for end, one in value.attributes().items()}
            elif kind == _ARRAY:
                for number, held in enumerate(value):
                    found |= {
                        f"{name}{number}.{end}": one for end, one in held.attributes().items()
                    }
        return found

    @classmethod
    def _kind_of(cls, name: str) -> int:
        field = next((field for field in cls.fields if field.name == name), None)
        if field is not None and field.kind in KINDS:
            return _TENSOR
        if field is None or _value_class(field.kind) is None:
            return _PLAIN
        return _ARRAY if field.count else _VALUE

    def pack(self, address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr) -> bytes:
        """Return the struct, as C++ reads it; `address` gives the address of a tensor. Raises
        ValueError: a tensor is missing, not contiguous, or not of the declared dtype and shape."""
        words, shapes = [], []
        for field in self.fields:
            if field.count and not 0 < len(getattr(self, field.name)) <= field.count:
                raise ValueError(
                    f"{type(self).__name__}.{field.name} has {len(getattr(self, field.name))}"
                    f" values; allowed: 1 to {field.count}"
                )
        for leaf, is_word in _with_words(type(self)):
            value, dtypes = leaf.of(self), KINDS.get(leaf.kind)
            missing = value is None and (leaf.may_miss or leaf.owner(self) is None)
            if value is None and dtypes is None and not missing:
                raise ValueError(f"{leaf.where} is None; it must be a {leaf.kind}")
            if dtypes is None:
                if is_word:
                    words.append(0 if missing else value)
                continue
            shapes.append(None if missing else getattr(value, "shape", ()))
            if missing:
                words.append(0)
            elif (
                isinstance(value, torch.Tensor) and value.dtype in dtypes and value.is_contiguous()
            ):
                words.append(address(value) or NOWHERE)
            else:
                _refuse(value, dtypes, leaf.where)
        check_shapes(type(self), tuple(shapes))
        return _struct(type(self)).pack(*words)

    @functools.cached_property
    def packed(self):
        """The struct in memory (lsq.native.loader.words), with the present addresses. A prepared
        pass replaces them."""
        return loader.words(self.pack())


_PLAIN, _TENSOR, _VALUE, _ARRAY = range(4)
NOWHERE = 256
"""Stands for the address of a tensor without elements: null would mean that it is missing."""


class Value(Declared):
    """Tensors that belong together and flow between operations."""


def _refuse(tensor, dtypes: tuple[torch.dtype, ...], where: str) -> None:
    found = (
        f"{tensor.dtype} with strides {tensor.stride()}"
        if isinstance(tensor, torch.Tensor)
        else repr(tensor)
    )
    raise ValueError(
        f"{where} is {found}; it must be a contiguous tensor of {' or '.join(map(str, dtypes))}"
    )


def _values() -> dict[str, type[Value]]:
    """Return name -> class of values, for annotations; the last of equal names counts."""
    return {cls.__name__: cls for cls in Value.__subclasses__()}


def _value_class(kind: str) -> type[Value] | None:
    return None if kind in KINDS else _values().get(kind)


@functools.cache
def _layout(cls: type[Declared], written: bool) -> tuple[tuple[Leaf, ...], int]:
    """Return every field of the struct, each value's fields behind it, and the struct's bytes.

    Fields are naturally aligned, as in every C++ compiler for a 64-bit machine. `written`: whether
    fields are written that say neither In nor Out.
    """
    found, offset = [], 0
    for field in cls.fields:
        out = field.direction == "Out" or (written and field.direction != "In")
        held = _value_class(field.kind)
        inner, size = _layout(held, out) if held else ((), 4 if field.kind == "float" else 8)
        offset += -offset % (8 if held else size)
        may_miss = field.optional or field.count > 0
        begins = [(field.name, n) for n in range(field.count)] or [(field.name,)]
        for begin in begins:
            where = f"{cls.__name__}.{field.name}"
            found.append(Leaf(begin, field.kind, out, may_miss, may_miss, where, offset))
            for leaf in inner:
                changed = {
                    "path": (*begin, *leaf.path),
                    "optional": leaf.optional or may_miss,
                    "where": f"{cls.__name__}: {leaf.where}",
                    "offset": offset + leaf.offset,
                }
                found.append(dataclasses.replace(leaf, **changed))
            offset += size
    return tuple(found), offset + -offset % 8


@functools.cache
def _with_words(cls: type[Declared]) -> list[tuple[Leaf, bool]]:
    """Return every leaf, and whether it is itself a word of the struct."""
    return [(leaf, _value_class(leaf.kind) is None) for leaf in _layout(cls, written=False)[0]]


@functools.cache
def _struct(cls: type[Declared]) -> struct.Struct:
    _, size = _layout(cls, written=False)
    letters, end = "", 0
    for leaf, is_word in _with_words(cls):
        if is_word:
            letter = "P" if leaf.kind in KINDS else "f" if leaf.kind == "float" else "q"
            letters += f"{leaf.offset - end}x{letter}"
            end = leaf.offset + struct.calcsize(letter)
    return struct.Struct(f"{letters}{size - end}x")


@functools.cache
def address_words(cls: type[Declared]) -> dict[Path, int]:
    """Return path -> index of the 8-byte word of the struct that holds the tensor's address."""
    return {leaf.path: leaf.offset // 8 for leaf in cls.leaves()}


@functools.lru_cache(maxsize=4096)
def check_shapes(cls: type[Declared], shapes: tuple[Sequence[int] | None, ...]) -> None:
    """Raise ValueError for tensors of other shapes than their fields' docstrings state. A name of a
    size means the same in all fields of one declaration. None: the tensor is missing."""
    stated = [(*rule, shapes[leaf]) for leaf, *rule in _rules(cls) if shapes[leaf] is not None]
    farthest = 0

    def fit(number: int, known: dict[tuple[str, ...], dict[str, int]]) -> bool:
        nonlocal farthest
        farthest = max(farthest, number)
        if number == len(stated):
            return True
        space, _, allowed, shape = stated[number]
        found = (_sizes(sizes, shape, known.get(space, {})) for sizes in allowed)
        return any(one is not None and fit(number + 1, {**known, space: one}) for one in found)

    if not fit(0, {}):
        _, name, allowed, shape = stated[farthest]
        wanted = " or ".join(f"[{', '.join(sizes)}]" for sizes in allowed)
        given = ", ".join(dict.fromkeys(f"{name} {list(shape)}" for _, name, _, shape in stated))
        raise ValueError(
            f"{cls.__name__}.{name} is {list(shape)}; it must be {wanted}, where there are {given}"
        )


Shapes = tuple[tuple[str, ...], ...]
_MATRIX = (), ("codes",), ("coded", "codes"), ("floats",)
"""Paths from a field to the tensor whose shape its docstring states: the field, or part of its
value."""


@functools.cache
def _rules(cls: type[Declared]) -> list[tuple[int, Path, str, Shapes]]:
    """Return (leaf, holder of its names of sizes, field, allowed shapes) of all stated shapes.
    Shapes that leave no choice come first."""
    found = []
    for number, leaf in enumerate(cls.leaves()):
        holder = cls.__name__
        for depth, part in enumerate(leaf.path):
            if isinstance(part, int):
                continue
            declared = declarations.declarations().get(holder)
            fields = {} if declared is None else {one.name: one for one in declared.fields}
            if part not in fields:
                break
            if fields[part].shapes and leaf.path[depth + 1 :] in _MATRIX:
                found.append((number, leaf.path[:depth], leaf.name, fields[part].shapes))
            holder = fields[part].kind

    def choices(rule: tuple) -> tuple[int, int]:
        names = [name for sizes in rule[-1] for name in sizes]
        formulas = sum(not (name.isidentifier() or name.isdecimal()) for name in names)
        return len(rule[-1]), formulas

    return sorted(found, key=choices)


def _sizes(
    names: Sequence[str], shape: Sequence[int], known: dict[str, int]
) -> dict[str, int] | None:
    """Return sizes by name, together with the known ones; None where `shape` does not fit."""
    if "..." in names:
        return known
    if len(names) != len(shape):
        return None
    found = dict(known)
    for name, size in zip(names, shape, strict=True):
        if name.isidentifier():
            wanted = found.setdefault(name, size)
        else:
            try:
                # safe: formulas stand in declarations, which are code
                wanted = eval(_formula(name), {"__builtins__": {}}, found)
            except (NameError, SyntaxError):
                continue
        if wanted != size:
            return None
    return found


@functools.cache
def _formula(text: str) -> CodeType:
    return compile(text, "declarations", "eval")
