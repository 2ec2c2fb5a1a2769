"""A script that trains until it is stopped, and what is done to it."""
