"""Scripts that take one step of training and write down when: `launch.py` starts them in several ways."""
