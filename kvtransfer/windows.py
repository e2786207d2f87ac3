"""Which pages of a sequence a group of layers still reads. Pure: positions and counts.

0 ............ passed ............ num_computed ............ num_computed + chunk
|  given back  |  read by the next token  |  written by the next step  |
               |<------ window - 1 ------>|
"""

from __future__ import annotations

from dataclasses import dataclass

from protos.values import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWindows:
    """`windows` has for each group the number of positions that a token reads, itself included; None: all."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def num_passed(self, num_computed: int) -> list[int]:
        """For each group, the leading pages that no position from `num_computed` on reads."""
        return [
            0 if window is None else max(0, num_computed + 1 - window) // self.block_size for window in self.windows
        ]

    def num_entries(self, num_tokens: int, num_computed: int, chunk: int) -> list[int]:
        """For each group, the table entries that a sequence of `num_tokens` needs at admission, with `num_computed` of
        them in the cache: enough for the worst moment of its prompt, in steps of `chunk` tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        return [
            num_blocks if window is None else min(num_blocks, passed + self._most(window, chunk))
            for window, passed in zip(self.windows, self.num_passed(num_computed), strict=True)
        ]

    def num_held(self, num_tokens: int, chunk: int) -> int:
        """The pages of all groups that a sequence of `num_tokens` holds at its worst moment."""
        return sum(self.num_entries(num_tokens, 0, chunk))

    def longest(self, num_pages: int, chunk: int, *, most: int) -> int:
        """Tokens of the longest sequence that `num_pages` can serve, `most` at most."""
        if self.num_held(most, chunk) <= num_pages:
            return most
        low, high = 0, -(-most // self.block_size)  # blocks: low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.num_held(middle * self.block_size, chunk) <= num_pages:
                low = middle
            else:
                high = middle
        return low * self.block_size

    def _most(self, window: int, chunk: int) -> int:
        """The most pages that `window - 1 + chunk` positions can touch."""
        return (window + chunk - 3 + self.block_size) // self.block_size + 1


def window_bytes(layout: KVLayout) -> list[tuple[int, int]]:
    """Each window of a layout, with a block's bytes in its layers."""
    sizes: dict[int, int] = {}
    for number, group in enumerate(layout.groups):
        if group.window is not None:
            sizes[group.window] = sizes.get(group.window, 0) + layout.page_bytes(number)
    return list(sizes.items())


def full_bytes(layout: KVLayout) -> int:
    return layout.block_bytes - sum([num_bytes for _, num_bytes in window_bytes(layout)])


def moved_bytes(layout: KVLayout, num_tokens: int) -> int:
    """Bytes of KV of `num_tokens` tokens that later tokens read: of a window only its positions."""
    windows = [min(num_tokens, window) * num_bytes for window, num_bytes in window_bytes(layout)]
    return (num_tokens * full_bytes(layout) + sum(windows)) // layout.block_size
