"""Run trials on Ray: the cluster, gangs of workers, node health and the sweep lock."""
