"""Accept a cluster: measure every part of it, and say which one is slow and why."""
