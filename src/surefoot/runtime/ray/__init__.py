"""The same runtime on Ray: actors, the cluster, and what ends it."""
