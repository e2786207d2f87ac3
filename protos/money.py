"""Amounts of money, for people."""

from __future__ import annotations


def usd_figure(usd: float) -> str:
    """USD rounded to the cent, or to three significant digits if that is finer: small loads cost less than a cent."""
    if usd >= 1:
        return f"{usd:,.2f}"
    exponent = int(f"{usd:.2e}".partition("e")[2])
    return f"{usd:,.{max(2, 2 - exponent)}f}"
