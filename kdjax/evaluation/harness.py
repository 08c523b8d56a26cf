"""A model of EleutherAI's lm-evaluation-harness, its name there `kdjax`; needs `kdjax[lm-eval]`.

    kdjax lm_eval --model_args pretrained=model.gguf,weights=packed --tasks hellaswag

It tokenizes, cuts and orders as the harness's `hf` does; `scoring` and `Model.generate` compute.
https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/model_guide.md
"""

# pyright: reportMissingImports=false
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kdjax.errors import UserError
from kdjax.evaluation.scoring import score
from kdjax.models.decoding import Sampling
from kdjax.models.model import Model, load

_log = logging.getLogger("kdjax")
_AUTO = 8  # rows at once for batch_size=auto


class KdjaxLM(TemplateLM):
    """Any model that `kdjax.load` reads, or a loaded one.

    `pretrained` is a path, `hf:ORG/REPO[/FILE]` or a `Model`; `weights`, `dtype`, `compute_dtype`,
    `tokenizer` and `base` are as for `kdjax.load`. `batch_size` rows are read at once, "auto" is 8.
    `max_length` bounds context and continuation (default: the model's positions), `max_gen_toks`
    an answer whose task sets no bound. `prefix_token_id` precedes a text without context (default:
    BOS, else EOS, as in the file).

        import lm_eval
        from kdjax.evaluation.harness import KdjaxLM

        lm = KdjaxLM("model.gguf", weights="packed", batch_size=8)
        results = lm_eval.simple_evaluate(lm, tasks=["hellaswag"], limit=100)
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        weights: str = "dense",
        dtype: str = "bfloat16",
        compute_dtype: str | None = None,
        tokenizer: str = "",
        base: str = "",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        device: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise UserError(
                f"--model_args: found {', '.join(unknown)}; expected pretrained, weights, dtype, "
                "compute_dtype, tokenizer, base, max_length, max_gen_toks, prefix_token_id."
            )
        if device not in (None, jax.default_backend()):
            _log.warning("device=%s has no effect: JAX_PLATFORMS or CUDA_VISIBLE_DEVICES", device)
        self.batch_size = _AUTO if str(batch_size).startswith("auto") else int(batch_size)
        self.max_gen_toks, self._prefix = int(max_gen_toks), prefix_token_id
        if isinstance(pretrained, Model):
            self.model = pretrained
        else:
            self.model = load(
                str(pretrained),
                weights=weights,
                dtype=dtype,
                compute_dtype=compute_dtype,
                tokenizer=tokenizer,
                base=base,
                max_segments=1,
                devices=jax.local_devices(),
            )
        if self.model.tokenizer is None or self.model.spec is None:
            raise UserError(f"{self.model}: expected a model with a decoder and a tokenizer.")
        # The harness reads its `chat_template`.
        self.tokenizer: Any = self.model.tokenizer
        self.max_length = min(self.model.spec.max_positions, int(max_length or 1 << 30))

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text or, of an instruct model, a turn."""
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Id that precedes a text without context."""
        if self._prefix is not None:
            return self._prefix
        bos = self.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness's cache: the hash of its content."""
        return self.tokenizer.content_hash

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Encodes a text, after BOS if the model's file adds it and the text does not begin so."""
        ids = self.tokenizer.encode(string)
        return ids if add_special_tokens is False else self.tokenizer.open_text(ids)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **settings: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        found = score(self.model, pairs, batch_size=self.batch_size, max_length=self.max_length)
        scores = [(one.log_prob, one.greedy) for one in found]
        for (pair, _, _), one in zip(requests, scores, strict=True):
            if pair is not None:  # a window of a rolling request has no text
                self.cache_hook.add_partial("loglikelihood", pair, one)
        return scores

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text, in windows of `max_length` ids."""
        windows, counts = [], []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text)
            pieces: Any = get_rolling_token_windows(
                ids, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            own = [(None, *make_disjoint_window(piece)) for piece in pieces]
            windows += own
            counts.append(len(own))
        left = iter(self._loglikelihood_tokens(windows))
        sums = [sum(next(left)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Completes each context up to a stop string, an end of text or of a turn."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        answers = [""] * len(requests)
        for members in groups.values():
            settings = requests[members[0]].args[1]
            sampling = self._read_sampling(settings)
            room = self.max_length - sampling.max_tokens
            if room < 1:
                raise UserError(
                    f"max_gen_toks={sampling.max_tokens} leaves no room for a prompt in "
                    f"{self.max_length} positions; lower it: --gen_kwargs max_gen_toks=N."
                )
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in members]
            written = self.model.generate(prompts, sampling, batch_size=self.batch_size)
            for number, completion in zip(members, written, strict=True):
                answers[number] = completion.text
                request = requests[number].args
                self.cache_hook.add_partial("generate_until", request, completion.text)
        return answers

    def _read_sampling(self, settings: Mapping[str, Any]) -> Sampling:
        """The harness's `gen_kwargs` as a `Sampling`; raises `UserError` for others."""
        given: dict[str, Any] = {**normalize_gen_kwargs(dict(settings), self.max_gen_toks)}
        given.pop("do_sample")  # without it the temperature is 0
        sampling = Sampling(
            max_tokens=given.pop("max_gen_toks"),
            temperature=float(given.pop("temperature", 0.0)),
            top_p=float(given.pop("top_p", 1.0)),
            top_k=int(given.pop("top_k", 0)),
            stop_ids=self.tokenizer.stop_ids,
            stop_strings=tuple(filter(None, given.pop("until"))),
            seed=int(given.pop("seed", 0)),
        )
        if given:
            raise UserError(
                f"--gen_kwargs: found {', '.join(given)}; expected until, max_gen_toks, do_sample, "
                "temperature, top_p, top_k, seed."
            )
        return sampling

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation by the tokenizer's chat template."""
        return self.tokenizer.render(chat_history, answer_next=add_generation_prompt)
