"""Checkpoints of one run in the folder of another: whatever differs between the two, they are refused.

A run is interrupted once it has saved. Then a run that differs in one field of its config, in its seeds, its version,
its training or its study starts, and finds these checkpoints where its own would be.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from addition_runs import SMALL
from joma.arguments import InputError
from joma.files import StorageError
from joma.runs import open_run
from joma.studies import load
from joma.studies.symmetry import position_emergence
from joma.study import Outcome, Study, execute
from joma.train.checkpoint import CheckpointStore
from studies.hierarchy import test_config_fields as hierarchy
from studies.related import (
    test_entropy_floor,
    test_even_pairs,
    test_icl_autoregression,
    test_icl_regression,
    test_induction_phases,
    test_markov_unigram,
    test_max_margin,
    test_panorama,
    test_polarise,
)
from studies.symmetry import test_config_fields as symmetry
from studies.text import test_config_fields as text
from studies.theorems import test_config_fields as theorems

THEOREMS = ("invariance", "value-invariant", "winner", "sparse-dense", "ladder")
HIERARCHY = ("alignment", "scan-snap", "hierarchy-order")
RELATED = {
    "polarise": test_polarise, "icl-regression": test_icl_regression, "max-margin": test_max_margin,
    "entropy-floor": test_entropy_floor, "even-pairs": test_even_pairs, "markov-unigram": test_markov_unigram,
    "icl-autoregression": test_icl_autoregression, "induction-phases": test_induction_phases, "panorama": test_panorama,
}  # fmt: skip
# Those that train by `Context.fit`.
STUDIES = (*THEOREMS, *HIERARCHY, *text.STUDIES, "addition", "position-emergence", *RELATED)


def config_and_changes(name: str) -> tuple[Any, Mapping[str, Any]]:
    """Return the smallest config of a study, and another value of each of its fields, as its tests change them."""
    first, second = text.texts()
    if name in THEOREMS:
        return theorems.CONFIGS[name], theorems.CHANGES[name]
    if name in RELATED:
        fields = RELATED[name].FIELDS
        return fields.config, {**fields.changes, **({"corpus": second} if hasattr(fields.config, "corpus") else {})}
    if name in HIERARCHY:
        return hierarchy.CONFIGS[name], hierarchy.CHANGES[name]
    if name in text.STUDIES:
        config = text.config_of(name)
        fields = [field.name for field in dataclasses.fields(config)]
        return config, {field: text.other_value(name, field) for field in fields}
    if name == "addition":
        return replace(SMALL, arms=("none causal", "mlp 1")), symmetry.CHANGES[name]
    config = position_emergence.Config(
        digits=1, layers=2, heads=2, width=8, batch=8, steps=4, rate=1e-2, warm_up=2, held=0.3, corpus=first,
        tokeniser="bytes", length=6, windows=4, records=3, asked=12, probed=10, compared=5, nulls=4, widths=(8,),
    )  # fmt: skip
    return config, {**symmetry.CHANGES[name], "corpus": second}


@dataclass
class Foreign:
    """The checkpoints of the first training of one study's run, and what other runs of it make of them."""

    study: Study
    config: Any
    folder: Path
    finished: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checkpoints = self.folder / "checkpoints"
        with _interrupted(self.checkpoints, finished=self.finished):
            execute(self.study, out=self.folder / "first", config=self.config, seeds=1)
        assert any(self.checkpoints.glob("*.safetensors")), f"{self.study.name} saved nothing"

    def start(self, what: str, study: Study, config: Any, seeds: int = 1) -> None:
        """Start another run whose first training finds the checkpoints; it must refuse them and name the folder."""
        self._expect_refusal(what, 1, lambda out: execute(study, out=out, config=config, seeds=seeds))

    def start_other_training(self) -> None:
        """Let the same run find the checkpoints in the folder of its second training, if it has two."""
        run = lambda out: execute(self.study, out=out, config=self.config, seeds=1)  # noqa: E731
        self._expect_refusal("training", 2, run)

    def _expect_refusal(self, what: str, training: int, run: Callable[[Path], Outcome]) -> None:
        out = Path(tempfile.mkdtemp(dir=self.folder))
        places: list[Path] = []
        with _found_at(training, self.checkpoints, places):
            try:
                run(out)
                problem = "was not refused" if len(places) >= training else ""
            except StorageError as refusal:
                named = f"{places[-1]} holds checkpoints of another run, which differs in " in str(refusal)
                problem = "" if named else f"was refused by another message: {refusal}"
                self.counts["refused"] += not problem
                self.counts["refused, as the run alone differs"] += (
                    str(refusal).split("differs in ")[-1].startswith("run;")
                )
            except InputError:  # another value may be no valid one beside the other fields
                problem = ""
                self.counts["not started, as the value is refused"] += 1
        self.counts["foreign checkpoints"] += len(places) >= training
        shutil.rmtree(out)
        if problem:
            self.failures.append(f"{self.study.name}, {what} changed: {problem}")

    def resume(self) -> bool:
        """Return whether the run itself takes up its checkpoints and ends with the bits of one never interrupted."""
        places: list[Path] = []
        whole = execute(self.study, out=self.folder / "whole", config=self.config, seeds=1)
        with _found_at(1, self.checkpoints, places):
            resumed = execute(self.study, out=self.folder / "resumed", config=self.config, seeds=1)
        return bool(places) and open_run(whole.path).drop_attrs().identical(open_run(resumed.path).drop_attrs())


@contextmanager
def _interrupted(copy: Path, *, finished: bool) -> Iterator[None]:
    """Interrupt the first training after its first save, or after its last with `finished`; copy what it has saved."""
    save = CheckpointStore.save

    def save_and_stop(store: CheckpointStore, step: int, tensors: Any, *, keep: int = 2) -> None:
        save(store, step, tensors, keep=keep)
        if not finished or keep == 1:
            shutil.copytree(store.folder, copy)
            raise KeyboardInterrupt

    with mock.patch.object(CheckpointStore, "save", save_and_stop), suppress(KeyboardInterrupt):
        yield


@contextmanager
def _found_at(training: int, checkpoints: Path, places: list[Path]) -> Iterator[None]:
    """Put the checkpoints in the folder of training number `training` before it looks for its own."""
    load_newest = CheckpointStore.load

    def find(store: CheckpointStore) -> Any:
        places.append(store.folder)
        if len(places) == training:
            shutil.copytree(checkpoints, store.folder, dirs_exist_ok=True)
        return load_newest(store)

    with mock.patch.object(CheckpointStore, "load", find):
        yield


def try_study(name: str, *, finished: bool, share: int = 1) -> Foreign:
    """Try a study with every field of its config changed in turn, or one in `share` of them, and all that is no field.

    Nothing is judged or drawn: that would take most of the time.
    """
    study = replace(load(name), claims=(), figures={})
    config, changes = config_and_changes(name)
    with tempfile.TemporaryDirectory(prefix="joma-foreign-") as folder:
        foreign = Foreign(study, config, Path(folder), finished)
        for changed, value in list(changes.items())[::share]:
            foreign.start(changed, study, replace(config, **{changed: value}))
        foreign.start("seeds", study, config, seeds=2)
        foreign.start("version", replace(study, version=study.version + 1), config)
        foreign.start("study", replace(study, name=f"{study.name}-again"), config)
        foreign.start_other_training()
        if not foreign.resume():
            foreign.failures.append(f"{name}: its own checkpoints were not resumed with the same bits")
    return foreign
