"""GPUs, topologies and data types, as descriptions and measured rates. Standard library only."""
