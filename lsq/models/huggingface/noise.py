"""lsq.monitor in a Trainer: its arguments, which checkpoints hold as plain values, and what is
logged of a look."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lsq.observe import Bounds, Monitor

ARGUMENTS = ("every", "rows", "bounds", "patience", "fall_back", "group")


def arguments_of_monitor(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of lsq.monitor, with Bounds that may have been plain.

    Raises:
        ValueError: a name is none of ARGUMENTS, or a bound is no number.
    """
    strange = sorted(given.keys() - ARGUMENTS)
    if strange:
        raise ValueError(
            f"monitor has {', '.join(map(repr, strange))}; allowed: {', '.join(ARGUMENTS)}"
        )
    bounds = given.get("bounds")
    return dict(given) | ({"bounds": Bounds(**bounds)} if isinstance(bounds, Mapping) else {})


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same for JSON, without the group of processes."""
    kept = {name: value for name, value in arguments.items() if name != "group"}
    return kept | ({"bounds": asdict(kept["bounds"])} if kept.get("bounds") else {})


def noise(monitor: Monitor, *, every_module: bool) -> dict[str, float]:
    """The least signal-to-noise of its last look in dB, of each module as well where wanted; how
    many are in floats."""
    found = {"lsq/modules_in_floats": float(len(monitor.fallen))}
    for name, reading in monitor.readings.items():
        for kind, value in reading.values().items():
            least = f"lsq/{kind}_signal_to_noise"
            found[least] = min(value, found.get(least, value))
            if every_module:
                found[f"{least}/{name}"] = value
    return found
