"""A request's tables of pages: taken for what steps write, given back behind windows. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from workers.kv.blocks import PASSED, BlockPool, CachedPrefix
from workers.scheduling.request import Request


def reset_tables(request: Request, num_groups: int) -> None:
    """Makes the tables empty. The caller has released their pages."""
    request.tables = [[] for _ in range(num_groups)]
    request.num_passed = [0] * num_groups


def take_prompt_pages(request: Request, prefix: CachedPrefix, pool: BlockPool, *, chunk: int, headroom: int) -> bool:
    """Gives the request the pages that its prompt needs at the worst moment. One without pages gets the prefix too, and
    leaves the pool `headroom` blocks. If there are too few, nothing changes and the result is False."""
    holds = bool(request.block_ids)
    held = prefix.held()
    pool.acquire(held)
    num_computed = request.num_computed + prefix.num_blocks * pool.block_size
    tables = request.tables if holds else prefix.tables
    entries = pool.windows.num_entries(request.num_tokens, num_computed, chunk)
    lacking = [max(0, num - len(table)) for num, table in zip(entries, tables, strict=True)]
    needed = sum(lacking)
    num_left = 0 if holds else headroom * len(tables)
    fresh = pool.allocate(needed) if pool.num_free >= needed + num_left else None
    if fresh is None:
        pool.release(held)
        return False
    if not holds:
        request.tables, request.num_passed = list(prefix.tables), list(prefix.num_passed)
    for table, num in zip(request.tables, lacking, strict=True):
        table += fresh[:num]
        del fresh[:num]
    request.num_computed = num_computed
    request.num_sealed += prefix.num_blocks
    return True


def chunks_lacking(running: Iterable[Request], pool: BlockPool, chunk: int) -> list[tuple[Request, int]]:
    """Running prompts, with the number of pages that their next chunk lacks."""
    prompts = [one for one in running if one.num_to_plan > 1]
    return [(one, num_lacking(one, pool, one.num_planned + min(one.num_to_plan, chunk))) for one in prompts]


def num_lacking(request: Request, pool: BlockPool, stop: int) -> int:
    """Pages that the request's tables lack for positions below `stop`."""
    num_blocks = pool.blocks_for(stop)
    return sum([max(0, num_blocks - len(table)) for table in request.tables])


def extend_tables(request: Request, pool: BlockPool) -> None:
    """One more page in each table, which the pool must have."""
    fresh = pool.allocate(len(request.tables))
    assert fresh is not None, "a batch is not prolonged beyond the blocks there are"
    for table, page in zip(request.tables, fresh, strict=True):
        table.append(page)


def seal_pages(request: Request, pool: BlockPool, first: int, stop: int) -> None:
    """Registers the pages of blocks [first, stop), which are full and computed, as cached."""
    for group, (table, passed) in enumerate(zip(request.tables, request.num_passed, strict=True)):
        start = max(first, passed)
        parent = request.hashes[start - 1] if start else b""
        pool.seal_chain(table[start:stop], request.hashes[start:stop], parent, group)


def release(request: Request, pool: BlockPool) -> None:
    for pages in request.held():
        pool.release(pages)


def give_back(request: Request, pool: BlockPool) -> None:
    """Releases the pages that no token from `num_computed` on reads."""
    for group, passed in enumerate(pool.windows.num_passed(request.num_computed)):
        table, before = request.tables[group], request.num_passed[group]
        if passed > before:
            pool.release(table[before:passed])
            table[before:passed] = [PASSED] * (passed - before)
            request.num_passed[group] = passed
