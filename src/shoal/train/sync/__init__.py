"""How the copies of a model agree."""
