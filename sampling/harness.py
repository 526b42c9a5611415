"""A model for lm-evaluation-harness, which the extra ``eval`` installs: scores and continuations of its requests."""

import difflib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval.api.model import LM, TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows
from tqdm import tqdm

from data import tokenizers
from models.gpt import GPT
from sampling.sampler import Sampler, Sampling
from sampling.scoring import ROWS, Scorer
from sampling.text_stream import TextStream
from support.errors import ConfigError, DataError

if TYPE_CHECKING:
    import tiktoken

KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "lm_eval_version")
"""What is kept of its results; the rest describes the machine, or repeats the task files."""
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Arguments of a generation that :class:`Sampling` has."""


class HarnessModel(TemplateLM):
    """A GPT as lm-evaluation-harness calls it.

    An answer depends on its own request alone: neither on the other requests nor on their order.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        max_length: maximum number of tokens of context and continuation; longer contexts lose their beginning.
        by_document: whether the model was trained on packed documents, each after end-of-text: every context then
            follows it too.
        rows: requests that are read at once.

    Raises:
        NotImplementedError: an attention mode of the model has no cached decode.
    """

    backend = "causal"

    def __init__(self, model: GPT, tokenizer: "tiktoken.Encoding", max_length: int, *, by_document: bool = False,
                 rows: int = ROWS):
        super().__init__()
        self.max_length = max_length
        self._tokenizer, self._by_document, self._rows = tokenizer, by_document, rows
        self._scorer = Scorer(model, max_length, rows=rows)
        self._sampler = Sampler(model, end_of_text=self.eot_token_id)

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token, which stands before a request without context."""
        return tokenizers.end_of_text(self._tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, after end-of-text if contexts follow it."""
        starts = self._by_document and add_special_tokens is not False
        text = tokenizers.encode_document(self._tokenizer, string.encode(errors="surrogatepass"))
        return [self.eot_token_id] * starts + [int(token) for token in text]

    def _loglikelihood_tokens(self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
                              disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        pairs = []
        for _texts, context, continuation in requests:
            if (most := self.max_length + 1 - len(continuation)) < 1:
                raise ConfigError(f"a continuation has {len(continuation):,} tokens; expected at most "
                                  f"{self.max_length:,}, the length of the model")
            pairs.append((context[-most:], continuation))
        with tqdm(total=len(pairs), desc="scores", disable=disable_tqdm) as bar:
            scores = [(score.log_likelihood, score.greedy) for score in self._scorer.score(pairs, bar.update)]
        for request, score in zip(requests, scores, strict=True):
            if (texts := request[0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text after end-of-text, in windows of ``max_length`` tokens."""
        windows = [self._windows(request.args[0]) for request in requests]
        scores = iter(self._loglikelihood_tokens([(None, *window) for text in windows for window in text],
                                                 disable_tqdm=disable_tqdm))
        found = []
        for request, text in zip(requests, windows, strict=True):
            some = itertools.islice(scores, len(text))
            found.append(sum(log_likelihood for log_likelihood, _ in some))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Context and continuation of each window."""
        tokens = self.tok_encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(tokens, self.eot_token_id, self.max_length, context_len=1)
        return [(inputs[:len(inputs) - len(targets) + 1], targets) for inputs, targets in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context, up to a stop string, end-of-text or the maximum number of tokens.

        Raises:
            ConfigError: an argument of the generation is unknown or out of range, or leaves no room for the context.
        """
        found: dict[int, str] = {}
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(repr(request.args[1]), []).append(number)
        with tqdm(total=len(requests), desc="continuations", disable=disable_tqdm) as bar:
            for numbers in kinds.values():
                options: dict[str, Any] = {**normalize_gen_kwargs(requests[numbers[0]].args[1])}
                # Each row has random numbers of its own, so that sampled continuations are made one at a time.
                for some in itertools.batched(numbers, 1 if options["do_sample"] else self._rows):
                    texts = self._continue([requests[number].args[0] for number in some], **options)
                    for number, text in zip(some, texts, strict=False):
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                        found[number] = text
                    bar.update(len(some))
        return [found[number] for number in range(len(requests))]

    def _continue(self, contexts: Sequence[str], until: Sequence[str], max_gen_toks: int, do_sample: bool,
                  **options: Any) -> list[str]:
        """The continuations of contexts with equal arguments."""
        if unknown := options.keys() - SAMPLED:
            raise ConfigError(f"generation by {', '.join(sorted(unknown))} is not supported; expected "
                              f"{', '.join(('until', 'max_gen_toks', 'do_sample', *SAMPLED))}")
        sampling = Sampling(**{"temperature": 1.0, **options}) if do_sample else Sampling(temperature=0.0)
        if (most := self.max_length - max_gen_toks) < 1:
            raise ConfigError(f"max_gen_toks is {max_gen_toks:,}; expected less than {self.max_length:,}, the length "
                              "of the model")
        prompts = [np.array(self.tok_encode(context) or [self.eot_token_id], np.int32)[-most:] for context in contexts]
        if not do_sample:  # one shape for all
            prompts += prompts[-1:] * (self._rows - len(prompts))
        streams = [TextStream(self._tokenizer, [stop.encode() for stop in until if stop]) for _ in contexts]
        texts = [""] * len(contexts)
        for tokens_BT in self._sampler.generate_each(prompts, sampling, max_new_tokens=max_gen_toks,
                                                     room=self.max_length):
            for row, stream in enumerate(streams):
                texts[row] += stream.feed(tokens_BT[row])
            if all(stream.ended for stream in streams):
                break
        return [text + stream.close() for text, stream in zip(texts, streams, strict=True)]


def load_tasks(names: Sequence[str], folder: Path | None = None) -> TaskManager:
    """The tasks of lm-evaluation-harness, and of task files in ``folder``, once all data of those named can be read.

    Raises:
        ConfigError: a task does not exist.
        DataError: its file or its data cannot be read, such as without a network.
    """
    # It takes ten seconds to read the task files of the package. Groups and tags of the folder may name some of them.
    manager = None if folder is None else TaskManager(include_path=str(folder), include_defaults=False)
    if manager is None or not {*names} <= {*manager.all_subtasks}:
        manager = TaskManager(include_path=None if folder is None else str(folder))
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.task_index, n=1)
            raise ConfigError(f"no task {name!r}" + (f"; perhaps you meant {near[0]}" if near else ""))
        try:
            manager.load(name)
        except Exception as error:  # of any package that reads data
            raise DataError(f"task {name}: its data cannot be read ({type(error).__name__}: "
                            f"{str(error).partition(chr(10))[0]})") from error
    return manager


def run_tasks(model: LM, manager: TaskManager, names: Sequence[str], *, fewshot: int | None = None,
              limit: int | None = None) -> dict[str, Any]:
    """The results of tasks, ``KEPT`` of what lm-evaluation-harness returns.

    Args:
        model: what is evaluated.
        manager: from :func:`load_tasks`.
        names: of tasks.
        fewshot: number of examples before each request; None: that of the task.
        limit: maximum number of documents of a task.
    """
    found: Any = simple_evaluate(model, tasks=list(names), task_manager=manager, num_fewshot=fewshot, limit=limit,
                                 log_samples=False, torch_random_seed=None)  # pyright: ignore[reportArgumentType]
    assert found is not None  # as in other processes than the first
    return {name: found[name] for name in KEPT if name in found}
