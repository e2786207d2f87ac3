"""docs/settings.md, made from the declarations: `python -m cluster.config.settings_page > docs/settings.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cluster.config.declared import DeclaredSetting, declared_settings, tables
from protos.setting import number

_HEAD = """# Settings

Every setting that a file for `--config` and `--set NAME=VALUE` may have; `baton config` prints those in force. Some
have a flag, too (`baton serve --help`). A default of "-" is found out at the start. The command
`python -m cluster.config.settings_page > docs/settings.md` makes this page.
"""


def page() -> str:
    lines = [_HEAD]
    for table in ("", *tables()):
        lines += [f"## [{table}]" if table else "## At the top of the file", ""]
        lines += ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
        lines += [_row(one) for one in declared_settings().values() if one.table == table]
        lines.append("")
    return "\n".join(lines)


_MAX_RANGE_CHARS = 90  # a line of the document has 160


def _row(declared: DeclaredSetting) -> str:
    setting = declared.setting
    allowed = " ".join(_allowed(declared))
    variable = f" Variable: `{setting.variable}`." if setting.variable else ""
    return f"| `{setting.name}` | {_default(setting.default)} | {allowed} | {setting.help}{variable} |"


def _allowed(declared: DeclaredSetting) -> Iterator[str]:
    setting = declared.setting
    if setting.kind is bool:
        yield "true, false"
    elif len(setting.range) > _MAX_RANGE_CHARS:
        yield "names in api.md"
    elif setting.range:
        yield setting.range
    elif setting.kind is str:
        yield "text"
    if setting.unit and setting.kind in (int, float):
        yield setting.unit


def _default(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return number(value)
    return f"`{json.dumps(value)}`" if isinstance(value, str) and value else "-" if value != "" else "empty"


if __name__ == "__main__":
    print(page(), end="")
