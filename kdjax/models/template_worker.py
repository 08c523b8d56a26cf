"""Renders chat templates for `templates`, in a separate process: `python template_worker.py`.

A template is a program that came with a model. Standard input brings pickled requests, each after
its length; standard output takes JSON, each after its length. The process ends with its input.
"""

import contextlib
import datetime
import json
import os
import pickle
import resource
import struct
import sys

# The date that templates write in place of today's, from Llama 3.2's template for programs
# without a clock. Rows, splits and prompts of equal inputs are then equal on every day.
DATE = datetime.datetime(2024, 7, 26)
SECONDS = 10  # of processor time for one conversation
_MEMORY = 1 << 30  # bytes beyond what the libraries take
_LENGTH = struct.Struct("<Q")


def _read(count):
    data = b""
    while len(data) < count:
        if not (part := os.read(0, count - len(data))):
            sys.exit()
        data += part
    return data


def _allow_seconds():
    spent = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(spent.ru_utime + spent.ru_stime) + SECONDS + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with contextlib.suppress(ValueError):  # the command has a lower limit
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def _bound_memory():
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, hard))


def _render(theirs, request):
    most, template, messages, given = request
    try:
        compiled = theirs._compile_jinja_template(template)  # which they keep
        compiled.environment.globals["strftime_now"] = DATE.strftime
        [text], generated = theirs.render_jinja_template(
            [messages], chat_template=template, **given
        )
    except MemoryError:
        return {"exceeded": f"more than {_MEMORY >> 20:,} MiB of memory"}
    except Exception as error:  # whatever Python raises in an expression of the template
        return {"refused": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
    if len(text) > most:
        return {"exceeded": f"{len(text):,} characters; expected {most:,} at most"}
    return {"text": text, "generated": generated[0] if generated else []}


def main():
    """Answers requests until there are no more."""
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path[:] = pickle.loads(_read(*_LENGTH.unpack(_read(_LENGTH.size))))
    from transformers.utils import chat_template_utils

    _bound_memory()
    while True:
        request = pickle.loads(_read(*_LENGTH.unpack(_read(_LENGTH.size))))
        _allow_seconds()
        data = json.dumps(_render(chat_template_utils, request)).encode()
        rest = memoryview(_LENGTH.pack(len(data)) + data)
        while rest:
            rest = rest[os.write(out, rest) :]


if __name__ == "__main__":
    main()
