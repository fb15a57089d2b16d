"""Make Python collect garbage rarely. Programs import this first.

Libraries make a million objects while they are imported, in which collections find nothing: a sixth of a start's time.
"""

import gc

gc.set_threshold(100_000, 10, 10)
