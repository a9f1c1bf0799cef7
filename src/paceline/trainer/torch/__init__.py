"""Training in torch: on one device, or on many ranks."""
