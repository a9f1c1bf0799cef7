"""The engine on CUDA: Triton kernels, captured steps, memory that can be lent out."""
