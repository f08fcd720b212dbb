from .local import LocalEngine as LocalEngine
from .ray import RayEngine as RayEngine
from .unit import Engine as Engine
from .unit import Failure as Failure
from .unit import Needs as Needs
from .unit import Output as Output
from .unit import Result as Result
from .unit import Unit as Unit
