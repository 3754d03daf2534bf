"""The words in which values and operations are declared; lsq/native/declarations.py says what they
mean in C++.

A declaration is a class with annotated fields. The same class stands for an operation of a program,
where its tensors
are virtual, and for one call, where they are real: `bind` makes the one of the other.
"""

import dataclasses
import functools
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
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
"""Element i of what they tell of is bit i % 8 of byte i // 8."""
Offsets = Annotated[torch.Tensor, torch.int32]
"""Row at which each sequence begins."""
Indices = Annotated[torch.Tensor, torch.int64]
"""Whole numbers from 0; Operation.limits says up to where."""
Key = Annotated[torch.Tensor, torch.int64]
"""[1], the key of random numbers (lsq.quant.random)."""
Bytes = Annotated[torch.Tensor, torch.uint8]
"""Memory in which several things lie."""
AnyFloats = Annotated[torch.Tensor, torch.float32, torch.bfloat16]
"""On every device; a size of the operation tells C++ which, see csrc.launch.FLOATS."""

Parameters = Annotated[torch.Tensor, torch.float32, torch.bfloat16]
"""float32; on the CPU it may be bfloat16, of which a size of the holder tells C++."""

KINDS: dict[str, tuple[torch.dtype, ...]] = {
    kind: globals()[kind].__metadata__ for kind in declarations.TENSORS
}
"""Kinds of tensors, by name, with the dtypes that they may have."""


class size(property):
    """Marks a property that C++ sees as int64_t."""


class factor(property):
    """Marks a property that C++ sees as float."""


def extent(axis: int, *places: str) -> size:
    """A size that is read off a tensor: `rows = extent(0, "x")`.

    `places` are dotted names; the first tensor that is there counts, and 0 stands for none of them.
    """

    paths = [place.split(".") for place in places]

    def find(holder: "Declared") -> int:
        found = (attribute(holder, path) for path in paths)
        return next((tensor.shape[axis] for tensor in found if tensor is not None), 0)

    return size(find)


Path = tuple[str | int, ...]
"""Names of fields, and indices in arrays, that lead to a tensor."""


def attribute(holder, path: Path):
    """The end of a path from `holder`; None where it, or a value on the way, is missing."""
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
    """A tensor field of a declaration, or of a value in it."""

    path: Path
    kind: str
    written: bool
    optional: bool

    @property
    def name(self) -> str:
        return _dotted(self.path)

    def of(self, holder: "Declared"):
        """The tensor in `holder`; None where it, or the value that would have it, is missing."""
        return attribute(holder, self.path)

    def owner(self, holder: "Declared") -> "Declared":
        """The operation or value in `holder` whose field the tensor is."""
        return attribute(holder, self.path[:-1])


class Declared:
    """A class whose annotated fields are its signature.

    Fields that may be missing are None unless given.
    """

    fields: tuple[declarations.Field, ...]
    may_hide = ()
    """Attributes that a field of a subclass may hide."""

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if cls.__module__ == __name__ or "fields" in vars(cls):
            return
        marked = [name for name, value in vars(cls).items() if isinstance(value, size | factor)]
        for name in (*cls.__annotations__, *marked):
            if hasattr(cls.__base__, name) and name not in cls.__base__.may_hide:
                base = cls.__base__.__name__
                raise ValueError(
                    f"{cls.__name__}.{name} would hide {base}.{name}; call it something else"
                )
        found = [
            declarations.parse(cls.__name__, name, text)
            for name, text in cls.__annotations__.items()
        ]
        for field in filter(None, found):
            if field.optional and field.name not in vars(cls):
                setattr(cls, field.name, None)
        dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)
        derived = [
            declarations.Field(
                name, declarations.MARKS[type(vars(cls)[name]).__name__], derived=True
            )
            for name in marked
        ]
        cls.fields = (*filter(None, found), *derived)
        cls._given = tuple(
            (field.name, cls._kind_of(field.name)) for field in dataclasses.fields(cls)
        )
        nearby = {
            name: one
            for name, one in vars(sys.modules[cls.__module__]).items()
            if isinstance(one, type)
        }
        bases = {name: one.__base__.__name__ for name, one in (nearby | _DECLARED).items()}
        declarations.check(
            declarations.Declaration(cls.__name__, cls.__base__.__name__, cls.fields), bases
        )
        _DECLARED[cls.__name__] = cls

    @classmethod
    @functools.cache
    def leaves(cls) -> tuple[Leaf, ...]:
        """Every tensor field, those of values included, in order."""
        return tuple(cls._leaves(written=False))

    @classmethod
    def _leaves(cls, written: bool) -> Iterator[Leaf]:
        for field in cls.fields:
            out = field.direction == "Out" or (written and field.direction != "In")
            if field.kind in KINDS:
                yield Leaf((field.name,), field.kind, out, field.optional)
            elif issubclass(_DECLARED.get(field.kind, int), Value):
                optional = field.optional or field.count > 0
                for begin in _paths(field):
                    for leaf in _DECLARED[field.kind]._leaves(out):
                        path = (*begin, *leaf.path)
                        yield Leaf(path, leaf.kind, leaf.written, leaf.optional or optional)

    def bind(self, resolve: Callable) -> Self:
        """A copy with resolve(tensor) for every tensor."""
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
        """Everything but tensors, by dotted names as those of leaves."""
        found = {}
        for name, kind in self._given:
            value = getattr(self, name)
            if kind == _PLAIN or (kind == _VALUE and value is None):
                found[name] = value
            elif kind != _TENSOR:
                values = value if kind == _ARRAY else [value]
                for number, held in enumerate(values):
                    path = (name, number) if kind == _ARRAY else (name,)
                    inner = held.attributes().items()
                    found |= {f"{_dotted(path)}.{end}": attribute for end, attribute in inner}
        return found

    @classmethod
    def _kind_of(cls, name: str) -> int:
        field = next((field for field in cls.fields if field.name == name), None)
        if field is None:
            return _PLAIN
        if field.kind in KINDS:
            return _TENSOR
        if not issubclass(_DECLARED.get(field.kind, int), Value):
            return _PLAIN
        return _ARRAY if field.count else _VALUE

    def pack(self, address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr) -> bytes:
        """The struct, as C++ reads it.

        Raises:
            ValueError: a tensor is not contiguous, or has another dtype or shape than was declared,
                or something is missing.
        """
        words: list = []
        shapes: list = []
        self._add_words(words, shapes, address, ())
        check_shapes(type(self), tuple(shapes))
        return _layout(type(self)).pack(*words)

    @functools.cached_property
    def packed(self):
        """The struct in memory (lsq.native.loader.words), with the addresses of now; a prepared
        pass puts in others.
        """
        return loader.words(self.pack())

    def _add_words(
        self, words: list, shapes: list, address: Callable, holders: tuple["Declared", ...]
    ) -> None:
        for field in self.fields:
            value = getattr(self, field.name)
            dtypes = KINDS.get(field.kind)
            if dtypes is None:
                if isinstance(value, Declared):
                    value._add_words(words, shapes, address, (*holders, self))
                elif field.count:
                    self._add_array(field, words, shapes, address, holders)
                elif value is not None:
                    words.append(value)
                elif field.optional:
                    _add_missing(_DECLARED[field.kind], words, shapes)
                else:
                    raise ValueError(
                        f"{_path(holders, self)}.{field.name} is None; it must be a {field.kind}"
                    )
            elif value is None and field.optional:
                words.append(0)
                shapes.append(None)
            elif (
                isinstance(value, torch.Tensor) and value.dtype in dtypes and value.is_contiguous()
            ):
                words.append(address(value) or NOWHERE)
                shapes.append(value.shape)
            else:
                _refuse(value, dtypes, f"{_path(holders, self)}.{field.name}")

    def _add_array(self, field, words, shapes, address, holders) -> None:
        values = getattr(self, field.name)
        if not 0 < len(values) <= field.count:
            raise ValueError(
                f"{_path(holders, self)}.{field.name} has {len(values)} values; allowed: 1 to"
                f" {field.count}"
            )
        for value in values:
            value._add_words(words, shapes, address, (*holders, self))
        for _ in range(field.count - len(values)):
            _add_missing(_DECLARED[field.kind], words, shapes)


_PLAIN, _TENSOR, _VALUE, _ARRAY = range(4)
"""Kinds of fields."""
_DECLARED: dict[str, type] = {}
NOWHERE = 256
"""In the place of the address of a tensor without elements, which is there all the same."""


class Value(Declared):
    """Tensors that belong together and flow between operations."""


def _add_missing(cls: type[Declared], words: list, shapes: list) -> None:
    words.extend(_zeros(cls))
    shapes.extend([None] * len(cls.leaves()))


def _dotted(path: Path) -> str:
    """("sums", 0, "parts") -> "sums0.parts"."""
    return "".join(str(part) if isinstance(part, int) else f".{part}" for part in path)[1:]


def _paths(field: declarations.Field) -> list[Path]:
    """The path of each value of a field."""
    if not field.count:
        return [(field.name,)]
    return [(field.name, number) for number in range(field.count)]


def _path(holders: tuple[Declared, ...], last: Declared) -> str:
    return ": ".join(type(one).__name__ for one in (*holders, last))


def _refuse(tensor, dtypes: tuple[torch.dtype, ...], where: str) -> None:
    found = (
        f"{tensor.dtype} with strides {tensor.stride()}"
        if isinstance(tensor, torch.Tensor)
        else repr(tensor)
    )
    raise ValueError(
        f"{where} is {found}; it must be a contiguous tensor of {' or '.join(map(str, dtypes))}"
    )


@functools.cache
def _layout(cls: type) -> struct.Struct:
    return struct.Struct("".join(_letters(cls)))


def _letters(cls: type) -> Iterator[str]:
    """The format for `struct`, field by field: natural alignment, whole structs as long as C++ has
    them."""
    for field in cls.fields:
        held = _DECLARED.get(field.kind)
        if field.kind == "float":
            yield "f"
        elif held is not None and issubclass(held, Value):
            yield f"0q{''.join(_letters(held))}0q" * (field.count or 1)
        else:
            yield "P" if field.kind in KINDS else "q"
    yield "0q"


@functools.cache
def address_words(cls: type) -> dict[Path, int]:
    """By path: the number of the 8-byte word in the struct that is the tensor's address."""
    found, before = {}, ""
    for field, letters in zip(cls.fields, _letters(cls), strict=False):
        first = struct.calcsize(before + "0q") // 8
        if field.kind in KINDS:
            found[field.name,] = first
        elif letters.startswith("0q"):
            held = _DECLARED[field.kind]
            for number, begin in enumerate(_paths(field)):
                offset = first + number * (_layout(held).size // 8)
                words = address_words(held).items()
                found |= {(*begin, *path): offset + word for path, word in words}
        before += letters
    return found


@functools.cache
def _zeros(cls: type) -> tuple[int, ...]:
    return _layout(cls).unpack(bytes(_layout(cls).size))


@functools.lru_cache(maxsize=4096)
def check_shapes(cls: type[Declared], shapes: tuple[Sequence[int] | None, ...]) -> None:
    """Refuse tensors of other shapes than the docstrings of their fields state; None stands for one
    that is missing.

    A name of a size means the same in all fields of one declaration.

    Raises:
        ValueError: a tensor does not fit the others.
    """
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
"""Paths from a field to the tensor whose shape its docstring states: the field itself, or one in
its value."""


@functools.cache
def _rules(cls: type[Declared]) -> list[tuple[int, Path, str, Shapes]]:
    """(which leaf, whose names of sizes they are, field, allowed shapes) of each tensor of which
    something is stated.

    Those come first that leave no choice.
    """
    found = []
    for number, leaf in enumerate(cls.leaves()):
        holder: type[Declared] = cls
        for depth, part in enumerate(leaf.path):
            if isinstance(part, int):
                continue
            declared = declarations.declarations().get(holder.__name__)
            field = (
                next((one for one in declared.fields if one.name == part), None)
                if declared
                else None
            )
            if field is not None and field.shapes and leaf.path[depth + 1 :] in _MATRIX:
                found.append((number, leaf.path[:depth], leaf.name, field.shapes))
            holder = _DECLARED.get(field.kind) if field is not None else None
            if holder is None:
                break
    return sorted(found, key=lambda rule: _choices(rule[-1]))


def _choices(allowed: Shapes) -> tuple[int, int]:
    """The number of allowed shapes, and of sizes in them that are formulas."""
    return len(allowed), sum(
        not (name.isidentifier() or name.isdecimal()) for sizes in allowed for name in sizes
    )


def _sizes(
    names: Sequence[str], shape: Sequence[int], known: dict[str, int]
) -> dict[str, int] | None:
    """Sizes by name, with those already known; None where `shape` does not fit."""
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
                # of declarations, which are code
                wanted = eval(_formula(name), {"__builtins__": {}}, found)
            except (NameError, SyntaxError):
                continue
        if wanted != size:
            return None
    return found


@functools.cache
def _formula(text: str) -> CodeType:
    """Compile a size that is computed of others, once."""
    return compile(text, "declarations", "eval")
