"""Machines that people have, made one cluster by a code: Ray underneath, without having to know it."""
