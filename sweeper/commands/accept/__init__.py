"""Accept a cluster: measure every part of it, and report which part is slow and why."""
