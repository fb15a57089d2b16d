"""Accept a cluster: measure every part, and report the slow parts and the likely causes."""
