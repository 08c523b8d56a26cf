"""Fields that earlier versions had: refused by name where they were used, passed over where not."""

import dataclasses
import importlib
import json
import re
from typing import Any

import pytest

import kdjax
from kdjax import config as config_module
from kdjax.commands.parsing import parse_run, run_parser
from kdjax.config import REMOVED, REMOVED_NAMES, Config, Removed, flatten, read_section, validate
from kdjax.errors import UserError
from kdjax.losses.kd import KDLoss
from kdjax.training.identity import check_same_run, identify, list_differences
from kdjax.watch.run import distill

SAID = r"was removed{}: {}.*; the tag before-the-cut still has it"


@pytest.fixture(params=["loss.gone", *REMOVED])
def removed(request, monkeypatch):
    """Name, row and text of a removed field: one of no version, and all that there are."""
    monkeypatch.setitem(config_module.REMOVED, "loss.gone", Removed(1.0, "do x", "2026-a-record"))
    gone = config_module.REMOVED[request.param]
    record = rf" \(docs/records/{gone.record}\.md\)" if gone.record else ""
    return request.param, gone, SAID.format(record, gone.instead[:9])


def test_a_config_that_sets_a_removed_field_is_refused(removed, tiny_config):
    name, _, said = removed
    *sections, field = name.split(".")
    section = getattr(tiny_config, sections[0]) if sections else tiny_config
    assert name not in flatten(Config())
    setattr(section, field, "used")
    with pytest.raises(UserError, match=f"{name} {said}"):
        validate(tiny_config)


@pytest.mark.parametrize("name", ["then", "loss.beyond"])
def test_a_run_with_python_of_ones_own_is_refused_as_any(name, tiny_config, tmp_path):
    """Its config is copied with what the Python replaces."""
    *sections, field = name.split(".")
    setattr(getattr(tiny_config, sections[0]) if sections else tiny_config, field, "used")
    with pytest.raises(UserError, match=f"{name} was removed"):
        distill(tiny_config, tmp_path / "run", loss=KDLoss())


def test_a_constructor_refuses_a_removed_field(removed):
    name, _, said = removed
    *sections, field = name.split(".")
    kind: Any = type(getattr(Config(), sections[0])) if sections else Config
    with pytest.raises(UserError, match=rf"{name} {said}\.$"):
        kind(**{field: "used"})


def test_a_flag_of_a_removed_field_is_refused(removed):
    name, _, said = removed
    with pytest.raises(UserError, match=f"--config.{name} {said}"):
        parse_run(run_parser("train", ""), ["--config=demo", f"--config.{name}=1"])


def test_a_saved_config_is_read_where_the_field_did_nothing(removed):
    name, gone, said = removed
    nested = dataclasses.asdict(Config())
    *sections, field = name.split(".")
    section = nested[sections[0]] if sections else nested
    section[field] = gone.off
    nested = json.loads(json.dumps(nested))
    assert read_section(Config(), nested) == Config()
    (nested[sections[0]] if sections else nested)[field] = "used"
    if gone.free:
        assert read_section(Config(), nested) == Config()
        return
    with pytest.raises(UserError, match=f"{name} {said}"):
        read_section(Config(), nested)


def test_a_run_goes_on_where_the_field_did_nothing(removed, tmp_path):
    name, gone, said = removed
    current = identify(Config(), {})
    assert not list(list_differences(current | {name: gone.off}, current))
    check_same_run(current | {name: gone.off}, current, tmp_path)
    with pytest.raises(UserError, match=f"(?s)cannot go on.*{name} {said}"):
        check_same_run(current | {name: "used"}, current, tmp_path)


def test_records_of_removed_fields_are_there(removed, request):
    name, gone, _ = removed
    if name != "loss.gone" and gone.record:  # a field that has another name has none
        assert (request.config.rootpath / f"docs/records/{gone.record}.md").is_file()


@pytest.mark.parametrize("name", REMOVED_NAMES)
def test_a_removed_name_argument_or_flag_is_refused(name, request):
    """Each is named as a user writes it: `kdjax.X`, `f(x=)`, `kdjax COMMAND --flag`."""
    gone = REMOVED_NAMES[name]
    said = re.escape(f"{name} was removed") + f".*{re.escape(gone.instead)}.*before-the-cut"
    with pytest.raises(UserError, match=said):
        if argument := re.fullmatch(r"(\w+)\((\w+)=\)", name):
            getattr(kdjax, argument[1])(**{argument[2]: None})
        elif name.startswith("kdjax."):
            exec(f"from kdjax import {name.removeprefix('kdjax.')}")
        else:
            _, command, flag = name.split()
            module = importlib.import_module(f"kdjax.commands.{command}")
            module.main.__wrapped__(["model", f"{flag}=1"])
    record = request.config.rootpath / f"docs/records/{gone.record}.md"
    assert not gone.record or record.is_file()


def test_other_names_are_refused_as_python_does():
    with pytest.raises(AttributeError, match="No kdjax attribute Behind"):
        kdjax.Behind  # noqa: B018
    with pytest.raises(TypeError, match="argument"):
        kdjax.make_step(size=3)
