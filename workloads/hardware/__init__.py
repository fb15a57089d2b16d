"""GPUs, topologies and data types: their descriptions and measured rates. Standard library only."""
