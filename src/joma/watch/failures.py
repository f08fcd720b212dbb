"""Probes that fail do not end a training: each distinct cause is one warning, with its step and a remedy."""

from __future__ import annotations

import re
import warnings

import torch

from joma.arguments import InputError, StateError
from joma.watch.distributed import describe_failure

_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


class ProbeFailed(UserWarning):
    """A probe could not measure the model; the training goes on without it."""


class Failures:
    """The failures of a series of probes; each distinct cause gives one warning."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    @property
    def any(self) -> bool:
        """Whether there has been a failure."""
        return bool(self._warned)

    def warn(self, what: str, step: int, error: Exception, *, remedy: str = "", stacklevel: int = 2) -> None:
        """Warn of a failure, unless the same cause, whatever its numbers, has been warned of."""
        cause = describe_failure(error).rstrip(".")
        key = re.sub(r"\d+(\.\d+)?", "#", f"{what} {cause}")
        if key not in self._warned:
            self._warned.add(key)
            advice = remedy or _remedy(error)
            message = f"{what} failed at step {step}, and training goes on: {cause}"
            warnings.warn(f"{message}; {advice}." if advice else f"{message}.", ProbeFailed, stacklevel=stacklevel + 1)


def _remedy(error: Exception) -> str:
    """Return what to do about an error; the messages of our own errors end with it."""
    if isinstance(error, InputError | StateError):
        return ""
    if is_out_of_memory(error):
        return "give a smaller `batch`"
    return "give `forward=`, a function of the model and the batch, or a `batch` that the model takes"


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory has run out, of a device or of this machine."""
    return isinstance(error, _OUT_OF_MEMORY) or "out of memory" in str(error)


def free_device_memory() -> None:
    """Return the unused memory of torch's caching allocator to the device, once its tensors are gone."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
