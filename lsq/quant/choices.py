"""Which format a tensor has: one for all, and others for those whose names fit a pattern.

    "int8,*fc2*=nvfp4,encoder.layers.0.*=float32"

First comes the format of all others; of several patterns that fit, the last one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache


@dataclass(frozen=True)
class FormatChoice:
    """A format for all, and exceptions."""

    others: str
    exceptions: tuple[tuple[str, str], ...] = ()
    """(pattern with * and ?, format) in order."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Every format that is named."""
        return self.others, *(form for _, form in self.exceptions)

    def of(self, *names: str) -> str:
        """The format of a tensor that is called so, or has several names."""
        fitting = (form for pattern, form in reversed(self.exceptions) if _fits(pattern, names))
        return next(fitting, self.others)

    def at(
        self,
        path: str,
        tensors: Mapping[str, Sequence[str]],
        fitted: MutableMapping[str, set[str]],
        *,
        read: bool = False,
    ) -> str:
        """What concerns a part of a model, as text.

        Args:
            path: of the part in the model; "" for all of it.
            tensors: what the part calls its tensors -> their names, in the part, in the state dict
                of the model: those of the weights that a tensor consists of.
            fitted: gets the patterns that fit one -> the formats of all that they fit.
            read: names are the tensor's own, and those of the weights that are multiplied by it.

        Raises:
            ValueError: patterns give the weights of one tensor different formats.
        """
        chosen = {}
        for own, theirs in tensors.items():
            names = [f"{path}.{name}" if path else name for name in theirs]
            form = chosen[own] = self._common(names[:read], names[read:])
            for pattern, _ in self.exceptions:
                if _fits(pattern, names):
                    fitted.setdefault(pattern, set()).add(form)
        others = (
            self.others
            if self.others in chosen.values() or not chosen
            else next(iter(chosen.values()))
        )
        return ",".join(
            [others, *(f"{own}={form}" for own, form in chosen.items() if form != others)]
        )

    def _common(self, own: Sequence[str], weights: Sequence[str]) -> str:
        forms = [self.of(*own, weight) for weight in weights] or [self.of(*own)]
        if len(set(forms)) > 1:
            what = "the input of " if own else ""
            given = (f"{form} to {what}{one}" for form, one in zip(forms, weights, strict=True))
            raise ValueError(
                f"gives {', '.join(given)}; but these are one tensor here: give all of them one"
                " format, "
                "or call lsq.convert with fused=False"
            )
        return forms[0]


def _fits(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


@cache
def format_choice(text: str) -> FormatChoice:
    """What a text says; formats are not looked at.

    Raises:
        ValueError: it has not the form above.
    """
    others, *exceptions = text.split(",")
    pairs = tuple(tuple(part.strip() for part in one.split("=")) for one in exceptions)
    if "=" in others or not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ValueError(
            f"{text!r} does not say which tensors have which format; write one format for all, then"
            " exceptions: "
            "int8,*fc2*=nvfp4,encoder.layers.0.*=float32"
        )
    return FormatChoice(others.strip(), pairs)


def check_choice(name: str, text: object, check: Callable[[str], None]) -> None:
    """Refuse a choice of formats that cannot be made.

    Args:
        name: of what is chosen, for errors.
        text: see `format_choice`.
        check: raises a ValueError for a format that does not exist.

    Raises:
        ValueError: no text, a text of another form, or `check`'s.
    """
    if not isinstance(text, str):
        raise ValueError(f"{name} is {text!r}; it must be the name of a format, such as 'int8'")
    try:
        for form in format_choice(text).formats:
            check(form)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}: {error}") from None
