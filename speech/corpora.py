"""The corpora: the generated one, and those of a folder."""

from pathlib import Path

from configs.schema import SpeechDataConfig
from data.utterances import BINS, Dataset
from speech import folders, synthetic
from support.errors import ConfigError
from support.files import cache_folder


def load(data: SpeechDataConfig, *, context: int, seed: int) -> Dataset:
    """The corpus of a config. Features are kept in ``$XDG_CACHE_HOME/lineargpt/speech`` (``~/.cache``).

    Args:
        data: the corpus, and how much of it.
        context: maximum number of frames.
        seed: of generated utterances, and of random subsets.

    Raises:
        ConfigError: the settings do not match.
        DataError: files are missing or broken.
    """
    folder = _folder(data)
    counts = {"train_utterances": data.train_utterances, "val_utterances": data.val_utterances}
    if folder is None:
        return synthetic.load(context=context, seed=seed, **counts)
    return folders.load(folders.CORPORA[data.corpus], folder, context=context, seed=seed, cache=cache_folder("speech"),
                        **counts)


def sizes(data: SpeechDataConfig, *, context: int) -> tuple[int, int]:
    """The features of a frame and the number of symbols of a corpus, without computing the features.

    Args:
        data, context: as for :func:`load`.

    Raises:
        ConfigError, DataError: as :func:`load`, as far as can be told without reading every utterance.
    """
    folder = _folder(data)
    if folder is None:
        synthetic.check_context(context)
        return BINS, len(synthetic.SYMBOLS)
    return folders.sizes(folders.CORPORA[data.corpus], folder)


def _folder(data: SpeechDataConfig) -> Path | None:
    """The folder of a corpus, its config checked; None for generated utterances."""
    if data.corpus == "synthetic":
        if data.dir is not None:
            raise ConfigError(f"data.dir is {data.dir}; expected None, as data.corpus is synthetic")
        return None
    if data.dir is None:
        raise ConfigError(f"data.dir is None; expected the folder of the corpus, as data.corpus is {data.corpus}")
    return Path(data.dir).expanduser()
