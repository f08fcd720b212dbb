"""An engine without processes: units travel as JSON and are performed here, the last one first."""

import json
from collections.abc import Callable, Iterator

from joma.engine import Engine, Result, Unit
from joma.engine.performing import perform


class InlineEngine(Engine):
    """Performs units in this process.

    Args:
        change: is applied to every result before it is returned, for tests of what goes wrong on the way.
    """

    def __init__(self, change: Callable[[Result], Result] = lambda result: result) -> None:
        self.change = change
        self.submitted: list[Unit] = []
        self._pending: list[Unit] = []

    def submit(self, unit: Unit) -> None:
        """Queue a unit."""
        unit = Unit.from_json(json.loads(json.dumps(unit.as_json())))
        self.submitted.append(unit)
        self._pending.append(unit)

    def results(self) -> Iterator[Result]:
        """Perform the units, the last one first."""
        while self._pending:
            unit = self._pending.pop()
            result, _ = perform(unit)
            yield self.change(Result(unit, json.loads(json.dumps(result.value)), result.failure, result.seconds))

    def cancel(self) -> None:
        """Forget the units that wait."""
        self._pending.clear()

    def close(self) -> None:
        """Forget the units that wait."""
        self.cancel()
