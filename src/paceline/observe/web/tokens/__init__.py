"""The page of one token sequence: its streams, and what each token did to the loss."""
