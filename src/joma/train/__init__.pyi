from .checkpoint import DamagedCheckpoint as DamagedCheckpoint
from .loop import fit as fit
from .optimiser import OPTIMISERS as OPTIMISERS
from .optimiser import Optimiser as Optimiser
from .options import Compute as Compute
from .options import Record as Record
from .options import Saving as Saving
from .protocol import CompiledModel as CompiledModel
