"""Which of the interfaces of `verifiers` is installed here."""

from importlib.metadata import PackageNotFoundError, version

import pytest

try:
    INSTALLED = tuple(map(int, version("verifiers").split(".")[:2]))
except PackageNotFoundError:
    INSTALLED = None

needs_tasksets = pytest.mark.skipif(INSTALLED is None or INSTALLED < (0, 4), reason="needs verifiers 0.4")
needs_classic = pytest.mark.skipif(INSTALLED is None or INSTALLED >= (0, 4), reason="needs verifiers below 0.4")
