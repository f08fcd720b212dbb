"""Options of the training loop: what to record, when to save, and how to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from joma import schedule
from joma.arguments import InputError, choice, sequence, whole

PRECISIONS = {"highest": "float32", "high": "TF32", "bf16": "bfloat16, accumulated in float32; measures use TF32"}
Measure = Callable[[Any, int], Mapping[str, Tensor]]


def _no_measures(model: Any, step: int) -> dict[str, Tensor]:  # noqa: ARG001  (the signature of `measure`)
    return {}


@dataclass(frozen=True)
class Record:
    """What is recorded while a model trains, and when. The loss is always recorded.

    Attributes:
        measure: a function of the model and the step that returns named tensors [seed, ...].
        at: the steps at which to record, such as those of `joma.schedule`; every step if None.
        dims: names of each variable's axes after the seed's.
        gradients: whether `measure` reads gradients. If not, recorded steps are replayed too on CUDA.
        seeds: labels of the seed axis; 0, 1, … if None.
    """

    measure: Measure = _no_measures
    at: Iterable[int] | None = None
    dims: Mapping[str, Sequence[str]] = field(default_factory=dict)
    gradients: bool = True
    seeds: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", _as_tuple(self.at))

    @property
    def reads_gradients(self) -> bool:
        """Whether measures need the gradients of the recorded step, so that it cannot be replayed."""
        return self.gradients and self.measure is not _no_measures

    def steps(self, last: int) -> frozenset[int]:
        """Return the steps at which to record, checked to lie in [0, last]."""
        steps = _checked_steps("at", range(last + 1) if self.at is None else self.at, last)
        if not steps:
            raise InputError("at", "at least one step", "none", "give steps, such as those of `joma.schedule.every`")
        return steps

    def labels(self, count: int) -> Sequence[int]:
        """Return one label for each of `count` seeds."""
        labels = range(count) if self.seeds is None else self.seeds
        if len(labels) != count:
            raise InputError("seeds", f"{count} labels", len(labels), "give one for each seed of the model")
        return labels


@dataclass(frozen=True)
class Saving:
    """Where and when checkpoints are written.

    Attributes:
        folder: a folder for this training alone. Training resumes from the newest checkpoint in it.
        at: the steps at which to save; ten of them if None. The end is always saved.
        min_seconds: a save that would come sooner than this after the last one, or after the start, is skipped.
        identity: what else tells this training from others, by name, such as the run it belongs to. It is stored in
            every checkpoint, and a checkpoint with another identity is refused.
    """

    folder: Path | str
    at: Iterable[int] | None = None
    min_seconds: float = 0.0
    identity: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", _as_tuple(self.at))

    def steps(self, last: int) -> frozenset[int]:
        """Return the steps at which to save, checked to lie in [0, last]."""
        return _checked_steps(
            "saving.at", schedule.every(max(1, last // 10), last) if self.at is None else self.at, last
        )


@dataclass(frozen=True)
class Compute:
    """How a step is computed on CUDA. On the CPU matrix products are always exact and nothing is compiled.

    Attributes:
        precision: of float32 matrix products, a name of `PRECISIONS`.
        compiled: whether to compile the modules that the model offers (`joma.train.protocol.CompiledModel`).
        dynamic: compile once for all sizes, for many models of different sizes one after the other. Otherwise each
            size has its own graph, which is faster.
    """

    precision: str = "highest"
    compiled: bool = True
    dynamic: bool = False

    def __post_init__(self) -> None:
        choice("precision", self.precision, PRECISIONS)

    @property
    def half(self) -> bool:
        """Whether matrix products are in bfloat16."""
        return self.precision == "bf16"


def _as_tuple(steps: Iterable[Any] | None) -> tuple[Any, ...] | None:
    """Keep the steps of an iterator, which could be read once only."""
    return None if steps is None else tuple(sequence("at", steps, "steps in any order", ordered=False))


def _checked_steps(name: str, steps: Iterable[Any], last: int) -> frozenset[int]:
    return frozenset(whole(name, step, low=0, high=last) for step in steps)
