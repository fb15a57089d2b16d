"""Print notices, the only output of code outside commands, pages and programs."""

import sys


def notify(text: str) -> None:
    """Print a notice to standard error: the terminal of a command, or the log of a trial or process."""
    print(text, file=sys.stderr, flush=True)
