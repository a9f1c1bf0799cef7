"""Models on Apple silicon: loading, LoRA, and array conversion. Nothing here, or that imports it, needs torch."""
