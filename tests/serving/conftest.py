"""The translator of the commands' tests."""

from tests.commands.conftest import output, translator  # noqa: F401
