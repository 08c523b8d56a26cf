"""A draft for a served GGUF file: a small model that learns from that file's own answers."""

import itertools
import json
from pathlib import Path

import numpy as np
import optax

import kdjax
from kdjax import demo


def make_batches(answers, tokenizer, rows=8, length=128):
    """Answers one after another, cut into rows: tokens and the ids that follow them."""
    ids = [i for answer in answers for i in [*answer, tokenizer.end_of_text_id]]
    size = rows * (length + 1)
    blocks = np.array(ids[: len(ids) // size * size], np.int32).reshape(-1, rows, length + 1)
    return [{"tokens": block[:, :-1], "labels": block[:, 1:]} for block in blocks]


def main(out: str = "runs/draft", steps: int = 60) -> None:
    served = kdjax.load(demo.TEACHER, weights="packed", dtype="float32")  # the very file
    draft = kdjax.load(demo.STUDENT, dtype="float32")
    tokenizer = served.tokenizer
    texts = [json.loads(line)["text"] for line in demo.STORIES.open()]
    assert tokenizer is not None
    prompts = [tokenizer.encode(text)[:12] for text in texts[: 4 * steps]]
    written = served.generate(prompts, temperature=1.0, max_tokens=112, batch_size=64)
    rows = [p + a.ids for p, a in zip(prompts, written, strict=True)]
    *batches, last = make_batches(rows, tokenizer)
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, warmup_steps=5, decay_steps=steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    # For a draft that is good already: kdjax.total_variation, the share that is rejected at T = 1.
    step = kdjax.make_step(draft, served, kdjax.KDLoss(kdjax.forward_kl), optimizer)
    state = step.init(draft.params)
    # The share of its drafts that the served model accepts at T = 1, on answers held out.
    print("before:", step.evaluate(state, served.params, [last])["acceptance"])
    for batch in itertools.islice(itertools.cycle(batches), steps):
        state, _ = step(state, served.params, batch)
    print("after:", step.evaluate(state, served.params, [last])["acceptance"])
    draft = draft.replace(params=state.params)
    file = Path(out) / "draft.gguf"
    kdjax.export_gguf(draft, file, dtype="q8_0", overwrite=True)
    # llama.cpp refuses vocabularies more than 128 ids apart in size, such as the demo's. Of another
    # pair: llama-server -m SERVED.gguf -md draft.gguf --spec-type draft-simple
    small = kdjax.load(file, dtype="float32")
    (story,) = served.generate(["One day, Lily"], draft=small, draft_tokens=3, max_tokens=48)
    assert story.drafted is not None
    print(f"{story.drafted.accepted} drafts accepted in {story.drafted.passes} passes:", story.text)


if __name__ == "__main__":
    main()
