"""Bytes and FLOPs as text and back."""

import pytest

from remat_kit import RematKitError
from remat_kit._units import format_bytes, format_flops, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("0", 0),
        ("1B", 1),
        ("1KiB", 1024),
        ("512 MiB", 512 * 1024**2),
        ("70GiB", 70 * 1024**3),
        ("2TiB", 2 * 1024**4),
        ("80GB", 80 * 10**9),
        ("3KB", 3000),
        ("5 mb", 5 * 10**6),
        ("1TB", 10**12),
        ("  1.5  gib ", 3 * 1024**3 // 2),
        ("0.1GiB", 107_374_182),  # 107374182.4 rounded
    ],
)
def test_parse_bytes(text, count):
    parsed = parse_bytes(text)
    assert parsed == count
    assert type(parsed) is int


def test_parse_bytes_is_exact_where_floats_are_not():
    assert parse_bytes("9007199254740993") == 2**53 + 1
    assert parse_bytes("16777217TiB") == 16777217 * 1024**4


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e9", "70G", "70 Gi B", "1,000MiB", "12 parsecs", "nan", "inf", "1.GiB", ".5GiB"]
)
def test_parse_bytes_refuses(text):
    with pytest.raises(RematKitError, match=r"is not a size in bytes.*KiB.*e\.g\. 70GiB"):
        parse_bytes(text)


def test_the_message_quotes_what_came_in():
    with pytest.raises(RematKitError, match=r"'70 apples'"):
        parse_bytes("70 apples")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2, "1.00 MiB"),
        (80 * 10**9, "74.51 GiB"),
        (1024**4, "1.00 TiB"),
        (5000 * 1024**4, "5,000.00 TiB"),
        (-1, "-1 B"),
        (-3 * 1024**3, "-3.00 GiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize("count", [0, 7, 1024, 5 * 1024**2, 70 * 1024**3, 3 * 1024**4])
def test_a_formatted_size_can_be_parsed_again(count):
    assert parse_bytes(format_bytes(count)) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 FLOP"),
        (999_999, "999999 FLOP"),
        (10**6, "1.00 MFLOP"),
        (25_769_803_776, "25.77 GFLOP"),
        (10**12, "1.00 TFLOP"),
        (2 * 10**15, "2.00 PFLOP"),
    ],
)
def test_format_flops_is_decimal(count, text):
    assert format_flops(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 µs"), (25e-6, "25.0 µs"), (1e-3, "1.00 ms"), (0.9994, "999.40 ms"), (90, "90.00 s")],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text
