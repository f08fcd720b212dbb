"""`python -m joma` is `joma`."""

import sys


def run() -> int:
    """Run the command line; Ctrl-C is answered from here on, even while modules are loaded."""
    try:
        from joma.train import interrupt
    except KeyboardInterrupt:
        sys.stderr.write("joma: interrupted; nothing has begun.\n")
        return 130
    with interrupt.answering():
        from joma.cli import main

        return main()


if __name__ == "__main__":
    sys.exit(run())
