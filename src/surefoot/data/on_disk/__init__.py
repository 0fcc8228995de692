"""Task files too large for memory: an index beside the file, one seek per task."""
