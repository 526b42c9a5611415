"""Text in, batches on the device out: sources, tokenizers, token files, loader."""
