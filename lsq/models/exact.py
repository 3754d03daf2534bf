"""Checks that a layer of another model computes what its class says: no patches, hooks, wrappers.

They see LoRA layers as the layers inside; lsq.models.adapters reads the adapters.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from operator import itemgetter
from types import FunctionType

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

PLAIN = (
    nn.Linear,
    NonDynamicallyQuantizableLinear,
    nn.LayerNorm,
    nn.Dropout,
    nn.Embedding,
    nn.ModuleList,
)
OTHERS = ("torch.nn.modules.activation", "transformers.activations", "transformers.pytorch_utils")
"""Modules that define activations and Conv1D."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_hooks = itemgetter(*HOOKS)
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
"""Names in torch.nn.modules.module of the hooks that all modules have."""
RECORDER = "transformers.utils.output_capturing"
"""Module whose hooks only record, and only where a fused layer runs its own code."""
REHEARSAL = "lsq.run.step"
"""Module whose hooks note what each module keeps while memory is planned."""
GEOMETRIC = "torch_geometric."
"""Begin of the modules of PyTorch Geometric, whose layers' methods it generates from templates."""
TRUSTED = ("torch", "transformers", "torch_geometric")
"""Packages whose functions a layer may call, or be decorated with."""


def check_exact(layer: nn.Module, parts: Mapping[str, str], parameters: set[str]) -> None:
    """Raise a ValueError for a layer that may compute something else than its class says.

    `parts`: paths of inner modules with classes of the layer's file -> ends of the classes' names.
    `parameters`: names of all parameters that the layer may have.
    """
    home = type(layer).__module__
    for path, module in [("", layer), *named_inside(layer)]:
        kind, name = type(module), f"its {path}" if path else "it"
        ending = parts.get(path)
        exact = kind in PLAIN or kind.__module__ in OTHERS
        if ending is not None:
            exact = kind.__module__ == home and kind.__name__.endswith(ending)
        if path and not exact:
            raise ValueError(f"{name} is a {kind.__module__}.{kind.__qualname__}")
        change = patched(kind) or altered(module)
        if change:
            raise ValueError(f"{name} has {change}")
        gone = [child for child, there in module._modules.items() if there is None]
        if gone:
            raise ValueError(f"its {f'{path}.{gone[0]}'.lstrip('.')} is None")
    for name, _ in layer.named_parameters():
        if name.replace(".base_layer.", ".") not in parameters and not is_adapter(name):
            raise ValueError(f"it has a parameter {name}, which its class does not use")


def is_lora(module: nn.Module) -> bool:
    """Whether it is PEFT's wrapper of a linear layer with LoRA adapters."""
    kind = type(module)
    return kind.__name__ == "Linear" and kind.__module__ == "peft.tuners.lora.layer"


def is_adapter(name: str) -> bool:
    """Whether the name of a parameter is of a LoRA adapter."""
    return ".lora_" in name


def base_of(module: nn.Module) -> nn.Module:
    """Return a layer without its adapters."""
    return module.base_layer if is_lora(module) else module


def module_at(layer: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path, with its adapters, or None."""
    for part in path.split(".") if path else ():
        layer = None if layer is None else layer._modules.get(part)
    return layer


def patched(kind: type[nn.Module]) -> str | None:
    """Describe a method of a class that another file defines, or that calls a foreign function."""
    for owner in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, FunctionType) and (
                name == "__call__" or not name.startswith("__")
            ):
                strange = _strange(function, owner)
                if strange:
                    return f"a {owner.__qualname__}.{name} {strange}"
    return None


def _strange(function: FunctionType, owner: type) -> str | None:
    while isinstance(getattr(function, "__wrapped__", None), FunctionType) and _trusted(function):
        function = function.__wrapped__
    home = _home(function)
    generated = home.startswith(GEOMETRIC) and owner.__module__.startswith(GEOMETRIC)
    if home != owner.__module__ and not generated:
        return f"that {home} defines"
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if isinstance(called, FunctionType) and not _trusted(called):
            return f"that calls a {name} of {_home(called)}"
    return None


def altered(module: nn.Module) -> str | None:
    """Describe a method that a module replaces, or a hook on it; None: there is neither."""
    state = module.__dict__
    replaced = own_methods(module, type(module))
    if replaced:
        return replaced
    for hooks in filter(None, map(state.get, HOOKS)):
        for hook in hooks.values():
            if _home(hook) != RECORDER:
                return f"a hook, {getattr(hook, '__qualname__', type(hook).__name__)}"
    return None


def unaltered(modules: Iterable[nn.Module]) -> bool:
    """Whether no module replaces a method or has a hook: what most passes find, fast."""
    return not any(
        [any(_hooks(vars(one))) or not _methods(type(one)).isdisjoint(vars(one)) for one in modules]
    )


def own_methods(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Describe a method of `kind` that this module alone replaces, or return None."""
    names, state = _methods(kind), module.__dict__
    return None if names.isdisjoint(state) else f"a {min(names & state.keys())} of its own"


def hooked_everywhere() -> str | None:
    """Describe a hook of all modules, or return None; hooks of a rehearsal only look."""
    for name in GLOBAL_HOOKS:
        if any(_home(hook) != REHEARSAL for hook in vars(torch_module)[name].values()):
            return f"a hook of all modules ({name})"
    return None


@lru_cache(maxsize=512)
def _methods(kind: type[nn.Module]) -> frozenset[str]:
    owners = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return frozenset(
        name
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, FunctionType)
    ) | {"forward"}


@lru_cache(maxsize=512)
def patched_now(kind: type[nn.Module], forward: Callable) -> str | None:
    """Return `patched` of a class, cached as long as the class has this `forward`."""
    return patched(kind)


def named_inside(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of all inner modules in a fixed order, without adapters."""
    for name, child in module._modules.items():
        if child is not None:
            yield prefix + name, base_of(child)
            yield from named_inside(base_of(child), f"{prefix}{name}.")


def unknown_attention(attention: nn.Module) -> str | None:
    """Describe the function that computes attention; None if it is one of transformers' own."""
    name = attention.config._attn_implementation or "eager"
    home = sys.modules[type(attention).__module__]
    functions = home.ALL_ATTENTION_FUNCTIONS
    known = _home(home.eager_attention_forward if name == "eager" else functions.get(name))
    own = known == home.__name__ or known.startswith("transformers.integrations.")
    if own and not name.startswith("paged|"):
        return None
    return f"its attention is {name!r}, " + (
        f"a function of {known}" if known else "which lsq does not know"
    )


def _home(function: object) -> str:
    """Return the module that defines a function's code, whatever a decorator says."""
    return getattr(function, "__globals__", {}).get("__name__", "")


def _trusted(function: FunctionType) -> bool:
    return _home(function).partition(".")[0] in TRUSTED
