from . import html as html
from . import probe as probe
from . import table as table
