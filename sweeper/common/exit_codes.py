"""The exit codes of `python -m sweeper`."""

COMPLETE = 0
SOME_FAILED = 1  # trials failed, or the sweep could not end as it should
INVALID_INPUT = 2
INTERRUPTED = 130
