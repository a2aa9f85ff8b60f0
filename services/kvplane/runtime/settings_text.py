"""Settings as text: the effective ones, and the reference of all."""

import json
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from sqlalchemy import make_url

from kvplane.runtime.settings import Settings, each_setting, variable

_INTRODUCTION = """# Settings

Every setting has a variable, and a place in the TOML file that `--config` or
`KVPLANE_CONFIG` names: `lease.ttl_s` is `ttl_s` of the table `[lease]`. The variable wins over
the file. A wrong or unknown setting stops the start. `kvplane config` prints what is in effect.

This page is written by `kvplane config --docs`.
"""


def as_values(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return all settings by section, secrets masked."""
    values: dict[str, dict[str, Any]] = {}
    for section, name, _ in each_setting():
        value = getattr(getattr(settings, section), name)
        if isinstance(value, SecretStr):
            value = "********" if value.get_secret_value() else ""
        elif (section, name) == ("database", "url"):
            value = make_url(value).render_as_string(hide_password=True)
        values.setdefault(section, {})[name] = value
    return values


def as_toml(settings: Settings) -> str:
    """Return all settings as a file; those without a value are comments."""
    lines: list[str] = []
    for section, values in as_values(settings).items():
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for name, value in values.items():
            lines.append(f"# {name} =" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def reference() -> str:
    """Return the reference of all settings in Markdown."""
    lines = [_INTRODUCTION.rstrip()]
    before = ""
    for section, name, field in each_setting():
        if section != before:
            before = section
            title = Settings.model_fields[section].description
            lines += [
                f"\n## {section}\n",
                f"{title}\n",
                "| setting | variable | default | meaning |",
                "|---|---|---|---|",
            ]
        lines.append(
            f"| `{section}.{name}` | `{variable(section, name)}` | {_default(field)} |"
            f" {_meaning(field)} |"
        )
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    return "" if value in (None, "") else f"`{_toml(value)}`"


def _meaning(field: FieldInfo) -> str:
    text = (field.description or "").replace("|", "\\|")
    if get_origin(field.annotation) is Literal:
        text += f" One of {', '.join(f'`{choice}`' for choice in get_args(field.annotation))}."
    return text


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return (
            f"{{{', '.join(f'{json.dumps(key)} = {_toml(item)}' for key, item in value.items())}}}"
        )
    # Strings, numbers and booleans look alike in JSON and TOML.
    return json.dumps(value, ensure_ascii=False)
