"""Whether head and embedding are one matrix: a header's word, or in GGUF what rounding explains."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from quick import cases

from kdjax.formats import open_table
from kdjax.formats.blocks import encode
from kdjax.formats.gguf import write_gguf
from kdjax.models.checkpoint import open_checkpoint, tie_head
from kdjax.models.loading import repeats_embedding

GOLDENS = Path(__file__).parent / "goldens"


def folder(path, tied, head):
    """A golden whose config says `tied`, with the head that a function makes of the embedding."""
    shutil.copytree(GOLDENS / "qwen2_tied", path)
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (path / "config.json").write_text(json.dumps(config))
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    made = head(tensors["model.embed_tokens.weight"].copy())
    if made is not None:
        tensors["lm_head.weight"] = made
    safetensors.numpy.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return open_checkpoint(path)


def near(embed):
    return embed + np.float32(0.1) * embed[::-1]


def one_row(embed):
    embed[77] *= np.float32(1.01)
    return embed


@pytest.mark.parametrize(
    ("said", "head", "tied"),
    [
        (True, lambda embed: None, True),
        (True, lambda embed: embed, True),
        (True, near, False),
        (True, one_row, False),
        (False, lambda embed: embed, False),
        (False, near, False),
    ],
)
def test_a_folder_is_believed_but_for_another_head(tmp_path, said, head, tied):
    """Transformers does not tie what is stored with other numbers, either."""
    checkpoint = folder(tmp_path / "a", said, head)
    assert checkpoint.spec.tied == tie_head(checkpoint).spec.tied == tied
    assert checkpoint.names


def test_a_folder_whose_separate_head_is_missing_is_refused(tmp_path):
    checkpoint = folder(tmp_path / "a", False, lambda embed: None)
    assert not tie_head(checkpoint).spec.tied
    with pytest.raises(ValueError, match=r"lm_head\.weight: missing"):
        checkpoint.names  # noqa: B018


def stored(path, embed, head, kinds):
    rows = [
        (name, kind, x.shape, np.asarray(encode(x, kind) if kind != "F32" else x.view(np.uint8)))
        for name, x, kind in zip(("token_embd", "output"), (embed, head), kinds, strict=True)
    ]
    rows = [(f"{name}.weight", *rest) for name, *rest in rows]
    write_gguf(path, {"general.architecture": "qwen2"}, rows)
    return open_table(path)


SIMPLE = [("F32", "F32"), ("F16", "F16"), ("F16", "Q8_0"), ("Q5_0", "Q8_0"), ("Q4_0", "F16")]
OF_256 = [
    ("Q8_0", "Q6_K"),
    ("Q4_K", "Q6_K"),
    ("Q3_K", "Q6_K"),
    ("Q2_K", "Q8_0"),
    ("IQ4_XS", "Q6_K"),
]


@pytest.mark.parametrize("kinds", cases(*SIMPLE, slow=[(kinds,) for kinds in OF_256]))
def test_a_matrix_stored_twice_is_one_in_any_two_types(kinds, tmp_path):
    """But not if all rows moved by 15%, or one of them as far as it is large."""
    embed = np.random.default_rng(0).standard_normal((300, 512)).astype(np.float32)
    embed[250:] *= np.float32(1e-4)  # rows that no text ever trained
    moved = embed + np.float32(0.15) * np.random.default_rng(1).standard_normal(embed.shape)
    row = embed.copy()
    row[123] = row[124]
    assert repeats_embedding(stored(tmp_path / "a.gguf", embed, embed, kinds))
    coarse = "Q2_K" in kinds or "Q3_K" in kinds  # their rounding moves numbers as far
    for other in (row,) if coarse else (row, moved.astype(np.float32)):
        assert not repeats_embedding(stored(tmp_path / "b.gguf", embed, other, kinds))
