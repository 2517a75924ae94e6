"""Whether W&B runs online: its server, key and mode, found where W&B looks for them, without importing it."""

from __future__ import annotations

import configparser
import netrc
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit


def choose_mode(mode: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """(`online`, `offline` or `disabled`, a remark for the user or None).

    `auto` follows WANDB_MODE or the mode of W&B's settings file where one is
    set; else it is online when a key is found. Online without a key would ask
    for one at the terminal and is turned into offline.
    """
    wish = mode
    if mode == "auto":
        wish = {"dryrun": "offline", "run": "online", "shared": "online"}.get(
            found := environ.get("WANDB_MODE") or _setting("mode", environ) or "auto", found
        )
    if wish in ("offline", "disabled"):
        return wish, None
    if has_key(environ):
        return "online", None
    if wish == "online":
        host = urlsplit(base_url(environ)).netloc
        return "offline", f"W&B has no key for {host} (WANDB_API_KEY or netrc); this run is written offline"
    return "offline", None


def base_url(environ: Mapping[str, str]) -> str:
    """The W&B server: WANDB_BASE_URL, the settings file's, or the public one."""
    return environ.get("WANDB_BASE_URL") or _setting("base_url", environ) or "https://api.wandb.ai"


def has_key(environ: Mapping[str, str]) -> bool:
    """Whether W&B would find credentials: environment, settings file, or netrc for the server's host."""
    if (
        environ.get("WANDB_API_KEY")
        or environ.get("WANDB_IDENTITY_TOKEN_FILE")
        or _setting("api_key", environ)
    ):
        return True
    named = environ.get("NETRC")
    home = Path(environ.get("HOME") or Path.home())
    for path in (Path(named).expanduser(),) if named else (home / ".netrc", home / "_netrc"):
        try:
            entry = netrc.netrc(path).authenticators(urlsplit(base_url(environ)).netloc)
        except (OSError, netrc.NetrcParseError):
            continue
        return bool(entry and entry[2])
    return False


def _setting(name: str, environ: Mapping[str, str]) -> str | None:
    """A value of W&B's settings files, the working directory's before the user's."""
    folder = environ.get("WANDB_CONFIG_DIR") or Path(environ.get("HOME") or Path.home()) / ".config" / "wandb"
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    try:
        parser.read([Path(folder).expanduser() / "settings", Path("wandb") / "settings"])
    except (configparser.Error, UnicodeDecodeError):
        return None
    return parser.get("default", name, fallback=None)
