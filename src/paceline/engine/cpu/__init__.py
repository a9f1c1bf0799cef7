"""The embedded engine's parts in plain torch: for a CPU, and what CUDA shares with it."""
