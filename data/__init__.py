"""Text in, batches on the device out: sources, tokenizers, token files, loader."""


class DataError(RuntimeError):
    """Data that cannot be had, written or trusted. The message is for the user; commands exit with 1."""
