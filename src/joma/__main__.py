"""`python -m joma` is `joma`."""

import os
import sys


def run() -> int:
    """Run the command line; Ctrl-C while it is still being loaded is one line too."""
    try:
        from joma.cli import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("joma: interrupted before anything was begun.\n")
        return 130
    except BrokenPipeError:  # the reader of a long help, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(run())
