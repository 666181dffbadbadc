"""The rules of PyTorch's CUDA caching allocator: how it allocates, splits, merges and releases blocks.

Source: c10/cuda/CUDACachingAllocator.cpp, whose functions are named where they are followed.
"""

from bisect import bisect_left, insort

MIB = 2**20
# the constants of CUDACachingAllocator.cpp, moved to c10/core/AllocatorConfig.h in later versions
MIN_BLOCK = 512  # kMinBlockSize: requests are rounded up to a multiple of it
SMALL_REQUEST = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_REQUEST = 10 * MIB  # kMinLargeAlloc: from here on each request gets a segment
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer
SEGMENT_ROUNDING = 2 * MIB  # kRoundLarge
# one expandable segment: more than a trace can fill, where PyTorch takes 9/8 of the GPU's memory
ADDRESS_SPACE = 2**21 * LARGE_SEGMENT


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Block:
    """A range of one segment, linked to its neighbours there."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "prev", "size", "stream")

    def __init__(self, pool: "Pool", stream: int, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.stream, self.address, self.size, self.mapped = pool, stream, address, size, mapped
        self.allocated = False
        self.prev: Block | None = None
        self.next: Block | None = None

    def link(self, before: "Block | None", behind: "Block | None") -> None:
        self.prev, self.next = before, behind
        if before:
            before.next = self
        if behind:
            behind.prev = self

    def split(self, size: int) -> "Block":
        """Keep the first `size` bytes; the rest becomes the block behind."""
        rest = Block(self.pool, self.stream, self.address + size, self.size - size, mapped=self.mapped)
        rest.link(self, self.next)
        self.size = size
        return rest


class Pool:
    """Cached free blocks by stream and size, and the unmapped ranges of expandable segments by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.segment = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int, int, Block]] = []  # BlockComparatorSize
        self.unmapped: list[tuple[int, int, Block]] = []  # BlockComparatorAddress

    def add(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, (block.stream, block.size, block.address, block))
        else:
            insort(self.unmapped, (block.stream, block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.stream, block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]

    def give_back(self, block: Block) -> None:
        """try_merge_blocks: absorb the free neighbours of a block that is in no list itself, then list it."""
        for other in (block.prev, block.next):
            if other and not other.allocated and other.mapped == block.mapped:
                self.remove(other)
                block.address = min(block.address, other.address)
                block.size += other.size
                if other is block.prev:
                    block.link(other.prev, block.next)
                else:
                    block.link(block.prev, other.next)
        self.add(block)


class SegmentAllocator:
    """The default rules: each segment is one cudaMalloc. The limit is in bytes; None for no limit."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.allocated = self.reserved = self.retries = 0
        self.small, self.large = Pool(small=True), Pool(small=False)
        self._next_address = 0

    def malloc(self, size: int, stream: int) -> Block | None:
        """malloc: a block of at least `size` bytes, or None when memory has run out."""
        size = round_up(max(size, 1), MIN_BLOCK)  # round_size
        pool = self.small if size <= SMALL_REQUEST else self.large  # get_pool
        block = self._best_fit(pool, size, stream) or self._grow(pool, size, stream)
        if block is None:
            self._release_cached()
            self.retries += 1
            block = self._grow(pool, size, stream)
            if block is None:
                return None
        if self._should_split(block, size):
            pool.add(block.split(size))
        block.allocated = True
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """free_block: back to its pool, merged with free neighbours."""
        block.allocated = False
        self.allocated -= block.size
        block.pool.give_back(block)

    def _best_fit(self, pool: Pool, size: int, stream: int) -> Block | None:
        """get_free_block: the smallest large enough; before unmapped space, as large as it could become."""
        free, index = pool.free, bisect_left(pool.free, (stream, size))
        if index == len(free) or free[index][0] != stream:
            return None
        last = bisect_left(free, (stream + 1,)) - 1
        while index < last and _room(free[index + 1][-1]) < _room(free[index][-1]):
            index += 1
        return free.pop(index)[-1]

    def _should_split(self, block: Block, size: int) -> bool:
        """should_split: a large block is split only if more than 1 MiB remains."""
        rest = block.size - size
        return rest >= MIN_BLOCK if block.pool.small else rest > SMALL_REQUEST

    def _grow(self, pool: Pool, size: int, stream: int) -> Block | None:
        """alloc_block: a new segment of get_allocation_size(size) bytes."""
        segment = round_up(size, SEGMENT_ROUNDING) if size >= LARGE_REQUEST else pool.segment
        if not self._reserve(segment):
            return None
        self._next_address += segment
        return Block(pool, stream, self._next_address - segment, segment)

    def _release_cached(self) -> None:
        """release_cached_blocks, release_blocks."""
        for pool in (self.large, self.small):
            for *_, block in list(pool.free):
                self._release(block)

    def _release(self, block: Block) -> None:
        """cudaFree the segment if no part of it is in use."""
        if block.prev is None and block.next is None:
            block.pool.remove(block)
            self.reserved -= block.size

    def _reserve(self, size: int) -> bool:
        """Take memory from the device, if the limit allows it."""
        if self.limit is not None and self.reserved + size > self.limit:
            return False
        self.reserved += size
        return True


class ExpandableAllocator(SegmentAllocator):
    """expandable_segments:True: one growing range per pool and stream, backed by pages of 2 or 20 MiB."""

    def _should_split(self, block: Block, size: int) -> bool:
        return block.size - size >= MIN_BLOCK

    def _grow(self, pool: Pool, size: int, stream: int) -> Block | None:
        """try_allocate_expandable_block: map pages at the lowest address with room for the request."""
        block = self._lowest_room(pool, size, stream)
        if not block.mapped and not self._map(block, size):
            return None
        while block.size < size:  # a free block, then an unmapped one that will absorb it
            behind = block.next
            assert behind is not None
            if not self._map(behind, min(size - block.size, behind.size)):
                return None
            block = behind
        pool.remove(block)
        return block

    def _lowest_room(self, pool: Pool, size: int, stream: int) -> Block:
        """find_expandable_block: where `size` bytes can be had in a row, partly or wholly by mapping."""
        for *_, block in pool.unmapped[bisect_left(pool.unmapped, (stream,)) :]:
            if block.stream != stream:
                break
            start = block.prev if block.prev and not block.prev.allocated else block
            room, end = 0, start
            while end and not end.allocated and room < size:
                room += end.size
                end = end.next
            if room >= size:
                return start
        self._next_address += ADDRESS_SPACE
        block = Block(pool, stream, self._next_address - ADDRESS_SPACE, ADDRESS_SPACE, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """map_block: back the beginning of an unmapped block with pages."""
        size = round_up(min(size, block.size), block.pool.segment)
        if not self._reserve(size):
            return False
        block.pool.remove(block)
        if size < block.size:
            block.pool.add(block.split(size))
        block.mapped = True
        block.pool.give_back(block)
        return True

    def _release(self, block: Block) -> None:
        """unmap_block: every page of which no part is in use; what remains on either side stays free."""
        pool = block.pool
        offset = block.address % ADDRESS_SPACE  # within its segment, where pages are aligned
        begin = round_up(offset, pool.segment)
        size = (offset + block.size) // pool.segment * pool.segment - begin
        if size <= 0:
            return
        pool.remove(block)
        if begin > offset:
            pages = block.split(begin - offset)
            pool.add(block)
            block = pages
        if size < block.size:
            pool.add(block.split(size))
        block.mapped = False
        pool.give_back(block)
        self.reserved -= size


def _room(block: Block) -> int:
    behind = block.next
    return block.size + (behind.size if behind and not behind.mapped else 0)
