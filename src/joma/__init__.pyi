from . import data as data
from . import drawing as drawing
from . import engine as engine
from . import models as models
from . import noise as noise
from . import probes as probes
from . import report as report
from . import schedule as schedule
from . import studies as studies
from . import study as study
from . import sweeps as sweeps
from . import theory as theory
from . import train as train
from . import watch as watch
from .probes.entropy import attention_entropy as attention_entropy
from .probes.permutation import permutation_gap as permutation_gap
from .probes.rank import stable_rank as stable_rank
from .probes.spectrum import participation_ratio as participation_ratio
from .probes.summary import attention_summary as attention_summary
from .runs import open_run as open_run
from .sweeps.joined import open_sweep as open_sweep

__version__: str
