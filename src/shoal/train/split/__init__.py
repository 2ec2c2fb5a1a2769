"""How one copy of a model is computed: by one worker as a whole, or by several that have a part of it each."""
