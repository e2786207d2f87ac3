"""A request's tables of pages: taken for what steps write, given back behind windows. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.kv.block_pool import PASSED, BlockPool, CachedPrefix, page_hash
from workers.scheduling.request import Request


def reset_tables(request: Request, num_groups: int) -> None:
    request.tables = [[] for _ in range(num_groups)]
    request.num_passed = [0] * num_groups
    request.partial_pages = ()


def give_tables(request: Request, tables: Sequence[list[int]], num_passed: Sequence[int], *, partial: bool) -> None:
    """Gives the request pages that came from another worker: for each group those from `num_passed` on. `partial`: the
    first that a window still reads may lack the positions before it, so it is not cached."""
    request.tables = [[PASSED] * passed + table for table, passed in zip(tables, num_passed, strict=True)]
    request.num_passed = list(num_passed)
    if partial:
        request.partial_pages = tuple([table[0] for table, passed in zip(tables, num_passed, strict=True) if passed])


def take_prompt_pages(request: Request, prefix: CachedPrefix, pool: BlockPool, *, chunk: int, headroom: int) -> bool:
    """Gives the request the pages that its prompt needs at the worst moment. One without pages gets the prefix too,
    with fresh pages for those on the host, and leaves the pool `headroom` blocks. If there are too few, nothing changes
    and the result is False. What is there without the pages on the host counts as computed."""
    holds = bool(request.block_ids)
    held = prefix.held()
    pool.acquire(held)
    num_begun = request.num_computed + prefix.num_blocks * pool.block_size
    tables = request.tables if holds else prefix.tables
    entries = pool.windows.num_entries(request.num_tokens, num_begun, chunk)
    lacking = [max(0, num - len(table)) for num, table in zip(entries, tables, strict=True)]
    needed = sum(lacking) + len(prefix.on_host)
    num_left = 0 if holds else headroom * len(tables)
    fresh = pool.allocate(needed) if pool.num_free >= needed + num_left else None
    if fresh is None:
        pool.release(held)
        return False
    if not holds:
        request.tables, request.num_passed = list(prefix.tables), list(prefix.num_passed)
    for group, index in prefix.on_host:
        request.tables[group][index] = fresh.pop()
    for table, num in zip(request.tables, lacking, strict=True):
        table += fresh[:num]
        del fresh[:num]
    request.num_computed += prefix.num_here * pool.block_size
    request.num_sealed += prefix.num_here
    return True


def chunks_lacking(running: Iterable[Request], pool: BlockPool, chunk: int) -> list[tuple[Request, int]]:
    """Returns running prompts with the number of pages that their next chunk lacks."""
    prompts = [request for request in running if request.num_to_plan > 1]
    return [
        (request, num_lacking(request, pool, request.num_planned + min(request.num_to_plan, chunk)))
        for request in prompts
    ]


def num_lacking(request: Request, pool: BlockPool, stop: int) -> int:
    num_blocks = pool.blocks_for(stop)
    return sum([max(0, num_blocks - len(table)) for table in request.tables])


def take_draft_pages(request: Request, pool: BlockPool, num_drafts: int, *, headroom: int) -> int:
    """Takes the pages that the request's next position and `num_drafts` after it lack, and leaves the pool `headroom`
    pages. Returns how many drafts have pages."""
    stop = request.num_planned + 1
    while num_lacking(request, pool, stop + num_drafts) > max(0, pool.num_free - headroom):
        num_drafts = max(0, (stop + num_drafts - 1) // pool.block_size * pool.block_size - stop)
        if num_drafts == 0:
            return 0
    for _ in range(num_lacking(request, pool, stop + num_drafts)):
        fresh = pool.allocate(1)
        assert fresh is not None, "the pool has fewer free pages than it counts"
        min(request.tables, key=len).extend(fresh)
    return num_drafts


def extend_tables(request: Request, pool: BlockPool) -> None:
    """Adds a page to each table. The pool must have it."""
    fresh = pool.allocate(len(request.tables))
    assert fresh is not None, "a batch is not prolonged beyond the blocks there are"
    for table, page in zip(request.tables, fresh, strict=True):
        table.append(page)


def seal_pages(request: Request, pool: BlockPool, first: int, stop: int) -> None:
    """Registers the pages of blocks [first, stop), which are full and computed, as cached."""
    for group, (table, passed) in enumerate(zip(request.tables, request.num_passed, strict=True)):
        start = max(first, passed)
        if request.partial_pages and start < stop and table[start] in request.partial_pages:
            start += 1
        parent = request.hashes[start - 1] if start else b""
        pool.seal_chain(table[start:stop], request.hashes[start:stop], parent, group)


def release(request: Request, pool: BlockPool) -> None:
    for pages in request.held():
        pool.release(pages)


def give_back(request: Request, pool: BlockPool) -> None:
    for group, passed in enumerate(pool.windows.num_passed(request.num_computed)):
        table, before = request.tables[group], request.num_passed[group]
        if passed > before:
            pages = table[before:passed]
            pool.release(pages)
            if pool.host is not None:
                tail = _tail(pool, group, (request.num_prompt - 1) // pool.block_size)
                pool.slide([page for index, page in enumerate(pages, before) if index not in tail])
            table[before:passed] = [PASSED] * (passed - before)
            request.num_passed[group] = passed


def drop_tables(request: Request, pool: BlockPool) -> None:
    """Empties the tables after their pages were released. The host keeps the pages that a continuation of the whole
    request reads."""
    if pool.host is not None and pool.has_windows:
        for group, passed in enumerate(request.num_passed):
            tail = _tail(pool, group, request.num_sealed)
            pool.keep([page_hash(request.hashes[index], group) for index in tail if index < passed])
    reset_tables(request, len(request.tables))


def _tail(pool: BlockPool, group: int, num_blocks: int) -> range:
    return range(pool.windows.num_passed(max(0, num_blocks * pool.block_size - 1))[group], num_blocks)
