"""From text to batches on the device: sources, tokenizers, token files, loader."""
