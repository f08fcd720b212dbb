from . import activations as activations
from . import bounce as bounce
from . import critical as critical
from . import flows as flows
from . import growth as growth
from . import hierarchy as hierarchy
from . import invariants as invariants
from . import mixture as mixture
