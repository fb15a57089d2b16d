"""Make Python collect garbage less often. Programs import this module before any other.

Library imports create a million objects. Collections find no garbage among them, but take a sixth of the startup time.
"""

import gc

gc.set_threshold(100_000, 10, 10)
