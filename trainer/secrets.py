"""Nothing secret is written down: values are removed by name, and wherever they turn up again.

A value is secret when its key, or the environment variable that holds it, has a
secret-like name. Names are cut into words at `_`, `-`, `.`, digits and
camelCase, and compared whole, so `api_key`, `dbPassword` and `AUTH_TOKEN` match
while `keyboard`, `monkey`, `author` and `tokenizer` do not. See `_WORDS` and
`_ENDINGS` for the list.

Matching errs on the safe side: `sort_key` loses its value in the record of the
run. The run itself is never changed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

REMOVED = "<removed>"
MIN_LENGTH = 6  # a shorter value would be found by chance in unrelated text

_WORDS = frozenset(
    "key keys apikey apikeys secret secrets token password passwords passwd pwd pass passphrase "
    "credential credentials cred creds auth oauth authorization authentication private bearer cookie "
    "cookies jwt".split()
)
# Words written together with what they belong to: dbpassword, githubtoken, awssecret.
_ENDINGS = (
    "apikey",
    "accesskey",
    "secretkey",
    "privatekey",
    "password",
    "passwd",
    "secret",
    "token",
    "credentials",
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)@")
_PLACES = frozenset({"PWD", "OLDPWD"})  # the shell's working directories


def is_secret_name(name: str) -> bool:
    """Whether a key or an environment variable of this name is taken to hold a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def environment_secrets(environ: Mapping[str, str]) -> set[str]:
    """Values of variables with secret-like names; an existing path is a place and not a secret."""
    return {
        value
        for name, value in environ.items()
        if name not in _PLACES and is_secret_name(name) and _is_searchable(value)
    }


class Redactor:
    """Removes secrets of the environment, and of `mapping` where given, from texts and mappings.

    Values under secret-like names in `mapping` are removed from other texts too,
    so a password that also stands in a run's name or in a traceback is caught.
    """

    def __init__(
        self, mapping: Mapping[Any, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        found = environment_secrets(os.environ if environ is None else environ)
        _collect(mapping or {}, False, found)
        # Longest first: a secret that contains another must go as a whole.
        self._values = sorted(found, key=lambda value: (-len(value), value))

    def text(self, text: str) -> str:
        """The text with every secret value, and every password inside a URL, replaced by `<removed>`."""
        for value in self._values:
            text = text.replace(value, REMOVED)
        return _URL_PASSWORD.sub(rf"\1:{REMOVED}@", text)

    def mapping(self, mapping: Mapping[Any, Any], texts_only: bool = False) -> dict[Any, Any]:
        """A copy as plain dicts and lists, secrets replaced by `<removed>`; empty and boolean values stay.

        With `texts_only` a secret-like name hides texts alone: for results, where
        the name may be a layer's (`attention.key`) and the value its bytes.
        """
        return {
            self._scalar(key): REMOVED
            if _is_secret(key, value) and (isinstance(value, str) or not texts_only)
            else self._value(value, texts_only)
            for key, value in mapping.items()
        }

    def _value(self, value: Any, texts_only: bool) -> Any:
        if isinstance(value, Mapping):
            return self.mapping(value, texts_only)
        if isinstance(value, list | tuple | set | frozenset):
            return [self._value(item, texts_only) for item in value]
        return self._scalar(value)

    def _scalar(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and str(value) in self._values:
            return REMOVED
        return value


def redact(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """`mapping` as plain dicts and lists without its secrets and without those of the environment."""
    return Redactor(mapping).mapping(mapping)


class SecretFilter(logging.Filter):
    """Removes secrets from log records, tracebacks included.

    Add it to handlers: a logger's own filter does not see its children's
    records. The environment is read once, when the filter is made; `mapping` is
    the configuration whose secrets are to be kept out as well.
    """

    def __init__(self, mapping: Mapping[Any, Any] | None = None) -> None:
        super().__init__()
        self._redactor = Redactor(mapping)
        self._formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = self._redactor.text(record.getMessage())
        record.args = None
        if record.exc_info and not record.exc_text:
            record.exc_text = self._formatter.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = self._redactor.text(record.exc_text)
        if record.stack_info:
            record.stack_info = self._redactor.text(record.stack_info)
        return True


def keep_out_of_logs(mapping: Mapping[Any, Any]) -> None:
    """Have every handler of this process's logging remove secrets, those of `mapping` among them."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(SecretFilter(mapping))


def _is_secret(key: Any, value: Any) -> bool:
    if not isinstance(key, str) or value is None or isinstance(value, bool) or value in ("", [], {}, ()):
        return False
    if key.lower().endswith("tokens"):
        return not isinstance(value, int | float)  # max_tokens counts, api_tokens lists
    return is_secret_name(key)


def _collect(value: Any, secret: bool, found: set[str]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _collect(item, secret or _is_secret(key, item), found)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            _collect(item, secret, found)
    elif secret and not isinstance(value, bool) and _is_searchable(str(value)):
        found.add(str(value))


def _is_searchable(value: str) -> bool:
    return len(value) >= MIN_LENGTH and not os.path.exists(value)
