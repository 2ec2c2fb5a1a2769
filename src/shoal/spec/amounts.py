"""Amounts in words, as errors and tables show them."""


def gib(num_bytes: float) -> str:
    size = num_bytes / 2**30
    return f"{size:.3g} GiB" if size < 999.5 else f"{size:,.0f} GiB"


def cores(number: float) -> str:
    return f"{number:g} core{'s' * (number != 1)}"


def gpus(number: float) -> str:
    return f"{number:g} GPU{'s' * (number > 1 or not number)}"
