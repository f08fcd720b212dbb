"""`python -m joma` is `joma`."""

import sys


def run() -> int:
    """Run the command line; Ctrl-C while it is still loading prints one line instead of a traceback."""
    try:
        from joma.cli import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("joma: interrupted before anything began.\n")
        return 130


if __name__ == "__main__":
    sys.exit(run())
