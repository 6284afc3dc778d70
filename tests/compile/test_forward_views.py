"""What TMA is told of the tensors of a forward call: descriptors as the host code makes them, read without a GPU.

A model of TMA computes with them where each row of a sequence is fetched, and that nothing outside of it is.
"""

import struct
from itertools import product
from typing import NamedTuple

import pytest
from launch_recorder import DESCRIPTOR_BYTES, Recorder, gpu_tensor, ragged_args

from flash_hopper.compile.presets import forward_plans
from flash_hopper.device.sequences import LAST
from flash_hopper.problem.dtypes import DType

BF16 = (DType.BF16,)
RAGGED = forward_plans([(64, 64)], dtypes=BF16, mask=("full",), ragged=(True,), lse=(True,))[:1]
RAGGED += forward_plans([(192, 128)], dtypes=BF16, mask=("causal",), ragged=(True,), lse=(True,))[:1]
DENSE = forward_plans([(64, 64)], dtypes=BF16, mask=("causal",), lse=(True,))[:1]
NAMES = ("q", "k", "v", "out")
ITEMSIZE = 2
START = 0x7F00_0000_0000
LSE_ENTRY = 2**35 + 3


class Descriptor(NamedTuple):
    """The fields of a TMA descriptor that our kernels use. strides: bytes, of all modes but the first; box: of the first two."""

    address: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    box: tuple[int, int]

    def place(self, *coordinates: int) -> int | None:
        """The address of an element, None if it lies outside and is filled with zeros, or not stored."""
        assert all(-(2**31) <= c < 2**31 for c in coordinates)
        if not all(0 <= c < size for c, size in zip(coordinates, self.sizes, strict=True)):
            return None
        steps = (ITEMSIZE, *self.strides)
        return (self.address + sum(c * step for c, step in zip(coordinates, steps, strict=True))) % 2**64


def decoded(descriptor: bytes) -> Descriptor:
    """Found by changing one argument at a time; strides count 16 bytes, their upper bits are packed in a word of their own."""
    words = struct.unpack("<32I", descriptor)
    strides = tuple((words[3 + i] | (words[7] >> 4 * i & 15) << 32) * 16 for i in range(4))
    sizes = tuple(words[8 + i] + 1 for i in range(5))
    return Descriptor(words[0] | words[1] << 32, strides, sizes, ((words[13] >> 24) + 1, (words[14] & 255) + 1))


class Layout(NamedTuple):
    """Of one tensor: batch entries, rows, heads, its strides in elements without the last, which is 1, and its start."""

    batch: int
    rows: int
    heads: int
    strides: tuple[int, int, int]
    address: int = START

    @property
    def entry(self) -> int:
        """Elements from one entry to the next, 0 if there is one for all sequences."""
        return self.strides[0] if self.batch > 1 else 0


def layouts(cols: int) -> list[Layout]:
    """Packed, padded, a slice of fused q, k, v, heads outermost, overlapping entries, and strides beyond 32 bits."""
    return [
        Layout(1, 1000, 6, (6000 * cols, 6 * cols, cols)),
        Layout(1, 1, 1, (cols, cols, cols), START + 0x1230),
        Layout(3, 700, 2, (1400 * cols, 2 * cols, cols)),
        Layout(3, 700, 2, (4200 * cols, 6 * cols, cols), START + 2 * cols * ITEMSIZE),
        Layout(2, 300, 4, (300 * cols, cols, 600 * cols)),
        Layout(4, 128, 2, (0, 2 * cols, cols)),
        Layout(1, 90_000, 2, (0, 2**20, 2**36)),
        Layout(2, 5000, 1, (2**33, 2**18, cols), 2**46),
    ]


@pytest.fixture(scope="module")
def recorder(kernels, tmp_path_factory) -> Recorder:
    plans = (*RAGGED, *DENSE)
    return Recorder([kernels.object_file(p) for p in plans], tmp_path_factory.mktemp("recorder"))


def passed(plan, q: Layout, k: Layout, recorder, kernels) -> list[bytes]:
    """The parameters of the kernel. q and out are laid out as `q`, k and v as `k`, each for its own head dim; the entries of the
    LSE are far apart."""
    cols = {"q": plan.tile_hdim, "k": plan.tile_hdim, "v": plan.tile_hdimv, "out": plan.tile_hdimv}
    given = {name: (q if name in ("q", "out") else k) for name in NAMES}
    dtype = str(plan.dtype)
    tensors, ragged, lse_shape = {}, None, (q.batch, q.heads, q.rows)
    for name, at in given.items():
        shape, strides = (at.batch, at.rows, at.heads, cols[name]), (*at.strides, 1)
        if plan.is_ragged:  # the first entry
            shape, strides = shape[1:], strides[1:]
        tensors[name] = gpu_tensor(shape, dtype, strides, at.address)
    if plan.is_ragged:
        lse_shape = lse_shape[1:]
        entries = tuple(at.entry for at in given.values())
        lengths = (0, 0, 0, 0, q.rows, k.rows, 1, 1)
        ragged = ragged_args((*entries, LSE_ENTRY if q.batch > 1 else 0), max(q.batch, k.batch), lengths)
    counter = None if plan.is_ragged else gpu_tensor((1,), "int32")
    call = [*tensors.values(), gpu_tensor(lse_shape, "fp32"), counter, ragged, None, None, None, 0.125, 100, 0]
    return recorder.parameters(plan.name, "ForwardKernel", kernels.parameters(plan), call)


def descriptors(plan, q: Layout, k: Layout, recorder, kernels) -> dict[str, Descriptor]:
    """By tensor; see `passed`."""
    found = [p for p in passed(plan, q, k, recorder, kernels) if len(p) == DESCRIPTOR_BYTES]
    return dict(zip(NAMES, map(decoded, found), strict=True))


def pairs(plan):
    """Each layout of q with another one of k: one side packed, the other padded among them."""
    for q, k in zip(layouts(plan.tile_hdim), reversed(layouts(plan.tile_hdim)), strict=True):
        yield q, k._replace(heads=1)


@pytest.mark.parametrize("plan", RAGGED, ids=lambda p: p.name)
def test_a_ragged_view_starts_at_its_tensor_and_has_the_modes_that_reach_every_row(plan, recorder, kernels):
    for q, k in pairs(plan):
        for name, found in descriptors(plan, q, k, recorder, kernels).items():
            at = q if name in ("q", "out") else k
            cols = plan.tile_hdim if name in ("q", "k") else plan.tile_hdimv
            _, row, head = at.strides
            assert found.address == at.address, (name, at)
            back = 2**34 - row
            assert found.strides == tuple(n * ITEMSIZE for n in (row, head, back, row)), (name, at)
            assert found.sizes == (cols, LAST, at.heads, LAST + 1, 2**31 - 1), (name, at)


@pytest.mark.parametrize("plan", RAGGED, ids=lambda p: p.name)
def test_rows_of_a_sequence_are_fetched_from_where_they_lie_and_nothing_behind_them(plan, recorder, kernels):
    """Coordinates as `RaggedBatch` gives them: row i of a sequence of n rows is LAST - n + i, inside only if i < n."""
    for q, k in pairs(plan):
        found = descriptors(plan, q, k, recorder, kernels)["q"]
        entry, row, head = q.strides
        for batch, n in product(range(q.batch), (1, 63, 64, 65, q.rows)):
            first = max(q.rows - n, 0) if q.batch == 1 else 0
            n = min(n, q.rows)
            forth = batch * (entry // row) + first + n
            for i, h, col in product((0, n // 2, n - 1), range(q.heads), (0, plan.tile_hdim - 1)):
                place = found.place(col, LAST - n + i, h, LAST, forth)
                assert place == q.address + ITEMSIZE * (batch * entry + (first + i) * row + h * head + col)
            for i in (n, n + 1, n + 255):
                assert found.place(0, LAST - n + i, 0, LAST, forth) is None
            assert found.place(plan.tile_hdim, LAST - n, 0, LAST, forth) is None


@pytest.mark.parametrize("plan", RAGGED, ids=lambda p: p.name)
def test_entries_of_a_padded_batch_are_reached_by_whole_rows_and_those_of_the_lse_by_64_bit_offsets(
    plan, recorder, kernels
):
    """The last number of a view is how many rows lie between two entries, 0 if sequences are packed."""
    for q, k in pairs(plan):
        *views, lse = passed(plan, q, k, recorder, kernels)[:5]
        rows = [struct.unpack("<7i", view)[-1] for view in views]
        of_q, of_k = (at.entry // at.strides[1] for at in (q, k))
        assert rows == [of_q, of_k, of_k, of_q], (q, k)
        assert struct.unpack_from("<q", lse, 24) == (LSE_ENTRY if q.batch > 1 else 0,)


@pytest.mark.parametrize("plan", DENSE, ids=lambda p: p.name)
def test_a_dense_view_is_the_tensor(plan, recorder, kernels):
    for q, k in pairs(plan):
        k = k._replace(batch=q.batch)
        for name, found in descriptors(plan, q, k, recorder, kernels).items():
            at = q if name in ("q", "out") else k
            cols = plan.tile_hdim if name in ("q", "k") else plan.tile_hdimv
            entry, row, head = at.strides
            assert found.address == at.address, (name, at)
            assert found.strides[:3] == tuple(n * ITEMSIZE for n in (row, head, entry)), (name, at)
            assert found.sizes[:4] == (cols, at.rows, at.heads, at.batch), (name, at)


@pytest.mark.parametrize("plan", [*RAGGED, *DENSE], ids=lambda p: p.name)
def test_boxes_are_the_tiles_of_the_plan(plan, recorder, kernels):
    q = layouts(plan.tile_hdim)[0]
    found = descriptors(plan, q, q._replace(heads=1), recorder, kernels)
    assert found["q"].box[1] == found["out"].box[1] == 64  # one warpgroup
    assert found["k"].box[1] == found["v"].box[1] == plan.tile_n
    assert all(plan.tile_hdim % d.box[0] == 0 for d in found.values())
