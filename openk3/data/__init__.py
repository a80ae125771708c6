"""From text to batches: sources, tokens, packing, and the byte model that the language model has to beat."""
