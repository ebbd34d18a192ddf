"""Every scheduling decision, pure: events in, commands out. No clock, no I/O, no tensors, no
threads."""
