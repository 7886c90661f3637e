"""Which evaluation was the best, and when to stop waiting for a better one."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_ERRORS = "loss", "perplexity", "error", "mse", "mae", "nll", "wer", "cer"  # names of what is better if smaller


@dataclass
class Best:
    """For `AMPTrainer(best=...)`: keeps the checkpoint of the best evaluation, and can stop early.

    metric: the name of a number in the evaluation. larger_is_better: None means False for names that end in "loss",
    "perplexity", "error", "mse", "mae", "nll", "wer" or "cer", and True for others, such as "f1".
    patience: training ends after this many evaluations in a row without an improvement; None never ends it.
    min_improvement: an evaluation has to be better than the best one by more than this. Raises ValueError for a
    patience below 1 or a min_improvement below 0.
    """

    metric: str = "loss"
    larger_is_better: bool | None = None
    patience: int | None = None
    min_improvement: float = 0.0
    value: float | None = field(default=None, init=False)  # of the best evaluation so far
    step: int = field(default=0, init=False)  # the step of that evaluation; 0 before the first
    waited: int = field(default=0, init=False)  # evaluations since then

    def __post_init__(self) -> None:
        if self.larger_is_better is None:
            self.larger_is_better = not self.metric.endswith(_ERRORS)
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"Best: patience is {self.patience}; expected at least 1, or None")
        if not 0 <= self.min_improvement < math.inf:
            raise ValueError(f"Best: min_improvement is {self.min_improvement}; expected a number that is not negative")

    def of(self, evaluation: Mapping[str, float]) -> float:
        """The metric in an evaluation. Raises ValueError if it is missing."""
        if self.metric not in evaluation:
            given = ", ".join(sorted(evaluation)) or "nothing"
            raise ValueError(f"Best: metric is {self.metric!r}, and the evaluation has {given}")
        return evaluation[self.metric]

    def record(self, value: float, step: int) -> bool:
        """Records an evaluation. Returns whether it is the best so far. NaN never is."""
        gain = math.inf if self.value is None else (value - self.value) * (1 if self.larger_is_better else -1)
        better = not math.isnan(value) and gain > self.min_improvement
        if better:
            self.value, self.step = value, step
        self.waited = 0 if better else self.waited + 1
        return better

    @property
    def waited_long_enough(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {name: x for name, x in asdict(self).items() if name not in ("patience", "min_improvement")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of another metric; patience and min_improvement may have changed."""
        for name in ("metric", "larger_is_better"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"Best: {name} is {getattr(self, name)!r}; expected {state[name]!r}, as the checkpoint has"
                )
        self.value, self.step, self.waited = state["value"], state["step"], state["waited"]
