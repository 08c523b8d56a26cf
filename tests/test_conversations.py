"""Conversations: what of them trains, by every family's template, and how rows hold them."""

import dataclasses
import datetime
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from kdjax.data import rows, text
from kdjax.data.conversations import read_conversation, render_answers
from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.models import template_worker
from kdjax.models.tokenizer import from_gguf

TEMPLATES = Path(__file__).parent / "goldens" / "templates"
# The end of an answer by each template: the token that the model writes there.
ENDS = {
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    "gemma4_v5": "<turn|>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
    "granite3": "<|end_of_text|>",
    "llama2": "</s>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "minicpm": "<|im_end|>",
    "ministral3": "</s>",
    "mistral_v3": "</s>",
    "olmo2": "<|endoftext|>",
    "olmo3": "<|endoftext|>",
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "phi4_mini": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "qwen3_6": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "smollm3": "<|im_end|>",
}
EOS = {"glm4moe": "<|endoftext|>", "phi3": "<|endoftext|>"}
EOS |= {"phi3_5": "<|endoftext|>", "phi4_mini": "<|endoftext|>"}
MARKS = sorted(
    {mark for end in ENDS.values() for mark in [end]}
    | {"<s>", "<bos>", "<|endoftext|>", "<|im_start|>", "<|user|>", "<|assistant|>", "<|system|>"}
    | {
        "<|observation|>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<start_of_turn>",
        "<|turn>",
        "<|start|>",
    }
    | {
        "<|message|>",
        "<|channel|>",
        "<|end|>",
        "<|call|>",
        "<|begin_of_text|>",
        "[INST]",
        "[/INST]",
    }
    | {"<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>", "<|tool_call|>"}
    | {"<|start_of_role|>", "<|end_of_role|>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁end｜>"}
    | {"<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"}
    | {"<tool_call|>", "<|tool_response>", "<|tool_call>"}
)


@pytest.fixture(scope="module")
def make_tokenizer(models):
    """Makes the demo's tokenizer with a template's text and every family's marks."""
    metadata = dict(open_table(models / "student.gguf").metadata)
    tokens = [t for t in metadata["tokenizer.ggml.tokens"] if not t.startswith("[PAD")]
    types = [int(t) for t in metadata["tokenizer.ggml.token_type"]][: len(tokens)]
    added = [mark for mark in MARKS if mark not in tokens]
    metadata |= {"tokenizer.ggml.tokens": [*tokens, *added]}
    metadata |= {"tokenizer.ggml.token_type": [*types, *[3] * len(added)]}
    base = from_gguf(metadata, "marks")

    def make(name, template=None):
        end = base.tokens.index(EOS.get(name, ENDS.get(name, "<|im_end|>")))
        written = template or (TEMPLATES / f"{name}.jinja").read_text()
        return dataclasses.replace(base, chat_template=written, eos_id=end)

    return make


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def read(record, tokenizer):
    """Text of the rendering, of each span, and of what is not trained."""
    said, spans = render_answers(read_conversation(record), tokenizer)
    inside = [said[start:end] for start, end in spans]
    cuts = [0, *(at for span in spans for at in span), len(said)]
    outside = "".join(said[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True))
    return said, inside, outside


CALL = {"id": "abcdefghi", "type": "function"}
CALL |= {"function": {"name": "weather", "arguments": '{"city": "Ulm", "days": 2}'}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}}
TOOL = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": TOOL}]
KINDS = {
    "one turn": {"messages": [user("first?"), assistant("Alpha.")]},
    "several": {
        "messages": [user("a?"), assistant("Alpha."), user("b?"), assistant("Beta.\nMore.")]
    },
    "system": {
        "messages": [{"role": "system", "content": "Be kind."}, user("a?"), assistant("Alpha.")]
    },
    "thinking": {
        "messages": [
            user("a?"),
            assistant("<think>\nhmm one\n</think>\n\nAlpha."),
            user("b?"),
            assistant("<think>\nhmm two\n</think>\n\nBeta."),
        ]
    },
    "tools": {
        "messages": [
            user("a?"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": '"rain"'},
            assistant("Alpha."),
        ],
        "tools": TOOLS,
    },
}
UNTOLD = {  # templates that write no tools, or none of their calls
    "deepseek_r1_distill": "tools",
    "deepseekv3": "tools",
    **dict.fromkeys(
        [
            "gemma3",
            "granite3",
            "llama2",
            "llama3",
            "minicpm",
            "olmo2",
            "phi3",
            "phi3_5",
            "phi4_mini",
            "smollm2",
            "smollm3",
        ],
        "tool_calls",
    ),
}


@pytest.mark.parametrize("name", sorted(ENDS))
def test_answers_of_every_template_are_found(make_tokenizer, name):
    """Each span has its answer and its end, and nothing that another wrote."""
    tokenizer = make_tokenizer(name)
    for kind, record in KINDS.items():
        if kind == "tools" and name in UNTOLD:
            with pytest.raises(UserError, match=f"found {UNTOLD[name]}, which the chat template"):
                read(record, tokenizer)
            continue
        _, inside, outside = read(record, tokenizer)
        answers = [m for m in record["messages"] if m["role"] == "assistant"]
        assert len(inside) == len(answers), kind
        for span, message in zip(inside, answers, strict=True):
            said = (message["content"] or "weather").split("</think>")[-1].strip()
            assert said in span and span.count(said) == 1, (kind, inside)
            assert not re.search(r"\?|Be kind|rain", span), (kind, inside)
            assert said == "weather" or said not in outside
        assert inside[-1].rstrip("\n").endswith(ENDS[name]), (kind, inside)
        assert all(tokenizer.find_marks(span)[-1][1] >= len(span) - 1 for span in inside)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("phi3", ["Alpha.<|end|>", "Beta.\nMore.<|end|>"]),
        ("qwen3", ["Alpha.<|im_end|>", "<think>\n\n</think>\n\nBeta.\nMore.<|im_end|>"]),
        ("qwen3_5_think", ["Alpha.<|im_end|>", "\n</think>\n\nBeta.\nMore.<|im_end|>"]),
        ("deepseek_r1_distill", [f"{a}{ENDS['deepseekv3']}" for a in ("Alpha.", "Beta.\nMore.")]),
        ("glm4moe", [f"\n<think></think>\n{a}<|user|>" for a in ("Alpha.", "Beta.\nMore.")]),
        ("llama2", [" Alpha. </s>", " Beta.\nMore. </s>"]),
    ],
)
def test_spans_by_hand(make_tokenizer, name, said):
    """A model writes these after the prompt of its turn: thoughts included, the opening not."""
    assert read(KINDS["several"], make_tokenizer(name))[1] == said


def test_a_call_closes_with_the_mark_of_its_result(make_tokenizer):
    record = {"messages": KINDS["tools"]["messages"][:2], "tools": TOOLS}
    (call,) = read(record, make_tokenizer("glm4moe"))[1]
    assert call.endswith("</tool_call><|observation|>")


def test_marks_of_a_template_say_what_trains(make_tokenizer):
    """Marks mean here what they mean to Transformers; `weight` takes its turn out."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
    )
    tokenizer = make_tokenizer("marked", template)
    assert read(KINDS["several"], tokenizer)[1] == ["Alpha.!", "Beta.\nMore.!"]
    first, second = assistant("Alpha.", weight=0), assistant("Beta.", weight=1)
    assert read({"messages": [user("a"), first, user("b"), second]}, tokenizer)[1] == ["Beta.!"]


def test_a_template_that_leaves_a_turn_out_is_refused_by_its_number(make_tokenizer):
    template = (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}"
        "\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UserError, match=r"leaves message 1 \(assistant\) out"):
        read(KINDS["several"], make_tokenizer("short", template))
    other = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    other += "{% if add_generation_prompt %}<|system|>answer:{% endif %}"
    with pytest.raises(UserError, match="opens message 1 otherwise in a prompt"):
        read(KINDS["one turn"], make_tokenizer("other", other))


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        (assistant(None), "message 1 has the content null; expected a text"),
        ({"role": "assistant", "value": "x"}, "the content none among role, value"),
        (assistant(3), "message 1 has the content 3"),
        (assistant([{"type": "image_url", "image_url": {}}]), "a part .*image_url.*type text"),
        (assistant("x", function_call={"name": "f"}), "message 1 has function_call="),
        (assistant(None, refusal="I may not."), "message 1 has refusal='I may not.'"),
        (assistant("x", weight=0.5), "message 1 has weight=0.5; expected 1, or 0"),
        (assistant("x", weight=0), "no message of the assistant of a weight above 0"),
        (assistant(None, tool_calls=["f"]), "message 1 has 'f' among its tool_calls"),
    ],
)
def test_what_no_template_writes_is_refused_by_its_field(
    make_tokenizer, tmp_path, message, refusal
):
    """A Python None or a list's repr trained before, or an empty answer."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [user("hi"), message]}))
    with pytest.raises(UserError, match=rf"a.jsonl:1: .*{refusal}"):
        list(text.documents([tmp_path / "a.jsonl"], make_tokenizer("qwen2_5")))


def test_a_thought_that_a_template_drops_is_told_once(make_tokenizer, tmp_path, caplog):
    """An example is what `kdjax answers` writes with DeepSeek-R1-Distill."""
    lines = [json.dumps({"messages": [user("a"), assistant("hmm\n</think>\n\nb")]})] * 3
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for name, told in (("qwen3", 0), ("deepseek_r1_distill", 1)):
        found = list(text.documents([tmp_path / "a.jsonl"], make_tokenizer(name)))
        assert len(found) == 3 and caplog.text.count("leaves the thought") == told


def test_parts_tools_and_weights_are_read(make_tokenizer):
    tokenizer = make_tokenizer("qwen2_5")
    parts = [{"type": "text", "text": "Al"}, {"type": "text", "text": "pha."}]
    record = {"messages": [user(parts), assistant(parts)], "tools": json.dumps(TOOLS)}
    said, inside, _ = read(record, tokenizer)
    assert inside == ["Alpha.<|im_end|>"] and '"name": "weather"' in said
    nulls = {"name": None, "tool_calls": None, "tool_call_id": None, "reasoning_content": None}
    filled = {"messages": [m | nulls for m in record["messages"]], "tools": TOOLS}
    assert read(filled, tokenizer) == read(record, tokenizer)
    halves = {"prompt": record["messages"][:1], "completion": record["messages"][1:]}
    assert read(halves | {"tools": TOOLS}, tokenizer) == read(record, tokenizer)
    shots = {"prompt": KINDS["several"]["messages"][:3], "completion": [assistant("Beta.")]}
    assert read(shots, tokenizer)[1] == ["Beta.<|im_end|>"]
    thinking = {"messages": [user("a"), assistant("b")], "chat_template_kwargs": {}}
    off = thinking | {"chat_template_kwargs": {"enable_thinking": False}}
    qwen = make_tokenizer("qwen3")
    assert [read(one, qwen)[1] for one in (thinking, off)] == [
        ["<think>\n\n</think>\n\nb<|im_end|>"],
        ["b<|im_end|>"],
    ]
    with pytest.raises(UserError, match="found tools='x'; expected a list of functions"):
        read(KINDS["one turn"] | {"tools": "x"}, tokenizer)


def test_any_error_of_a_template_is_one_line(make_tokenizer):
    for body in (
        "{{ 1 / 0 }}",
        "{{ messages[9].x.y }}",
        "{{ raise_exception('no') }}",
        "{{ 'a' + 1 }}",
    ):
        with pytest.raises(UserError, match=r"the chat template refuses the messages: \w"):
            make_tokenizer("bad", body).render([user("x")])


def test_renderings_are_those_of_transformers(make_tokenizer, monkeypatch):
    """By the same sandbox; the date alone is another."""
    import transformers.utils.chat_template_utils as theirs

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return template_worker.DATE

    monkeypatch.setattr(theirs, "datetime", Day)
    for name in ENDS:
        tokenizer = make_tokenizer(name)
        for record in (KINDS["several"], KINDS["system"]):
            (expected,), _ = theirs.render_jinja_template(
                [record["messages"]],
                chat_template=tokenizer.chat_template,
                add_generation_prompt=True,
                **tokenizer._named_tokens,
            )
            assert tokenizer.render(record["messages"], answer_next=True) == expected, name


def test_a_dated_template_writes_one_date_and_the_split_is_the_files(make_tokenizer, tmp_path):
    """Else rows, and the documents held out, are others tomorrow."""
    tokenizer = make_tokenizer("llama3_2")
    assert "Today Date: 26 Jul 2024" in tokenizer.render([user("x")])
    (tmp_path / "a.jsonl").write_text(json.dumps(KINDS["one turn"]))
    other = make_tokenizer("qwen2_5")
    (one,), (two,) = (text.documents([tmp_path / "a.jsonl"], t) for t in (tokenizer, other))
    assert one.text != two.text and one.digest() == two.digest()


def test_a_word_that_joins_the_prompts_space_trains(make_tokenizer):
    tokenizer = make_tokenizer("qwen2_5")
    document = text.Document("Answer: yes", "x", ((8, 11),))
    ((_, ids, mask),) = rows.tokenize_documents([document], tokenizer, 7)
    assert tokenizer.decode(ids[mask.astype(bool)][:-1].tolist()).strip() == "yes"


# --- rows ---------------------------------------------------------------------------------------

WORDS = ["sun", "moon", "star", "tree", "rock", "bird", "fish", "wind", "rain", "snow"]


def say(rng, most=30):
    return " ".join(rng.choice(WORDS, rng.integers(1, most)))


def draw_record(rng):
    """A record of a random form, and its ChatML with what trains, both written by hand."""
    turns, expected, trained = [], "", []
    if rng.random() < 0.4:
        turns.append({"role": "system", "content": say(rng)})
    else:
        expected = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
        expected += "assistant.<|im_end|>\n"
    for _ in range(rng.integers(1, 4)):
        turns += [user(say(rng)), assistant(say(rng))]
    last = len(turns) - 1
    halves = rng.random() < 0.3
    for i, turn in enumerate(turns):
        expected += f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n"
        weighs = turn["role"] == "assistant" and (i == last or not halves)
        if weighs and i != last and rng.random() < 0.3:
            turn["weight"], weighs = 0, False
        if weighs:
            trained.append(f"{turn['content']}<|im_end|>")
        if rng.random() < 0.3:
            turn["content"] = [{"type": "text", "text": turn["content"]}]
    record = {"prompt": turns[:-1], "completion": turns[-1:]} if halves else {"messages": turns}
    return record, (expected, "".join(trained))


def list_documents(side, tokenizer):
    """Text and trained text of each document of the rows."""
    for tokens, segments, mask in zip(*side, strict=True):
        for number in range(1, int(segments.max()) + 1):
            ids, here = tokens[segments == number], mask[segments == number].astype(bool)
            yield tokenizer.decode(ids.tolist()), tokenizer.decode(ids[here].tolist())


def prepare(folder, tokenizer, patterns, begun="", **changes):
    end = tokenizer.end_of_text_id
    settings = rows.RowSettings(str(patterns), "", tokenizer, 255, 0.3, end, 32)
    settings = dataclasses.replace(settings, **changes)
    return rows.prepare_rows(settings, folder / "cache", begun)


def test_fifty_random_conversations_decode_as_written_by_hand(make_tokenizer, tmp_path):
    rng, tokenizer = np.random.default_rng(3), make_tokenizer("qwen2_5")
    drawn = [draw_record(rng) for _ in range(50)]
    lines = "\n".join(json.dumps(record) for record, _ in drawn)
    (tmp_path / "a.jsonl").write_text(lines)
    found = prepare(tmp_path, tokenizer, tmp_path / "a.jsonl", seq_len=1023)
    documents = [*list_documents(found.train, tokenizer), *list_documents(found.heldout, tokenizer)]
    assert sorted(documents) == sorted(expected for _, expected in drawn)
    assert len(found.train) > 1 and found.info["train"]["long"] == 0


def test_conversations_have_rows_of_their_own_by_best_fit(make_tokenizer, tmp_path):
    """Text around them is packed as if they were not there; no record is cut."""
    tokenizer = make_tokenizer("minicpm")
    (tmp_path / "a.txt").write_text("plain " * 3000)
    rng = np.random.default_rng(5)
    records = [{"messages": [user(say(rng, 12)), assistant(say(rng, 12))]} for _ in range(200)]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = prepare(tmp_path, tokenizer, f"{tmp_path}/a.txt,{tmp_path}/b.jsonl")
    chats = [d for side in found[:2] for d, _ in list_documents(side, tokenizer) if "user" in d]
    assert len(chats) == 200 and all(d.count("<|im_end|>") == 2 for d in chats)
    for side in found[:2]:
        for row in side.tokens:
            said = tokenizer.decode(row.tolist())
            assert not ("plain" in said and "<|im_end|>" in said), "text has rows of its own"
    full = [(s > 0).mean() for side in found[:2] for s in side.segments]
    assert np.mean(full) > 0.9


@pytest.mark.parametrize(("long", "kept"), [("leave_out", 0), ("cut", 1)])
def test_longer_than_a_row_is_left_out_or_loses_its_beginning(make_tokenizer, tmp_path, long, kept):
    tokenizer = make_tokenizer("minicpm")
    lines = [{"messages": [user(f"{i}?"), assistant(f"short {i}")]} for i in range(30)]
    lines[7]["messages"][0]["content"] = "much " * 400
    lines[7]["messages"][1]["content"] = "the end of it"
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = prepare(tmp_path, tokenizer, tmp_path / "a.jsonl", long=long)
    sides = [found.info[name] for name in ("train", "heldout")]
    assert sum(side["long"] for side in sides) == 1
    assert [side["first_long"] for side in sides if side["long"]] == [f"{tmp_path}/a.jsonl:8"]
    assert sum(side["documents"] for side in sides) == 29 + kept
    documents = [d for side in found[:2] for d in list_documents(side, tokenizer)]
    assert ("the end of it<|im_end|>" in [trained for _, trained in documents]) == bool(kept)
    with pytest.raises(
        UserError, match=r"a.jsonl:\d+: found a record longer than a row of 5 tokens"
    ):
        prepare(tmp_path, tokenizer, tmp_path / "a.jsonl", seq_len=4)


def test_a_run_goes_on_with_the_rows_that_an_earlier_version_cut(make_tokenizer, tmp_path):
    """Text alone keeps its key; rows of records are found by the key that the run began with."""
    tokenizer = make_tokenizer("minicpm")
    (tmp_path / "a.txt").write_text("plain " * 300)
    (tmp_path / "b.txt").write_text("other " * 300)
    lines = [{"messages": [user(f"{i}?"), assistant(f"short {i}")]} for i in range(30)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))
    end = tokenizer.end_of_text_id
    settings = rows.RowSettings(f"{tmp_path}/c.jsonl", "", tokenizer, 255, 0.3, end, 32)
    fields = [2, 255, end, 32, False, tokenizer.content_hash, 0.3]
    content = (tmp_path / "c.jsonl").read_bytes()
    hashes = b"|.jsonl\0" + hashlib.sha256(content).digest() + b"|"
    earlier = hashlib.sha256(json.dumps(fields).encode() + hashes).hexdigest()
    assert rows.rows_key(settings) != earlier == rows.rows_key(settings, begun=earlier)
    assert rows.rows_key(settings, begun="another") == rows.rows_key(settings)
    cut = dataclasses.replace(settings, long="cut")
    assert rows.rows_key(settings) != rows.rows_key(cut)
    texts = [
        dataclasses.replace(one, train=f"{tmp_path}/a.txt", heldout=f"{tmp_path}/b.txt")
        for one in (settings, cut)
    ]
    assert rows.rows_key(texts[0]) == rows.rows_key(texts[1])
    with pytest.raises(UserError, match="found no rows, with which this run began"):
        rows.prepare_rows(settings, tmp_path / "cache", earlier)
    made = rows.prepare_rows(settings, tmp_path / "cache")
    (tmp_path / "cache" / made.key).rename(tmp_path / "cache" / earlier)
    assert rows.prepare_rows(settings, tmp_path / "cache", earlier).key == earlier


@pytest.mark.parametrize("name", ["continue_final_message", "add_generation_prompt"])
def test_a_record_says_nothing_of_what_an_answer_is(make_tokenizer, tmp_path, name):
    """Either would end the rendering elsewhere than the answer; a template's variables may come."""
    record = KINDS["one turn"] | {"chat_template_kwargs": {name: True, "enable_thinking": False}}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(UserError, match=rf"a.jsonl:1: found {name} in chat_template_kwargs"):
        list(text.documents([tmp_path / "a.jsonl"], make_tokenizer("qwen3")))


# --- random forms -------------------------------------------------------------------------------

WORDS = ["one", "two", "größe", "4", "five?", "six,", "(seven)", "eight\n\nnine", "日本", "don't"]
SLOW = pytest.mark.slow


class Form:
    """A random template, and the reference: what it writes, and which part of it trains."""

    def __init__(self, seed):
        draw = np.random.default_rng(seed)
        pick = lambda *options: options[draw.integers(len(options))]  # noqa: E731
        self.named = pick(True, False)  # <|im_start|>role or <|role|>
        self.after = pick("\n", ":\n", "") if self.named else pick("\n", "")
        self.close = pick("<|im_end|>", "<|end|>", "</s>", "" if not self.named else "<|end|>")
        self.between = pick("\n", "") if self.close else ""
        self.first = pick("", "<s>", "<|begin_of_text|>")
        self.last = pick("", "<|endoftext|>") if self.close else ""
        self.default = pick("", "Be brief.")
        self.merges = pick(True, False)  # the system's text into the first turn
        self.empty = pick("", "<think>\n\n</think>\n\n")  # in the last answer alone

    def open(self, role):
        return f"<|im_start|>{role}{self.after}" if self.named else f"<|{role}|>{self.after}"

    @property
    def template(self):
        opening = "<|im_start|>{{ m.role }}" if self.named else "<|{{ m.role }}|>"
        system = "{{ m.content }}\n\n" if self.merges else ""
        system = system or f"{self.open('system')}{{{{ m.content }}}}{self.close}{self.between}"
        default = system.replace("{{ m.content }}", self.default) if self.default else ""
        # Merged, the system's text follows the mark that opens the first turn of the user.
        return (
            f"{self.first}{{% set ns = namespace(system='') %}}"
            f"{{% if messages[0].role != 'system' %}}{{% set ns.system %}}{default}{{% endset %}}"
            f"{{% endif %}}{{% for m in messages %}}{{% if m.role == 'system' %}}"
            f"{{% set ns.system %}}{system}{{% endset %}}{{% else %}}"
            + ("" if self.merges else "{{ ns.system }}")
            + f"{opening}{self.after}"
            + ("{{ ns.system }}" if self.merges else "")
            + "{% set ns.system = '' %}"
            + f"{{% if loop.last and m.role == 'assistant' %}}{self.empty}{{% endif %}}"
            + f"{{{{ m.content }}}}{self.close}{self.between}{{% endif %}}{{% endfor %}}"
            + f"{{% if add_generation_prompt %}}{self.open('assistant')}"
            + f"{{% else %}}{self.last}{{% endif %}}"
        )

    def render(self, messages):
        """Pieces of the text, each with whether it trains."""
        pieces, system = [(self.first, False)], self.default
        if messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        closed = False  # by the mark that opens a turn, which trained
        for i, message in enumerate(messages):
            opened = self.open(message["role"])
            if closed:
                opened = opened.removeprefix("<|user|>")
            if i == 0 and system:
                whole = self.open("system") + system + self.close + self.between
                opened = opened + f"{system}\n\n" if self.merges else whole + opened
            trains = message["role"] == "assistant" and message.get("weight") != 0
            said = self.empty if i + 1 == len(messages) and message["role"] == "assistant" else ""
            close = self.close or ("<|user|>" if trains else "")
            pieces += [(opened, False), (said + message["content"] + close, trains)]
            pieces += [(self.between, False)]
            closed = trains and not self.close
        return [*pieces, (self.last, False)]


def draw_conversation(seed):
    draw = np.random.default_rng(seed)
    says = lambda: " ".join(draw.choice(WORDS, draw.integers(1, 9)))  # noqa: E731
    messages = [{"role": "system", "content": says()}] if draw.random() < 0.3 else []
    for turn in range(draw.integers(1, 4)):
        silent = turn == 0 and draw.random() < 0.2
        messages += [
            user(f"{seed} {says()}"),
            assistant(says(), **({"weight": 0} if silent else {})),
        ]
    messages[-1].pop("weight", None)
    return messages


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(s, marks=SLOW) for s in range(3, 50))])
def test_rows_hold_conversations_of_random_forms(seed, make_tokenizer, tmp_path):
    """Decoded from the rows: every conversation complete, and trained on what the answers say."""
    form = Form(seed)
    tokenizer = make_tokenizer("random", form.template)
    end = tokenizer.tokens.index(form.close or "<|endoftext|>")
    tokenizer = dataclasses.replace(tokenizer, eos_id=end)
    conversations = [draw_conversation(100 * seed + i) for i in range(8)]
    records = [{"messages": messages} for messages in conversations]
    sides = {"a.json": records[:6], "b.json": records[6:]}
    for name, side in sides.items():
        (tmp_path / name).write_text(json.dumps(side))
    paths = (str(tmp_path / name) for name in sides)
    settings = rows.RowSettings(*paths, tokenizer, 400, 0.3, tokenizer.eos_id, max_segments=4)
    made = rows.prepare_rows(settings, tmp_path / "rows")
    found = []
    for side in (made.train, made.heldout):
        for ids, segments, mask in zip(*side, strict=True):
            for segment in range(1, segments.max() + 1):
                here, trains = segments == segment, mask != 0
                texts = (tokenizer.decode(ids[at].tolist()) for at in (here, here & trains))
                found.append(tuple(texts))
    expected = []
    for messages in conversations:
        pieces = form.render(messages)
        trained = "".join(text for text, trains in pieces if trains)
        expected.append(("".join(text for text, _ in pieces), trained))
    assert sorted(found) == sorted(expected)  # of 8, none in two rows
