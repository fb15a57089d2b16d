"""Take an inventory of a cluster's nodes, and diagnose problems."""
