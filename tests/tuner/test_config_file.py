"""Configs: default < file < --set < flag, each value with its source; what is odd is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from engines.errors import InputError
from tuner.config import TuneConfig
from tuner.config_file import KEYS, Effective, Sourced, effective
from tuner.tune_command import config_of, defaults, parser

WHOLE = """\
exports: [rtn, sub/gptq]
output: BUNDLE
precisions: [fp32, int8]
tasks: ["mine=prompts.jsonl"]
budget:
  latency_ms: 85%
  memory_mib: 1e3
quality:
  objective: quality
  max_loss: {all: 1.5, chain: 3}
  gates: {cos: 0.25}
search:
  strategy: fast
  trials: 40
  seed: 7
space:
  clip: [1.0, 0.9]
  threads: [0, 2]
  graph_optimization: all
  spinning: [false]
run:
  strict: true
  cache: ~
"""


def read(tmp_path: Path, text: str | bytes, *settings: str, **flags: Any) -> Effective:
    file = tmp_path / "tune.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    given = {name.replace("_", "."): Sourced(value, "--flag") for name, value in flags.items()}
    return effective(defaults(), file, settings, given)


def test_a_whole_file_becomes_a_config(tmp_path: Path) -> None:
    config = config_of(read(tmp_path, WHOLE))
    assert config == TuneConfig(
        export=tmp_path / "rtn",
        others=(tmp_path / "sub/gptq",),
        output=tmp_path / "BUNDLE",
        precisions=("fp32", "int8"),
        tasks=("mine=prompts.jsonl",),
        latency_share=0.85,
        memory_mib=1000.0,
        objective="quality",
        max_loss=1.5,
        max_losses=(("chain", 3.0),),
        gates=(("cos", 0.25),),
        strategy="fast",
        trials=40,
        seed=7,
        space=(
            ("clip", (1.0, 0.9)),
            ("graph_optimization", "all"),
            ("spinning", (False,)),
            ("threads", (0, 2)),
        ),
    )
    assert config.floor_of("chain") == 3.0
    assert config.floor_of("edit") == 1.5


def test_a_route_s_values_are_words_whatever_they_look_like(tmp_path: Path) -> None:
    text = "exports: [e]\noutput: b\nspace: {-kgen:codegen:cuda_tile: [0, 2]}\n"
    found = read(tmp_path, text, "space.-peep:max=4", "space.-slice_fusion=off")
    assert found["space.-kgen:codegen:cuda_tile"] == ("0", "2")
    assert config_of(found).pinned == {"-peep:max": "4", "-slice_fusion": "off"}
    assert read(tmp_path, found.to_yaml())["space.-peep:max"] == "4"


def test_one_value_pins_a_knob_and_a_list_of_one_does_not(tmp_path: Path) -> None:
    for text, value in (("window", "window"), ("[window]", ("window",)), ("3", 3)):
        found = read(tmp_path, "exports: [e]\noutput: b\n", f"space.scales={text}")
        assert found["space.scales"] == value
        assert read(tmp_path, found.to_yaml())["space.scales"] == value
        config = config_of(found)
        assert (config.pinned, config.choices) == (
            ({}, {"scales": value}) if isinstance(value, tuple) else ({"scales": value}, {})
        )
    for knob in ("schedule", "precisions"):
        with pytest.raises(InputError, match=f"knob '{knob}' cannot be pinned"):
            config_of(read(tmp_path, "exports: [e]\noutput: b\n", f"space.{knob}=all"))


def test_each_value_tells_where_it_came_from(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE, "search.trials=9", "quality.max_loss.edit=2", search_seed=8)
    sources = {key: each.source for key, each in found.values.items()}
    assert sources["search.seed"] == "--flag"
    assert sources["search.trials"] == sources["quality.max_loss.edit"] == "--set"
    assert sources["search.strategy"] == f"{tmp_path / 'tune.yaml'}:13"
    assert sources["target"] == "default"
    assert found["search.seed"] == 8
    assert found["search.trials"] == 9
    assert found["quality.max_loss.all"] == 1.5


def test_what_is_printed_is_such_a_file_again(tmp_path: Path) -> None:
    found = read(
        tmp_path, WHOLE, "search.storage=sqlite:///a b.db", "tasks=['no', '1e3', 'x # y']"
    )
    again = read(tmp_path, found.to_yaml())
    plain = {key: each.value for key, each in found.values.items()}
    assert {key: each.value for key, each in again.values.items()} == plain
    assert all("  # " in line for line in found.to_yaml().splitlines() if not line.endswith(":"))


def test_defaults_alone_are_the_config_s_own() -> None:
    found = effective(defaults(), None, ["exports=[E]", "output=B"], {})
    assert config_of(found) == TuneConfig(export=Path("E"), output=Path("B"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("serach: {trials: 3}", r"tune\.yaml:1: unknown key 'serach'; did you mean 'search'"),
        ("search:\n  trails: 3", r"tune\.yaml:2: unknown key 'search\.trails'; did you mean 'se"),
        ("search:\n  trials: 3\n  trials: 4", "3: the key 'trials' stands there twice"),
        ("search: {trials: 3.5}", "search.trials must be a whole number, got '3.5'"),
        ("search: {trials: 0755}", "search.trials must be a whole number, got '0755'"),
        ("search: {trials: [1]}", "search.trials must be a whole number, got a list"),
        ("search: {trials: {a: 1}}", "search.trials must be a whole number"),
        ("search: 3", "search must be a mapping"),
        ("- search", "unknown key|must be"),
        ("run: {strict: yes}", "run.strict must be true or false, got 'yes'"),
        ("run: {strict: no}", "run.strict must be true or false, got 'no'"),
        ("budget: {mean_bits: .nan}", "budget.mean_bits must be a number"),
        ("budget: {mean_bits: 1e999}", "budget.mean_bits must be a number"),
        ("a: &x 1\nb: *x", "anchors and aliases are not read"),
        ("quality: {max_loss: {chain: much}}", "quality.max_loss.chain must be a number"),
        ("exports: {a: b}", "exports must be a list of paths"),
        ("a: 1\n---\nb: 2", "is no YAML"),
        ("a: [1", "is no YAML"),
        ("\tsearch: 1", "is no YAML"),
        ("search: !!python/object:os.system {}", "tags are not read"),
        (b"\xff\xfe\x00", "not UTF-8"),
        ("x" * ((1 << 20) + 1), "larger than"),
        ("[" * 3000, "is no YAML|must be|unknown"),
        ("? [a, b]\n: 1", "a key must be a plain word"),
    ],
)
def test_what_is_odd_is_refused_with_its_place(
    tmp_path: Path, text: str | bytes, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        read(tmp_path, text)


def test_words_stay_words(tmp_path: Path) -> None:
    found = read(tmp_path, "tasks: [no, on, 1e-3, 007]\ntarget: null\nsearch: {storage: yes}")
    assert found["tasks"] == ("no", "on", "1e-3", "007")
    assert found["target"] == "cpu"
    assert found["search.storage"] == "yes"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "search:\n"])
def test_a_file_that_says_nothing_changes_nothing(tmp_path: Path, text: str) -> None:
    found = read(tmp_path, text)
    assert {key: each.value for key, each in found.values.items()} == {
        key: value for key, value in defaults().items() if value is not None
    }


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("search.trials", "--set takes KEY=VALUE"),
        ("=3", "--set takes KEY=VALUE"),
        ("search.tirals=3", "unknown key 'search.tirals'; did you mean 'search.trials'"),
        ("search.trials=x", "--set search.trials=x: search.trials must be a whole number"),
        ("space.clip={a: 1}", "space.clip must be a value or a list of values"),
    ],
)
def test_a_setting_at_fault_is_told(setting: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        effective(defaults(), None, [setting], {})


def test_a_missing_file_is_told() -> None:
    with pytest.raises(InputError, match=r"cannot read the config 'nowhere\.yaml'"):
        effective(defaults(), Path("nowhere.yaml"), [], {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("quality: {gates: {l7: 1}}", "a gate is one of l0, l1, l2, lInf, cos, got 'l7'"),
        ("quality: {max_loss: -1}", "max_loss"),
        ("quality: {max_loss: {edit: -1}}", "max_loss of 'edit' must be at least 0"),
        ("search: {strategy: best}", "strategy is one of tpe, fast, full, mixed, random"),
        ("run: {child_limit_s: 0}", "child_limit_s > 0 must hold"),
        ("run: {child_memory_mib: -1}", "child_memory_mib > 0 must hold"),
        ("space: {clip: [1.0, 1.0]}", "knob 'clip' needs different choices"),
        ("budget: {latency_ms: soon}", "milliseconds or a percentage"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        config_of(read(tmp_path, f"exports: [E]\noutput: B\n{text}"))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tune needs an EXPORT"):
        config_of(read(tmp_path, "output: B"))
    with pytest.raises(InputError, match="tune needs -o BUNDLE"):
        config_of(read(tmp_path, "exports: [E]"))


def test_every_argument_of_the_command_is_a_key_or_says_what_to_do() -> None:
    made = parser()
    names = {
        each.dest
        for each in made._actions
        if not isinstance(each, argparse._HelpAction | argparse._VersionAction)
    }
    others = {"config", "set", "print_config", "dry_run", "json", "verbose"}
    assert len(names - others) == len(KEYS) - 1  # a knob's choices have no flag of their own
