"""Several models: `--model` given repeatedly, and `[[models]]` in a settings file."""

import argparse
import tomllib

import pytest

from mlx_troupe.api.flags import add_model, add_settings, as_arguments, dashed, given_models, given_settings
from mlx_troupe.api.layers import load_settings
from mlx_troupe.api.options import SettingsError

TABLES = """
[runtime]
max-rows = 8

[[models]]
path = "/m/small"
aliases = ["s", "gpt-4o-mini"]
pin = true

[[models]]
name = "big"
model = "org/big"
quantize = "q4"
max_rows = 2
prefix-cache-bytes = "64 MiB"
ttl_s = 60

[pool]
model-ttl-s = 600
"""


def parse(*arguments, environment=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_model(parser)
    add_settings(parser, ("server", "runtime", "pool"), models=True)
    found = parser.parse_args(dashed(arguments))
    return load_settings(given_settings(found), environment or {}, found.config, given_models(found))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(TABLES)
    return path


def names(settings):
    return [model.name for model in settings.models]


def test_one_model_is_no_pool():
    for arguments in (["demo"], ["--model", "demo"], ["demo", "--max-rows", "3"]):
        settings = parse(*arguments)
        assert settings.models == ()
        assert settings.runtime.model == "demo"


def test_models_are_named_by_flags():
    settings = parse("--model", "/m/a", "--model=org/b", "--max-rows", "3")
    assert names(settings) == ["a", "org/b"]
    assert [model.config.model for model in settings.models] == ["/m/a", "org/b"]
    assert {model.config.max_rows for model in settings.models} == {3}
    assert names(parse("x", "--model", "y")) == ["x", "y"]
    with pytest.raises(SettingsError, match="two models are called 'a'"):
        parse("--model", "/m/a", "--model", "/other/a")


def test_models_are_described_by_tables(file):
    settings = parse("--config", str(file), "--stall-target-s", "0.2")
    small, big = settings.models
    assert (small.name, small.aliases, small.pin, small.ttl_s) == ("small", ("s", "gpt-4o-mini"), True, None)
    assert (small.config.model, small.config.max_rows, small.config.quantize) == ("/m/small", 8, None)
    assert (big.name, big.config.served_name, big.pin, big.ttl_s) == ("big", "big", False, 60)
    assert (big.config.quantize, big.config.max_rows, big.config.prefix_cache_bytes) == ("q4", 2, 64 << 20)
    assert {model.config.stall_target_s for model in settings.models} == {0.2}
    assert settings.pool.model_ttl_s == 600
    assert settings.of_one_model().runtime == small.config


def test_a_flag_goes_before_the_file(file):
    assert parse("--config", str(file), "--model", "demo").models == ()
    assert parse("--config", str(file), environment={"MLX_TROUPE_MODEL": "demo"}).models == ()
    assert names(parse("--config", str(file), "--model", "x", "--model", "y")) == ["x", "y"]


def test_the_settings_in_force_give_the_same_models(file, tmp_path):
    settings = parse("--config", str(file))
    again = tmp_path / "again.toml"
    again.write_text(settings.toml())
    assert parse("--config", str(again)).models == settings.models
    assert len(tomllib.loads(settings.toml())["models"]) == 2


def test_only_the_first_model_is_traced():
    settings = parse("--model", "a", "--model", "b", "--trace", "t.json")
    assert [model.config.trace for model in settings.models] == ["t.json", ""]


def test_a_process_gets_its_models_otherwise(file):
    assert not [flag for flag in as_arguments(parse("--model", "a", "--model", "b"), {}) if flag.startswith("--model=")]
    assert "--model=a" in as_arguments(parse("--model", "a"), {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models = 3", "are tables"),
        ("models = [3]", "are tables"),
        ("[models]\nname = 'x'", "are tables"),
        ("[[models]]\nname = 'x'", "missing required field `model`"),
        ("[[models]]\nmodel = 'x'\nmax_row = 3", "no setting 'max_row'"),
        ("[[models]]\nmodel = 'x'\nserved_name = 'y'", "no setting 'served_name'"),
        ("[[models]]\nmodel = 'x'\nmemory = 'safe'", "the whole server's"),
        ("[[models]]\nmodel = 'x'\nmax_rows = 0", "max_rows"),
        ("[[models]]\nmodel = 'x'\npin = 'maybe'", "pin"),
        ("[[models]]\nmodel = 'x'\n[[models]]\nmodel = 'y'\naliases = ['x']", "two models are called 'x'"),
        ("[[models]]\nmodel = 'x'\nname = 'default'", "names the first model"),
        ("[runtime]\nmodel = 'z'\n[[models]]\nmodel = 'x'", "keep one of them"),
        ("[model]\nx = 1", "is not a table of settings"),
    ],
)
def test_mistakes_are_named(tmp_path, text, problem):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=problem) as caught:
        parse("--config", str(path))
    assert str(path) in str(caught.value)
