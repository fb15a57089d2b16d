"""Inventory and diagnose every node of a cluster."""
