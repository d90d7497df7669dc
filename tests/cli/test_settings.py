"""Settings in layers."""

import argparse
import tomllib

import msgspec
import pytest

from mlx_troupe.api.flags import add_model, add_settings, dashed, given_settings
from mlx_troupe.api.layers import load_settings
from mlx_troupe.api.options import SECTIONS, SettingsError, all_options, options_of, parse_size
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime.config import RuntimeConfig


def parse(*arguments: str):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_model(parser)
    add_settings(parser, ("server", "runtime"))
    found = parser.parse_args(dashed(arguments))
    return load_settings(given_settings(found), {}, found.config)


def test_defaults_are_the_structs():
    settings = load_settings({}, {})
    assert settings.server == ServerSettings()
    assert settings.runtime == RuntimeConfig(allow_download=True)  # the command line is what may download
    assert set(settings.sources.values()) == {"default"}


def test_every_field_is_a_setting_with_help():
    names = [field.name for struct in SECTIONS.values() for field in msgspec.structs.fields(struct)]
    assert len(set(names)) == len(names)
    options = all_options()
    assert list(options) == names
    assert all(option.help for option in options.values())


def test_precedence(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('[server]\nport = 1\nhost = "::1"\n[runtime]\nmax-rows = 3\nmax_queue = 4\npage_tokens = 5\n')
    environment = {"MLX_TROUPE_MAX_ROWS": "6", "MLX_TROUPE_MAX_QUEUE": "7", "OTHER": "x"}
    settings = load_settings({"max_rows": "8"}, environment, str(path))
    assert settings.server.port == 1
    assert settings.server.host == "::1"
    assert settings.runtime.max_rows == 8
    assert settings.runtime.max_queue == 7
    assert settings.runtime.page_tokens == 5
    assert settings.runtime.inbox == RuntimeConfig().inbox
    assert settings.sources["max_rows"] == "flag --max-rows"
    assert settings.sources["max_queue"] == "environment MLX_TROUPE_MAX_QUEUE"
    assert settings.sources["page_tokens"] == f"file {path}"
    assert settings.sources["inbox"] == "default"


def test_the_environment_may_name_the_file(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("[server]\nport = 1\n")
    assert load_settings({}, {"MLX_TROUPE_CONFIG": str(path)}).server.port == 1


def test_flags():
    settings = parse(
        *("demo", "--max_rows", "8", "--no-access-log", "--insecure", "--prefix-cache-bytes", "2GiB"),
        *("--length_classes=256,1024", "--overlap=off", "--queue-timeout-s", "1.5", "--memory-limit-bytes", "none"),
        *("--allowed-hosts", "a, b", "--no-allow-download"),
    )
    assert settings.runtime.model == "demo"
    assert settings.runtime.max_rows == 8
    assert settings.server.access_log is False
    assert settings.server.insecure is True
    assert settings.runtime.prefix_cache_bytes == 2 << 30
    assert settings.runtime.length_classes == (256, 1024)
    assert settings.runtime.overlap == "off"
    assert settings.runtime.queue_timeout_s == 1.5
    assert settings.runtime.memory_limit_bytes is None
    assert settings.server.allowed_hosts == ("a", "b")
    assert settings.runtime.allow_download is False


def test_the_model_by_flag_or_argument():
    assert parse("--model", "a/b").runtime.model == "a/b"
    assert parse("a/b", "--max-rows", "2").runtime.model == "a/b"
    assert parse("--max-rows", "2").runtime.model is None


def test_dashes_and_underscores():
    assert dashed(["--a_b", "--c_d=e_f", "g_h", "-x", "--", "--i_j"]) == [
        *("--a-b", "--c-d=e_f", "g_h", "-x", "--", "--i_j")
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_rows", "many", "--max-rows"),
        ("overlap", "maybe", "auto, launch, build, off"),
        ("prefix_cache_bytes", "2 parsecs", "unit"),
        ("port", "70000", "--port"),
        ("keepalive_interval_s", "0", "--keepalive-interval-s"),
        ("default_top_p", "2", "--default-top-p"),
        ("access_log", "perhaps", "--access-log"),
        ("length_classes", "1,x", "--length-classes"),
    ],
)
def test_values_that_do_not_fit(name, value, message):
    with pytest.raises(SettingsError) as caught:
        load_settings({name: value}, {})
    assert message in str(caught.value)
    assert value in str(caught.value)


def test_the_source_of_a_bad_value_is_named(tmp_path):
    with pytest.raises(SettingsError, match="environment MLX_TROUPE_PORT"):
        load_settings({}, {"MLX_TROUPE_PORT": "x"})
    path = tmp_path / "s.toml"
    path.write_text("[server]\nport = true\n")
    with pytest.raises(SettingsError, match=r"s\.toml"):
        load_settings({}, {}, str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1\n", "'port' is close"),
        ("[server]\nmax_rows = 1\n", r"stands in \[runtime\]"),
        ("port = 1\n", "not a table"),
        ("[sevrer]\n", "not a table"),
        ("[server\n", "s.toml"),
    ],
)
def test_files_with_mistakes(tmp_path, text, message):
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_settings({}, {}, str(path))


def test_a_file_that_is_not_there():
    with pytest.raises(SettingsError, match="No such file"):
        load_settings({}, {}, "/nowhere/s.toml")


def test_misspelt_variables_are_pointed_out():
    environment = {"MLX_TROUPE_MAX_ROW": "1", "MLX_TROUPE_NO_BLAS": "1", "MLX_TROUPE_CACHE": "/x"}
    (warning,) = load_settings({}, environment).warnings
    assert "MLX_TROUPE_MAX_ROWS" in warning


def test_printed_settings_read_back(tmp_path):
    flags = {"served_name": 'a "b" \\ \n ü', "max_rows": "7", "allowed_hosts": "x,y", "queue_timeout_s": "inf"}
    settings = load_settings(flags, {"MLX_TROUPE_ACCESS_LOG": "off"})
    text = settings.toml()
    tomllib.loads(text)
    assert "max_rows = 7  # flag --max-rows" in text
    assert "access_log = false  # environment MLX_TROUPE_ACCESS_LOG" in text
    assert "port = 8000  # default" in text
    assert "# revision = none  # default" in text
    path = tmp_path / "s.toml"
    path.write_text(text)
    again = load_settings({}, {}, str(path))
    assert again.server == settings.server
    assert again.runtime == settings.runtime


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("1k", 1000), ("64 MB", 64_000_000), ("2GiB", 2 << 30), ("1.5 Gi", 3 << 29), ("1TB", 10**12)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 XB", "1 GB 2", "1e9"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_help_texts_fit_argparse():
    parser = argparse.ArgumentParser()
    add_settings(parser, tuple(SECTIONS))
    text = parser.format_help()
    assert all(option.flag in text for section in SECTIONS for option in options_of(section))
