"""Find what a folder holds besides the checkpoints of its series, so that nothing is ignored silently."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from joma.arguments import InputError
from joma.watch.step_names import EPOCH, step_number

TRAINER_STATE = "trainer_state.json"  # the Hugging Face Trainer writes it beside the weights
MAX_STATE = 1 << 26  # bytes; it holds the whole log of a training
WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx)$")
TRAINING_STATE = re.compile(
    r"(optimizer|optim|scheduler|rng_state|random_states|scaler|sampler|training_args|dataloader)\w*"
    r"\.(pt|pth|bin|pkl|safetensors)|(optimizer_\d+|(bf16_)?zero_pp_rank_.*)(\.pt)?"
)
LIKE_A_CHECKPOINT = re.compile(r"(?i).*(check-?point|ckpt|step|epoch|iter|final|best|last|latest)")
FINAL = re.compile(
    r"(?i)(final|last|latest|end)([-_]?(model|checkpoint|ckpt))?|(model|checkpoint|ckpt)[-_]?(final|last|latest|end)"
)
SHOWN = 4  # names that a message enumerates
IN_FOLDERS = "put each checkpoint into a folder named after its step, such as step1000"
ALONE = "give its name as a revision to measure it alone"


@dataclass(frozen=True)
class Ignored:
    """Folders or files that are no part of a series.

    Attributes:
        names: relative to the series' folder.
        message: what they are and why they are not measured.
        remedy: what to do.
    """

    names: tuple[str, ...]
    message: str
    remedy: str


def holds_weights(folder: Path) -> bool:
    """Return whether a folder has a file that may hold weights."""
    return any(WEIGHTS.search(name) and not TRAINING_STATE.fullmatch(name) for name in _list(folder))


def loose_weights(folder: Path) -> list[str]:
    """Return the names of the files in a folder that may hold weights, or the state of a training."""
    return [name for name in _list(folder) if WEIGHTS.search(name)]


def empty_series(source: str, wanted: str, names: list[str], folder: Path | None) -> InputError:
    """Return the error for a source whose subfolders or revisions, `names`, hold nothing that is wanted."""
    loose = [] if folder is None else loose_weights(folder)
    got = f"{source} with {', '.join([*names[:8], *loose[:SHOWN]]) or 'none'}"
    remedy = "give revisions or a pattern" if names else "give the folder that holds the checkpoints"
    return InputError("source", f"a series with {wanted}", got, IN_FOLDERS if loose else remedy)


def trainer_step(folder: Path) -> int | None:
    """Return the training step that a folder's trainer_state.json states; None if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        file = folder / TRAINER_STATE
        if file.is_file() and file.stat().st_size <= MAX_STATE:
            state = json.loads(file.read_bytes())
            step = state.get("global_step") if isinstance(state, dict) else None
            return step_number(str(step)) if type(step) is int else None
    return None


def ignored_folders(
    root: Path, names: Iterable[str], members: Mapping[str, int], unit: str, *, root_is_model: bool
) -> Iterator[Ignored]:
    """Yield the subfolders `names`, which are no members, that look like checkpoints, and the model beside the series.

    Args:
        root: the series' folder.
        names: its subfolders that are not in the series.
        members: the steps of the series, by name.
        unit: what the series counts, "step" or "epoch".
        root_is_model: whether the folder itself is a member.
    """
    for name in names:
        if holds_weights(root / name) or LIKE_A_CHECKPOINT.match(name):
            yield _ignored_folder(root, name, members, unit)
    loose = [] if root_is_model else loose_weights(root)
    if loose:
        message = f"{_enumerate(loose)} in the folder itself {'is' if len(loose) == 1 else 'are'} not in the series"
        remedy = IN_FOLDERS
        if (step := trainer_step(root)) is not None:
            same = _same_step(step, members)
            message += f": {TRAINER_STATE} says {unit} {step}{same}"
            remedy = "nothing is lost if the weights are the same" if same else remedy
        yield Ignored(tuple(loose), message, remedy)


def _ignored_folder(root: Path, name: str, members: Mapping[str, int], unit: str) -> Ignored:
    step, epoch = trainer_step(root / name), re.fullmatch(EPOCH, name)
    if not holds_weights(root / name):
        return Ignored((name,), f"{name} holds no weights", "save the weights into it, or remove it")
    if unit == "step" and epoch:
        message = f"{name} counts epochs, and the series counts steps"
        return Ignored((name,), message, "give the pattern `epoch` to measure the epochs instead")
    if step is None:
        message = f"the name {name!r} says no step, so that its place in the series is unknown"
        return Ignored((name,), message, f"rename it after its step, such as step1000, or {ALONE}")
    same = _same_step(step, members)
    message = f"the name {name!r} says no step, and its {TRAINER_STATE} says step {step}"
    if same:
        return Ignored((name,), f"{message}{same}", f"nothing is lost if the weights are the same; else {ALONE}")
    return Ignored((name,), message, f"rename it to step{step} if it belongs to this training, or {ALONE}")


def _same_step(step: int, members: Mapping[str, int]) -> str:
    same = next((member for member, other in members.items() if other == step), None)
    return f", as does {same}" if same else ""


def unread_files(root: Path, folders: Mapping[str, Path]) -> Iterator[Ignored]:
    """Yield the files of the checkpoints that look like weights and are not read, once for all checkpoints.

    Args:
        root: the series' folder, for the names.
        folders: the folder of each checkpoint, by name.
    """
    training: dict[str, list[str]] = {}
    beside: dict[str, list[str]] = {}
    for checkpoint, folder in folders.items():
        names = _list(folder)
        for name in names:
            if TRAINING_STATE.fullmatch(name):
                training.setdefault(name, []).append(checkpoint)
        for name in _unselected(names):
            beside.setdefault(name, []).append(checkpoint)
    if training:
        holders = sorted({checkpoint for places in training.values() for checkpoint in places})
        verb = "holds" if len(training) == 1 else "hold"
        message = f"{_enumerate(sorted(training))} in {_places(holders)} {verb} the state of the training, not weights"
        yield Ignored(_paths(root, folders, training), message, "nothing has to be done")
    for name, checkpoints in beside.items():
        message = f"{name} in {_places(checkpoints)} is not read: other files hold the weights that are measured"
        remedy = "remove it, or move it into a checkpoint of its own if its weights are others"
        yield Ignored(_paths(root, folders, {name: checkpoints}), message, remedy)


def _unselected(names: Collection[str]) -> Iterator[str]:
    """Yield the weight files that are not read because a safetensors file, or the full model, is preferred."""
    weights = [name for name in names if WEIGHTS.search(name) and not TRAINING_STATE.fullmatch(name)]
    full = [name for name in weights if re.fullmatch(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)", name)]
    chosen = [name for name in full if name.endswith(".safetensors")] or full
    if not chosen:
        safetensors = [name for name in weights if name.endswith(".safetensors")]
        chosen = safetensors if len(safetensors) == 1 else weights
    yield from (name for name in weights if name not in chosen)


def _paths(root: Path, folders: Mapping[str, Path], files: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return the files' paths relative to the series' folder."""
    return tuple(
        os.path.relpath(folders[checkpoint] / name, root) for name, places in files.items() for checkpoint in places
    )


def _places(checkpoints: list[str]) -> str:
    return checkpoints[0] if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints"


def _enumerate(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _list(folder: Path) -> list[str]:
    """Return the names of the files in a folder; none if it cannot be read, which is a fault of its own."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if not entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []
