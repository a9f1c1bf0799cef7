"""Models on Apple silicon: loading, LoRA, and arrays that travel. Nothing here, or that imports it, knows torch."""
