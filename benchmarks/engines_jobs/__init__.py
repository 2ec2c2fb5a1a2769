"""What `engines.py` has run on a cluster: a training that takes turns, and Ray Train under fire."""
