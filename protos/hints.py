"""Words for errors, logs and reports: which name was probably meant, which there are, how many, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable
from pathlib import Path

MAX_LISTED = 10
_LFS = b"version https://git-lfs.github.com/spec/"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant: at most one letter of four is wrong, missing, too many, or swapped
    with the next. Case and separators do not count. None without one."""
    plain = _plain(name)
    allowed = max(1, len(plain) // 4) if len(plain) > 2 else 0
    as_long = [one for one in known if abs(len(_plain(one)) - len(plain)) <= allowed]
    far, near = min(((_distance(plain, _plain(one)), one) for one in as_long), default=(allowed + 1, ""))
    return near if far <= allowed else None


def suggested(name: str, known: Iterable[str]) -> str:
    choices = sorted(known)
    near = nearest(name, choices)
    return f"did you mean {near!r}?" if near else f"there are {', '.join(choices)}"


def listed(names: Collection[str], most: int = MAX_LISTED) -> str:
    first = [one for one, _ in zip(names, range(most), strict=False)]
    left = len(names) - len(first)
    return ", ".join(first) + (f" and {left} more" if left else "")


def encodable(text: str) -> str:
    r"""The text with each lone surrogate, as a file name that is no UTF-8 has, written as \udcff: msgpack and protobuf
    refuse lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def extra_command(extra: str) -> str:
    """The command that installs an optional dependency. Baton is on no package index."""
    return f".venv/bin/pip install -e '.[{extra}]' in Baton's checkout"


def counted(num: int, noun: str) -> str:
    """1 thread, 2 threads."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def byte_count(num: float) -> str:
    """1.5 GB: with decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if num < 1000:
            return f"{num:.0f} {unit}" if unit == "B" else f"{num:.1f} {unit}"
        num /= 1000
    return f"{num:.1f} TB"


def usd_figure(usd: float) -> str:
    """USD rounded to the cent, or to three significant digits if that is finer: small loads cost less than a cent."""
    if usd >= 1:
        return f"{usd:,.2f}"
    exponent = int(f"{usd:.2e}".partition("e")[2])
    return f"{usd:,.{max(2, 2 - exponent)}f}"


def unusable(error: OSError, *, to_write: bool = False) -> str:
    """Why a file that the user named cannot be read or written, and what to do about it."""
    wanted = "write to" if to_write else "read"
    fixes = {
        errno.ENOENT: "make its folder first, or give another path" if to_write else "correct the path",
        errno.EISDIR: "give a file's path",
        errno.ENOTDIR: "one of its folders is a file: give another path",
        errno.EACCES: f"give one that you may {wanted}",
        errno.EPERM: f"give one that you may {wanted}",
        errno.EROFS: "give one that can be written to",
        errno.ENOSPC: "make room, or give a path on another disk",
    }
    return f"{error.strerror or error}: {fixes.get(error.errno or 0, 'give another path')}"


def lfs_pointer(path: Path) -> str:
    """The fix for a Git LFS pointer; "" for another file."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS)) == _LFS
    except OSError:
        return ""
    return (
        f"{path} is a Git LFS pointer and not the file itself: run `git lfs pull` in {path.parent}"
        if is_pointer
        else ""
    )


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _distance(one: str, other: str) -> int:
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one):
        last, before, row = before, row, [i + 1]
        for j, b in enumerate(other):
            row.append(min(before[j] + (a != b), before[j + 1] + 1, row[j] + 1))
            if i and j and a == other[j - 1] and b == one[i - 1]:
                row[-1] = min(row[-1], last[j - 1] + 1)
    return row[-1]
