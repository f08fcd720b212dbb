from .joined import open_sweep as open_sweep
from .points import Draws as Draws
from .points import Grid as Grid
from .points import Range as Range
from .store import Sweep as Sweep
from .store import SweepUnit as SweepUnit
from .store import find_sweeps as find_sweeps
from .store import read_sweep as read_sweep
