"""The corpora: the generated one, and those of a folder."""

from pathlib import Path

from configs.schema import SpeechDataConfig
from speech import folders, synthetic
from speech.utterances import Dataset
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
    sizes = {"train_utterances": data.train_utterances, "val_utterances": data.val_utterances}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"data.{name} is {value}; expected a number above 0")
    if data.corpus == "synthetic":
        if data.dir is not None:
            raise ConfigError(f"data.dir is {data.dir}; expected None, as data.corpus is synthetic")
        return synthetic.load(context=context, seed=seed, **sizes)
    if data.dir is None:
        raise ConfigError(f"data.dir is None; expected the folder of the corpus, as data.corpus is {data.corpus}: give "
                          "--data-dir")
    return folders.load(folders.CORPORA[data.corpus], Path(data.dir).expanduser(), context=context, seed=seed,
                        cache=cache_folder("speech"), **sizes)
