"""The settings of a session: one table, and all that must agree with it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nbdist.client.magic_lines.parsers import verb_parsers
from nbdist.client.magic_lines.start_flags import start_keywords
from nbdist.client.session.session import Session
from nbdist.client.start.node_arguments import nodes_wanted
from nbdist.client.start.start_settings import START_SETTINGS, StartSettings
from nbdist.errors import UsageError
from nbdist.launch.request import Request
from nbdist.wire.messages.life import RankSettings

ROOT = Path(__file__).parents[2]
OF_THE_CALL = {"replace", "progress"}  # keywords of `Session` that say how to start it, not what it is


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    return str(caught.value)


# --- the table and `Session`


def keywords() -> list[inspect.Parameter]:
    return list(inspect.signature(Session).parameters.values())


def test_the_keywords_of_a_session_are_the_settings_with_their_types_and_defaults() -> None:
    declared = {name: each.type for name, each in StartSettings.__dataclass_fields__.items()}
    found = {each.name: each for each in keywords() if each.name not in OF_THE_CALL}
    assert {name: each.annotation for name, each in found.items()} == declared
    assert {name: each.default for name, each in found.items()} == {
        name: setting.default for name, setting in START_SETTINGS.items()
    }


def test_the_docstring_of_a_session_explains_each_keyword_in_order() -> None:
    documented = re.search(r"Args:\n(.*?)\n\n", inspect.getdoc(Session) or "", re.DOTALL)
    assert documented is not None
    assert re.findall(r"^    (\w+):", documented[1], re.MULTILINE) == [each.name for each in keywords()]


def test_ranks_know_settings_by_the_names_that_they_have_in_a_session() -> None:
    assert set(RankSettings.__struct_fields__) <= set(START_SETTINGS)


# --- values


WRONG: list[tuple[str, Any, str]] = [
    ("num_processes", 0, "the number of ranks must be a whole number of 1 or more, not 0: `%distributed start -n 2`"),
    ("num_processes", True, "the number of ranks must be a whole number of 1 or more, not True"),
    (
        "num_nodes",
        None,
        "num_nodes must be a whole number of 1 or more, not None: "
        "`%distributed start --num-nodes 2 --master-addr 10.0.0.1`",
    ),
    ("master_addr", 5, "master_addr must be a non-empty str, not 5"),
    ("master_addr", "", "master_addr must be a non-empty str, not ''"),
    ("master_port", 0, "master_port must be a whole number of 1 or more, not 0: `--master-port 29500`"),
    ("master_port", 65536, "master_port must be at most 65535, not 65536: `--master-port 29500`"),
    ("interface", ["eth0"], "interface must be a non-empty str, not ['eth0']"),
    ("token_file", 3, "token_file must be a path, not 3"),
    ("save", 3, "save must be a path, not 3"),
    ("node_timeout", 0, "node_timeout must be a number of seconds above 0, not 0: `node_timeout=60`"),
    ("node_timeout", 0.5, "node_timeout must be at least 3 seconds, got 0.5: `--node-timeout 60` is the default"),
    ("private_network", "no", "private_network must be True or False, not 'no'"),
    ("on", 5, 'on must be the name of a profile, or a dict like {"engine": "ssh", "hosts": ["node-a"]}, not 5'),
    ("gpus", 0.5, "gpus must name GPUs, for example [0, 2] or '0,2', not 0.5"),
    ("backend", 3, "backend must be a str, not 3: `backend='gloo'`"),
    (
        "backend",
        "glo",
        "backend 'glo' is unknown: did you mean `--backend gloo`? "
        "Allowed values: gloo, nccl, mpi, ucc, cpu:gloo,cuda:nccl",
    ),
    ("init", None, "init must be True or False, not None"),
    ("timeout", -1, "timeout must be a number of seconds above 0, not -1: `timeout=60`"),
    ("linger", "12h", "linger must be a number of seconds of 0 or more, not '12h': `linger=60`"),
    ("until", "6pm", "until must be a time, for example 18:00 or 2030-01-31T06:00, not '6pm'"),
    ("until", 18, "until must be a time, for example 18:00 or 2030-01-31T06:00, not 18"),
    ("until", "2020-01-31T06:00", "until must be a time to come, and 2020-01-31T06:00 is over"),
    ("time_left", "", "time_left must be a non-empty str, not ''"),
    ("warn", "10m", "warn must be a number of seconds of 0 or more, not '10m': `warn=60`"),
    ("idle", 0, "idle must be a number of seconds above 0, not 0: `idle=60`"),
    ("every", 0, "every must be a number of seconds above 0, not 0: `every=60`"),
    ("end_grace", -1, "end_grace must be a number of seconds of 0 or more, not -1: `end_grace=60`"),
    ("keep", 1, "keep must be True or False, not 1"),
    ("exact", "yes", "exact must be True or False, not 'yes'"),
    ("on_death", "hael", "on_death 'hael' is unknown: did you mean 'heal'? Allowed values: 'ask', 'heal', 'stop'"),
]


@pytest.mark.parametrize(("name", "value", "says"), WRONG, ids=[f"{name}={value!r}" for name, value, _ in WRONG])
def test_a_wrong_value_is_one_error_that_names_what_is_allowed(name: str, value: Any, says: str) -> None:
    message = refusal(lambda: StartSettings(**{name: value}))
    assert message.startswith(says)


def test_each_setting_refuses_something() -> None:
    assert {name for name, _, _ in WRONG} == set(START_SETTINGS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, setting.default) for name, setting in START_SETTINGS.items()),
        *(("gpus", gpus) for gpus in (0, "0,2", [0, "MIG-1"], range(2), [])),
        *(("token_file", file) for file in ("tokens", Path("tokens"))),
        *(("on", cluster) for cluster in ("big", {"engine": "ssh"})),
        *(("linger", 0), ("master_port", 65535), ("backend", "cpu:gloo,cuda:nccl"), ("on_death", "stop")),
    ],
)
def test_what_is_allowed_is_kept_as_it_was_given(name: str, value: Any) -> None:
    assert getattr(StartSettings(**{name: value}), name) is value


# --- flags


def typed(line: str) -> dict[str, Any]:
    return start_keywords(verb_parsers()["start"].read(line))


def test_a_line_without_flags_leaves_all_settings_at_their_defaults() -> None:
    assert StartSettings(**typed("")) == StartSettings()


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("-n 4", "num_processes", 4),
        ("--num-processes 4", "num_processes", 4),
        ("--num-nodes 2", "num_nodes", 2),
        ("--master-addr node-a", "master_addr", "node-a"),
        ("--master-port 29500", "master_port", 29500),
        ("--interface eth0", "interface", "eth0"),
        ("--token-file tokens", "token_file", "tokens"),
        ("--node-timeout 90", "node_timeout", 90.0),
        ("--private-network", "private_network", True),
        ("--on big", "on", {"profile": "big"}),
        ("--hosts node-a,node-b:4", "on", {"engine": "ssh", "hosts": ["node-a", "node-b:4"]}),
        ("--gpus 0,2", "gpus", ["0", "2"]),
        ("--backend gloo", "backend", "gloo"),
        ("--no-init", "init", False),
        ("--timeout 1.5", "timeout", 1.5),
        ("--linger 12h", "linger", 12 * 3600.0),
        ("--until 18:00", "until", "18:00"),
        ("--time-left 'squeue -h -j 1 -O TimeLeft'", "time_left", "squeue -h -j 1 -O TimeLeft"),
        ("--warn 5m", "warn", 300.0),
        ("--idle 30m", "idle", 1800.0),
        ("--every 1h", "every", 3600.0),
        ("--end-grace 2m", "end_grace", 120.0),
        ("--keep", "keep", True),
        ("--exact", "exact", True),
        ("--on-death heal", "on_death", "heal"),
    ],
)
def test_a_flag_sets_one_setting(line: str, name: str, value: object) -> None:
    assert StartSettings(**typed(line)).given() == {name: value}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-n 0", "invalid number of ranks '0': use 1 or more, for example -n 2"),
        ("--num-nodes x", "invalid number 'x': use 1 or more"),
        ("--timeout never", "invalid duration 'never': use a number of seconds greater than 0, for example 60"),
        ("--linger 12w", "invalid duration '12w': use, for example, 0, 90, 15m, or 12h"),
        ("--idle 0", "invalid duration '0': use, for example, 90s, 30m, or 2h"),
        ("--on-death hael", "invalid choice: 'hael'"),
    ],
)
def test_a_flag_with_a_wrong_value_is_one_error(line: str, says: str) -> None:
    message = refusal(lambda: typed(line))
    assert message.startswith("%distributed start: ") and says in message


# --- the form in JupyterLab


def test_the_form_has_the_fields_of_the_table() -> None:
    fields = json.loads((ROOT / "labextension/src/lab/start_fields.json").read_text())
    assert fields == [
        {"name": name, "flag": setting.flags(name)[0], **asdict(setting.form)}
        for name, setting in START_SETTINGS.items()
        if setting.form is not None
    ]


@pytest.mark.parametrize(
    ("name", "text", "fits"),
    [
        *(("num_processes", text, True) for text in ("1", "8", "02", "999", "1000", "1024")),
        *(("num_processes", text, False) for text in ("0", "00", "1025", "1030", "2000", "10000", "two", "-1", "1.5")),
        *(("gpus", text, True) for text in ("0", "0,2", "10,11")),
        *(("gpus", text, False) for text in ("0,", ",", "0 2", "a")),
    ],
)
def test_the_form_takes_what_the_flag_takes(name: str, text: str, fits: bool) -> None:
    form = START_SETTINGS[name].form
    assert form is not None
    assert bool(re.search(form.pattern, text)) is fits


# --- profiles


def started(profile: dict[str, Any], **settings: Any) -> StartSettings:
    on = {"engine": "ssh", "hosts": ["127.0.0.1"], **profile}
    return nodes_wanted(StartSettings(on=on, **settings))[0]


def test_a_profile_sets_what_is_left_at_its_default() -> None:
    found = started({"n": 3, "master_addr": "127.0.0.1", "node_timeout": 90, "private_network": True})
    assert (found.num_processes, found.master_addr, found.node_timeout) == (3, "127.0.0.1", 90)
    assert found.private_network


def test_what_is_given_wins_over_the_profile() -> None:
    found = started({"n": 3, "master_addr": "node-of-nobody"}, num_processes=2, master_addr="127.0.0.1")
    assert (found.num_processes, found.master_addr) == (2, "127.0.0.1")


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ({"n": "two"}, "Expected `int | null`, got `str` - at `$.n`"),
        ({"n": 0}, "the number of ranks must be a whole number of 1 or more, not 0"),
        ({"master_port": 70000}, "master_port must be at most 65535, not 70000"),
    ],
)
def test_a_wrong_value_in_a_profile_says_where_it_is(profile: dict[str, Any], says: str) -> None:
    message = refusal(lambda: started(profile))
    assert message.startswith("`%distributed start`: ") and says in message


def test_the_documentation_lists_what_profiles_may_set() -> None:
    text = (ROOT / "docs/nodes.md").read_text()
    found = re.search(r"Every profile may have (.*?)\.", text, re.DOTALL)
    assert found is not None
    assert re.findall(r"`(\w+)`", found[1]) == [each.profile for each in START_SETTINGS.values() if each.profile]


@pytest.mark.parametrize("name", [name for name, setting in START_SETTINGS.items() if setting.several_nodes])
def test_on_one_machine_what_is_for_several_is_refused(name: str) -> None:
    values: dict[str, Any] = {"node_timeout": 60, "master_port": 29500, "private_network": True}
    settings = StartSettings(**{name: values.get(name, "x")})
    assert refusal(lambda: nodes_wanted(settings)) == (
        f"{name} is for sessions on several machines: add `--num-nodes 2`, or leave it out"
    )


# --- the launcher


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("num_processes", 0, "num_processes must be a whole number of 1 or more, not 0"),
        ("num_nodes", "2", "num_nodes must be a whole number of 1 or more, not '2'"),
        ("master_addr", 5, "master_addr must be a non-empty str, not 5"),
        ("timeout", 0, "timeout must be a number of seconds above 0, not 0: `timeout=60`"),
    ],
)
def test_a_launch_refuses_what_a_session_refuses_without_an_example_of_a_session(
    name: str, value: Any, says: str
) -> None:
    assert refusal(lambda: Request(print, **{"num_processes": 1, name: value})) == says
    assert says.partition(" must ")[2] in refusal(lambda: StartSettings(**{name: value}))
