"""Who runs where: playing groups, moving weights, and the local runtime."""
