"""Descriptions and measured rates of GPUs, topologies and data types. Standard library only."""
