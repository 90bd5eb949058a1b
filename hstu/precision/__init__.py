"""FP8 for linears: recipes, what this machine can do, the emulation in plain PyTorch, and Transformer Engine."""
