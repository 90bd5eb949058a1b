"""Errors that the user can mend. Other packages import them from :mod:`genrec.configs.schema`."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend; its text is one sentence saying what, where and what is allowed.

    ``told``: whether the user has been told, by this rank or another.
    """

    told = False


class ConfigError(UserError):
    """A configuration that cannot be: an unknown value, a wrong type or an impossible combination.

    ``fields`` names the bindings at fault as "Class.field", so that the loader can put file and line before the text.
    """

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class UnavailableError(UserError):
    """A feature that is named in the configuration but that this version or this machine does not have."""
