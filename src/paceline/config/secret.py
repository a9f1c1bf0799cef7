"""Finds secrets in a run file, which is kept with the run, shown on the screen and sent to exporters.

Everything a run writes begins with its run file or comes from its environments, so this is the one place to stop a key.
What needs one names the environment variable that holds it.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

from paceline.errors import PacelineError

_NAME = re.compile(
    r"(?:.*_)?(?:(?:api|secret|access|private|auth|openai|anthropic|hf|wandb|account|service|signing|encryption|master)"
    r"_?keys?|passwords?|passwd|pwd|pass_?phrase|secrets?|auth|authorization|bearer|credentials?|jwt|token)"
)
"""Keys that say what they hold, by how they end."""
_WORD = re.compile(r"(?:.*_)?(?:bos|eos|pad|sep|cls|unk|mask|stop|start|begin|end|image|audio|video|special)_token")
"""Keys whose token is a word of a vocabulary."""
_PLACEHOLDER = re.compile(r"\$?\{?[A-Z][A-Z0-9_]*\}?|(?i:none|null|dummy|not[-_]needed|unused|empty|local|)")
"""Placeholders where no key is needed, or the name of an environment variable."""
_OPAQUE = re.compile(r"(?:Bearer )?[\w.~+/=:|-]{8,}", re.IGNORECASE | re.ASCII)
"""The form of an access token; one of a vocabulary is shorter, or has brackets or spaces."""
_SCHEME = r"\s*[a-z][a-z0-9+.:-]*://"
_LOGIN = re.compile(rf"(?:\s*(?:[a-z0-9.]+\+)?https?://[^/?#\s]*|{_SCHEME}[^/?#\s:@]*:[^/?#\s]+)@", re.IGNORECASE)
"""Over HTTP whatever stands before the @ may be a key; elsewhere (`ssh://git@host`) a name without a password is none.
"""
_QUERY = re.compile(
    rf"{_SCHEME}[^\s#]*[?&;](?:(?:(?:api|access|secret)[_-]?key|(?:access|auth)[_-]?token|password|passwd|secret|sig"
    r"|(?:x-(?:amz|goog)-)?signature|x-amz-security-token)=(?!(?:none|dummy|not-needed|empty|local)?(?:[&;#\s]|$))"
    r"|(?:key|token)=(?![a-z]{0,7}(?:[&;#\s]|$)))",
    re.IGNORECASE,
)
"""A key or token may also be that of a table: a short plain word is no secret."""


def address_secret(address: str) -> str | None:
    """The secret part of an address, in words; it is never quoted itself.

    >>> address_secret("http://me:s3cret@host/v1")
    'a login before the @'
    >>> address_secret("https://host/v1?limit=3&api-key=s3cret")
    'a key behind the ?'
    >>> address_secret("postgres://me:s3cret@host/rows")
    'a login before the @'
    >>> address_secret("http://host:8000/v1")
    """
    if _LOGIN.match(address):
        return "a login before the @"
    return "a key behind the ?" if _QUERY.match(address) else None


def read_key(variable: str | None, where: str) -> str | None:
    """The key that an environment variable holds; None where none is named."""
    key = os.environ.get(variable) if variable is not None else None
    if variable is not None and not key:
        raise PacelineError(f"{where}: the environment variable {variable} is not set: put the key there")
    return key


def redact(text: str, secret: str | None) -> str:
    """A server's answer without the key that was sent to it: some servers repeat it."""
    return text.replace(secret, "***") if secret else text


def secrets_in(value: Any, at: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, entry in value.items():
            place = f"{at}.{key}" if at else str(key)
            if _holds_secret(str(key), entry):
                yield (
                    f"{place} is a secret, and a run file is kept with the run: put it into an environment variable, "
                    "give the variable's name here and read it in your code"
                )
            else:
                yield from secrets_in(entry, place)
                if isinstance(key, str):
                    yield from _address(key, f"a key of {at}")
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from secrets_in(entry, f"{at}.{number}")
    elif isinstance(value, str):
        yield from _address(value, at)


def _holds_secret(key: str, entry: Any) -> bool:
    """Whether a string, or one of a list of them, is what the key's name says."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")
    if not _NAME.fullmatch(name) or _WORD.fullmatch(name):
        return False
    texts = [text for text in (entry if isinstance(entry, list | tuple) else [entry]) if isinstance(text, str)]
    if name.endswith("token"):
        texts = [text for text in texts if _OPAQUE.fullmatch(text)]
    return not all(map(_PLACEHOLDER.fullmatch, texts))


def _address(text: str, at: str) -> Iterator[str]:
    if part := address_secret(text):
        yield (
            f"{at} has {part}, and a run file is kept with the run: leave it out of the address, and name the "
            "environment variable that holds the key (`api_key_env`, or a retrieval's `api_key_variable`)"
        )
