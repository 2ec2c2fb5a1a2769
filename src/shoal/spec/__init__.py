"""What travels between the parts of shoal: frozen data, no I/O, no torch."""
