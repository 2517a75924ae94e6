"""Server, key and mode are found where W&B looks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wandb_stub import API_KEY
from trainer.wandb_account import base_url, choose_mode

KEY = {"WANDB_API_KEY": API_KEY}


@pytest.fixture(autouse=True)
def no_settings_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("mode", "environ", "chosen"),
    [
        ("auto", {}, "offline"),
        ("auto", KEY, "online"),
        ("auto", {"WANDB_IDENTITY_TOKEN_FILE": "/token"}, "online"),
        ("auto", {**KEY, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {**KEY, "WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {**KEY, "WANDB_MODE": "disabled"}, "disabled"),
        ("auto", {**KEY, "WANDB_MODE": "run"}, "online"),
        ("offline", KEY, "offline"),
        ("online", {**KEY, "WANDB_MODE": "offline"}, "online"),
    ],
)
def test_mode(mode: str, environ: dict[str, str], chosen: str, tmp_path: Path) -> None:
    assert choose_mode(mode, {**environ, "HOME": str(tmp_path)}) == (chosen, None)


@pytest.mark.parametrize(("mode", "environ"), [("online", {}), ("auto", {"WANDB_MODE": "online"})])
def test_online_without_a_key_is_offline_and_says_so(
    mode: str, environ: dict[str, str], tmp_path: Path
) -> None:
    chosen, remark = choose_mode(mode, {**environ, "HOME": str(tmp_path)})
    assert chosen == "offline"
    assert remark == "W&B has no key for api.wandb.ai (WANDB_API_KEY or netrc); this run is written offline"


def test_key_in_netrc_is_for_its_host(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password 0123456789\n")
    (tmp_path / ".netrc").chmod(0o600)
    home = {"HOME": str(tmp_path)}
    assert choose_mode("auto", home)[0] == "online"
    assert choose_mode("auto", {**home, "WANDB_BASE_URL": "https://wandb.example"})[0] == "offline"
    assert choose_mode("auto", {"HOME": "/nowhere", "NETRC": str(tmp_path / ".netrc")})[0] == "online"
    (tmp_path / ".netrc").write_text("machine\n")
    assert choose_mode("auto", home)[0] == "offline"


def test_settings_file_gives_server_key_and_mode(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "wandb"
    folder.mkdir(parents=True)
    home = {"HOME": str(tmp_path)}
    (folder / "settings").write_text("[default]\nbase_url = https://wandb.example\napi_key = 0123456789\n")
    assert base_url(home) == "https://wandb.example"
    assert choose_mode("auto", home) == ("online", None)
    (folder / "settings").write_text("[default]\nmode = offline\napi_key = 0123456789\n")
    assert choose_mode("auto", home) == ("offline", None)
    (folder / "settings").write_text("no section\n")
    assert base_url(home) == "https://api.wandb.ai"
