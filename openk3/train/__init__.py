"""Pre-training: recipe, optimizer, balancing, checkpoints, the step loop."""
