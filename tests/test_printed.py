"""Commands that pages, help texts and messages print: each is read by its command's parser."""

import argparse
import ast
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from kdjax.commands import cli, draft, parsing
from kdjax.config import Config, flatten, validate
from kdjax.errors import FINISHED

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
PAGES += [*REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("*/README.md")]
PAGES += REPOSITORY.glob("kdjax/demo/*.md")
HELPS = [REPOSITORY / "kdjax" / "commands" / f"{name}.py" for name in cli.COMMANDS]
CONFIG = r"(--config=|kdjax data )(?:CONFIG|\.\.\.|\w+\.py)(?!\S)"  # a user's
# Errors of a part of a command.
UNFINISHED = "required|--config is missing|expected one argument|'(?:[A-Z]|{})'"


class _ReadError(Exception):
    """Ends a command that has read its command line."""


def split_commands(line):
    """Yields the words of each command in a line of a shell, without what starts it."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    command = []
    for word in [*words, ";"]:
        if not set(word) <= set("();|&<>"):
            command.append(word)
            continue
        for at, name in enumerate(command):
            if name == "kdjax" or (command[at - 1] == "-m" and re.match(r"kdjax|scripts", name)):
                yield command[at:]
                break
        command = []


def read_block(page):
    """Yields the commands of a page's shell blocks, or of a module's examples."""
    text = page.read_text()
    if page.suffix == ".py":
        blocks = [re.sub(r"^(?!    kdjax ).*", "", ast.get_docstring(ast.parse(text)), flags=re.M)]
    else:
        blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, flags=re.M | re.S)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            yield from split_commands(line)


def list_strings(page):
    """Texts of a page without its blocks, or of a module; `{}` is what a program puts there."""
    text = page.read_text()
    if page.suffix == ".md":
        return [re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)]
    nodes = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Constant | ast.JoinedStr)]
    inner = {id(part) for x in nodes if isinstance(x, ast.JoinedStr) for part in x.values}
    return [_join(x) for x in nodes if id(x) not in inner]


def _join(node):
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(x.value) if isinstance(x, ast.Constant) else "{}" for x in parts)


def read_mentions(page):
    """Yields the commands, or parts of commands, within the sentences of a page or a module."""
    alone = r"|^  +(kdjax .+)$" if page.suffix == ".py" else "()"
    for text in list_strings(page):
        for said in re.findall(rf"`((?:kdjax|python3? -m) [^`]+)`{alone}", text, re.M):
            for words in split_commands(" ".join("".join(said).split())):
                if words[1:2] not in (["COMMAND"], ["--help"]):
                    yield [word for word in words if word[:1] == "-" or "{}" not in word]


@pytest.fixture
def read(monkeypatch, capsys):
    """Reads a command's words; a part of a command may lack what is required. Returns the error."""
    part, override = [], parsing.override

    def stop_after(kind):
        parse = kind.parse_args

        def parse_args(parser, args=None, namespace=None):
            for needed in part and (*parser._actions, *parser._mutually_exclusive_groups):
                needed.required = False
            parse(parser, args, namespace)
            raise _ReadError

        monkeypatch.setattr(kind, "parse_args", parse_args)

    def override_and_stop(*given):
        validate(override(*given))
        raise _ReadError

    for kind in (argparse.ArgumentParser, parsing.Parser):
        stop_after(kind)
    for module in (parsing, draft):
        monkeypatch.setattr(module, "override", override_and_stop)
    monkeypatch.chdir(REPOSITORY)

    def read(words, is_part):
        part[:] = [True] * is_part
        program, *flags = shlex.split(re.sub(CONFIG, r"\1qwen7b_0p5b", shlex.join(words)))
        if program == "kdjax.main":
            flags = ["train", *flags]
        try:
            if flags[:1] == ["lm_eval"]:  # its flags are the harness's, which takes two seconds
                return ""
            if program.startswith("kdjax"):
                cli.main(flags)
            else:
                module = importlib.import_module(program)
                if hasattr(module, "__path__"):
                    module = importlib.import_module(f"{program}.__main__")
                monkeypatch.setattr(sys, "argv", words)
                module.main()
        except _ReadError:
            return ""
        except SystemExit as end:
            if end.code == FINISHED:  # of --help
                return ""
        said = capsys.readouterr().err
        return "" if is_part and re.search(UNFINISHED, said) else f"{shlex.join(words)}\n{said}"

    return read


@pytest.mark.parametrize("page", [*PAGES, *HELPS], ids=lambda page: page.name)
def test_commands_of_blocks_and_helps_can_be_read(page, read):
    wrong = [said for words in read_block(page) if (said := read(words, False))]
    assert not wrong, "\n".join(wrong)


def test_commands_of_sentences_and_messages_can_be_read(read):
    pages = [*PAGES, *REPOSITORY.glob("kdjax/**/*.py")]
    found = [words for page in pages for words in read_mentions(page)]
    wrong = [said for words in found if (said := read(words, True))]
    assert len(found) > 100 and not wrong, "\n".join(wrong)


def test_fields_that_pages_and_messages_set_are_fields():
    pages = [*PAGES, *REPOSITORY.glob("kdjax/**/*.py"), *REPOSITORY.glob("configs/*.py")]
    field = r"--(?:no)?config\.([a-z][\w.]*\w)"
    found = [(name, page.name) for page in pages for name in re.findall(field, page.read_text())]
    known = {*flatten(Config()), "field"}  # which stands for any
    assert len(found) > 100 and not [one for one in found if one[0] not in known]
