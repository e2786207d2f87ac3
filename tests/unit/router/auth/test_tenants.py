"""The file of tenants and keys, and how a bad one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.errors import Misconfigured
from router.auth.tenants import Roster, Tenant, hash_of, new_key, read_roster

ONE, OTHER, ADMIN = new_key(), new_key(), new_key()


def roster_of(tmp_path: Path, text: str) -> Roster:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return read_roster(path)


def test_a_key_finds_its_tenant_and_only_its_hash_is_stored(tmp_path: Path) -> None:
    text = f"""
        admin_keys = ["{hash_of(ADMIN)}"]
        [tenants.acme]
        keys = ["{hash_of(ONE)}", "{hash_of(OTHER)}"]
        weight = 2
        max_priority = 5
        requests_per_min = 60
    """
    assert ONE not in text
    roster = roster_of(tmp_path, text)
    acme = Tenant(name="acme", weight=2, max_priority=5, requests_per_min=60)
    assert roster.tenant_of(ONE) == roster.tenant_of(OTHER) == acme
    assert roster.tenant_of(ADMIN) is None
    assert roster.tenant_of(new_key()) is None
    assert roster.is_admin(ADMIN)
    assert not roster.is_admin(ONE)
    assert not roster.is_open


def test_without_a_roster_everybody_may_ask() -> None:
    assert Roster().is_open
    assert Roster().is_admin("")


def test_taking_back_the_last_key_opens_nothing(tmp_path: Path) -> None:
    roster = roster_of(tmp_path, f"admin_keys = ['{hash_of(ADMIN)}']\n[tenants.acme]\nkeys = []")
    assert not roster.is_open
    assert roster.tenant_of(ONE) is None


def test_tenants_have_caches_of_their_own_unless_they_share_them(tmp_path: Path) -> None:
    a, b, nobody = Tenant(name="a"), Tenant(name="b"), Tenant()
    assert a.cache_salt(b"x") != b.cache_salt(b"x")
    assert a.cache_salt(b"x") != a.cache_salt(b"y")
    assert a.cache_salt(b"x") == Tenant(name="a", weight=2.0).cache_salt(b"x")
    assert nobody.cache_salt(b"x") == b"x"
    text = f"share_cache = true\nadmin_keys = ['{hash_of(ADMIN)}']\n[tenants.a]\n[tenants.b]"
    assert {tenant.cache_salt(b"x") for tenant in roster_of(tmp_path, text).tenants.values()} == {b"x"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tenants.a]\nkeys = ['sk-baton-oops']", "an entry is not a hash"),
        ("[tenants.a]\nweigth = 2", "did you mean 'weight'"),
        ("tenant = 3", "did you mean 'tenants'"),
        ("[tenants.a]\nweight = 0", "weight = 0: give a number from 0.001"),
        ("[tenants.a]\nmax_concurrent = 1.5", "give a whole number"),
        ("[tenants.a]\nmax_concurrent = true", "give a whole number"),
        ("[tenants.'a b']\n", "the name 'a b'"),
        ("[tenants.a]\n", "admin_keys is missing"),
        ("", "no table"),
        ("[tenants]\n", "no table"),
        (f"admin_keys = ['sha256:{'0' * 64}']", "no table"),
        ("share_cache = 1", "give true or false"),
        ("tenants = 1", "write a table"),
        ("admin_keys = 'x'", "give a list of hashes"),
        ("x = = 1", "is not TOML"),
    ],
)
def test_a_bad_file_is_refused_with_the_place_and_the_cure(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(Misconfigured, match=told) as refused:
        roster_of(tmp_path, text)
    assert "sk-baton-oops" not in refused.value.message


def test_a_key_is_one_tenants_and_no_administrators(tmp_path: Path) -> None:
    key, admin = hash_of(ONE), hash_of(ADMIN)
    with pytest.raises(Misconfigured, match="b and a have the same key"):
        roster_of(tmp_path, f"admin_keys = ['{admin}']\n[tenants.a]\nkeys = ['{key}']\n[tenants.b]\nkeys = ['{key}']")
    with pytest.raises(Misconfigured, match="an admin key is also a key of a"):
        roster_of(tmp_path, f"admin_keys = ['{key}']\n[tenants.a]\nkeys = ['{key}']")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"nowhere\.toml"):
        read_roster(tmp_path / "nowhere.toml")
