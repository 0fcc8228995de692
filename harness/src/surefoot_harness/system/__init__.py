"""What the rest of the package asks of the operating system: files, processes, signals, memory, text."""
