"""The shape of a worker's KV cache: groups of layers, their parts, and a head beside them. Part of `protos.values`."""

from __future__ import annotations

from functools import lru_cache

from protos.codec import Value


class KVPart(Value, frozen=True, kw_only=True):
    """A tensor that a KV cache keeps of a layer: at each position `heads` rows of `width` elements, over all ranks.
    `cut_by_heads`: ranks divide the heads, or copy one; else each rank has all."""

    name: str  # "key", "value", or LATENT
    heads: int
    width: int
    dtype: str
    cut_by_heads: bool = True

    @property
    def position_bytes(self) -> int:
        return self.heads * self.width * ITEM_BYTES[self.dtype]

    @property
    def is_scale(self) -> bool:
        return self.name.endswith(SCALE)


LATENT = "latent"
"""The name of a part that is key and value at once."""


class KVGroup(Value, frozen=True, kw_only=True):
    """Layers with the same parts and one block table. `window`: how many positions back a block is still read; None:
    all."""

    layers: tuple[int, ...]
    parts: tuple[KVPart, ...]
    window: int | None = None


class KVHead(Value, frozen=True, kw_only=True):
    """The KV of a drafting head beside a block of its model, under the first group's block table, divided between ranks
    as the model's. `name`: its kind and a hash of its files, because KV of two heads differs."""

    name: str
    num_layers: int
    parts: tuple[KVPart, ...]

    @property
    def position_bytes(self) -> int:
        return self.num_layers * sum([part.position_bytes for part in self.parts])


class KVLayout(Value, frozen=True, kw_only=True):
    """Shape of one worker's KV cache over all its `tp` ranks. A block has `block_size` positions of a group's layers.
    `model` names what made the KV: caches of two models differ even with equal shapes. `device` is the kind of memory:
    "cpu", "cuda", or "" if not known.

    Groups with the same parts share their memory: a page has a block's positions of one of these groups, and room for
    as many layers as the largest has. A block takes a page of each group. KV of a `head` goes where that of the first
    group goes."""

    groups: tuple[KVGroup, ...]
    block_size: int
    tp: int = 1
    model: str = ""
    device: str = ""
    head: KVHead | None = None

    @staticmethod
    def dense(
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        block_size: int,
        tp: int = 1,
        model: str = "",
        device: str = "",
        head: KVHead | None = None,
    ) -> KVLayout:
        """Keys and values of the same shape in all layers: one group."""
        groups = _dense_groups(num_layers, num_kv_heads, head_dim, dtype)
        return KVLayout(groups=groups, block_size=block_size, tp=tp, model=model, device=device, head=head)

    @staticmethod
    def latent(*, num_layers: int, width: int, dtype: str, block_size: int, tp: int = 1) -> KVLayout:
        """One vector of `width` elements for all heads of a layer, of which every rank keeps a copy: latent
        attention."""
        part = KVPart(name=LATENT, heads=1, width=width, dtype=dtype, cut_by_heads=False)
        group = KVGroup(layers=tuple(range(num_layers)), parts=(part,))
        return KVLayout(groups=(group,), block_size=block_size, tp=tp)

    @property
    def parts(self) -> tuple[KVPart, ...]:
        return tuple([part for group in self.groups for part in group.parts])

    @property
    def num_layers(self) -> int:
        return sum([len(group.layers) for group in self.groups])

    @property
    def num_kv_heads(self) -> int:
        """How many shares the cache can be divided into: its heads, or 1 if every rank has all of it. All parts have
        the same number (`kvtransfer.reshard.why_incompatible`)."""
        return min([part.heads if part.cut_by_heads else 1 for part in self.parts], default=0)

    @property
    def kv_dtype(self) -> str:
        """The type of the elements without scales; several types are joined by commas."""
        return ", ".join(dict.fromkeys([part.dtype for part in self.parts if not part.is_scale]))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all parts, layers and shares, with the head's."""
        return self.head_bytes + self.block_size * sum(
            [len(group.layers) * part.position_bytes for group in self.groups for part in group.parts]
        )

    @property
    def head_bytes(self) -> int:
        """Bytes of one block in the layers of a head; 0 without one."""
        return self.block_size * self.head.position_bytes if self.head is not None else 0

    def page_bytes(self, group: int) -> int:
        """Bytes of one block in the layers of one group, over all shares."""
        layers, parts = self.groups[group].layers, self.groups[group].parts
        return self.block_size * len(layers) * sum([part.position_bytes for part in parts])

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple([group.window for group in self.groups])

    @property
    def frees_blocks(self) -> bool:
        return any(group.window is not None for group in self.groups)

    @property
    def stored_bytes(self) -> int:
        """Bytes that a block takes in memory, over all shares: `block_bytes`, and what smaller groups leave empty."""
        num_layers = max([len(group.layers) for group in self.groups], default=0)
        return self.head_bytes + self.block_size * num_layers * sum([part.position_bytes for part in self.parts])


SCALE = "_scale"
"""How the names of parts end that multiply the elements of another part: "key_scale" those of "key"."""

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "float8_e4m3fn": 1}
"""Bytes of a tensor's element, by dtype."""


@lru_cache(maxsize=256)
def _dense_groups(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> tuple[KVGroup, ...]:
    parts = tuple(KVPart(name=name, heads=num_kv_heads, width=head_dim, dtype=dtype) for name in ("key", "value"))
    return (KVGroup(layers=tuple(range(num_layers)), parts=parts),)
