"""workers -> steps: the training loop, and how a model is cut and its copies agree."""
