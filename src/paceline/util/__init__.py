"""Small parts that know nothing of reinforcement learning."""
