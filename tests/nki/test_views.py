"""Views and masks read and write the same elements as NumPy, with slices if the indices allow it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_interpreter import access, kernel, loading, memory, tensors
from nki_interpreter.indices import box

with loading.interpreter():
    import neuronxcc.nki as older
    import neuronxcc.nki.language as older_nl
    import nki.isa as nisa
    import nki.language as nl

    import nki


@st.composite
def views(draw):
    """A shape, and a view of it that NumPy makes from slices, flips, transposes and splits."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4)))
    array = np.arange(np.prod(shape)).reshape(shape)
    index = tuple(
        draw(st.integers(0, n - 1).flatmap(lambda a: st.sampled_from([a, slice(a, None), slice(a, None, 2)])))
        for n in shape
    )
    view = array[(*index, ...)]
    if view.ndim and draw(st.booleans()):
        view = np.flip(view, draw(st.integers(0, view.ndim - 1)))
    view = np.transpose(view, draw(st.permutations(range(view.ndim))))
    return array, view


def pattern(array, view):
    offset = (view.__array_interface__["data"][0] - array.__array_interface__["data"][0]) // 8
    return tuple((s // 8, n) for s, n in zip(view.strides, view.shape, strict=True)), offset


@settings(max_examples=100, deadline=None)
@given(views())
def test_a_view_of_slices_is_planned_without_gathers(case):
    array, view = case
    dims, offset = pattern(array, view)
    assert access.plan(array.shape, offset, dims) is not None


@settings(max_examples=6, deadline=None)
@given(views())
def test_a_view_is_read_and_written_as_by_numpy(case):
    array, view = case
    dims, offset = pattern(array, view)
    np.testing.assert_array_equal(memory.read(jnp.asarray(array), dims, offset), view)
    expected = array.copy()
    values = -1 - np.arange(view.size).reshape(view.shape)
    np.lib.stride_tricks.as_strided(expected.reshape(-1)[offset:], view.shape, view.strides)[...] = values
    np.testing.assert_array_equal(memory.write(jnp.asarray(array), dims, offset, jnp.asarray(values)), expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3))
def test_a_box_is_found_in_a_mask(bounds):
    mask = np.zeros((4,) * len(bounds), np.bool_)
    mask[tuple(slice(a, b) for a, b in bounds)] = True
    found = box(mask)
    assert found is not None
    again = np.zeros_like(mask)
    again[tuple(slice(a, b) for a, b in found)] = True
    np.testing.assert_array_equal(again, mask)


def hlo(function, *shapes, older=False):
    inputs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    recorded = kernel.record(function, inputs, {}, older=older)
    return jax.jit(recorded).lower(*inputs).compiler_ir("hlo").as_hlo_text()


def test_slices_patterns_and_arange_make_no_gather_and_no_scatter():
    def function(x):
        i, j = older_nl.arange(16)[:, None], older_nl.arange(8)[None, :]
        result = older_nl.ndarray((16, 32), x.dtype, buffer=older_nl.shared_hbm)
        older_nl.store(result[i, 4 * j + 1], older_nl.load(x[i + 2, 2 * j]))
        older_nl.store(result[i, 16 + j], older_nl.load(x[i, j], mask=(i < 3) & (j < 5)))
        return result

    text = hlo(function, (18, 16), older=True)
    assert "gather" not in text
    assert "scatter" not in text


def test_masked_elements_keep_what_is_there():
    @given(st.integers(0, 9), st.integers(0, 9), st.booleans())
    @settings(max_examples=4, deadline=None)
    def check(rows, columns, triangle):
        x = np.arange(64, dtype=np.float32).reshape(8, 8)

        def function(a):
            i, j = older_nl.mgrid[0:8, 0:8]
            shown = (j <= i) if triangle else (i < rows) & (j < columns)
            result = older_nl.ndarray((8, 8), a.dtype, buffer=older_nl.shared_hbm)
            older_nl.store(result, older_nl.zeros((8, 8), a.dtype))
            older_nl.store(result[i, j], older_nl.load(a[i, j]), mask=shown)
            return result

        i, j = np.ogrid[0:8, 0:8]
        shown = (j <= i) if triangle else (i < rows) & (j < columns)
        (found,) = kernel.record(function, [x], {}, older=True)(x)
        np.testing.assert_array_equal(found, np.where(shown, x, 0))

    check()


def matmul(a, b, tiles=nl.affine_range):
    """`a.T @ b` in tiles of 8."""
    result = nl.ndarray((a.shape[1], b.shape[1]), a.dtype, buffer=nl.shared_hbm)
    for m in tiles(a.shape[1] // 8):
        for n in tiles(b.shape[1] // 8):
            sums = nl.ndarray((8, 8), nl.float32, buffer=nl.psum)
            for k in tiles(a.shape[0] // 8):
                left, right = (nl.ndarray((8, 8), a.dtype, buffer=nl.sbuf) for _ in range(2))
                nisa.dma_copy(dst=left, src=a[nl.ds(8 * k, 8), 8 * m : 8 * m + 8])
                nisa.dma_copy(dst=right, src=b[nl.ds(8 * k, 8), 8 * n : 8 * n + 8])
                nisa.nc_matmul(dst=sums, stationary=left, moving=right)
            done = nl.ndarray((8, 8), a.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=done, src=sums)
            nisa.dma_copy(dst=result[8 * m : 8 * m + 8, 8 * n : 8 * n + 8], src=done)
    return result


@pytest.mark.parametrize("bound", [0, 1 << 20])
def test_a_loop_gives_the_same_rolled_and_unrolled(bound):
    a, b = (np.random.default_rng(i).uniform(-1, 1, (40, 24 + 8 * i)).astype(np.float32) for i in range(2))
    recorded = kernel.record(matmul, [a, b], {}, older=False, bound=bound)
    assert any("rolled, its first iteration beside it" in note for note in recorded.notes) == (bound == 0)
    np.testing.assert_allclose(jax.jit(recorded)(a, b)[0], a.T @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [64, 61])
def test_a_masked_last_tile_stays_beside_the_loop(rows):
    def function(x):
        result = older_nl.ndarray(x.shape, x.dtype, buffer=older_nl.shared_hbm)
        i, j = older_nl.arange(8)[:, None], older_nl.arange(4)[None, :]
        for tile in older_nl.affine_range(8):
            row = 8 * tile + i
            older_nl.store(result[row, j], older_nl.load(x[row, j], mask=row < rows), mask=row < rows)
        return result

    x = np.random.default_rng(0).uniform(-1, 1, (rows, 4)).astype(np.float32)
    recorded = kernel.record(function, [x], {}, older=True, bound=0)
    beside = ", its last iteration beside it" if rows % 8 else ""
    assert recorded.notes == (f"a loop of {8 - (rows % 8 > 0)} iterations is rolled{beside}",)
    np.testing.assert_array_equal(jax.jit(recorded)(x)[0], x)


@pytest.mark.parametrize("bad", [None, 5, 40])
def test_indices_are_checked_in_a_rolled_loop(bad):
    """The first index outside is reported, with the line of its instruction."""

    @older.jit
    def gathered(x, rows):
        result = older_nl.ndarray(rows.shape, x.dtype, buffer=older_nl.shared_hbm)
        j = older_nl.arange(1)[None, :]
        for tile in older_nl.affine_range(48):
            row = older_nl.load(rows[tile : tile + 1])
            older_nl.store(result[tile : tile + 1], older_nl.load(x[row, j]))
        return result

    x = np.arange(10, dtype=np.float32)[:, None]
    rows = (np.arange(48, dtype=np.int32) % 10)[:, None]
    recorded = kernel.record_kernel(gathered, [x, rows], {})
    assert recorded.notes == ("a loop of 48 iterations is rolled",)
    if bad is None:
        np.testing.assert_array_equal(gathered(x, rows), x[rows[:, 0]])
        return
    rows[bad], rows[44] = 10 + bad, 99
    with pytest.raises(IndexError, match=f"index {10 + bad} is out of bounds for axis 0 with size 10") as raised:
        gathered(x, rows)
    assert "test_views.py" in raised.value.__notes__[0]


@pytest.mark.parametrize("number", [[6, 0, 6, 3], [6, 7, 0, 0]], ids=["inside", "outside"])
def test_a_matrix_that_a_number_names_is_a_slice_and_no_gather_of_elements(number):
    """Also for rows of the matrix, in rolled loops over numbers and over rows."""

    @nki.jit
    def named(x, numbers):
        count, (rows, columns) = numbers.shape[1], x.shape[1:]
        result = nl.ndarray((count, rows, columns), x.dtype, buffer=nl.shared_hbm)
        places = nl.ndarray(numbers.shape, numbers.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=places, src=numbers)
        for i in nl.affine_range(count):
            for start in nl.affine_range(rows // 2):
                part = nl.ndarray((2, columns), x.dtype, buffer=nl.sbuf)
                view = x[0, nl.ds(2 * start, 2)]
                nisa.dma_copy(dst=part, src=view.ap(view.get_pattern(), scalar_offset=places[0:1, i : i + 1]))
                nisa.dma_copy(dst=result[i, nl.ds(2 * start, 2)], src=part)
        return result

    x, numbers = np.arange(7 * 80 * 3, dtype=np.float32).reshape(7, 80, 3), np.array([number], np.int32)
    recorded = kernel.record(named.function, [x, numbers], {}, older=False, bound=0)
    assert recorded.notes == tuple(f"a loop of {n} iterations is rolled" for n in (40, 4))
    assert "gather" not in jax.jit(recorded).lower(x, numbers).as_text("hlo")
    if max(number) < 7:
        np.testing.assert_array_equal(jax.jit(recorded)(x, numbers)[0], x[number])
        np.testing.assert_array_equal(named(x, numbers), x[number])
        return
    with pytest.raises(IndexError, match="is out of bounds for axis 0 with size"):
        named(x, numbers)


def test_the_size_of_the_hlo_does_not_grow_with_the_loops():
    assert len(hlo(matmul, (96, 96), (96, 96)).splitlines()) < 600


def test_a_loop_of_both_zeros_is_not_rolled():
    def function(x):
        result = nl.ndarray((48, *x.shape), x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(48):
            tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=x)
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=-0.0 if i % 2 else 0.0)
            nisa.dma_copy(dst=result[i], src=tile)
        return result

    x = np.ones((4, 4), np.float32)
    recorded = kernel.record(function, [x], {}, older=False)
    signs = np.signbit(jax.jit(recorded)(x)[0])
    assert not signs[::2].any() and signs[1::2].all()


def test_a_loop_whose_iterations_differ_is_not_rolled():
    def function(x):
        result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        carried = nl.ndarray((8, 8), x.dtype, buffer=nl.sbuf)
        nisa.memset(carried, 0.0)
        for i in nl.sequential_range(8):
            tile = nl.ndarray((8, 8), x.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=x[8 * i : 8 * i + 8])
            if i * i % 3 == 1:
                nisa.tensor_tensor(tile, tile, carried, nl.add)
            carried = tile
            nisa.dma_copy(dst=result[8 * i : 8 * i + 8], src=tile)
        return result

    x = np.random.default_rng(0).uniform(-1, 1, (64, 8)).astype(np.float32)
    expected, last = x.copy(), np.zeros((8, 8), np.float32)
    for i in range(8):
        part = expected[8 * i : 8 * i + 8]
        part += last if i * i % 3 == 1 else 0
        last = part
    recorded = kernel.record(function, [x], {}, older=False, bound=0)
    assert any("unrolled: its iterations differ" in note for note in recorded.notes)
    np.testing.assert_allclose(jax.jit(recorded)(x)[0], expected, rtol=1e-6)


@settings(max_examples=300, deadline=None)
@given(views(), st.data())
def test_a_view_is_reshaped_where_numpy_does_it_without_a_copy(given_view, data):
    array, view = given_view
    flat = [f for n in view.shape for f in {1: [], 4: [2, 2], 6: [2, 3], 8: [2, 2, 2]}.get(n, [n])]
    factors = data.draw(st.permutations(flat))
    shape = []
    for factor in factors:
        if shape and data.draw(st.booleans()):
            shape[-1] *= factor
        else:
            shape.append(factor)
    dims, _ = pattern(array, view)
    try:
        expected = view.reshape(shape, copy=False)
    except ValueError:
        assert tensors.reshaped(dims, tuple(shape)) is None
    else:
        assert tensors.reshaped(dims, tuple(shape)) == pattern(array, expected)[0]


def test_contiguous_memory_is_reshaped_across_its_dimensions():
    assert tensors.reshaped(((2048, 10944), (1, 2048)), (128, 304, 576)) == ((175104, 128), (576, 304), (1, 576))


def test_a_mask_that_fits_one_operand_of_a_product_belongs_to_it():
    @older.jit
    def kernel_with_mask(x, y):
        result = older_nl.ndarray((128, 512), x.dtype, buffer=older_nl.shared_hbm)
        columns = older_nl.arange(512)[None, :]
        moving = older_nl.load(y)
        product = older_nl.matmul(older_nl.load(x), moving, transpose_x=True, mask=columns < 300)
        older_nl.store(result[older_nl.arange(128)[:, None], columns], product, mask=columns < 300)
        return result

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(128, 128)).astype(np.float32), rng.normal(size=(128, 512)).astype(np.float32)
    recorded = kernel.record_kernel(kernel_with_mask, [x, y], {})
    (got,) = recorded(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_allclose(np.asarray(got)[:, :300], (x.T @ y)[:, :300], rtol=1e-4, atol=1e-4)
