"""What survives a crash: the run folder, durable writes, and the record of the machine."""
