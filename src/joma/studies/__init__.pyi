from .catalogue import STUDIES as STUDIES
from .catalogue import load as load
