"""Secrets are removed by name and wherever their values turn up; ordinary names are left alone."""

from __future__ import annotations

import io
import logging
from dataclasses import asdict
from pathlib import Path

import pytest

from trainer.config import RunConfig
from trainer.secrets import Redactor, SecretFilter, is_secret_name, redact


@pytest.mark.parametrize(
    "name",
    "api_key apiKey APIKey WANDB_API_KEY token auth_token hf-token db_password dbpassword DB_PASSWORD2 "
    "secret MY_SERVICE_SECRET clientSecret credentials aws.credential private_key auth authorization passwd "
    "AWS_SECRET_ACCESS_KEY smtp_pass passphrase bearer session_cookie githubtoken".split(),
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    "keyboard monkey author authored tokenizer max_tokens secretary hidden_dim compass passes run_dir "
    "lr batch_size timeout_s keystone privateer bypass PATH TOKENIZERS_PARALLELISM".split(),
)
def test_ordinary_names(name: str) -> None:
    assert not is_secret_name(name)


def test_values_under_secret_names_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = {
        "model": {"options": {"api_key": "abc", "width": 3, "max_tokens": 128, "api_tokens": ["a"]}},
        "strategy": {"options": {"db_password": 12345678, "credentials": {"user": "u", "word": "w"}}},
        "list": ({"token": ["a", "b"]}, 1.5, True, None),
        "auth": None,
        "private": False,
        "secret": "",
    }
    assert redact(mapping) == {
        "model": {
            "options": {"api_key": "<removed>", "width": 3, "max_tokens": 128, "api_tokens": "<removed>"}
        },
        "strategy": {"options": {"db_password": "<removed>", "credentials": "<removed>"}},
        "list": [{"token": "<removed>"}, 1.5, True, None],
        "auth": None,
        "private": False,
        "secret": "",
    }


def test_results_lose_only_texts() -> None:
    redactor = Redactor({}, {"MY_TOKEN": "planted-value"})
    result = redactor.mapping(
        {"attention.key": {"bytes": 4096}, "key": "planted", "note": "x planted-value"}, True
    )
    assert result == {"attention.key": {"bytes": 4096}, "key": "<removed>", "note": "x <removed>"}


def test_own_configuration_is_left_alone() -> None:
    config = asdict(RunConfig(run_dir="/somewhere"))
    changed = [
        f"{section}.{key}"
        for section, values in redact(config).items()
        if isinstance(values, dict)
        for key, value in values.items()
        if value == "<removed>"
    ]
    assert changed == []
    assert redact(config)["run_dir"] == "/somewhere"


def test_environment_values_are_found_in_any_text(tmp_path: Path) -> None:
    environ = {
        "MY_SERVICE_SECRET": "s3cr3t-value",
        "LONGER_SECRET": "s3cr3t-value-and-more",
        "SHORT_KEY": "abc",
        "PIN_TOKEN": "987654321",
        "KEY_FILE": str(tmp_path),  # a place
        "OLDPWD": "/no/such/place",
        "EDITOR": "editor-value",
    }
    redactor = Redactor({}, environ)
    assert redactor.text("run s3cr3t-value, s3cr3t-value-and-more") == "run <removed>, <removed>"
    unchanged = f"abc {tmp_path} /no/such/place/x editor-value"
    assert redactor.text(unchanged) == unchanged
    assert redactor.mapping({"s3cr3t-value": 987654321, "n": 98765432}) == {
        "<removed>": "<removed>",
        "n": 98765432,
    }


def test_configured_secrets_are_found_in_other_values() -> None:
    mapping = {"options": {"db_password": "hunter-22"}, "run_name": "with hunter-22 inside"}
    assert redact(mapping)["run_name"] == "with <removed> inside"


def test_password_in_url() -> None:
    assert redact({"data": "s3://user:pass@host/path"}) == {"data": "s3://user:<removed>@host/path"}
    assert redact({"data": "http://host:8080/a@b"}) == {"data": "http://host:8080/a@b"}


def test_log_filter_hides_messages_and_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_SECRET", "s3cr3t-value")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(SecretFilter({"options": {"api_key": "from-config"}}))
    logger = logging.getLogger("test_secrets.child")
    logger.addHandler(handler)
    try:
        logger.error("value %s and %s, %d %%", "s3cr3t-value", "from-config", 5)
        try:
            raise ValueError("s3cr3t-value is wrong")
        except ValueError:
            logger.exception("failed", stack_info=True)
    finally:
        logger.removeHandler(handler)
    text = stream.getvalue()
    assert text.startswith("value <removed> and <removed>, 5 %\n")
    assert "ValueError: <removed> is wrong" in text
    assert "s3cr3t-value" not in text
