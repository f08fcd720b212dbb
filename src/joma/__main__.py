"""`python -m joma` is `joma`."""

import sys

from joma.cli import main

if __name__ == "__main__":
    sys.exit(main())
