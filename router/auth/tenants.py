"""Tenants, their API keys and their limits, from a TOML file that holds only hashes of the keys.

    share_cache = false            # tenants never see each other's prefix cache, be it by timing
    admin_keys = ["sha256:..."]    # open /admin

    [tenants.acme]
    keys = ["sha256:..."]          # `baton key acme` makes one
    weight = 2.0                   # of its fair share of tokens
    max_priority = 10
    requests_per_min = 600
    tokens_per_min = 1_000_000     # prompt and answer
    max_concurrent = 64
    soft_budget_usd = 800          # more is shown, in a header and a metric
    hard_budget_usd = 1000         # more is refused
    budget_period = "month"        # or "day" (UTC)

A key has 256 random bits, so a plain hash cannot be inverted; slow hashes are for passwords, which can be guessed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from protos.errors import BadCheckpoint, InvalidRequest, Misconfigured
from protos.hints import suggested, unusable
from protos.model_files.plain_files import read_plain

ANONYMOUS = ""
KEY_PREFIX = "sk-baton-"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_MAX_BYTES = 2**24
_TOP = {"share_cache", "admin_keys", "tenants"}
# Setting of a tenant -> least and greatest value.
_RANGES: Mapping[str, tuple[float, float]] = {
    "weight": (0.001, 1000.0),
    "max_priority": (-(2**31), 2**31 - 1),
    "requests_per_min": (0.01, 10**9),
    "tokens_per_min": (1, 10**12),
    "max_concurrent": (1, 10**6),
    "soft_budget_usd": (0, 10**9),
    "hard_budget_usd": (0, 10**9),
}
PERIODS: tuple[str, ...] = ("month", "day")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """None means no limit. Tenants that share caches can detect, by a request's time, that another tenant sent the same
    prompt."""

    name: str = ANONYMOUS
    weight: float = 1.0
    max_priority: int | None = None
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    max_concurrent: int | None = None
    soft_budget_usd: float | None = None
    hard_budget_usd: float | None = None
    budget_period: Literal["month", "day"] = "month"
    shares_cache: bool = False

    @property
    def is_limited(self) -> bool:
        return (self.requests_per_min, self.tokens_per_min, self.max_concurrent) != (None, None, None)

    @property
    def has_budget(self) -> bool:
        return self.soft_budget_usd is not None or self.hard_budget_usd is not None

    def cache_salt(self, salt: bytes) -> bytes:
        """The root of the tenant's block hashes, unique unless caches are shared."""
        if self.shares_cache or self.name == ANONYMOUS:
            return salt
        return hashlib.blake2b(salt, digest_size=32, person=b"baton tenant", key=self.name.encode()).digest()

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequest."""
        if self.max_priority is not None and priority > self.max_priority:
            raise InvalidRequest(
                f"'priority' has the value {priority}: it must be at most {self.max_priority} for tenant {self.name}",
                param="priority",
            )


NOBODY = Tenant()
"""The tenant of all requests if there are no keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """An empty roster gives each request the tenant `NOBODY`."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    by_key: Mapping[str, Tenant] = field(default_factory=dict)
    admin_keys: frozenset[str] = frozenset()

    @property
    def is_open(self) -> bool:
        """With tenants a key is needed, even if all keys have been revoked."""
        return not self.tenants

    def tenant_of(self, key: str) -> Tenant | None:
        return self.by_key.get(hash_of(key))

    def is_admin(self, key: str) -> bool:
        """A roster without an administrator's key leaves /admin open."""
        return not self.admin_keys or hash_of(key) in self.admin_keys


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """Keys are compared by hash, so that a comparison's time reveals nothing."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def read_roster(path: Path) -> Roster:
    """Raises Misconfigured."""
    try:
        document = tomllib.loads(read_plain(path, _MAX_BYTES).decode())
    except (OSError, BadCheckpoint) as error:
        wrong = unusable(error) if isinstance(error, OSError) else str(error)
        raise Misconfigured(f"tenants: {path}: {wrong}; `baton key` prints its lines", param="tenants") from error
    except (ValueError, RecursionError) as error:
        raise Misconfigured(
            f"tenants: {path} is not TOML: {error}; `baton key` prints its lines", param="tenants"
        ) from error
    _known(document, _TOP, "at the top")
    share_cache = document.get("share_cache", False)
    if not isinstance(share_cache, bool):
        raise Misconfigured(f"tenants: share_cache = {share_cache!r}: give true or false", param="share_cache")
    tables = document.get("tenants", {})
    if not isinstance(tables, dict):
        raise Misconfigured(f"tenants = {tables!r}: write a table [tenants.NAME] for each", param="tenants")
    tenants: dict[str, Tenant] = {}
    by_key: dict[str, Tenant] = {}
    for name, table in tables.items():
        tenant, keys = _tenant(name, table, share_cache)
        tenants[name] = tenant
        for key in keys:
            if key in by_key:
                raise Misconfigured(
                    f"tenants: {name} and {by_key[key].name} have the same key {key[:14]}...: a key is one tenant's",
                    param=f"tenants.{name}.keys",
                )
            by_key[key] = tenant
    admin_keys = _hashes("admin_keys", document.get("admin_keys", []))
    if both := set(admin_keys) & set(by_key):
        name = by_key[min(both)].name
        raise Misconfigured(
            f"tenants: an admin key is also a key of {name}: administrators have keys of their own", param="admin_keys"
        )
    if not tenants:
        raise Misconfigured(
            f"tenants: {path} has no table [tenants.NAME], so nobody has a key: `baton key NAME` prints its lines; "
            "without router.tenants no request needs a key",
            param="tenants",
        )
    if not admin_keys:
        raise Misconfigured(
            "tenants: admin_keys is missing: /admin shows all tenants, so it needs a key of its own "
            "(`baton key --admin` makes one)",
            param="admin_keys",
        )
    return Roster(tenants=tenants, by_key=by_key, admin_keys=frozenset(admin_keys))


def _tenant(name: str, table: Any, shares_cache: bool) -> tuple[Tenant, list[str]]:
    where = f"tenants.{name}"
    if not is_name(name):
        raise Misconfigured(
            f"tenants: the name {name[:80]!r}: give 1 to 64 letters, digits, '_', '.', '@' or '-'", param="tenants"
        )
    if not isinstance(table, dict):
        raise Misconfigured(f"{where} = {table!r}: write a table [{where}]", param=where)
    _known(table, {"keys", "budget_period", *_RANGES}, f"in [{where}]")
    settings: dict[str, Any] = {}
    for setting, (least, greatest) in _RANGES.items():
        if setting not in table:
            continue
        value, whole = table[setting], setting in ("max_priority", "max_concurrent")
        if type(value) not in ((int,) if whole else (int, float)) or not least <= value <= greatest:
            kind = "a whole number" if whole else "a number"
            raise Misconfigured(
                f"{where}.{setting} = {value!r}: give {kind} from {least:g} to {greatest:g}", param=f"{where}.{setting}"
            )
        settings[setting] = value
    period = table.get("budget_period", PERIODS[0])
    if period not in PERIODS:
        raise Misconfigured(
            f"{where}.budget_period = {period!r}: give {' or '.join(PERIODS)}", param=f"{where}.budget_period"
        )
    tenant = Tenant(name=name, shares_cache=shares_cache, budget_period=period, **settings)
    if tenant.hard_budget_usd is not None and (tenant.soft_budget_usd or 0.0) > tenant.hard_budget_usd:
        raise Misconfigured(
            f"{where}: soft_budget_usd = {tenant.soft_budget_usd:g} is more than hard_budget_usd = "
            f"{tenant.hard_budget_usd:g}: a soft budget is to be noticed first",
            param=f"{where}.soft_budget_usd",
        )
    return tenant, _hashes(f"{where}.keys", table.get("keys", []))


def _hashes(where: str, given: Any) -> list[str]:
    if not isinstance(given, list):
        raise Misconfigured(f"{where} = {given!r}: give a list of hashes", param=where)
    for entry in given:
        if not isinstance(entry, str) or not _HASH.fullmatch(entry):
            # It may be a key, written here by mistake: it must not continue into logs.
            raise Misconfigured(
                f"{where}: an entry is not a hash: write sha256: and 64 hex digits, as `baton key` prints them, "
                "never the key itself",
                param=where,
            )
    return list(given)


def _known(found: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in found:
        if name not in known:
            raise Misconfigured(f"tenants: there is no setting {name!r} {where}: {suggested(name, known)}", param=name)
