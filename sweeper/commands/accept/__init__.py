"""Accept a cluster: measure every part of it, and report which one is slow and why."""
