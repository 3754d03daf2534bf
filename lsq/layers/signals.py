"""When a training looks at what its quantisers do, and what of that is unhealthy."""

from lsq.layers.statistics import TensorStatistics

LEAST_INTERVAL = 25
"""Updates between two collections, at least: an update that is looked at takes about half as long
again."""
LARGEST_CLIPPED_SHARE = 0.05
"""A tensor with a larger share of its values clipped is warned of."""
SMALLEST_CODE = 7
"""An 8-bit tensor whose largest |code| is at most this uses fewer than 4 of the 7 bits of a
magnitude."""


def interval_of(log_interval: int) -> int:
    """Updates between two collections in a training that logs that often: a multiple of it,
    LEAST_INTERVAL or more."""
    log_interval = max(log_interval, 1)
    return log_interval * -(-LEAST_INTERVAL // log_interval)


def complaint(
    statistics: TensorStatistics, option: str = "QuantConfig(clip_init={!r})"
) -> str | None:
    """Describe what is wrong with a tensor; None: nothing.

    `option`: how to choose the way in which clips are first measured.
    """
    if statistics.clipped_share > LARGEST_CLIPPED_SHARE:
        return (
            f"{statistics.clipped_share:.1%} of its values are clipped (clip"
            f" {statistics.clip:.4g}); the clip is too "
            f"small: try {option.format('absmax')} or a lower learning rate"
        )
    if statistics.bits == 8 and statistics.largest_code <= SMALLEST_CODE:
        return (
            f"its largest code is {statistics.largest_code} of 127, fewer than 4 bits (clip"
            f" {statistics.clip:.4g}); "
            f"the clip is too large: try {option.format('mse')}"
        )
    return None
