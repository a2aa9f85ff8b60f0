"""What a database's URL may say."""

from pathlib import Path
from typing import Final

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

# As libpq has them: https://www.postgresql.org/docs/current/libpq-connect.html
_PARAMETERS: Final = (
    "host", "port", "passfile", "target_session_attrs", "application_name",
    "sslmode", "sslrootcert", "sslcert", "sslkey",
)  # fmt: skip
_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")


def check(url: str) -> None:
    """Raise ValueError for a URL that cannot be.

    That is one of another kind of database, with a parameter that is not known, with
    another `sslmode` than there are, or with a file that is not there.
    """
    try:
        parsed = make_url(url)
        kind = parsed.get_backend_name()
    except ArgumentError:
        kind = ""
    except ValueError:
        raise ValueError(
            "has a wrong port; several hosts go into ?host=one:5432,two:5432"
        ) from None
    if kind not in {"sqlite", "postgresql"}:
        raise ValueError("must begin with sqlite:/// or postgresql://")
    if kind == "postgresql":
        _check_parameters({name: str(value) for name, value in parsed.query.items()})


def _check_parameters(query: dict[str, str]) -> None:
    for name in query:
        if name not in _PARAMETERS:
            raise ValueError(f"{name} is not known; known are {', '.join(_PARAMETERS)}")
    mode = query.get("sslmode", "prefer")
    if mode not in _MODES:
        raise ValueError(f"sslmode must be one of {', '.join(_MODES)}")
    if mode.startswith("verify-") and "sslrootcert" not in query:
        raise ValueError(f"sslmode={mode} needs sslrootcert, a file with the CA's certificate")
    for name in ("passfile", "sslrootcert", "sslcert", "sslkey"):
        if name in query and not Path(query[name]).is_file():
            raise ValueError(f"{name}: there is no file {query[name]}")
