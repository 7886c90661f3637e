"""Learning-rate schedules: a linear warm-up from 0, then linear, cosine, polynomial or no decay."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def linear_schedule(optimizer: Optimizer, warmup_steps: int, max_steps: int) -> LambdaLR:
    """Learning rates rise linearly from 0 for warmup_steps, then fall linearly to 0 at max_steps.

    Equivalent to `transformers.get_linear_schedule_with_warmup`. Raises ValueError unless
    0 <= warmup_steps < max_steps.
    """
    return _schedule("linear_schedule", optimizer, warmup_steps, max_steps, lambda left: left)


def cosine_schedule(optimizer: Optimizer, warmup_steps: int, max_steps: int) -> LambdaLR:
    """Learning rates rise linearly from 0 for warmup_steps, then fall as half a cosine to 0 at max_steps, and stay.

    Equivalent to `transformers.get_cosine_schedule_with_warmup` up to max_steps. Raises ValueError as linear_schedule.
    """
    return _schedule(
        "cosine_schedule", optimizer, warmup_steps, max_steps, lambda left: (1 - math.cos(math.pi * left)) / 2
    )


def polynomial_schedule(
    optimizer: Optimizer, warmup_steps: int, max_steps: int, power: float = 1.0, end: float = 0.0
) -> LambdaLR:
    """Learning rates rise linearly from 0 for warmup_steps, then fall to `end` at max_steps, and stay.

    power: 1 falls in a line, 2 in a parabola. end: a share of each group's rate. Equivalent to
    `transformers.get_polynomial_decay_schedule_with_warmup`, except that its lr_end is one rate for all groups. Raises
    ValueError as linear_schedule, and unless power > 0 and 0 <= end <= 1.
    """
    if not 0 < power < math.inf:
        raise ValueError(f"polynomial_schedule: power is {power}; expected a positive number")
    if not 0 <= end <= 1:
        raise ValueError(f"polynomial_schedule: end is {end}; expected 0 to 1, a share of the rate")
    return _schedule(
        "polynomial_schedule", optimizer, warmup_steps, max_steps, lambda left: (1 - end) * left**power + end
    )


def constant_schedule(optimizer: Optimizer, warmup_steps: int) -> LambdaLR:
    """Learning rates rise linearly from 0 for warmup_steps, then stay.

    Equivalent to `transformers.get_constant_schedule_with_warmup`. Raises ValueError for negative warmup_steps.
    """
    return _schedule("constant_schedule", optimizer, warmup_steps, math.inf, lambda left: 1.0)


def _schedule(
    name: str, optimizer: Optimizer, warmup_steps: int, max_steps: float, factor: Callable[[float], float]
) -> LambdaLR:
    """factor(left): the share of the rate. left: the share of the steps after the warm-up that are left, 1 to 0."""
    if not 0 <= warmup_steps < max_steps:
        expected = "at least 0" if max_steps == math.inf else f"0 to max_steps - 1, {max_steps - 1}"
        raise ValueError(f"{name}: warmup_steps is {warmup_steps}; expected {expected}")

    def at(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        left = 1.0 if max_steps == math.inf else max(max_steps - step, 0) / (max_steps - warmup_steps)
        return factor(left)

    return LambdaLR(optimizer, at)
