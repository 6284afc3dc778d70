"""The user's own rows: they come back as they were written, bad ones are refused by file, row and field, and calls follow them."""

import json
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from flash_hopper import settings
from flash_hopper.plan import own_tiles
from flash_hopper.plan.budget import O_PLACES, Layout, layout_fault
from flash_hopper.plan.forward import choice_of, own_row, plan_forward, plan_with, table_layout
from flash_hopper.plan.own_tiles import OwnRow, add_row, find_row, parse_rows, read_rows
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing.bench_suites import BenchShape

ROW = OwnRow(128, 128, "causal", False, 2049, 4096, 128, 96, True, 2, 2, "apart", "NVIDIA H20", "100 us against 110 us")
NAMES = [field.name for field in fields(OwnRow)]
REQUIRED = [name for name in NAMES if name != "streams"]

MASKS = ("full", "causal", "local", "chunk")
LAYOUTS = [
    Layout(*x) for x in product((64, 128, 192, 256), (32, 64, 112), (False, True), (1, 2), (2, 3, 5), O_PLACES, (1, 2))
]
texts = st.text(min_size=1).filter(str.strip)


@st.composite
def rows(draw):
    """Few places and lengths, so that some rows of a list overlap."""
    hdim, hdimv, mask = draw(st.sampled_from([64, 128])), draw(st.sampled_from([32, 128])), draw(st.sampled_from(MASKS))
    fitting = [x for x in LAYOUTS if layout_fault(x, hdim, hdimv, 2, mask) is None]
    layout, low = draw(st.sampled_from(fitting)), draw(st.integers(0, 3))
    gpu = draw(st.sampled_from([None, "NVIDIA H20"]) | texts)
    lengths = low, low + draw(st.integers(0, 2))
    place = hdim, hdimv, mask, draw(st.booleans())
    return OwnRow(*place, *lengths, gpu=gpu, why=draw(texts), **asdict(layout))


def text_of(*given: dict) -> str:
    return json.dumps({"rows": list(given)})


def problem(seqlen=4096, d=128, **options):
    return BenchShape("tune", DType.BF16, d, d, True, seqlen, seqlen, 1, 4, 4, **options).problem


@pytest.fixture
def tiles(tmp_path, monkeypatch) -> Path:
    """The file that the environment names."""
    path = tmp_path / "tiles.json"
    monkeypatch.setenv(settings.TILES, str(path))
    read_rows.cache_clear()
    yield path
    read_rows.cache_clear()


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.lists(rows(), max_size=6))
def test_what_is_written_is_read_and_a_row_takes_the_place_of_one_for_the_same_requests(tmp_path_factory, given_rows):
    path = tmp_path_factory.mktemp("tiles") / "new" / "tiles.json"
    kept: list[OwnRow] = []
    for row in given_rows:
        if any(row.overlaps(other) and not row.replaces(other) for other in kept):
            before = path.read_text()
            with pytest.raises(ArgumentError, match="overlap"):
                add_row(path, row)
            assert path.read_text() == before
            continue
        add_row(path, row)
        kept = [other for other in kept if not row.replaces(other)] + [row]
        assert read_rows(path) == tuple(kept)
    assert not kept or [p.name for p in path.parent.iterdir()] == ["tiles.json"]


def test_the_file_has_one_row_a_line(tmp_path):
    path = tmp_path / "tiles.json"
    for row in (ROW, replace(ROW, gpu=None)):
        add_row(path, row)
    assert sum(line.startswith("  {") for line in path.read_text().splitlines()) == 2


OF_OTHER_TYPES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())


@hypothesis_settings(max_examples=200)
@given(st.sampled_from(NAMES), OF_OTHER_TYPES)
def test_a_value_of_another_type_is_refused_with_file_row_and_field(name, value):
    own = asdict(ROW)[name]
    if type(value) is type(own) or (name == "gpu" and (value is None or type(value) is str)):
        return
    with pytest.raises(ArgumentError, match=rf"^tiles\.json, row 1: {name} must be "):
        parse_rows(text_of(asdict(replace(ROW, gpu=None)), asdict(ROW) | {name: value}), "tiles.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hdim": 100}, "hdim must be a multiple of 32 up to 256"),
        ({"hdimv": 0}, "hdimv must be a multiple"),
        ({"hdimv": 288}, "hdimv must be a multiple"),
        ({"mask": "window"}, "mask must be one of full, causal, local, chunk, got 'window'"),
        ({"rows_from": -1}, "rows_from must not be negative"),
        ({"rows_to": 2048}, "rows_to must be at least rows_from"),
        ({"m": 100}, "m must be a multiple of 64"),
        ({"n": 100}, "n must be a multiple of 16"),
        ({"o_place": "k"}, "o_place must be one of apart, q, v, got 'k'"),
        ({"o_place": "v", "n": 48}, "o_place v needs n of at least 64 .* got n = 48"),
        (
            {"o_place": "v", "m": 192},
            "o_place v needs .* a stage of V for each of a tile's 3 warpgroups, .* kv_stages = 2",
        ),
        ({"n": 192}, r"n = 192 .* takes 208 registers .* has 232"),
        ({"kv_stages": 4}, r"kv_stages and q_stages .* take \d+ bytes, there are \d+"),
        ({"m": 64}, "has_pingpong must be false"),
        ({"m": 64, "streams": 2}, "has_pingpong must be false"),
        ({"streams": 3}, "streams must be 1 to 2, got 3"),
        ({"m": 192, "streams": 2}, "m must be a multiple of 64 up to 128 in 2 streams, got 192"),
        ({"mask": "chunk", "m": 256, "n": 32, "hdimv": 32}, "m must be at most 192 for chunks"),
        ({"why": " "}, "why must say"),
        ({"gpu": ""}, "gpu must be a name"),
        ({"us": 3.0}, "us is not known; a row has hdim, "),
    ],
    ids=str,
)
def test_a_row_that_no_kernel_could_follow_is_refused_when_the_file_is_read(changes, message):
    with pytest.raises(ArgumentError, match=rf"^tiles\.json, row 0: {message}"):
        parse_rows(text_of(asdict(ROW) | changes), "tiles.json")


@pytest.mark.parametrize("name", REQUIRED)
def test_every_field_but_the_streams_is_required(name):
    values = asdict(ROW)
    del values[name]
    with pytest.raises(ArgumentError, match=rf"row 0: {name} is missing"):
        parse_rows(text_of(values), "tiles.json")


def test_a_row_that_says_nothing_of_streams_has_one():
    values = asdict(ROW)
    del values["streams"]
    assert parse_rows(text_of(values), "tiles.json") == (ROW,)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rows": {}}', '{"rows": [], "x": 1}', '{"rows": [1]}', "[" * 10_000, "\x00"], ids=repr
)
def test_a_file_that_holds_something_else_is_refused(text):
    with pytest.raises(ArgumentError, match=r"^tiles\.json"):
        parse_rows(text, "tiles.json")


@given(st.text() | st.recursive(OF_OTHER_TYPES, st.lists).map(lambda x: text_of({"hdim": x})))
def test_no_text_raises_anything_but_the_typed_error(text):
    with pytest.raises(ArgumentError):
        parse_rows(text, "tiles.json")


def test_rows_that_overlap_are_refused_unless_they_are_for_different_gpus():
    later = replace(ROW, rows_from=4096, rows_to=5000)
    with pytest.raises(ArgumentError, match=r"row 1: rows_from to rows_to overlap with those of row 0"):
        parse_rows(text_of(asdict(ROW), asdict(later)), "tiles.json")
    for other in ({"gpu": None}, {"gpu": "NVIDIA H800"}, {"mask": "full"}, {"is_ragged": True}, {"rows_from": 4097}):
        assert len(parse_rows(text_of(asdict(ROW), asdict(replace(later, **other))), "tiles.json")) == 2


def test_a_missing_or_unreadable_file_is_a_typed_error_that_names_it(tiles):
    with pytest.raises(ArgumentError, match=r"tiles\.json cannot be read"):
        plan_forward(problem())
    tiles.write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=r"tiles\.json cannot be read"):
        plan_forward(problem())


def test_a_row_is_taken_for_its_lengths_mask_layout_head_dims_and_gpu_only(tiles):
    add_row(tiles, ROW)
    own = plan_with(problem(), ROW.layout)
    assert own != plan_forward(problem())
    for seqlen, d in ((2049, 128), (4096, 128), (3000, 104)):
        assert plan_forward(problem(seqlen, d), "NVIDIA H20") == plan_with(problem(seqlen, d), ROW.layout)
    cases = [
        (problem(2048), "NVIDIA H20"), (problem(4097), "NVIDIA H20"), (problem(d=96), "NVIDIA H20"),
        (problem(lengths="equal"), "NVIDIA H20"), (problem(left=1024), "NVIDIA H20"), (problem(), "NVIDIA H200"), (problem(), None),
    ]  # fmt: skip
    for asked, gpu in cases:
        assert plan_forward(asked, gpu) == plan_with(asked, table_layout(asked)), (asked, gpu)
        assert own_row(choice_of(asked), gpu) is None


def test_windows_count_by_their_reach_and_packed_batches_by_their_hint(tiles):
    add_row(tiles, replace(ROW, mask="local", rows_from=1025, rows_to=1025))
    add_row(tiles, replace(ROW, is_ragged=True, rows_from=4096, rows_to=4096))
    for asked in (problem(16_384, left=1024), problem(4000, lengths="equal"), problem(3000, lengths="equal")):
        assert plan_forward(asked, "NVIDIA H20").layout == ROW.layout


def test_a_row_that_names_the_gpu_goes_before_one_for_any():
    anywhere = replace(ROW, gpu=None, n=80)
    asked = 128, 128, "causal", False, 4000
    for order in ((ROW, anywhere), (anywhere, ROW)):
        assert find_row(order, *asked, "NVIDIA H20") == ROW
        assert find_row(order, *asked, "NVIDIA H800") == anywhere
        assert find_row(order, *asked, None) == anywhere


def test_a_file_is_read_once(tiles, monkeypatch):
    add_row(tiles, replace(ROW, gpu=None))
    parsed = []
    monkeypatch.setattr(own_tiles, "parse_rows", lambda text, name: parsed.append(name) or parse_rows(text, name))
    plans = {plan_forward(problem(seqlen)) for seqlen in range(100, 5000, 100)}
    assert len(plans) > 1 and parsed == [str(tiles)]


def test_without_a_file_nothing_is_read(monkeypatch):
    monkeypatch.delenv(settings.TILES, raising=False)
    monkeypatch.setattr("flash_hopper.plan.forward.read_rows", None)
    assert plan_forward(problem(), "NVIDIA H20").layout == table_layout(problem())
