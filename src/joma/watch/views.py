"""How a recording and a recorder show themselves: attention maps, figures, and a small table as their `repr`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import xarray as xr
from torch import nn

from joma.arguments import StateError, whole
from joma.probes.attention_call import AttentionCall
from joma.watch.display import Summary, as_html, as_text, summarise_recording, summarise_trajectory
from joma.watch.maps import KeptCalls, attention_maps, kept_calls

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Displayed:
    """An object whose `repr` is a small table, in a terminal and in a notebook."""

    def summary(self) -> Summary:
        """Return the table."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(self.summary())

    def _repr_html_(self) -> str:
        return as_html(self.summary())


class RecordingViews(Displayed):
    """The part of a `Recording` that shows what was recorded."""

    listeners: list[Callable[[str, AttentionCall], None]]
    pass_started: list[Callable[[], None]]
    not_seen: dict[str, str]
    _model_name: str
    _kept: KeptCalls | None = None

    def dataset(self) -> xr.Dataset:
        """Return what was recorded."""
        raise NotImplementedError

    def row_counts(self) -> dict[str, int]:
        """Return the number of rows by layer."""
        raise NotImplementedError

    def keep_maps(self, maps: bool | int) -> None:
        """Keep the queries and keys of the last pass for `maps`, as the argument of `attention` says."""
        self._kept = kept_calls(maps)
        if self._kept is not None:
            self.listeners.append(self._kept.keep)
            self.pass_started.append(self._kept.start_pass)

    def maps(
        self,
        layer: str | int,
        head: Any = None,
        *,
        queries: Any = None,
        keys: Any = None,
        tokens: Any = None,
        key_tokens: Any = None,
        tokenizer: Any = None,
    ) -> xr.DataArray:
        """Return attention weights of a layer in the last pass, computed again in float64 from its queries and keys.

        The context must be opened with `attention(model, maps=True)`, which keeps at most 256 MiB, or with a number of
        bytes. Dropout is not part of the weights. A learned sink (GPT-OSS) takes its share, so that rows sum to less
        than 1.

        Args:
            layer: its name, or its number in the order of the calls.
            head: a number, a slice or a list of numbers; all if not given.
            queries, keys: the window, likewise. Rows are normalised over all keys, whatever window is shown.
            tokens: strings for the positions, or a tokenizer's output, or token numbers together with `tokenizer`; for
                all sequences or for each.
            key_tokens: those of the keys, where they are other tokens, as in cross attention.
            tokenizer: anything whose `decode([number])` returns a string.

        Returns:
            Weights with dims batch, head, query, key, and with coordinates `query_token`, `key_token` for tokens. NaN
            where a query sees no key.
        """
        words = {"tokens": tokens, "key_tokens": key_tokens, "tokenizer": tokenizer}
        return attention_maps(self._kept, layer, head, queries=queries, keys=keys, **words)

    def plot(self) -> Figure:
        """Draw the entropy by layer and head, and the weight on the sinks by layer if it was measured."""
        from joma.watch.figures import draw_recording

        return draw_recording(self._averaged())

    def plot_map(self, layer: str | int, head: int = 0, *, batch: int = 0, **options: Any) -> Figure:
        """Draw the attention map of one head for one sequence of the last pass; other arguments as for `maps`."""
        from joma.watch.figures import draw_map

        weights = self.maps(layer, whole("head", head, low=0), **options)
        return draw_map(weights.isel(batch=whole("batch", batch, low=0, high=weights.sizes["batch"] - 1), head=0))

    def summary(self) -> Summary:
        """Return the table that `repr` shows: by layer the heads, the entropy with its spread over heads, the rows."""
        data = _data_or_none(self._averaged)
        rows = {} if data is None else self.row_counts()
        return summarise_recording(self._model_name, data, rows, self.not_seen)

    def _averaged(self) -> xr.Dataset:
        """Return the dataset, its measures by layer and head if rows are averaged: each pass counts by its rows."""
        from joma.watch.averages import means  # which imports the class of recordings

        data = self.dataset()
        if data.sizes["pass"] == 1 or "query" in data.dims:
            return data
        values = means(cast(Any, self))[1]
        return data.assign({name: (("layer", "head"), values[str(name)], data[name].attrs) for name in data.data_vars})


class RecorderViews(Displayed):
    """The part of a `Recorder` that shows what was recorded."""

    model: nn.Module

    def dataset(self) -> xr.Dataset:
        """Return the trajectory."""
        raise NotImplementedError

    def plot(self) -> Figure:
        """Draw entropy by layer over the training with its spread over heads, sinks if measured, and stable ranks."""
        from joma.watch.figures import draw_trajectory

        return draw_trajectory(self.dataset())

    def summary(self) -> Summary:
        """Return the table that `repr` shows: by layer the entropy at the first and at the last probe."""
        return summarise_trajectory(_class_name(self.model), _data_or_none(self.dataset))


def _class_name(model: nn.Module) -> str:
    """Return the name of the model's class; `fully_shard` derives a class `FSDPName` from it."""
    name, *bases = [kind.__name__ for kind in type(model).__mro__]
    return name.removeprefix("FSDP") if name.removeprefix("FSDP") in bases else name


def _data_or_none(dataset: Callable[[], xr.Dataset]) -> xr.Dataset | None:
    """Return the data, or None if nothing was recorded: a `repr` never raises an error."""
    try:
        return dataset()
    except (StateError, ValueError):
        return None
