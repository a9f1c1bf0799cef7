"""Secrets have no place in a run file: it is kept with the run, shown on the screen and sent to exporters.

Everything a run writes begins with its run file or comes from its environments, so this is the one place to stop a key.
What needs one names the environment variable that holds it.
"""

import re
from collections.abc import Iterator
from typing import Any

NAMES = {"api_key", "apikey", "password", "passwd", "secret", "secret_key", "authorization"}
NAMES |= {"access_token", "auth_token", "bearer_token"}
"""Keys that say what they hold."""
_LOGIN = re.compile(r"\s*https?://[^/?#\s]*@", re.IGNORECASE)
_QUERY = re.compile(
    r"\s*https?://[^\s#]*[?&;](?:(?:api|access|secret)?[_-]?key|(?:access|auth)?[_-]?token|password|passwd|secret|sig"
    r"|signature)=[^&;\s]",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*|")
"""`EMPTY`, or the name of an environment variable."""


def in_address(address: str) -> str | None:
    """What of an address is nobody's business, in words; it is never quoted itself.

    >>> in_address("http://me:s3cret@host/v1")
    'a login before the @'
    >>> in_address("https://host/v1?limit=3&api-key=s3cret")
    'a key behind the ?'
    >>> in_address("http://host:8000/v1")
    """
    if _LOGIN.match(address):
        return "a login before the @"
    return "a key behind the ?" if _QUERY.match(address) else None


def hidden(text: str, secret: str | None) -> str:
    """What somebody answered, without the key that was sent to them: some say it back."""
    return text.replace(secret, "***") if secret else text


def secrets_in(value: Any, at: str = "") -> Iterator[str]:
    """A sentence for each secret in these tables."""
    if isinstance(value, dict):
        for key, entry in value.items():
            place = f"{at}.{key}" if at else str(key)
            plain = str(key).lower().replace("-", "_")
            if plain in NAMES and isinstance(entry, str) and not _PLACEHOLDER.fullmatch(entry):
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


def _address(text: str, at: str) -> Iterator[str]:
    if told := in_address(text):
        yield (
            f"{at} has {told}, and a run file is kept with the run: leave it out of the address, and name the "
            "environment variable that holds the key (`api_key_env`, or a retrieval's `api_key_variable`)"
        )
