from . import addition as addition
from . import combinations as combinations
from . import sources as sources
from . import text as text
from . import tokens as tokens
from . import trees as trees
