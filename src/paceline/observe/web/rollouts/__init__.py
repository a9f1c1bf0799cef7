"""The pages of rollouts: which there are, what was said, and how groups compare."""
